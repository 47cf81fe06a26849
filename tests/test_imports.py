"""Which subpackage may know which, and what a start costs."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lm_polygraph_asmi
from tests.pages import inline, table
from tests.report.runs import save

PACKAGE = "lm_polygraph_asmi"
ROOT = Path(lm_polygraph_asmi.__file__).parent
MAY_IMPORT = {
    inline(room)[0]: set(inline(others))
    for room, _, others in table("contributing.md", "subpackage")
}
"""Subpackage -> others, as contributors read it; one within another by its path."""
LIGHT = "torch transformers lm_polygraph datasets"
WITHOUT = {
    "core/maths": "transformers lm_polygraph datasets pandas",
    **dict.fromkeys(("core", "core/model"), "lm_polygraph datasets pandas"),
    "estimators": "transformers datasets",
    **dict.fromkeys(("analysis", "report", "_hydra", "commands"), LIGHT),
    **dict.fromkeys(("heads/analysis", "heads/items"), LIGHT),
    **dict.fromkeys(("results", "heads"), "lm_polygraph datasets"),
    "decisions": "lm_polygraph datasets scipy.stats sklearn matplotlib",
    "scoring": "lm_polygraph datasets pandas scipy.stats sklearn matplotlib",
    **dict.fromkeys(("host", "stat_calculators"), "datasets"),
}
"""Subpackage -> libraries that do not come with it; its functions and types may import them."""
HEAVY = (
    "torch", "transformers", "lm_polygraph", "datasets", "scipy.stats", "sklearn", "matplotlib",
    "pandas", "accelerate", "spacy", "openai", "bert_score", "nltk",
)  # fmt: skip
LOOSE = {"config", "files", "inputs", "lazy", "options", "tables", "validation"}
CORE_KNOWS = {"config", "files", "validation"}  # loose files that the core imports
ENTRANCES = {"commands/__init__.py", "report/items/__init__.py"}
"""Where the core finds heads: their commands, and what they add to the report."""


def room_of(*parts: str) -> str:
    found = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in found if name in MAY_IMPORT), parts[0])


def files_of(subpackage: str) -> Iterator[Path]:
    """Its files, but for those of subpackages within it."""
    for file in (ROOT / subpackage).rglob("*.py"):
        if room_of(*file.relative_to(ROOT).parts) == subpackage:
            yield file


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def named(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Modules that import statements name, and what they take from these: submodules, perhaps."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (str(node.module), *(f"{node.module}.{each.name}" for each in node.names))


@cache
def imported(file: Path) -> set[str]:
    """What a file imports, also inside functions, but for what only type checkers see."""
    nodes = list(ast.walk(parsed(file)))
    blocks = [n for n in nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    hidden = {inner for block in blocks for part in block.body for inner in ast.walk(part)}
    return {*named(node for node in nodes if node not in hidden)}


def own_imports(file: Path) -> set[Path]:
    """The package's modules and subpackages that a file imports, by their paths."""
    own = [Path(*name.split(".")[1:]) for name in imported(file) if name.split(".")[0] == PACKAGE]
    return {p for p in own if p.parts and ((ROOT / p).is_dir() or (ROOT / f"{p}.py").is_file())}


@cache
def at_the_top(file: Path) -> tuple[set[str], list[Path]]:
    """What a file imports at its top: libraries, their modules, and files of the package."""
    names = {*named(parsed(file).body)}
    own = [ROOT.joinpath(*name.split(".")[1:]) for name in names if name.startswith(PACKAGE)]
    starts = {folder / "__init__.py" for path in own for folder in (path, *path.parents)}
    files = sorted({path.with_suffix(".py") for path in own} | starts)
    return names | {name.split(".")[0] for name in names}, [f for f in files if f.is_file()]


def come_with(subpackage: str) -> set[str]:
    """Libraries that its files import at their tops, or files of the package that they import."""
    files = [*files_of(subpackage)]
    for file in files:  # which grows
        files += [more for more in at_the_top(file)[1] if more not in files]
    return set().union(*(at_the_top(file)[0] for file in files))


def test_every_folder_is_a_room_and_no_arrow_leads_back():
    found = {file.relative_to(ROOT).parts[0] for file in ROOT.rglob("*.py")}
    loose = {f"{name}.py" for name in ("__init__", *LOOSE)}
    assert found == loose | {name for name in MAY_IMPORT if "/" not in name}
    TopologicalSorter(MAY_IMPORT).prepare()  # raises where one leads in a circle


def test_loose_files_and_the_core_import_nothing_above_them():
    for file in (*(ROOT / f"{name}.py" for name in LOOSE), *(ROOT / "core").rglob("*.py")):
        below = {"core", *CORE_KNOWS} if "core" in file.relative_to(ROOT).parts else LOOSE
        assert {path.parts[0] for path in own_imports(file)} <= below, file


@pytest.mark.parametrize("subpackage", MAY_IMPORT)
def test_imports_point_one_way(subpackage):
    for file in files_of(subpackage):
        entrance = {"heads"} if str(file.relative_to(ROOT)) in ENTRANCES else set()
        rooms = {room_of(*p.parts) for p in own_imports(file) if (ROOT / p.parts[0]).is_dir()}
        assert rooms <= {subpackage, *MAY_IMPORT[subpackage], *entrance}, file
    assert not come_with(subpackage) & {*WITHOUT.get(subpackage, "").split()}


def test_the_core_finds_heads_in_two_places_alone():
    """Names in strings, as `importlib` takes them, are imports too."""
    for file in ROOT.rglob("*.py"):
        own = str(file.relative_to(ROOT))
        if not own.startswith("heads/"):
            assert (f"{PACKAGE}.heads" in file.read_text()) == (own in ENTRANCES), own


COMMANDS = [
    ("--help", "score"),
    ("decide --help", "--calibration"),
    ("doctor --config-name nosuch", "--config-name nosuch is no config"),
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


def test_commands_answer_at_once_and_programs_start_light(tmp_path, monkeypatch):
    """What they import is counted, and what Hydra's plugin does in every program."""
    save(tmp_path / "RUN")
    (tmp_path / "LICENSE").write_bytes((ROOT.parent / "LICENSE").read_bytes())
    (tmp_path / "BAD.jsonl").write_text('{"prompt": "a", "answer": "b", "correct": "yes"}\n')
    monkeypatch.chdir(tmp_path)
    plugin = "import lm_polygraph_asmi, hydra_plugins.lm_polygraph_asmi.search_path"
    start = "from click.testing import CliRunner\nfrom lm_polygraph_asmi.commands import main"
    run = "done = CliRunner().invoke(main, {!r})\nprint(done.output, done.exception)"
    steps = [run.format(command.split()) for command, _ in COMMANDS + WITH_PANDAS]
    between = f"import sys; print('\\0', *(m for m in {HEAVY} if m in sys.modules), end='\\0')"
    # Nothing is garbage: to look for some among all that is imported takes a third of the time.
    steps = ["import gc; gc.disable()", *(f"{step}\n{between}" for step in (plugin, start, *steps))]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(steps)], capture_output=True, text=True, check=True
    )
    *told, _ = done.stdout.split("\0")
    assert told[1].split() + told[3].split() == []
    for case, printed, there in zip(COMMANDS + WITH_PANDAS, told[4::2], told[5::2], strict=True):
        assert case[1] in printed, case
        assert there.split() in ([], ["pandas"] * (case in WITH_PANDAS)), case


def test_public_names():
    assert set(lm_polygraph_asmi.__all__) == {
        "ASMI", "ASMIConfig", "AdaptASMI", "Calibration", "Decider", "Decision", "Score", "Scorer",
        "SemASMI", "__version__", "available_stat_calculators", "decide", "estimate_uncertainty",
        "score", "score_file",
    }  # fmt: skip
    assert all(getattr(lm_polygraph_asmi, name) for name in lm_polygraph_asmi.__all__)
    with pytest.raises(AttributeError, match="TokenASMI"):
        lm_polygraph_asmi.TokenASMI  # noqa: B018
