"""Which part may import which, and what a plain import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lm_polygraph_asmi

ROOT = Path(lm_polygraph_asmi.__file__).parent

FORBIDDEN = {
    "maths": ("transformers", "lm_polygraph.", "lm_polygraph_asmi.model", "datasets"),
    "model": ("lm_polygraph.", "lm_polygraph_asmi.maths", "lm_polygraph_asmi.stat_calculators"),
    "estimators": ("transformers", "lm_polygraph_asmi.model", "lm_polygraph_asmi.stat_calculators"),
    "report": ("torch", "transformers", "lm_polygraph.", "lm_polygraph_asmi.model"),
    "analysis": ("transformers", "lm_polygraph_asmi.model", "lm_polygraph_asmi.stat_calculators"),
}


def imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name + "." for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(f"{node.module}.")
    return names


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_point_one_way(part):
    files = list((ROOT / part).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            assert not name.startswith(FORBIDDEN[part]), f"{file.name} imports {name}"


@pytest.mark.parametrize(
    "module", ["lm_polygraph_asmi", "hydra_plugins.lm_polygraph_asmi.search_path"]
)
def test_what_every_program_imports_is_light(module):
    """Hydra imports the search path plugin in every program of the environment."""
    code = (
        f"import sys, {module}; print([m for m in "
        "('torch', 'transformers', 'lm_polygraph', 'datasets', 'scipy') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "[]", printed.stderr


def test_public_names():
    assert set(lm_polygraph_asmi.__all__) == {
        "ASMI", "AdaptASMI", "Reference", "Score", "SemASMI", "__version__",
        "available_stat_calculators", "score",
    }  # fmt: skip
    for name in lm_polygraph_asmi.__all__:
        assert getattr(lm_polygraph_asmi, name)
    with pytest.raises(AttributeError, match="has no attribute 'TokenASMI'"):
        lm_polygraph_asmi.TokenASMI  # noqa: B018
