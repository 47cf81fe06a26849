"""What README and pages show works; YAML entries are run in test_plugin."""

import importlib
import json
import re
import subprocess
from dataclasses import fields
from functools import cache
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import click
import pytest
import transformers
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from lm_polygraph.utils.common import load_external_module
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

from lm_polygraph_asmi.analysis import Clustered
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.core.statistics import NOT_BY_DEPTH, AnswerStatistics
from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.inputs import parse_request, parse_row
from lm_polygraph_asmi.results import names
from tests import pages
from tests.composing import composed
from tests.pages import DOCS, PAGES, RECIPES, REPOSITORY, blocks, inline, prose, table
from tests.report.runs import save
from tests.tiny_lm import whitebox

CONFIGS, PACKAGE = REPOSITORY / "configs", REPOSITORY / "lm_polygraph_asmi"
EXAMPLES = sorted(file for file in PACKAGE.rglob("*.py") if ">>>" in file.read_text())
TYPED = ("polygraph_eval", "polygraph_asmi", "python", "python3", "pip", "bash", "curl", "inspect")
every_page = pytest.mark.parametrize("page", [*PAGES, *pages.NOTEBOOKS], ids=lambda page: page.name)


@every_page
def test_every_language_is_run_somewhere(page):
    """A block in another language, or in none, would go unchecked; `text` is what was printed."""
    assert "```" not in prose(page)
    for block in blocks("yaml", page):
        assert re.search("MaskedHeadsCalculator|defaults:|seed: ", block.parsed)  # test_plugin


@pytest.fixture
def tiny_hub(monkeypatch):
    """A tiny model and its tokenizer in the place of all others; its answers soon end."""
    load_named.cache_clear()
    tiny = whitebox(max_position_embeddings=1024)
    tiny.model.generation_config.eos_token_id = list(range(2, len(tiny.tokenizer), 3))
    tokenizer, template = tiny.tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for owner, thing in (("AutoModelForCausalLM", tiny.model), ("AutoTokenizer", tokenizer)):
        found = classmethod(lambda _, name, thing=thing, **__: thing if name else None)
        monkeypatch.setattr(getattr(transformers, owner), "from_pretrained", found)
    monkeypatch.setattr(Repository, "problem", lambda _: None)
    yield
    load_named.cache_clear()


RUN_HERE = [p for p in (*PAGES, DOCS / "quickstart.md") if p != RECIPES and blocks("python", p)]
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
    for example in Sybil([PythonCodeBlockParser()]).parse(page):  # its blocks share a namespace
        example.evaluate()


CALLED = {"function": {"name": "find", "arguments": '{"thing": "mill"}'}}
TALK = [
    {"role": "user", "content": "What colour is the mill?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "The mill is red."},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
CALLS = (  # a request, and the choices of its response; None: an error
    (
        {"messages": TALK, "tools": TOOLS, "temperature": 0},
        [{"message": {"content": "Red."}, "finish_reason": "stop"}],
    ),
    ({"tools": None}, [{"message": {"content": "The mill is"}, "finish_reason": "length"}]),
    (
        {"tools": TOOLS},
        [{"message": {"content": None, "tool_calls": [CALLED]}, "finish_reason": "tool_calls"}],
    ),
    ({}, [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]),
    (
        {"stream": True, "tools": TOOLS},
        [{"delta": {"content": "Red."}, "finish_reason": "eos_token"}],
    ),
    ({}, None),
    ({"n": 2}, [{"index": n, "message": {"content": "Red."}} for n in (0, 1)]),
    ({}, [{"message": {"content": "Red.", "reasoning": "It is."}, "finish_reason": "stop"}]),
    ({}, [{"message": {"content": "Red.", "reasoning_content": "So."}, "finish_reason": "stop"}]),
    ({}, [{"message": {"content": "Red"}, "finish_reason": "content_filter"}]),
)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda request, response: {"request": request, "response": response},
        lambda request, response: {**request, "response": json.dumps(response)},
        lambda request, response: {"request": {"body": request}, "response": {"body": response}},
        lambda request, response: {"input": request, "output": response},
        lambda request, response: {
            **request, "input": request["messages"], "output": [response],
        },
        lambda request, response: {
            "messages": request.pop("messages"), "model_parameters": request, "response": response,
            "error_information": {"error_code": ""},
        },
        lambda request, response: {
            "request": request,
            "response": f'data: {json.dumps(response)}\n\ndata: {{"usage": {{}}}}\n\ndata: [DONE]',
        },
        lambda request, response: request | response,
        lambda request, response: {
            "note": "[INFO] a call",
            "httpRequest": {"headers": None, "body": json.dumps(request)},
            "httpResponse": {"status": 200, "body": json.dumps(response)},
        },
    ],
)  # fmt: skip
def test_the_converter_of_a_server_s_log(wrapped, tmp_path, capsys):
    """Its rows are taken as they stand; what is no whole answer is left out and counted."""
    lines = [
        json.dumps(
            wrapped(
                {"messages": TALK} | request,
                {"id": f"red{n % 10}"} | ({"choices": choices} if choices else {"error": "busy"}),
            )
        )
        for n, (request, choices) in enumerate((*CALLS, CALLS[0]))
    ]
    log, out = tmp_path / "log.jsonl", tmp_path / "rows.jsonl"
    log.write_text("\n".join([*lines, json.dumps({"messages": TALK, "reply": "Red."})]))
    loaded("docs/tutorials/log_to_rows.py").main.callback(log, out, None)
    told = re.findall(r"left out, ([\w ]+).*: (\d) \(line (.+)\)", capsys.readouterr().out)
    assert told == [
        ("cut off by max_tokens", "1", "2"), ("a tool call", "1", "3"), ("a refusal", "1", "4"),
        ("logged or asked before", "2", "5, 11"), ("no answer", "2", "6, 12"),
        ("several answers", "1", "7"), ("reasoning apart", "2", "8, 9"),
        ("finish_reason ", "1", "10"),
    ]  # fmt: skip
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row == {"id": "red0", "messages": TALK, "tools": TOOLS, "answer": "Red."}
    request = parse_request(**parse_row(row))
    assert (request.answer, request.template) == ("Red.", {"tools": TOOLS})


def test_the_converter_keeps_the_answers_of_one_model(tmp_path):
    """A service falls back on another model under the same name of a request."""
    _, choices = CALLS[0]
    log, out = tmp_path / "log.jsonl", tmp_path / "rows.jsonl"
    log.write_text("\n".join(
        json.dumps({
            "model": "asked for",
            "input": [{"role": "user", "content": f"Which mill, {model}?"}],
            "output": {"model": model, "choices": choices},
        })
        for model in "aab"
    ))  # fmt: skip
    convert = loaded("docs/tutorials/log_to_rows.py").main.callback
    with pytest.raises(SystemExit, match=r"a \(1\), b \(1\).* --model"):
        convert(log, out, None)
    assert not out.exists()
    with pytest.raises(SystemExit, match="is the log"):
        convert(log, log, "b")
    convert(log, out, "b")
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["messages"][0]["content"] == "Which mill, b?"


ASKED = {"messages": [{"role": "user", "content": "What colour?"}]}


def whole(text, **fields):
    return {"choices": [{"message": {"content": text} | fields, "finish_reason": "stop"}]}


def stream(*tokens, id="s"):
    ends = [*[None] * (len(tokens) - 1), "stop"]
    return [
        {"id": id, "choices": [{"delta": {"content": token}, "finish_reason": end}]}
        for token, end in zip(tokens, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [  # the answer and options, or the reason
        ((ASKED, stream("a", " the", " b", " the", "")), ("a the b the", {})),
        ((ASKED, [*stream("Re", "d", id="cut")[:1], *stream("Red.")]), "several answers"),
        ((ASKED, [*stream("Red", "."), whole("Red.")]), ("Red.", {})),
        ((ASKED, [*stream("Red", "."), whole("Blue.")]), "several answers"),
        ((ASKED, [whole("Red."), whole("Red.") | {"usage": {"total_tokens": 9}}]), ("Red.", {})),
        (
            (ASKED, [{"choices": [{"message": {"content": "Re"}}]}, whole("Red.")]),
            "several answers",
        ),
        ((ASKED, {"choices": [{"message": {"content": "a"}}, *whole("b")["choices"]]}), "several"),
        ((ASKED, whole([{"type": "thinking"}, {"type": "text", "text": "Red."}])), "not only text"),
        ((ASKED, whole("Red.", thinking="Hm.")), "reasoning apart"),
        ((ASKED, [whole("Red."), whole("Red.", reasoning="Hm.")]), "reasoning apart"),
        ((ASKED, whole("Red.", refusal="No.")), "a refusal"),
        (
            (
                ASKED,
                whole("Red.") | {"usage": {"completion_tokens_details": {"reasoning_tokens": 9}}},
            ),
            "reasoning apart",
        ),
        ((ASKED, whole("Red (litellm_truncated 9 chars)")), "shortened"),
        (
            (
                [ASKED, {"optional_params": {"extra_body": {"chat_template_kwargs": {"a": 1}}}}],
                whole("R"),
            ),
            ("R", {"chat_template_kwargs": {"a": 1}}),
        ),
        (([ASKED, {"modelParameters": {"reasoning_effort": "high"}}], whole("R")), "not taken"),
        ((ASKED | {"reasoning_effort": "low"}, whole("Red.")), "not taken"),
        ((ASKED | {"extra_body": {"documents": [{}]}}, whole("R")), ("R", {"documents": [{}]})),
        (([ASKED, {"retrieval": {"documents": [{}]}}], whole("R")), ("R", {})),
        (([ASKED, {"kept": {"tools": TOOLS}}], whole("R")), ("R", {"tools": TOOLS})),
        (([ASKED, {"tools": ["find"], "properties": {"tools": {}}}], whole("R")), ("R", {})),
        (([ASKED | {"tools": TOOLS}, {"tools": [{"function": {}}]}], whole("R")), "not taken"),
        (([ASKED, ASKED | {"seed": 1}, {"input": ["text"]}], whole("R")), ("R", {})),
        (([ASKED, {"messages": TALK}], whole("R")), "several requests"),
        (({"messages": json.dumps(ASKED["messages"])}, whole("R")), ("R", {})),
        (
            ({"messages": [{**ASKED["messages"][0], "id": "m1", "name": None}]}, whole("R")),
            ("R", {}),
        ),
    ],
)
def test_the_converter_reads_a_line_or_leaves_it_out(line, expected, tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "rows.jsonl"
    log.write_text(json.dumps({"sent": line[0], "got": line[1]}), encoding="utf-8-sig")
    convert = loaded("docs/tutorials/log_to_rows.py").main.callback
    if isinstance(expected, str):
        with pytest.raises(SystemExit, match="no row"):
            convert(log, out, None)
        assert expected in capsys.readouterr().out
    else:
        convert(log, out, None)
        row = json.loads(out.read_text())
        assert (row.pop("answer"), row) == (expected[0], row | ASKED | expected[1])
        assert set(row) == {"id", "messages", *expected[1]}


def test_the_converter_keeps_a_question_about_another_document(tmp_path, capsys):
    question = {"role": "user", "content": "Until when?"}
    orders = (
        "Monday, 30 November 2026: Order 17.",
        "Tuesday, 1 December 2026: Order 17.",
        "Order 18.",
    )
    requests = [{"messages": [{"role": "system", "content": text}, question]} for text in orders]
    log, out = tmp_path / "log.jsonl", tmp_path / "rows.jsonl"
    log.write_text("\n".join(json.dumps(request | whole("Red.")) for request in requests))
    loaded("docs/tutorials/log_to_rows.py").main.callback(log, out, None)
    assert "asked before: 1 (line 2)" in capsys.readouterr().out
    rows = map(json.loads, out.read_text().splitlines())
    assert [row["messages"][0]["content"] for row in rows] == [orders[0], orders[2]]


@pytest.mark.parametrize(
    ("log", "size", "others"), [("server-log", 60, 2), ("server-log-later", 20, 0)]
)
def test_the_log_to_try_has_the_answers_that_its_page_names(log, size, others):
    text = (DOCS / f"tutorials/{log}.jsonl").read_text()
    assert (text.count('"finish_reason": "stop"'), text.count("\n")) == (size, size + others)


def typed(code: str, folder) -> list[list[str]]:
    """Commands as bash makes them of a block, loops, variables and functions resolved."""
    activate = folder / ".venv/bin/activate"
    activate.parent.mkdir(parents=True, exist_ok=True)
    activate.touch()
    for name in TYPED:  # each only says how it was called
        say = f'printf "%s\\x1f" {name} "$@"; printf "\\x1e"'
        code = f"{name}() {{ {say}; }} >&3\n{code}"
    log = folder / "typed"
    command = ["bash", "-euc", f"exec 3>{log}\n{code}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return [call.split("\x1f")[:-1] for call in log.read_text().split("\x1e")[:-1]]


def check_eval(arguments: list[str]) -> None:
    """The config is there and takes the overrides; of a sweep, those of its first job."""
    given = get_args_parser().parse_args(arguments)
    overrides = []
    for override in OverridesParser.create().parse_overrides(given.overrides):
        swept = override.is_sweep_override()
        assert given.multirun or not swept, override.input_line
        first = next(override.sweep_string_iterator()) if swept else None
        overrides.append(f"{override.get_key_element()}={first}" if swept else override.input_line)
    # Choices of these groups all set the same keys: that they are there is enough.
    alike = [text for text in overrides if text.startswith(("benchmark=", "estimators="))]
    for override in alike:
        assert (CONFIGS / f"{override.replace('=', '/')}.yaml").is_file(), override
    # What is added to a user's config can be added to ours.
    name = "asmi_demo" if given.config_dir else given.config_name
    composed(name, *(override for override in overrides if override not in alike))


def check_click(command: click.Command, arguments: list[str]) -> dict:
    """Its options exist and take these values; files need not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(click.Path, "convert", lambda _, value, *__: value)
        return command.make_context(command.name, list(arguments)).params


@cache
def loaded(file: str) -> ModuleType:
    return load_external_module(str(REPOSITORY / file))


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
            where = ["--config-dir", given["config_dir"]] if given["config_dir"] else []
            check_eval([*where, "--config-name", given["config_name"], *given["overrides"]])
    elif program == "bash":
        assert (REPOSITORY / rest[0]).is_file()
    elif program == "pip":
        assert rest[0] == "install"
        extras = re.findall(r"\.\[(\w+)\]", " ".join(rest))
        assert set(extras) <= set(metadata("lm-polygraph-asmi").get_all("Provides-Extra"))
    elif rest[0] == "-m":
        assert find_spec(rest[1])
    else:
        check_click(loaded(rest[0]).main, rest[1:])


@every_page
def test_commands_could_start(page, tmp_path):
    """Those of blocks, of a notebook's cells and of the prose."""
    shells = [block.parsed for block in blocks("bash", page)]
    cells = [block.parsed for block in blocks("python", page)]
    shells += [cell.partition("\n")[2] for cell in cells if cell.startswith("%%bash")]
    words = [code for code in inline(prose(page)) if len(code.split()) > 2]
    for shell in [*shells, *(code for code in words if code.split()[0] in TYPED)]:
        calls = typed(shell, tmp_path)
        assert calls
        for call in calls:
            check(call)


def shipped(pattern: str) -> set[str]:
    return {file.stem for file in CONFIGS.glob(pattern)}


def test_every_name_is_in_its_table_and_exists():
    for page, column, there in (
        ("config.md", "parameter", composed("asmi_coqa").asmi),
        ("config.md", "config", shipped("asmi_*.yaml") - {"asmi_base", "asmi_benchmark"}),
        ("outputs.md", "statistic", {*names.SAVED} - {"greedy_log_likelihoods"}),
        (
            "outputs.md",
            "field of `asmi`",
            {f.name for f in fields(AnswerStatistics)} - {*NOT_BY_DEPTH},
        ),
    ):
        told = [name for row in table(page, column) for name in inline(row[0])]
        assert sorted(told) == sorted(there)
    for group, choices in table("config.md", "group"):
        told = {name for name in inline(choices) if "=" not in name}
        there = shipped(f"{group.strip('`=')}/*.yaml")
        assert told == there - {"asmi_demo"}  # of that config alone


@every_page
def test_module_paths_exist(page):
    for path in re.findall(r"lm_polygraph_asmi(?:\.\w+)+", page.read_text()):
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), path


def slug(heading: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@every_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    assert links
    for link in (link for link in links if not link.startswith("https://")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert (target.exists(), target.is_relative_to(REPOSITORY)) == (True, True), link
        headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE) if anchor else [""]
        assert anchor in map(slug, headings), link


def test_every_page_is_in_the_table_of_contents():
    """The site's is made from the lists of the front page."""
    made = loaded("docs/conf.py").toctrees((DOCS / "index.md").read_text())
    entries = re.findall(r"^.+ <([\w/-]+)>$", made, re.MULTILINE)
    files = [file for kind in ("md", "rst") for file in DOCS.rglob(f"*.{kind}")]
    there = {str(file.relative_to(DOCS).with_suffix("")) for file in files}
    unlisted = ("reference/api/generated/", "evidence/")  # plans are outside of the navigation
    listed = sorted(name for name in there - {"index"} if not name.startswith(unlisted))
    assert sorted(entries) == listed


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
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
    for example in pages.DOCSTRINGS.parse(file):
        example.evaluate()


def test_the_page_of_config_files_shows_each_once():
    page = (DOCS / "reference/config-files.rst").read_text()
    shown = re.findall(r"literalinclude:: \.\./\.\./configs/(\S+)", page)
    assert sorted(shown) == sorted(
        str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml")
    )


def test_errors_that_the_page_names_are_raised():
    """Each phrase of the first column is in a message of the package, wherever its line breaks."""
    sources = [re.sub(r'"\s*f?"', "", file.read_text()) for file in PACKAGE.rglob("*.py")]
    for phrases, *_ in table("gotchas.md", "the error says"):
        for phrase in re.split(r";|\.\.\.", phrases):
            assert any(phrase.strip() in source for source in sources), phrase
