"""README and pages of docs/, and the code blocks in them."""

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.md"))
"""Executed when the site is built."""
PAGES = [
    REPOSITORY / "README.md",
    *sorted(
        page for folder in ("", "how-to", "reference") for page in (DOCS / folder).glob("*.md")
    ),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of code; `page` is its file's name."""

    page: str
    code: str


def blocks(language: str) -> list[Block]:
    """All blocks of a language, in order."""
    return [
        Block(page.name, code)
        for page in PAGES
        for found, code in FENCE.findall(page.read_text())
        if found == language
    ]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the table below a header row that begins so; no line of it spans two."""
    (file,) = [p for p in PAGES if p.name == page]
    rows = file.read_text().split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def inline(text: str) -> list[str]:
    """Contents of its inline code."""
    return re.findall(r"`([^`\n]+)`", text)
