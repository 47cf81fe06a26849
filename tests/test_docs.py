"""What README and pages show works; YAML entries are run in test_plugin."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib.metadata import metadata
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import pytest
import transformers
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from lm_polygraph_asmi.analysis import Clustered
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.results import names
from lm_polygraph_asmi.scoring.statistics import UNMASKED, AnswerStatistics
from tests.composing import composed
from tests.pages import (
    DOCS,
    DOCSTRINGS,
    NOTEBOOKS,
    PAGES,
    RECIPES,
    REPOSITORY,
    blocks,
    inline,
    prose,
    python,
    table,
    with_blocks,
)
from tests.report.runs import save
from tests.test_imports import SUBPACKAGES, parsed
from tests.tiny_lm import whitebox

CONFIGS = REPOSITORY / "configs"
QUICKSTART = DOCS / "quickstart.md"
BY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_every_language_is_run_somewhere(page):
    """A block in another language, or in none, would go unchecked; `text` is what was printed."""
    assert "```" not in prose(page)
    for block in blocks("yaml", page):
        assert "MaskedHeadsCalculator" in block.parsed or "defaults:" in block.parsed  # test_plugin


@pytest.fixture(scope="module")
def tiny():
    """A tiny random model. Its answers soon end, not after the 128 tokens that they may have."""
    model = whitebox(max_position_embeddings=1024)
    model.model.generation_config.eos_token_id = list(range(2, len(model.tokenizer), 3))
    return model


@pytest.fixture
def tiny_hub(tiny, monkeypatch):
    """The tiny model and its tokenizer in the place of all others."""
    load_named.cache_clear()
    tokenizer = tiny.tokenizer
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    for owner, thing in (("AutoModelForCausalLM", tiny.model), ("AutoTokenizer", tokenizer)):
        found = classmethod(lambda _, name, thing=thing, **__: thing if name else None)
        monkeypatch.setattr(getattr(transformers, owner), "from_pretrained", found)
    yield
    load_named.cache_clear()


RUN_HERE = [page for page in with_blocks("python", QUICKSTART) if page != RECIPES]


RECIPE_CALLS = {
    "fastapi": 'score(Question(prompt="Who?", answer=" Brask"))["score"]',
    "inspect_ai": 'fragility("smollm2")',
    "mlflow": 'fragility(inputs={"prompt": "Who?"}, outputs=" Brask").value',
}


@pytest.mark.usefixtures("tiny_hub")
@pytest.mark.parametrize("library", RECIPE_CALLS)
def test_recipes(library):
    (code,) = (b.parsed for b in blocks("python", RECIPES) if f"from {library}" in b.parsed)
    assert len(code.splitlines()) <= 20
    pytest.importorskip(library)
    names: dict[str, object] = {}
    exec(code, names)
    assert eval(RECIPE_CALLS[library], names)


@pytest.mark.usefixtures("tiny_hub")
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_python_runs(page, place, tmp_path, monkeypatch):
    """All of a page in order, as a reader copies it: nothing may be undefined."""
    (tmp_path / "RUN").symlink_to(place / "RUN")
    (tmp_path / "docs").symlink_to(DOCS)  # what a page says of the evidence
    (tmp_path / "scored.jsonl").write_text('{"id": "a1", "score": 0.01}\n')  # of `score --out`
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Clustered, "number", lambda _, default: default // 10)  # of resamples
    for example in python(page):
        example.evaluate()


TYPED = ("polygraph_eval", "polygraph_asmi", "python", "python3", "pip", "bash", "curl", "inspect")


def typed(code: str, folder) -> list[list[str]]:
    """Commands as bash makes them of a block, loops, variables and functions resolved."""
    activate = folder / ".venv/bin/activate"
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.touch()
    for name in TYPED:  # each only says how it was called
        code = f'{name}() {{ printf "%s\\0" {name} "$@" >&3; printf "\\n\\0" >&3; }}\n{code}'
    log = folder / "typed"
    subprocess.run(
        ["bash", "-euc", f"exec 3>{log}\n{code}"], cwd=folder, check=True, capture_output=True
    )
    calls, call = [], []
    for word in log.read_text().split("\0")[:-1]:
        if word == "\n":
            calls.append(call)
            call = []
        else:
            call.append(word)
    return calls


def check_eval(arguments: list[str]) -> None:
    """The config is there and takes the overrides; of a sweep, those of its first job."""
    given = get_args_parser().parse_args(arguments)
    first = []
    for override in OverridesParser.create().parse_overrides(given.overrides):
        if override.is_sweep_override():
            assert given.multirun, override.input_line
            value = next(override.sweep_string_iterator())
            first.append(f"{override.get_key_element()}={value}")
        else:
            first.append(override.input_line)
    if any("ray" in override for override in first) and not find_spec(
        "hydra_plugins.hydra_ray_launcher"
    ):  # an extra that the tests do without
        assert (CONFIGS / "hydra/launcher/asmi_ray.yaml").is_file()
        first = [override for override in first if "hydra" not in override]
    # Choices of these groups all set the same keys: that they are there is enough.
    alike = [override for override in first if override.startswith(("benchmark=", "estimators="))]
    # What is added to a user's config can be added to ours.
    config = composed(
        "asmi_demo" if given.config_dir else given.config_name,
        *(override for override in first if override not in alike),
    )
    for override in alike:
        assert override.partition("=")[0] in config.hydra.runtime.choices
        assert (CONFIGS / f"{override.replace('=', '/')}.yaml").is_file(), override


def check_click(command: click.Command, arguments: list[str]) -> dict:
    """Its options exist and take these values; files need not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(click.Path, "convert", lambda _, value, *__: value)
        return command.make_context(command.name, list(arguments)).params


@cache
def loaded(file: str) -> ModuleType:
    """A Python file that is in no package."""
    spec = spec_from_file_location(Path(file).stem, REPOSITORY / file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_script(file: str, arguments: list[str]) -> None:
    check_click(loaded(file).main, arguments)


def check(call: list[str]) -> None:
    """A command could start: program, options, config and overrides exist."""
    program, *rest = call
    if program == "polygraph_eval":
        check_eval(rest)
    elif program == "polygraph_asmi":
        command, words = main.commands[rest[0]], rest[1:]
        if isinstance(command, click.Group):
            command, words = command.get_command(None, words[0]), words[1:]
        given = check_click(command, words)
        if rest[0] == "doctor":
            check_eval(["--config-name", given["config_name"], *given["overrides"]])
    elif program == "bash":
        assert (REPOSITORY / rest[0]).is_file()
    elif program == "pip":
        assert rest[0] == "install"
        extras = re.findall(r"\.\[(\w+)\]", " ".join(rest))
        assert set(extras) <= set(metadata("lm-polygraph-asmi").get_all("Provides-Extra"))
    elif rest[0] == "-m":
        assert find_spec(rest[1])
    else:
        check_script(rest[0], rest[1:])


@pytest.mark.parametrize("page", with_blocks("bash", *NOTEBOOKS), ids=lambda page: page.name)
def test_commands_could_start(page, tmp_path):
    shells = [block.parsed for block in blocks("bash", page)]
    groups = [group.parsed for group in blocks("python", page) if group.parsed.startswith("%%bash")]
    shells += [group.partition("\n")[2] for group in groups]
    for shell in shells:
        calls = typed(shell, tmp_path)
        assert calls
        for call in calls:
            check(call)


@BY_PAGE
def test_commands_in_the_prose_could_start(page, tmp_path):
    for code in inline(prose(page)):
        if code.split()[0] in TYPED and len(code.split()) > 2:
            (call,) = typed(code, tmp_path)
            check(call)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("polygraph_eval --config-name asmi_nowhere", MissingConfigException),
        ("polygraph_eval --config-name asmi_coqa data.limits=3", ConfigCompositionException),
        ("polygraph_eval --config-name asmi_coqa 'data.shard=range(8)'", AssertionError),
        (
            "polygraph_asmi doctor --config-name asmi_coqa modell=asmi_local",
            ConfigCompositionException,
        ),
        ("for n in 1; do polygraph_asmi score --prompt-files $n; done", click.NoSuchOption),
        ("polygraph_asmi plan --heads many", click.BadParameter),
        ("python scripts/build_babi.py one two three", click.UsageError),
        ("pip install '.[nothing]'", AssertionError),
    ],
)
def test_a_wrong_command_is_noticed(code, error, tmp_path):
    (call,) = typed(code, tmp_path)
    with pytest.raises(error):
        check(call)


def test_every_setting_is_told_and_exists():
    told = [name for row in table("config.md", "parameter") for name in inline(row[0])]
    assert sorted(told) == sorted(composed("asmi_coqa").asmi), "the parameters in config.md"


def test_every_config_is_in_the_tables_and_exists():
    told = {name for row in table("config.md", "config") for name in inline(row[0])}
    there = {file.stem for file in CONFIGS.glob("asmi_*.yaml")}
    assert told == there - {"asmi_base", "asmi_benchmark"}  # parts of the others
    for group, choices in table("config.md", "group"):
        folder = CONFIGS / group.strip("`=")
        told = {name for name in inline(choices) if "=" not in name}
        there = {file.stem for file in folder.glob("*.yaml")}
        assert told == there - {"asmi_demo"}  # of that config alone


def test_every_statistic_is_told_and_exists():
    told = {name for row in table("outputs.md", "statistic") for name in inline(row[0])}
    assert told == set(names.SAVED) - {"greedy_log_likelihoods"}
    told = {name for row in table("outputs.md", "field of `asmi`") for name in inline(row[0])}
    assert told == {field.name for field in fields(AnswerStatistics)} - set(UNMASKED)


@BY_PAGE
def test_module_paths_exist(page):
    for path in re.findall(r"lm_polygraph_asmi(?:\.\w+)+", page.read_text()):
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), path


def keys(node: object, above: str = "") -> set[str]:
    """Dotted names of all that can be set in a config."""
    if not isinstance(node, dict):
        return {above}
    return {above} | set().union(
        *(keys(value, f"{above}.{key}".strip(".")) for key, value in node.items())
    )


@cache
def settable() -> set[str]:
    """In one config or another: groups and keys."""
    configs = [
        composed("asmi_coqa"), composed("asmi_demo"), composed("asmi_stability"),
        composed("asmi_offline", "model=asmi_local"), composed("asmi_grid"),
    ]  # fmt: skip
    found = set(configs[0].hydra.runtime.choices)
    return found.union(*(keys(OmegaConf.to_container(config)) for config in configs))


@BY_PAGE
def test_overrides_in_the_prose_exist(page):
    if page.name == "changelog.md":
        pytest.skip("it names what earlier versions had")
    for code in inline(prose(page)):
        for override in code.split():
            key = re.match(r"([a-z_./]+)=(?!\"|\w+\()", override)  # those are Python's
            assert not key or key[1] in settable() or key[1].startswith("hydra"), override


def slug(heading: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_no_line_is_a_comment_by_accident(page):
    """MyST drops a line that begins with a percent sign, as a wrapped "46 %" may."""
    assert not re.search(r"^\s*%", prose(page), re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(REPOSITORY), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert anchor in map(slug, headings), link


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_terms_are_defined_one_click_away(page):
    named = re.search(r"\b(PRR|MSP|AUROC|[Pp]erplexity)\b", prose(page))
    assert not named or "glossary.md" in page.read_text() or page.name == "glossary.md", named


def test_every_page_is_in_the_table_of_contents():
    """The site's is made from the lists of the front page."""
    made = loaded("docs/conf.py").toctrees((DOCS / "index.md").read_text())
    entries = re.findall(r"^.+ <([\w/-]+)>$", made, re.MULTILINE)
    assert len(entries) == len(set(entries))
    files = [file for kind in ("md", "rst") for file in DOCS.rglob(f"*.{kind}")]
    there = {str(file.relative_to(DOCS).with_suffix("")) for file in files}
    unlisted = ("reference/api/generated/", "evidence/")  # plans are outside of the navigation
    assert {"index", *entries} >= {name for name in there if not name.startswith(unlisted)}
    assert there >= set(entries)


PACKAGE = REPOSITORY / "lm_polygraph_asmi"
EXAMPLES = sorted(file for file in PACKAGE.rglob("*.py") if ">>>" in file.read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a finished run in it."""
    folder = tmp_path_factory.mktemp("examples")
    save(folder / "RUN")
    return folder


@pytest.fixture
def smollm2(request):
    """The model that examples name: a tiny one in its place, with --slow itself."""
    if not request.config.getoption("--slow"):
        request.getfixturevalue("tiny_hub")


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_examples_in_docstrings_run(file, place, monkeypatch):
    monkeypatch.chdir(place)
    # The debugger of doctest looks at every file that a line was ever shown of.
    monkeypatch.setattr("linecache.checkcache", lambda *_: None)
    for example in DOCSTRINGS.parse(file):
        example.evaluate()


def shown(docstring: str | None) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(docstring or "")


@pytest.mark.parametrize(
    "room",
    [
        "",
        ".scoring",
        ".decisions",
        ".estimators",
        ".maths",
        ".analysis",
        ".heads.analysis",
    ],
)
def test_every_public_name_has_an_example(room):
    """A function has one that calls it; a class stands in one, or such a function returns it."""
    public = importlib.import_module(f"lm_polygraph_asmi{room}")
    things = {name: getattr(public, name) for name in public.__all__}
    told = {name: thing for name, thing in things.items() if callable(thing)}
    assert things.keys() - told.keys() <= {"__version__"}
    assert told
    seen = ""
    for name, thing in told.items():
        examples = "".join(example.source + example.want for example in shown(thing.__doc__))
        if isinstance(thing, type):
            seen += examples
        else:
            assert re.search(rf"\b{name}\(", examples), name
            seen += f"{examples}{inspect.signature(thing).return_annotation}\n"
    for name, thing in told.items():
        assert not isinstance(thing, type) or re.search(rf"\b{name}\b", seen), name


def test_the_table_of_rooms_is_what_imports_may_be():
    rows = table("contributing.md", "subpackage")
    told = {inline(room)[0]: set(inline(knows)) for room, _, knows in rows}
    assert told == {name: set(room.subpackages.split()) for name, room in SUBPACKAGES.items()}


def test_every_public_name_has_a_page():
    conf = loaded("docs/conf.py")
    pages = conf.api_pages()
    for module in conf.API:
        for name in set(importlib.import_module(module).__all__) - {"__version__"}:
            assert any(page.endswith(f"/{name}") for page in pages), name
    listed = re.findall(r"^   generated/(\w+)$", conf.API_INDEX.read_text(), re.MULTILINE)
    assert listed == [page for page in pages if "/" not in page]


def test_the_page_of_config_files_is_up_to_date():
    script = loaded("scripts/config_page.py")
    assert script.PAGE.read_text() == script.page(), "run python scripts/config_page.py"
    shown = set(re.findall(r"literalinclude:: \.\./\.\./configs/(\S+)", script.page()))
    assert shown == {str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml")}


def test_the_papers_numbers_are_items_of_the_report():
    made = "".join(file.read_text() for file in PACKAGE.glob("**/items/*.py"))
    configs = {file.stem for file in CONFIGS.glob("*.yaml")}
    for item, _, run in table("paper.md", "item"):
        for name in inline(item) if not item.startswith("none") else ():
            assert f'"{name}"' in made or f'f"{name.partition("_")[0]}_{{' in made, name
        named = {word for code in inline(run) for word in code.split() if "=" not in word}
        assert {name for name in named if name.startswith("asmi_")} <= configs, run


def test_the_workflow_runs_what_the_project_names():
    """Every Python of pyproject.toml, and its oldest transformers."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    low, high = map(int, re.search(r'">=3\.(\d+),<3\.(\d+)"', project).groups())
    oldest = re.search(r'"transformers>=([\d.]+)"', project)[1]
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/checks.yml").read_text())
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    newest = [job["python"] for job in matrix if job["transformers"] == "newest"]
    assert newest == [f"3.{minor}" for minor in range(low, high)]
    assert {job["transformers"] for job in matrix} == {"newest", f"{oldest}.0"}


@pytest.mark.slow
def test_the_site_is_built(tmp_path):
    """As scripts/docs.sh does it, but in this environment; it needs the extra `docs`."""
    for needed in ("furo", "myst_nb", "sphinx_click", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(needed)
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", str(DOCS)]
    done = subprocess.run([*build, str(tmp_path)], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-4000:]
    for page in (page for page in tmp_path.rglob("*.html") if "_static" not in page.parts):
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', page.read_text()), page


def test_the_readme_is_a_screen():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 130


def test_errors_that_the_page_names_are_raised():
    """Each phrase of the first column stands in a message of the package."""
    texts = []
    for file in (REPOSITORY / "lm_polygraph_asmi").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    page = (REPOSITORY / "docs/reference/gotchas.md").read_text().partition("## Errors")[2]
    rows = page.split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    for row in rows.splitlines():
        for phrase in re.split(r";|\.\.\.", row.split("|")[1]):
            assert any(phrase.strip() in text for text in texts), phrase
