"""Which subpackage may know which, that nothing goes in circles, and what a start costs."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

import lm_polygraph_asmi
from tests.report.runs import save

PACKAGE = "lm_polygraph_asmi"
ROOT = Path(lm_polygraph_asmi.__file__).parent


class Subpackage(NamedTuple):
    """What a folder of the package may import, besides itself, `config`, `files`, `lazy`,
    `options` and `validation`.

    Attributes:
        subpackages: other folders; one within another by its path.
        without: packages it must do without; types may be named.
        why: the reason.
    """

    subpackages: str
    without: str
    why: str


SUBPACKAGES = {
    "maths": Subpackage(
        "", "transformers lm_polygraph datasets pandas",
        "formulas are checked on three numbers, with no model at hand",
    ),
    "model": Subpackage(
        "", "lm_polygraph datasets pandas",
        "passes hold no formula, so that each is checked against brute force by itself",
    ),
    "analysis": Subpackage(
        "", "torch transformers lm_polygraph datasets",
        "statistics take arrays: anybody's, from anywhere, in a notebook too",
    ),
    "results": Subpackage(
        "analysis model maths", "lm_polygraph datasets",
        "what is on disk is read without the host that wrote it; settings offer statistics' input",
    ),
    "report": Subpackage(
        "analysis results maths", "torch transformers lm_polygraph datasets",
        "tables and figures need finished runs alone, and p and S for the plan",
    ),
    "host": Subpackage(
        "model", "datasets",
        "what LM-Polygraph needs knows models, but not how a score is computed",
    ),
    "scoring": Subpackage(
        "maths model results analysis host", "lm_polygraph datasets",
        "the engine joins formulas and passes; LM-Polygraph takes seconds to import",
    ),
    "decisions": Subpackage(
        "maths model results analysis host scoring", "lm_polygraph datasets",
        "a score needs no labels: only what labels say of it knows both",
    ),
    "estimators": Subpackage(
        "maths results host", "transformers datasets",
        "estimators read statistics by name and never touch the model; one has a side model",
    ),
    "stat_calculators": Subpackage(
        "maths model results host scoring estimators", "datasets",
        "calculators hand the host's batches to the engine",
    ),
    "runs": Subpackage(
        "results host analysis", "",
        "a run is examined, recorded and joined from outside: how it scores is no matter",
    ),
    "_hydra": Subpackage(
        "runs results host", "torch transformers lm_polygraph datasets",
        "Hydra imports the plugin in every program of the environment",
    ),
    "commands": Subpackage(
        "maths results analysis report runs scoring decisions",
        "torch transformers lm_polygraph datasets",
        "a command is a thin front; help must not wait for torch",
    ),
    "heads": Subpackage(
        "maths model results host scoring heads/analysis",
        "lm_polygraph datasets",
        "what tests the paper stands on all that scores and reports, and beside what runs",
    ),
    "heads/analysis": Subpackage(
        "analysis", "torch transformers lm_polygraph datasets",
        "statistics of heads take arrays, too",
    ),
    "heads/items": Subpackage(
        "heads heads/analysis analysis results report",
        "torch transformers lm_polygraph datasets",
        "their tables and figures need finished runs alone, too",
    ),
}  # fmt: skip
ENTRANCES = {"commands/__init__.py", "report/items/__init__.py"}
"""Where the core finds heads: their commands, and what they add to the report."""


def room_of(*parts: str) -> str:
    """The innermost subpackage of a path in the package."""
    found = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in found if name in SUBPACKAGES), parts[0])


def files_of(subpackage: str) -> Iterator[Path]:
    """Its files, but for those of subpackages within it."""
    for file in (ROOT / subpackage).rglob("*.py"):
        if room_of(*file.relative_to(ROOT).parts) == subpackage:
            yield file


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imported(file: Path, for_types: bool = False) -> list[str]:
    """Modules that a file imports, also inside functions.

    `for_types`: those for type checkers alone, too.
    """
    found: list[str] = []
    nodes: list[ast.AST] = [parsed(file)]
    for node in nodes:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            nodes += [*node.orelse, *(node.body if for_types else [])]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(str(node.module))
            if str(node.module).startswith(PACKAGE):  # a submodule, perhaps
                found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case | ast.Module):
            nodes += ast.iter_child_nodes(node)
    return found


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def test_every_folder_is_a_room():
    folders = {file.relative_to(ROOT).parts[0] for file in ROOT.rglob("*.py")}
    loose = {
        f"{n}.py"
        for n in [
            "__init__",
            "algorithm",
            "config",
            "files",
            "lazy",
            "options",
            "validation",
        ]
    }
    assert {name for name in folders if not name.endswith(".py")} == {
        name for name in SUBPACKAGES if "/" not in name
    }
    assert {name for name in folders if name.endswith(".py")} == loose


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_imports_point_one_way(subpackage):
    allowed = {subpackage, "options", "validation", *SUBPACKAGES[subpackage].subpackages.split()}
    for file in files_of(subpackage):
        entrance = "heads" if str(file.relative_to(ROOT)) in ENTRANCES else None
        for name in imported(file):
            package, *rest = name.split(".")
            if package == PACKAGE and rest and (ROOT / rest[0]).is_dir():
                there = room_of(*rest)
                assert there in {*allowed, entrance}, (
                    f"{file.name} imports {name}, but {SUBPACKAGES[subpackage].why}"
                )


def test_the_core_finds_heads_in_two_places_alone():
    """Names in strings, as `importlib` takes them, are imports too."""
    for file in ROOT.rglob("*.py*"):
        own = str(file.relative_to(ROOT))
        if not own.startswith("heads/") and file.suffix in (".py", ".pyi"):
            assert (f"{PACKAGE}.heads" in file.read_text()) == (own in ENTRANCES), own


def test_heads_use_what_the_core_offers():
    """No name that begins with an underscore."""
    for subpackage in (name for name in SUBPACKAGES if name.startswith("heads")):
        for file in files_of(subpackage):
            private = [
                name for name in imported(file) if re.search(rf"^{PACKAGE}\..*\._[a-z]", name)
            ]
            assert not private, file.name


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_rooms_do_without_what_they_need_not(subpackage):
    """At the top of a file; what a function imports is imported when it is called."""
    for file in files_of(subpackage):
        for node in parsed(file).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in names:
                package = name.split(".")[0]
                assert package not in SUBPACKAGES[subpackage].without.split(), (
                    f"{file.name} imports {name}, but {SUBPACKAGES[subpackage].why}"
                )


def test_nothing_imports_in_circles():
    known = modules()
    graph = {
        name: {other for other in imported(file, True) if other in known and other != name}
        for name, file in known.items()
    }
    # A package names what it holds, on first use: its own file is no part of a circle.
    held = {name: {o for o in graph[name] if not o.startswith(f"{name}.")} for name in known}
    list(TopologicalSorter(held).static_order())


HEAVY = (
    "torch", "transformers", "lm_polygraph", "datasets", "scipy.stats", "sklearn", "matplotlib",
    "pandas", "accelerate", "spacy", "openai", "bert_score", "nltk",
)  # fmt: skip


def heavy_after(*steps: str) -> list[tuple[set[str], str]]:
    """What a new process has imported after each of these steps, and what the step printed."""
    between = f"import sys; print('\\0', *(m for m in {HEAVY} if m in sys.modules), end='\\0')"
    # Nothing is garbage: to look for some among all that is imported takes a third of the time.
    code = "\n".join(["import gc; gc.disable()", *(f"{step}\n{between}" for step in steps)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *parts, _ = done.stdout.split("\0")
    return [(set(there.split()), said) for said, there in zip(*[iter(parts)] * 2, strict=True)]


def test_what_every_program_imports_is_light():
    """Hydra imports the search path plugin in every program of the environment."""
    modules = (PACKAGE, "hydra_plugins.lm_polygraph_asmi.search_path")
    for imports, _ in heavy_after(*(f"import {module}" for module in modules)):
        assert imports == set()


COMMANDS = [
    ("--help", "score"),
    ("decide --help", "--calibration"),
    ("doctor --config-name nosuch", "Cannot find primary config 'nosuch'"),
    ("score --model x LICENSE --depth 2", "depth must lie in (0, 1)"),
    ("score --model x LICENSE --method raw", "'raw' is not one of"),
    ("heads --help", "probe"),
]
WITH_PANDAS = [
    ("plan --heads 32", "p = 0.15, S = 40"),
    ("results RUN", "Sem-ASMI"),
    ("report RUN --out x --metric Nope", "has no quality metric 'Nope'"),
    ("results LICENSE", "is not a run saved by LM-Polygraph"),
    ("calibrate BAD.jsonl --risk 0.2 --out x.json", "row 1: expected a row with scores, got"),
]


def test_commands_answer_at_once(tmp_path, monkeypatch):
    """What they import is counted, since seconds depend on the machine."""
    save(tmp_path / "RUN")
    (tmp_path / "LICENSE").write_bytes((ROOT.parent / "LICENSE").read_bytes())
    (tmp_path / "BAD.jsonl").write_text('{"prompt": "a", "answer": "b", "correct": "yes"}\n')
    monkeypatch.chdir(tmp_path)
    start = "from click.testing import CliRunner\nfrom lm_polygraph_asmi.commands import main"
    run = "done = CliRunner().invoke(main, {!r})\nprint(done.output, done.exception)"
    steps = [run.format(command.split()) for command, _ in COMMANDS + WITH_PANDAS]
    (imports, _), *answers = heavy_after(start, *steps)
    assert imports == set()
    for (command, said), (imports, printed) in zip(COMMANDS + WITH_PANDAS, answers, strict=True):
        assert said in printed, command
        assert imports <= ({"pandas"} if (command, said) in WITH_PANDAS else set()), command


SCORING = "from lm_polygraph_asmi import Calibration, Score, score"
OF_SCORING = {"torch", "transformers", "accelerate"}


def scoring_imports() -> None:
    """In a process that has the libraries of a model: nothing else comes with the package."""
    others = {PACKAGE, *HEAVY} - OF_SCORING
    for name in list(sys.modules):
        if any(f"{name}.".startswith(f"{other}.") for other in others):
            del sys.modules[name]
    exec(SCORING, {})
    assert (others - {PACKAGE}).isdisjoint(sys.modules)


def test_scoring_leaves_the_host_alone():
    """LM-Polygraph brings spaCy, openai and bert_score: seconds that `score` does not need."""
    fork = get_context("fork").Process(target=scoring_imports)
    fork.start()
    fork.join()
    assert fork.exitcode == 0


@pytest.mark.slow
def test_scoring_leaves_the_host_alone_in_a_new_process():
    # Older releases of transformers import scikit-learn for generation.
    (of_transformers, _), (imports, _) = heavy_after(
        "from transformers import GenerationMixin",
        SCORING,
    )
    assert {"torch", "transformers"} <= imports
    assert imports <= of_transformers | OF_SCORING


LAZY = [file for file in ROOT.rglob("__init__.py") if "attach(" in file.read_text()]


@pytest.mark.parametrize("file", LAZY, ids=lambda file: file.parent.name)
def test_no_lazy_name_is_that_of_a_file(file):
    """Importing the file would hide what has its name."""
    names = import_module(".".join(file.parent.relative_to(ROOT.parent).parts)).__all__
    assert names
    assert set(names).isdisjoint(other.stem for other in file.parent.glob("*.py"))


def test_public_names():
    assert set(lm_polygraph_asmi.__all__) == {
        "ASMI", "ASMIConfig", "AdaptASMI", "Calibration", "Decider", "Decision", "Score", "Scorer",
        "SemASMI", "__version__", "available_stat_calculators", "decide", "score", "score_file",
    }  # fmt: skip
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    typed = {n.names[0].name: n.module for n in stub.body if isinstance(n, ast.ImportFrom)}
    assert {*typed, "__version__"} == set(lm_polygraph_asmi.__all__)
    for name in lm_polygraph_asmi.__all__:
        assert getattr(lm_polygraph_asmi, name)
    with pytest.raises(AttributeError, match="TokenASMI"):
        lm_polygraph_asmi.TokenASMI  # noqa: B018
