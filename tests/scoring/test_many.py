"""Many rows: one after the other, as columns, and in blocks that a kill does not undo."""

import json
from itertools import islice

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from lm_polygraph_asmi import score_batch
from lm_polygraph_asmi.scoring import blocks
from lm_polygraph_asmi.scoring.many import OUTPUT
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.scoring.conftest import PROMPT
from tests.scoring.test_reuse import SETTINGS, columns, known_to, passes  # noqa: F401

PASSAGE = "The ferry Ondine was built in Brask in 1931. "
ROWS = [
    {"id": "a", "prompt": PASSAGE + "Who built it?", "answer": " Brask"},
    {"id": "b", "prompt": PASSAGE + "A question about the passage."},
    {"id": "c", "prompt": None, "answer": ""},
    {"id": "d", "prompt": PASSAGE + "A question about the passage.", "answer": " True"},
    {"id": "e", "prompt": PROMPT, "answer": [7, 8]},
]


@pytest.fixture
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, **SETTINGS, max_new_tokens=3)


def test_rows_come_out_as_they_went_in(scorer, passes):  # noqa: F811
    given = json.loads(json.dumps(ROWS))
    taken = []

    def rows():
        for row in given:
            taken.append(row["id"])
            yield row

    found = scorer.score_many(rows())
    assert next(found).id == "a"
    assert taken == ["a"]  # no row is taken before its turn
    found = [None, *found]
    assert given == ROWS
    assert [(one.index, one.id) for one in found[1:]] == list(zip(range(1, 5), "bcde", strict=True))
    assert [one.error is None for one in found[1:]] == [True, False, True, True]
    shared = len(scorer.tokenizer(PASSAGE)["input_ids"])
    starts = [start for start, _ in known_to(passes)]
    assert starts[0] == 0
    assert any(start >= shared - 1 for start in starts)  # the passage was not run again
    for one, row in zip(found[1:], ROWS[1:], strict=True):
        if one.score is None:
            continue
        alone = scorer.score(row["prompt"], row.get("answer"))
        np.testing.assert_allclose(columns(one.score.tokens), columns(alone.tokens), atol=1e-5)
    with pytest.raises(ValueError, match="expected a text"):
        list(scorer.score_many(ROWS, on_error="raise"))
    with pytest.raises(ValueError, match="on_error"):
        scorer.score_many(ROWS, on_error="ignore")


def test_columns_in_columns_out(scorer):
    frame = pd.DataFrame(ROWS[:4])
    given = {name: frame[name].to_numpy() for name in frame}
    found = score_batch(given, scorer)
    assert list(found) == [*given, *OUTPUT]
    for name, column in given.items():
        assert found[name] is column
    each = list(scorer.score_many(ROWS[:4]))
    expected = [None if one.score is None else one.score.score for one in each]
    assert found["asmi_score"].tolist() == pytest.approx(expected)
    assert [error is None for error in found["asmi_error"]] == [True, True, False, True]
    # The model's own answer stands where none was given, and a given one stays.
    assert [text is None for text in found["asmi_answer"]] == [True, False, True, True]
    assert set(json.loads(found["asmi_tokens"][0])[0]) >= {"text", "u", "alternative"}
    assert score_batch(given, scorer, tokens="none")["asmi_tokens"].tolist() == [None] * 4
    with pytest.raises(ValueError, match="would be overwritten"):
        score_batch(found, scorer)
    with pytest.raises(ValueError, match="expected a column 'prompt'"):
        score_batch({}, scorer)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_blocks_go_on_where_they_stopped(scorer, tmp_path, suffix):
    rows = [{**row, "answer": " Brask"} for row in ROWS[:4]]
    source = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(source, row_group_size=3)
    else:
        source.write_text("\n\n".join(map(json.dumps, rows)) + "\nno JSON\n")
    made = len(rows) + (suffix == ".jsonl")

    def run(folder, stop=None):
        left = blocks.blocks_left(source, folder, 2, {"seed": 0})
        done = blocks.score_blocks(scorer, source, left, folder, "compact")
        return list(islice(done, stop))

    whole = run(tmp_path / "whole")
    assert sum(one.rows for one in whole) == made
    assert sum(one.failed for one in whole) == 1 + (suffix == ".jsonl")
    assert len(run(tmp_path / "killed", stop=1)) == 1
    assert len(run(tmp_path / "killed")) == len(whole) - 1
    assert run(tmp_path / "killed") == []

    def content(folder):
        files = sorted(folder.glob(f"block-*{suffix}"))
        if suffix == ".parquet":
            return [row for file in files for row in pq.read_table(file).to_pylist()]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    found = content(tmp_path / "whole")
    assert [row["asmi_row"] for row in found] == list(range(made))
    assert [row.get("id") for row in found][:4] == list("abcd")
    if suffix == ".jsonl":  # a line that is none keeps its content
        assert found[-1]["line"] == "no JSON"
        assert found[-1]["asmi_error"] == "ValueError: expected a JSON object"
    with pytest.raises(ValueError, match="with other settings"):
        blocks.blocks_left(source, tmp_path / "whole", 2, {"seed": 1})
    with pytest.raises(ValueError, match="holds no blocks"):
        blocks.blocks_left(source, tmp_path, 2, {"seed": 0})


def test_a_table_without_prompts_is_refused_before_a_model_is_loaded(tmp_path):
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["Who?"], "answer": [" Edda"]}), source)
    with pytest.raises(ValueError, match="expected a column 'prompt', got 'question', 'answer'"):
        blocks.blocks_of(source, 4)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_full_disk_costs_one_block(scorer, tmp_path, monkeypatch, suffix):
    source, folder = tmp_path / f"rows{suffix}", tmp_path / "out"
    rows = pd.DataFrame([{"prompt": PROMPT, "answer": " A"}] * 3)
    rows.to_parquet(source) if suffix == ".parquet" else rows.to_json(
        source, orient="records", lines=True
    )
    own = blocks._kept

    def full(file):
        if "0000001" in file.name:
            raise OSError(28, "No space left on device")
        own(file)

    monkeypatch.setattr(blocks, "_kept", full)
    left = blocks.blocks_left(source, folder, 1, {})
    done = list(blocks.score_blocks(scorer, source, left, folder, "none"))
    assert [one.error is None for one in done] == [True, False, True]
    assert "No space left" in done[1].error
    assert sorted(file.name for file in folder.iterdir()) == [
        blocks.PLAN, f"block-0000000{suffix}", f"block-0000002{suffix}",
    ]  # fmt: skip
    assert [block.number for block in blocks.blocks_left(source, folder, 1, {})] == [1]


def test_a_bad_row_costs_itself_alone(scorer, tmp_path):
    source, folder = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [
        {"prompt": PROMPT, "answer": " A", "note": "\ud800"},  # half a pair, as JSON may hold it
        {"prompt": PROMPT, "answer": " A", "asmi_score": 7.0},
        {"prompt": PROMPT, "answer": " A", "asmi_row": 7},
        {"prompt": "\ud800", "answer": " A"},
        {"prompt": PROMPT, "answer": " A"},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left = blocks.blocks_left(source, folder, 5, {})
    [done] = blocks.score_blocks(scorer, source, left, folder, "none")
    assert (done.failed, done.error) == (3, None)
    found = [json.loads(line) for line in (folder / "block-0000000.jsonl").open()]
    assert [row["asmi_row"] for row in found] == list(range(5))
    assert [row["asmi_error"] is None for row in found] == [True, False, False, False, True]
    assert found[0]["note"] == "\ud800"
    assert json.loads(found[1]["line"]) == rows[1]  # what was given is kept
    assert "['asmi_row'] would be overwritten" in found[2]["asmi_error"]

    table = tmp_path / "rows.parquet"
    pd.DataFrame([{"prompt": PROMPT, "asmi_row": 7}]).to_parquet(table)
    with pytest.raises(ValueError, match=r"columns \['asmi_row'\] would be overwritten"):
        blocks.blocks_of(table, 4)


def test_a_folder_is_read_as_one_table(scorer, tmp_path):
    source, folder = tmp_path / "rows.parquet", tmp_path / "out"
    pd.DataFrame([{"prompt": PROMPT, "answer": " A", "id": i} for i in range(3)]).to_parquet(source)
    left = blocks.blocks_left(source, folder, 2, {})
    killed = folder / f".{blocks._place(folder, left[0], source).name}.4711"
    killed.write_bytes(b"half")
    assert all(
        one.error is None for one in blocks.score_blocks(scorer, source, left, folder, "none")
    )
    assert not killed.exists()
    assert pd.read_parquet(folder)["id"].tolist() == [0, 1, 2]
    assert pq.read_table(folder).num_rows == 3
    assert len(load_dataset("parquet", data_dir=str(folder), split="train")) == 3


def test_of_a_large_row_group_little_is_in_memory(tmp_path, monkeypatch):
    """Blocks may begin anywhere in the group, and be larger or smaller than a batch."""
    monkeypatch.setattr(blocks, "BATCH", 4)
    source = tmp_path / "rows.parquet"
    pd.DataFrame({"prompt": [str(i) for i in range(30)]}).to_parquet(source, row_group_size=20)
    for size in (3, 4, 9, 20):
        blocks._rows_of.cache_clear()
        for block in [one for one in blocks.blocks_of(source, size) if one.number != 1]:
            read = blocks._table_of(str(source), block)["prompt"].to_pylist()
            assert read == [str(block.row + i) for i in range(block.rows)]
            assert len(blocks._rows_of(str(source), block.at[0]).held) <= size + 2 * 4
    first = blocks.blocks_of(source, 3)[0]
    assert len(blocks._table_of(str(source), first)) == 3  # again from the start


def test_changed_weights_are_another_run(tmp_path):
    model, source = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    (model / "weights").write_bytes(b"a" * 5 * blocks.ENDS)
    source.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    before = {"contents": blocks.contents(model, "a name on a hub")}
    assert len(blocks.blocks_left(source, tmp_path / "out", 1, before)) == 1
    (model / "weights").write_bytes(b"a" * (5 * blocks.ENDS - 1) + b"b")
    after = {"contents": blocks.contents(model, "a name on a hub")}
    with pytest.raises(ValueError, match="other settings"):
        blocks.blocks_left(source, tmp_path / "out", 1, after)
