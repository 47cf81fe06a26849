"""Search texts for the private words in words.csv.

    python scripts/words.py                       # README, docs, package, configs and scripts
    python scripts/words.py README.md docs        # these files and folders

Prints file:line, the words, and the term to use. Exits with status 1 if there are any. In Python
files, strings and comments are searched, and (but for tests) the names that a file defines; in
configs, comments; in Markdown, everything but code.
"""

import ast
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
PACKAGE = "lm_polygraph_asmi"
EVERYWHERE = ("README.md", "pyproject.toml", "docs", "configs", "scripts", "tests", PACKAGE)
LEFT_OUT = ("docs/changelog.md", "docs/evidence", "scripts/words.py")
"""Plans written before a measurement keep their words."""
TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def avoided(column: str = "avoid") -> list[tuple[re.Pattern[str], str]]:
    """(pattern, term to use) of every phrase to avoid in texts; with "names", in names of code."""
    with TERMS.open(newline="") as lines:
        rows = [(row[column].split(";"), row["term"]) for row in csv.DictReader(lines)]
    if column == "names":  # whole words of a name such as two_words
        rows = [([f"(?<![a-z])(?:{p})(?![a-z])" for p in some if p], term) for some, term in rows]
    return [(re.compile(p, re.I), term) for some, term in rows for p in some if p]


def names(file: Path) -> Iterator[tuple[int, str]]:
    """(line number, name with words set apart by _) of what a Python file defines."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        yield node.lineno, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)


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
            if file.suffix in (".md", ".py", ".yaml", ".sh", ".toml") and not skipped:
                yield file


@click.command(help=__doc__)
@click.argument("paths", nargs=-1)
def main(paths: tuple[str, ...]) -> None:
    of_texts, of_names, count = avoided(), avoided("names"), 0
    for file in files(paths or EVERYWHERE):
        searched = [(of_texts, texts(file))]
        if file.suffix == ".py":
            content = file.read_text()
            if not any(pattern.search(content) for pattern, _ in of_texts):
                searched = []  # none in the whole file: its tokens, which take seconds, have none
            if not file.is_relative_to(REPOSITORY / "tests"):
                searched.append((of_names, names(file)))
        for patterns, lines in searched:
            for number, text in lines:
                for pattern, term in patterns:
                    for match in pattern.finditer(text):
                        count += 1
                        click.echo(f'{file}:{number}: "{match[0]}": write {term}')
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
