"""Many answers from a file, and the command."""

import itertools
import json
import re
import sys
from dataclasses import fields

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from datasets import load_dataset

from lm_polygraph_asmi import score
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.files import locked, parse_json
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.many import OUTPUT
from lm_polygraph_asmi.scoring.result import COMPACT
from lm_polygraph_asmi.scoring.rows import (
    COPIED_FIELDS,
    Row,
    check_out,
    line_of,
    misspelt,
    read_rows,
    reserved,
    score_file,
    score_rows,
)
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.text import row_request
from lm_polygraph_asmi.scoring.tokens import Token
from tests import tiny_lm
from tests.scoring.conftest import PROMPT
from tests.scoring.test_text import CHAT

pytestmark = pytest.mark.usefixtures("unseen")

BATCH = 4
"""Rows of `small_batches`."""
ROWS = [
    {"prompt": PROMPT, "answer": " Brask", "id": "q1", "gold": ["Brask"]},
    {"prompt": "Where do the blue kites start?"},
    {"prompt": "True or False?", "answer": [7, 8]},
]


def write(path, lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def written(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, max_new_tokens=3)


@pytest.fixture
def small_batches(monkeypatch):
    """For what happens within a batch and after it."""
    monkeypatch.setattr("lm_polygraph_asmi.scoring.rows.BATCH", BATCH)


@pytest.fixture
def calls(monkeypatch):
    """Prompts in the order they were scored."""
    seen = []

    def spy(row):
        seen.append(row["prompt"])
        return row_request(row)

    monkeypatch.setattr("lm_polygraph_asmi.scoring.text.row_request", spy)
    return seen


def test_rows_of_a_file(tmp_path):
    lines = [ROWS[0], "", "  ", "{not json", '["a list"]', {"answer": "no prompt"}, ROWS[1]]
    found = list(read_rows(write(tmp_path / "in.jsonl", lines)))
    assert [row.number for row in found] == [1, 4, 5, 6, 7]  # as an editor counts
    assert found[0].content == ROWS[0]
    assert found[4].content == ROWS[1]
    assert "not JSON" in found[1].error
    expected = 'expected an object with a "prompt", got '
    assert found[2] == Row(5, {"line": '["a list"]'}, expected + "a list")
    assert found[3] == Row(6, {"answer": "no prompt"}, expected + "the fields answer")
    odd = {"prompt": "a\u2028b\x85c\n"}  # line breaks to Python, not to JSON lines
    source = write(tmp_path / "odd.jsonl", [json.dumps(odd, ensure_ascii=False)])
    assert list(read_rows(source)) == [Row(1, odd)]


@pytest.mark.parametrize("name", ["in.jsonl", "in.JSONL", "in.ndjson"])
def test_names_of_json_lines(tmp_path, name):
    assert [row.content for row in read_rows(write(tmp_path / name, ROWS))] == ROWS


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV", "rows.xlsx"])
def test_a_table_is_no_prompt(tmp_path, name):
    (tmp_path / name).write_text("prompt,answer\nWho?, Edda\n")
    with pytest.raises(ValueError, match=r"expected \.parquet, \.jsonl \(one object per line"):
        list(read_rows(tmp_path / name))


def test_a_prompt_as_text(tmp_path):
    (tmp_path / "prompt.txt").write_text("Passage\n\nWho?\n\n")
    assert list(read_rows(tmp_path / "prompt.txt")) == [Row(1, {"prompt": "Passage\n\nWho?\n"})]


def test_files_of_other_programs(tmp_path):
    """Editors of Windows begin a file with a mark, which would be a token of the prompt."""
    for name, text in (("prompt.txt", "Who?\n"), ("in.jsonl", json.dumps({"prompt": "Who?"}))):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert list(read_rows(tmp_path / name)) == [Row(1, {"prompt": "Who?"})]
    (tmp_path / "prompt.txt").write_bytes("né".encode("latin-1"))
    with pytest.raises(ValueError, match=r"prompt\.txt: expected UTF-8"):
        list(read_rows(tmp_path / "prompt.txt"))
    (tmp_path / "in.json").write_text("[]")
    with pytest.raises(ValueError, match=r"in\.json: expected \.jsonl .* got \.json"):
        list(read_rows(tmp_path / "in.json"))


def test_what_is_written(scorer, model, tokenizer, tmp_path):
    out = tmp_path / "out.jsonl"
    found = list(score_file(scorer, write(tmp_path / "in.jsonl", ROWS), out))
    assert [(row.number, outcome.error) for row, outcome in found] == [(n, None) for n in (1, 2, 3)]
    lines = written(out)
    for number, (line, (_, outcome)) in enumerate(zip(lines, found, strict=True)):
        row = ROWS[number]
        alone = score(
            model, row["prompt"], row.get("answer"), tokenizer=tokenizer, max_new_tokens=3
        )
        assert line.items() >= json.loads(json.dumps(outcome.result.to_dict())).items()
        assert float(alone) == line["score"]
        assert (line["row"], line["prompt"]) == (number + 1, row["prompt"])
    assert (lines[0]["id"], lines[0]["gold"]) == ("q1", ["Brask"])
    assert (lines[0]["answer"], lines[0]["scored_text"]) == (" Brask", " Brask</s>")
    assert lines[2]["answer"] == [7, 8]
    assert lines[1]["scored_text"].startswith(lines[1]["answer"])


def test_every_field_of_a_line_is_the_inputs_or_the_scores(scorer):
    found = scorer.score(PROMPT, " Brask").to_dict()
    assert set(found) - COPIED_FIELDS <= reserved(scorer)
    assert {"row", "error"} <= reserved(scorer)


def test_samples_of_a_row(model, tokenizer):
    scorer = Scorer(model, tokenizer=tokenizer, method="adapt")
    row = Row(0, {"prompt": PROMPT, "answer": [5], "samples": [" a", " Brask"]})
    ((_, outcome),) = score_rows(scorer, [row])
    expected = score(
        model, PROMPT, [5], tokenizer=tokenizer, samples=[" a", " Brask"], method="adapt"
    )
    assert float(outcome.result) == float(expected)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(("suffix", "scope"), [(".jsonl", "all"), (".parquet", "response")])
def test_a_killed_run_writes_the_same_file(model, tokenizer, calls, tmp_path, suffix, scope):
    """The rows of whole batches are not scored again; of the batch that was being scored, all."""
    rows = [{"prompt": f"{PROMPT} {i % 7}", "answer": " Brask"} for i in range(2 * BATCH + 3)]
    rows[5]["answer"] = ""
    source = tmp_path / f"in{suffix}"
    write(source, rows) if suffix == ".jsonl" else pd.DataFrame(rows).to_parquet(source)

    def run(out, cache):
        scorer = Scorer(model, tokenizer=tokenizer, scope=scope, result_cache=tmp_path / cache)
        calls.clear()
        return score_file(scorer, source, tmp_path / out)

    killed = run(f"killed{suffix}", "cache")
    for _ in range(BATCH + 2):
        next(killed)
    killed.close()
    assert not (tmp_path / f"killed{suffix}").exists()
    assert len(list(run(f"killed{suffix}", "cache"))) == len(rows)
    assert len(calls) == BATCH + 3
    list(run(f"again{suffix}", "cache"))
    assert calls == []
    list(run(f"whole{suffix}", "elsewhere"))
    assert len(calls) == len(rows)
    killed, again, whole = (tmp_path / f"{name}{suffix}" for name in ("killed", "again", "whole"))
    assert killed.read_bytes() == again.read_bytes()
    if suffix == ".parquet":
        assert killed.read_bytes() == whole.read_bytes()
        return
    for one, other in zip(written(killed), written(whole), strict=True):
        for line in (one, other):
            line.pop("seconds", None)  # measured
        assert one == other


def test_a_result_cache_knows_what_a_score_depends_on(model, tokenizer, calls, tmp_path):
    def scored(rows=(), **settings):
        rows = rows or [{"prompt": PROMPT, "answer": " Brask", "note": 1}]
        scorer = Scorer(
            model, tokenizer=tokenizer, result_cache=tmp_path, **{"max_new_tokens": 3} | settings
        )
        calls.clear()
        list(score_rows(scorer, [Row(number, row) for number, row in enumerate(rows)]))
        return len(calls)

    assert (scored(), scored()) == (1, 0)
    assert (
        scored([{"prompt": PROMPT, "answer": " Brask", "note": 2}]) == 0
    )  # no score depends on it
    assert scored([{"prompt": PROMPT, "answer": " 1931"}]) == 1
    for settings in ({"stop": "\n"}, {"seed": 1}, {"method": "asmi"}, {"attention": "sdpa"}):
        assert (scored(**settings), scored(**settings)) == (1, 0)
    weight = next(model.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 1
    try:
        assert scored() == 1
    finally:
        with torch.no_grad():
            weight.copy_(before)
    hook = model.register_forward_hook(lambda *_: None)  # cannot be identified
    try:
        assert (scored(), scored()) == (1, 1)
    finally:
        hook.remove()
    assert scored() == 0


def test_a_result_cache_knows_what_prepares_a_prompt(calls, tmp_path, monkeypatch):
    """Chat templates and stop conditions."""
    host = tiny_lm.whitebox()

    def scored(**settings):
        scorer = Scorer(host, result_cache=tmp_path / "cache", max_new_tokens=3, **settings)
        calls.clear()
        list(score_rows(scorer, [Row(1, {"prompt": PROMPT})]))
        return len(calls)

    host.tokenizer(["a", "b c"], padding=True)  # by anybody; the next call undoes it
    assert (scored(), scored()) == (1, 0)
    monkeypatch.setattr(host.model.generation_config, "eos_token_id", 5)
    assert (scored(), scored()) == (1, 0)
    monkeypatch.setattr(host.tokenizer, "chat_template", CHAT)
    assert (scored(), scored()) == (1, 0)
    monkeypatch.setattr(host, "instruct", True, raising=False)
    assert (scored(), scored()) == (1, 0)


def test_ids_of_a_cached_batch_are_those_of_its_rows(model, tokenizer, tmp_path):
    for row_id in ("a", "b"):
        scorer = Scorer(model, tokenizer=tokenizer, result_cache=tmp_path)
        ((_, outcome),) = score_rows(scorer, [Row(1, {"prompt": PROMPT, "id": row_id})])
        assert outcome.id == row_id


def test_line_breaks_of_other_systems(tmp_path):
    """Rows end at \\n or \\r\\n; other line breaks of Unicode are text."""
    prompts = ["Who?", "a\u2028b", "c\x85d", "e\u2029"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    for end, mark in itertools.product(("\n", "\r\n"), ("", "\ufeff")):
        (tmp_path / "rows.jsonl").write_bytes((mark + end.join([*lines, "{", ""])).encode())
        *rows, last = read_rows(tmp_path / "rows.jsonl")
        assert [row.content["prompt"] for row in rows] == prompts
        assert (last.number, last.content) == (len(lines) + 1, {"line": "{"})


def test_a_failure_that_may_pass_is_not_kept(model, tokenizer, tmp_path, monkeypatch):
    scorer = Scorer(model, tokenizer=tokenizer, result_cache=tmp_path)
    rows = [Row(1, {"prompt": PROMPT, "answer": " Brask"})]
    with monkeypatch.context() as full:
        full.setattr(
            Engine, "score", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        assert next(score_rows(scorer, rows))[1].error == "no memory"
        list(score_rows(scorer, rows))
    ((_, outcome),) = score_rows(scorer, rows)
    assert outcome.error is None


def test_a_full_disk_leaves_no_file(scorer, tmp_path, monkeypatch):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lm_polygraph_asmi.scoring.rows.line_of", full)
    with pytest.raises(OSError, match="No space left"):
        list(score_file(scorer, source, out))
    assert not out.exists()


BAD = [
    "{not json",
    {"answer": " no prompt"},
    {"prompt": PROMPT, "answer": ""},
    {"prompt": PROMPT * 100},
    {"prompt": [{"role": "user", "content": "no template"}]},
    {"prompt": []},
    {"prompt": 7},
    {"prompt": PROMPT, "answer": 7},
    {"prompt": PROMPT, "answer": ["x"]},
    {"prompt": PROMPT, "answer": [10**6]},
]


def test_bad_rows_stop_nothing(scorer, tmp_path):
    source = write(tmp_path / "in.jsonl", [*BAD, ROWS[0]])
    found = list(score_file(scorer, source, tmp_path / "out.jsonl"))
    assert [outcome.result is None for _, outcome in found] == [True] * len(BAD) + [False]
    lines = written(tmp_path / "out.jsonl")
    assert [line["row"] for line in lines] == list(range(1, len(BAD) + 2))
    assert all(line["error"] for line in lines[:-1])
    assert lines[0]["line"] == "{not json"
    assert lines[2]["prompt"] == PROMPT  # fields of the input stay
    assert "error" not in lines[-1]


def test_a_line_keeps_what_was_given(scorer, tmp_path):
    rows = [{"prompt": PROMPT, "answer": None}, {"prompt": PROMPT, "score": 7, "note": "kept"}]
    lines = [*map(json.dumps, rows), '{"prompt": ' + "[" * 10**5, '{"prompt": ' + "1" * 5000 + "}"]
    list(score_file(scorer, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"))
    first, second, *unreadable = written(tmp_path / "out.jsonl")
    assert first["answer"]  # the model's own
    assert second["line"] == rows[1]
    assert all("not JSON" in line["error"] for line in unreadable)


def test_a_file_that_appears_meanwhile_is_kept(scorer, tmp_path):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    rows = score_file(scorer, source, out)
    next(rows)
    out.write_text("precious")
    with pytest.raises(ValueError, match=r"exists: the result is in .*partial"):
        list(rows)
    assert out.read_text() == "precious"


@pytest.mark.usefixtures("small_batches")
def test_rows_in_parquet(scorer, tmp_path):
    rows = pd.DataFrame(
        [{"prompt": PROMPT, "answer": " Brask", "at": pd.Timestamp(0)}, {"prompt": None}] * BATCH
    )
    far = pa.array([2**30] * len(rows), pa.int32()).cast(pa.date32())  # no date of Python's
    table = pa.Table.from_pandas(rows, preserve_index=False)
    pq.write_table(table.append_column("far", far), tmp_path / "in.parquet", row_group_size=5)
    out = tmp_path / "out.parquet"
    list(score_file(scorer, tmp_path / "in.parquet", out))
    assert pq.read_table(out)["far"].combine_chunks() == far
    scored = pq.read_table(out).drop_columns("far").to_pandas()
    assert list(scored) == [*rows, *OUTPUT]
    pd.testing.assert_frame_equal(scored[list(rows)], rows)
    assert (scored["asmi_error"].isna() == (scored["asmi_score"] >= 0)).all()
    assert scored["asmi_error"].isna().sum() == BATCH
    assert set(json.loads(scored["asmi_tokens"][0])[0]) == set(COMPACT)
    assert len(load_dataset("parquet", data_files=str(out), split="train")) == 2 * BATCH
    with pytest.raises(ValueError, match="leave its column out"):
        list(score_file(scorer, tmp_path / "in.parquet", tmp_path / "out.jsonl"))
    pq.write_table(table, tmp_path / "in.parquet")
    list(score_file(scorer, tmp_path / "in.parquet", tmp_path / "out.jsonl"))
    assert len(written(tmp_path / "out.jsonl")) == 2 * BATCH


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["Who?"]}, "expected a column 'prompt', got 'question'"),
        ({"prompt": ["Who?"], "asmi_score": [7]}, r"\['asmi_score'\] would be overwritten"),
    ],
)
def test_a_table_that_cannot_be_written(tmp_path, columns, message):
    pd.DataFrame(columns).to_parquet(tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=message):
        check_out(tmp_path / "in.parquet", tmp_path / "out.parquet", OUTPUT)
    with pytest.raises(ValueError, match=r"expected a \.jsonl file, or \.parquet for rows"):
        check_out(tmp_path / "in.jsonl", tmp_path / "out.parquet", OUTPUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def command(folder):
    def run(*arguments, model=folder):
        words = ["score", "--model", str(model), "--max-new-tokens", "3", *map(str, arguments)]
        return CliRunner().invoke(main, words, env={"COLUMNS": "200"})

    return run


def test_command_on_many_rows(command, calls, model, tokenizer, tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", [ROWS[0], "{", *ROWS[1:], BAD[2]])
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    arguments = [source, "--out", out, "--html", page, "--depth", "0.9"]
    done = command(*arguments)
    assert done.exit_code == 1
    assert "row 2: not JSON" in done.stderr
    assert "row 5: the answer is empty" in done.stderr
    assert "Scoring" in done.stderr
    said = r"3 scored, 2 failed, 1 with warnings, [\d.e+-]+ rows per second\.\nResults: "
    assert re.search(said, done.stdout)
    assert ["score" in line for line in written(out)] == [True, False, True, True, False]
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer, depth=0.9)
    assert written(out)[0]["score"] == pytest.approx(float(expected), rel=1e-5)
    assert page.read_text(encoding="utf-8").count('<section class="asmi" id=') == 3
    # A file of scores is never overwritten; what was scored is kept until all rows are.
    assert f"{out} exists" in " ".join(command(*arguments).stderr.split())
    first = out.read_text()
    out.unlink()
    calls.clear()
    done = command(*arguments)
    assert done.exit_code == 1
    assert "Resuming" in done.stderr
    assert calls == []
    assert out.read_text() == first
    out.unlink()
    write(source, ROWS)
    assert " of 3 rows" not in done.stderr
    monkeypatch.setattr(sys.modules["lm_polygraph_asmi.commands.score"], "MINUTE", 0)
    done = command(*arguments)
    assert done.exit_code == 0
    assert "1 of 3 rows" in done.stderr
    assert not (tmp_path / "out.jsonl.cache").exists()


def test_command_changes_rows_of_parquet_too(command, tmp_path):
    pd.DataFrame([{"prompt": PROMPT}]).to_parquet(tmp_path / "in.parquet")
    write(tmp_path / "in.jsonl", [{"prompt": PROMPT}])
    for suffix in (".parquet", ".jsonl"):
        out = tmp_path / f"out{suffix}"
        done = command(tmp_path / f"in{suffix}", "--answer", " Brask", "--out", out)
        assert done.exit_code == 0, done.output
    (line,) = written(tmp_path / "out.jsonl")
    assert pd.read_parquet(tmp_path / "out.parquet")["asmi_text"].tolist() == [line["scored_text"]]
    refused = command(tmp_path / "in.parquet", "--chat", "--out", tmp_path / "chat.parquet")
    assert "has no chat template" in " ".join(refused.stderr.split())


def test_command_deletes_no_folder_of_others(command, tmp_path):
    source, folder = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl.cache"
    folder.mkdir()
    (folder / "notes.txt").write_text("precious")
    refused = command(source, "--out", tmp_path / "out.jsonl")
    assert "out.jsonl.cache exists" in " ".join(refused.stderr.split())
    done = command(source, "--out", tmp_path / "out.jsonl", "--result-cache", folder)
    assert done.exit_code == 0
    assert (folder / "notes.txt").read_text() == "precious"


def test_command_with_a_result_cache(command, calls, tmp_path):
    source, cache = write(tmp_path / "in.jsonl", ROWS), tmp_path / "shared"
    for out, number in (("one.jsonl", len(ROWS)), ("two.jsonl", 0)):
        calls.clear()
        done = command(source, "--out", tmp_path / out, "--result-cache", cache)
        assert (done.exit_code, len(calls)) == (0, number)
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [("none", None), ("compact", set(COMPACT)), ("full", {field.name for field in fields(Token)})],
)
def test_command_tells_as_much_of_tokens_as_asked(command, tmp_path, tokens, expected):
    source, out = write(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    done = command(source, "--out", out, "--tokens", tokens)
    assert done.exit_code == 0, done.output
    (line,) = written(out)
    assert line["score"] > 0
    if expected is None:
        assert line.get("tokens") is None
    else:
        assert {frozenset(token) for token in line["tokens"]} == {frozenset(expected)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--out", "x.parquet"], ".parquet for rows in Parquet; got x.parquet"),
    ],
)
def test_command_refuses_options_that_would_go_unheard(command, tmp_path, given, said):
    refused = command(write(tmp_path / "in.jsonl", ROWS[:1]), *given)
    assert refused.exit_code == 1
    assert said in refused.stderr


def test_command_says_which_field_it_does_not_read(command, tmp_path):
    rows = [{"prompt": PROMPT, "answr": " Brask", "id": "a", "answers": ["Brask"]}]
    done = command(write(tmp_path / "in.jsonl", rows), "--out", tmp_path / "out.jsonl")
    assert done.exit_code == 0
    assert "Warning: ignoring the field 'answr'; did you mean 'answer'?" in done.stderr
    assert misspelt(["prompt", "answer", "answers", "id", "correct", "quality", "cluster"]) == {}


def test_command_names_rows_by_their_own_id(command, tmp_path):
    source = write(tmp_path / "in.jsonl", [ROWS[0], BAD[2] | {"id": "broken one"}, BAD[2]])
    done = command(source, "--out", tmp_path / "out.jsonl")
    assert done.exit_code == 1
    assert "row 2 (broken one): the answer is empty" in done.stderr
    assert "row 3: the answer is empty" in done.stderr


def test_command_on_one_prompt(command, model, tokenizer, tmp_path):
    source = tmp_path / "prompt.txt"
    source.write_text(PROMPT + "\n")
    done = command(source, "--answer", " Brask", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer)
    assert f"Sem-ASMI: {float(expected):.4f} nats" in done.stdout
    assert "Scores have no common scale" in done.stdout
    assert " Brask" in (tmp_path / "page.html").read_text(encoding="utf-8")
    plain = command(source, "--method", "asmi", "--scope", "response")
    expected = score(
        model, PROMPT, tokenizer=tokenizer, method="asmi", scope="response", max_new_tokens=3
    )
    assert f"\nASMI: {float(expected):.4f} nats" in "\n" + plain.stdout
    stopped = command(source, "--answer", " Brask", "--stop", "\\n", "--out",
                      tmp_path / "out.jsonl")  # fmt: skip
    assert stopped.exit_code == 0
    assert written(tmp_path / "out.jsonl")[0]["scored_text"] == " Brask\n"


def test_command_with_a_chat_template(command, tmp_path):
    source = tmp_path / "prompt.txt"
    source.write_text(PROMPT)
    refused = command(source, "--chat")
    assert refused.exit_code == 1
    assert "row 1: the prompt is a list of messages" in refused.stderr
    whitebox = tiny_lm.whitebox()
    whitebox.model.save_pretrained(tmp_path / "chat")
    tokenizer = tiny_lm.tokenizer()
    try:
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(tmp_path / "chat")
        messages = [{"role": "user", "content": PROMPT}]
        expected = score(whitebox.model, messages, " Brask", tokenizer=tokenizer)
    finally:
        tokenizer.chat_template = None
    out = tmp_path / "out.jsonl"
    done = command(source, "--chat", "--answer", " Brask", "--out", out,
                   model=tmp_path / "chat")  # fmt: skip
    assert done.exit_code == 0, done.output
    (line,) = written(out)
    assert line["prompt"] == messages
    assert line["score"] == pytest.approx(float(expected), rel=1e-5)


def test_command_with_all_settings(command, folder, tmp_path):
    source, out = tmp_path / "prompt.txt", tmp_path / "out.jsonl"
    source.write_text(PROMPT)
    settings = {
        "method": "adapt", "depth": 0.9, "scope": "response", "num_masks": 9, "mask_rate": 0.3,
        "mask_sampler": "balanced", "top_k": 8, "seed": 3, "num_samples": 4, "tau": 0.1,
        "beta": 2.0, "closing_token": False,
    }  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = command(source, "--answer", " Brask", "--out", out, *words[:-1],
                   "--no-closing-token")  # fmt: skip
    assert done.exit_code == 0, done.output
    scorer = Scorer(str(folder), max_new_tokens=3, **settings)
    expected = scorer.score(PROMPT, " Brask")
    (line,) = written(out)
    assert line["score"] == pytest.approx(float(expected), rel=1e-6)
    saved = expected.settings | scorer.fingerprints()
    assert line["settings"] == json.loads(json.dumps(saved))
    own = set(settings)
    assert {name: line["settings"][name] for name in own} == {n: settings[n] for n in own}


def test_command_says_what_is_wrong(command, calls, tmp_path):
    source, many = tmp_path / "prompt.txt", write(tmp_path / "in.jsonl", ROWS)
    source.write_text(PROMPT)
    precious, page = tmp_path / "notes.txt", tmp_path / "page.jsonl"
    precious.write_text("my notes")
    for arguments, message in (
        ([source, "--dtype", "float99"], "got 'float99'"),
        ([source, "--dtype", "nn"], "expected dtype auto or a torch dtype"),
        ([many, "--answer", "x"], "--answer needs a single prompt"),
        ([many], "name a file with --out or --html"),
        ([write(tmp_path / "none.jsonl", [])], "has no rows"),
        ([source, "--out", precious], "expected a .jsonl file"),
        ([source, "--depth", "60"], "depth must lie in (0, 1)"),
        (
            [write(tmp_path / "odd.jsonl", [{"q": "Who?"}]), "--html", tmp_path / "p.html"],
            'row 1: expected an object with a "prompt", got the fields q',
        ),
        ([many, "--out", many], "it is the file of prompts"),
        ([write(tmp_path / "p.jsonl.partial", ROWS), "--out", tmp_path / "p.jsonl"], "of prompts"),
        ([source, "--out", tmp_path / "out.jsonl", "--html", page], "the name of an .html file"),
        ([source, "--html", tmp_path / "no" / "page.html"], "its folder does not exist"),
    ):
        done = command(*arguments)
        assert done.exit_code == 1
        assert message in done.stderr.replace("\n", " ")
        assert isinstance(done.exception, SystemExit)
    missing = command(source, model=tmp_path / "no model")
    assert missing.exit_code == 1
    assert "cannot load the model" in missing.stderr
    assert calls == []
    assert precious.read_text() == "my notes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--answer", ""], "got an empty --answer"),
    ],
)
def test_command_refuses_before_it_loads(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "other.json").write_text("{}")
    write(tmp_path / "rows.jsonl", ROWS)
    done = command("prompt.txt", *arguments, model="no such model")
    assert done.exit_code == 1
    assert message in done.stderr.replace("\n", " ")
    assert "no such model" not in done.stderr
    done = command("prompt.txt", "--calibration", "c.json", model="no such model")
    assert done.exit_code == 2
    assert "score takes no calibration: `polygraph_asmi decide`" in done.stderr.replace("\n", " ")


def test_load(folder):
    assert Scorer(str(folder)).model.dtype == torch.float32
    scorer = Scorer(str(folder), dtype="bfloat16", method="asmi", seed=3)
    assert scorer.model.dtype == torch.bfloat16
    assert (scorer.config.method, scorer.config.seed) == ("asmi", 3)
    assert not scorer.model.training
    assert len(scorer.score(PROMPT, " Brask").tokens) > 1


def test_an_answer_of_another_type(scorer):
    rows = [Row(0, {"prompt": PROMPT, "answer": 7})]
    ((_, outcome),) = score_rows(scorer, rows)
    assert outcome.result is None
    assert outcome.error == "expected an answer as text or token ids, got 7"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"score": 77, "tokens": "mine"}, r"expected no fields \['score', 'tokens'\]"),
        ({"unit": [], "signals": "good"}, r"expected no fields \['signals', 'unit'\]"),
        ({"answer": [1.5]}, "text or a list of token ids"),
        ({"answer": [float("inf")]}, r"the field 'answer\[0\]': expected a finite number, got inf"),
        ({"samples": "pear"}, "expected samples as a list of answers"),
    ],
)
def test_rows_that_would_be_misread(scorer, row, problem):
    ((_, outcome),) = score_rows(scorer, [Row(0, {"prompt": PROMPT} | row)])
    assert outcome.result is None
    assert re.search(problem, outcome.error)


def test_json_that_readers_understand_differently(scorer, tmp_path):
    """NaN would be written as it came; of a field that occurs twice, the last would win."""
    lines = [
        '{"prompt": "Who built it?", "answer": " Brask", "x": NaN}',
        '{"prompt": "Who?", "answer": " a", "correct": true, "correct": false}',
        '{"prompt": "Who?", "answer": " a", "x": -0.0, "y": 123456789012345678901234567890}',
    ]
    list(score_file(scorer, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"))
    text = (tmp_path / "out.jsonl").read_text()
    first, second, third = (parse_json(line) for line in text.splitlines())
    assert "the field 'x': expected a finite number" in first["error"]
    assert "the field 'correct' occurs twice" in second["error"]
    assert ("error" in third, third["y"]) == (False, 123456789012345678901234567890)
    assert '"x": -0.0' in text
    rows = [
        Row(1, {"prompt": "Who?", "x": {"y": [1, float("nan")]}}),
        Row(2, {"prompt": "a\ud800"}),
    ]
    for (row, outcome), field in zip(
        score_rows(scorer, rows), (r"x\.y\[1\]", "prompt"), strict=True
    ):
        assert re.search(f"the field '{field}': expected", outcome.error)
        assert parse_json(line_of(row, outcome, scorer))["error"] == outcome.error
    table = pa.table({"prompt": ["Who?"], "answer": [" a"], "x": [float("nan")]})
    pq.write_table(table, tmp_path / "in.parquet")
    list(score_file(scorer, tmp_path / "in.parquet", tmp_path / "nan.jsonl"))
    assert parse_json((tmp_path / "nan.jsonl").read_text())["x"] is None


def test_two_writers_of_one_file(scorer, tmp_path):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    first = score_file(scorer, source, out)
    next(first)
    with pytest.raises(ValueError, match=r"out\.jsonl is being written by another"):
        next(score_file(scorer, source, out))
    with pytest.raises(ValueError, match="is being written by another"):  # before a model is loaded
        check_out(source, out, OUTPUT)
    list(first)
    assert [line["row"] for line in written(out)] == [1, 2, 3]
    killed = score_file(scorer, source, tmp_path / "again.jsonl")
    next(killed)
    killed.close()
    list(score_file(scorer, source, tmp_path / "again.jsonl"))
    assert (tmp_path / "again.jsonl").read_text().count("\n") == 3


def test_a_second_command_stops_before_it_loads_a_model(command, tmp_path, monkeypatch):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, locked(f"{out}.lock", remove=True):
        patch.setattr("lm_polygraph_asmi.scoring.scorer.load_named", pytest.fail)
        done = command(source, "--out", out)
    assert done.exit_code == 1
    assert "out.jsonl is being written by another program" in " ".join(done.stderr.split())
    assert command(source, "--out", out).exit_code == 0
    assert {file.name for file in tmp_path.iterdir()} >= {"in.jsonl", "out.jsonl"}
    assert not [*tmp_path.glob("out.jsonl.*")]
