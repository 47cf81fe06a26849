"""README, pages of docs/ and docstrings, and the examples in them, as sybil finds them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sybil import Document, Example, Region, Sybil
from sybil.parsers.myst import CodeBlockParser
from sybil.parsers.rest import DocTestParser

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
FOLDERS = ("", "tutorials", "how-to", "concepts", "results", "reference")
EVERY = [page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md"))]
NOTEBOOKS = [page for page in EVERY if page.read_text().startswith("---\nfile_format: mystnb")]
"""Executed when the site is built."""
PAGES = [REPOSITORY / "README.md", *(page for page in EVERY if page not in NOTEBOOKS)]
RECIPES = DOCS / "how-to/recipes.md"  # its blocks need other libraries, each its own
LANGUAGES = ("python", "bash", "yaml", "text")


@cache
def blocks(language: str, page: Path) -> list[Example]:
    """Blocks of a language; the code is `parsed`."""
    return list(Sybil([CodeBlockParser(language, lambda _: None)]).parse(page))


@cache
def prose(page: Path) -> str:
    """The page without its blocks of code in the known languages."""
    document = Sybil([CodeBlockParser(name, lambda _: None) for name in LANGUAGES]).parse(page)
    text = document.text
    for _, region in reversed(document.regions):
        text = text[: region.start] + text[region.end :]
    return text


def table(page: str, head: str) -> list[list[str]]:
    """Settings of the table below a header row that begins so; no line of it spans two."""
    (file,) = [p for p in (*PAGES, *NOTEBOOKS) if p.name == page]
    rows = file.read_text().split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[text.strip() for text in row.strip("|").split("|")] for row in rows]


def inline(text: str) -> list[str]:
    """Contents of its inline code."""
    return re.findall(r"`([^`\n]+)`", text)


@cache
def start_of_room(folder: Path) -> dict[str, object]:
    """Names that a room's own docstring defines for the examples of all others in it."""
    document = Sybil([DocTestParser()]).parse(folder / "__init__.py")
    for example in document:
        example.evaluate()
    return document.namespace


def afresh(_: Document) -> Iterator[Region]:
    """At the start of every docstring: no example leans on what another docstring's defined."""

    def begin(example: Example) -> None:
        example.namespace.clear()
        example.namespace.update(start_of_room(Path(example.path).parent))
        example.document.push_evaluator(example.document.import_document)

    yield Region(0, 0, None, begin)


DOCSTRINGS = Sybil([afresh, DocTestParser()])
