"""No function is too long to read at once, and the whole stays small.

Sizes are counted in statements: docstrings, comments and line breaks cost nothing, so that prose
may breathe.
"""

import ast
from pathlib import Path

import pytest

import lm_polygraph_asmi
from tests.test_imports import parsed

PACKAGE = Path(lm_polygraph_asmi.__file__).parent
ROOT = PACKAGE.parent
LINES, PARAMETERS = 60, 7  # most lines of a function besides its docstring, and most parameters
CEILINGS = {
    "lm_polygraph_asmi": 11_069,
    "lm_polygraph_asmi/scoring": 1105,
    "lm_polygraph_asmi/decisions": 925,
    "tests": 10_564,
    "scripts": 1202,
}
"""Folder -> most statements of its modules."""
WORDS = {"README.md": 800, "docs": 18_000}  # README, and all pages but the changelog -> most words
EVIDENCE = 8_000_000  # most bytes of data that figures of the pages are computed from


def test_functions_are_read_at_once():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, first = f"{file.name}:{node.name}", node.body[0]
                start = first.lineno - 1 if ast.get_docstring(node) is None else first.end_lineno
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                assert node.end_lineno - start <= LINES, name
                assert len(given) <= PARAMETERS, name


def statements(file: Path) -> int:
    """Statements of a module, but for docstrings."""
    nodes = list(ast.walk(parsed(file)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(
        isinstance(node, documented) and ast.get_docstring(node) is not None for node in nodes
    )
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def words(*files: Path) -> int:
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="no checkout")
def test_everything_stays_under_its_ceiling():
    """Leave something out rather than raise a number."""
    sizes = {name: sum(map(statements, (ROOT / name).rglob("*.py"))) for name in CEILINGS}
    assert {n: (size, CEILINGS[n]) for n, size in sizes.items() if size > CEILINGS[n]} == {}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "changelog.md"]
    written = {"README.md": words(ROOT / "README.md"), "docs": words(*pages)}
    assert {n: (size, WORDS[n]) for n, size in written.items() if size > WORDS[n]} == {}
    evidence = [file for file in (ROOT / "docs" / "evidence").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in evidence) <= EVIDENCE
