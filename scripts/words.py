"""Search texts for the private words in words.csv.

    python scripts/words.py                       # README, docs, package, configs and scripts
    python scripts/words.py README.md docs        # these files and folders

Prints file:line, the words, and the term to use. Exits with status 1 if there are any. Of Python
files only strings and comments are searched, of configs only comments, of Markdown everything
but code.
"""

import csv
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click

REPOSITORY = Path(__file__).parents[1]
TERMS = REPOSITORY / "scripts/words.csv"
EVERYWHERE = ("README.md", "docs", "lm_polygraph_asmi", "configs", "scripts")
LEFT_OUT = ("docs/changelog.md", "docs/evidence", "scripts/words.py")
"""Plans written before a measurement keep their words."""
TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def avoided() -> list[tuple[re.Pattern[str], str]]:
    """(pattern, term to use) of every phrase to avoid."""
    with TERMS.open(newline="") as lines:
        rows = [(row["avoid"].split(";"), row["term"]) for row in csv.DictReader(lines)]
    return [(re.compile(p, re.I), term) for avoid, term in rows for p in avoid if p]


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of what people read in a file."""
    content = file.read_text()
    if file.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(content).readline):
            if token.type in TEXT:
                yield from enumerate(token.string.splitlines(), token.start[0])
    elif file.suffix == ".md":
        content = re.sub(r"(?ms)^```.*?^```", lambda m: "\n" * m[0].count("\n"), content)
        content = re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", content)  # code, and where links lead
        yield from enumerate(content.splitlines(), 1)
    else:
        for number, line in enumerate(content.splitlines(), 1):
            yield number, line.partition("#")[2]


def files(paths: tuple[str, ...]) -> Iterator[Path]:
    """The files below paths that people read."""
    left_out = [REPOSITORY / name for name in LEFT_OUT]
    for path in (REPOSITORY / name for name in paths):
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            skipped = any(file.is_relative_to(one) for one in left_out)
            if file.suffix in (".md", ".py", ".yaml", ".sh") and not skipped:
                yield file


@click.command(help=__doc__)
@click.argument("paths", nargs=-1)
def main(paths: tuple[str, ...]) -> None:
    patterns, count = avoided(), 0
    for file in files(paths or EVERYWHERE):
        for number, text in texts(file):
            for pattern, term in patterns:
                for match in pattern.finditer(text):
                    count += 1
                    click.echo(f'{file}:{number}: "{match[0]}": write {term}')
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
