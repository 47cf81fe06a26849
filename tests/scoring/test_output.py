"""Results in files and tables: what is written, what a killed run goes on with, and what not."""

import errno
import io
import json
from copy import deepcopy
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch

from lm_polygraph_asmi import Scorer, score_file
from lm_polygraph_asmi.files import locked, parse_json
from lm_polygraph_asmi.scoring import BatchScorer, Score, UnmaskedAnswer, output
from tests.scoring.conftest import PROMPT
from tests.scoring.test_rows import MIXED, contents

pytestmark = pytest.mark.usefixtures("unseen")

SUFFIXES = (".jsonl", ".parquet")
ROWS = [
    {"prompt": PROMPT, "answer": " Brask", "id": "007", "gold": "Brask"},
    {"prompt": 'Where do the "blue kites" start,\nand when?', "gold": "NA", "id": "2"},
    {"prompt": "True or False?", "answer": [7, 8], "gold": "true", "id": "3"},
]
SETTINGS = {"num_masks": 6, "mask_rate": 0.4, "max_new_tokens": 3}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, **SETTINGS)


@pytest.fixture
def calls(monkeypatch):
    seen, plain = [], Scorer.score

    def counted(self, prompt, *rest, **named):
        seen.append(prompt)
        return plain(self, prompt, *rest, **named)

    monkeypatch.setattr(Scorer, "score", counted)
    return seen


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written(scorer, tmp_path, suffix):
    source, out, seen = write(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}", []
    assert score_file(scorer, source, out, seen=lambda *found: seen.append(found)) == 0
    rows = contents(out)
    for number, (row, given) in enumerate(zip(rows, ROWS, strict=True), start=1):
        alone = seen[number - 1][1].result
        assert row.items() >= given.items()
        assert (row["row"], row["correct"], row["score"]) == (number, None, float(alone))
        found = Score.from_dict(row)
        assert found.settings == alone.settings | scorer.fingerprints()
        assert found.tokens == alone.tokens
        assert UnmaskedAnswer.of_row(row).signals == alone.signals
    assert (rows[0]["scored_text"], rows[2]["answer"]) == (" Brask</s>", [7, 8])
    assert [path.name for path in tmp_path.iterdir() if path.name[:3] == "out"] == [out.name]


GIVEN = [{"prompt": f"{PROMPT} {i % 4}", "answer": " Brask", "id": str(i)} for i in range(7)]


def lines_of(out):
    """The file that grows, from which a Parquet file is made."""
    return out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.partial")


def check_same(found, expected):
    """All but the time, the labels, and the order of rows that were done again."""
    for row, other in zip(sorted(found, key=lambda row: row["row"]), expected, strict=True):
        for name in other.keys() - {"seconds", "correct"}:
            assert row[name] == other[name], name


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("end", ["\n", "", '\n{"row": 6, "prompt": "Who', '\n{"row": 6'])
def test_a_stopped_run_resumes(scorer, calls, tmp_path, suffix, end):
    """Rows that are finished, and labels in them, stay; a last line that was cut is done again."""
    given = [*GIVEN[:1], {"prompt": None, "id": "1"}, *GIVEN[2:]]
    source, out = write(tmp_path / "in.jsonl", given), tmp_path / f"out{suffix}"

    def stop(row, _):
        if row.number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_file(scorer, source, out, seen=stop)
    rows = contents(lines_of(out).rename(tmp_path / "found.jsonl"))
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5]
    labelled = [json.dumps(row | {"correct": row["row"] % 2 == 1, "mine": "x"}) for row in rows]
    lines_of(out).write_text("\n".join(labelled) + end)
    calls.clear()
    assert score_file(scorer, source, out) == 1
    assert calls == [row["prompt"] for row in given[5:]]  # the other fails before
    rows = contents(out)
    assert [row["row"] for row in rows] == [1, 3, 4, 5, 2, 6, 7]
    assert [row["correct"] for row in rows] == [True, True, False, True, None, None, None]
    assert [row.get("mine") for row in rows] == ["x"] * 4 + [None] * 3
    assert "prompt" in rows[4]["error"]
    calls.clear()
    assert score_file(scorer, write(source, GIVEN), out) == 0  # what failed is tried again
    assert (calls, contents(out)[0]["correct"]) == ([GIVEN[1]["prompt"]], True)
    score_file(scorer, source, tmp_path / f"whole{suffix}")
    check_same(contents(out), contents(tmp_path / f"whole{suffix}"))
    calls.clear()
    before = contents(out)
    assert score_file(scorer, write(source, [*GIVEN, *GIVEN[:1]]), out) == 0
    assert (calls, contents(out)[:7]) == ([GIVEN[0]["prompt"]], before)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("room", [0, 9, 10_000])
def test_a_full_disk(scorer, tmp_path, monkeypatch, suffix, room):
    """It takes a part of a line, then no more: whole rows remain, and the message names them."""
    source, out = write(tmp_path / "in.jsonl", GIVEN), tmp_path / f"out{suffix}"
    left, opened = [room], type(out).open

    class Full(io.FileIO):
        def write(self, line):
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken, left[0] = line[: left[0]], max(0, left[0] - len(line))
            return super().write(taken)

    def full(path, mode="r", *args, **options):
        return Full(path, mode) if mode == "ab" else opened(path, mode, *args, **options)

    monkeypatch.setattr(type(out), "open", full)
    with pytest.raises(OSError, match=f"no space left.*{lines_of(out)}"):
        score_file(scorer, source, out)
    monkeypatch.undo()
    finished = lines_of(out).read_text().splitlines(keepends=True)
    assert all(line.endswith("\n") and parse_json(line) for line in finished)
    assert 0 < len(finished) < len(GIVEN) if room > 9 else not finished
    assert score_file(scorer, source, out) == 0
    score_file(scorer, source, tmp_path / f"whole{suffix}")
    check_same(contents(out), contents(tmp_path / f"whole{suffix}"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in.jsonl", out.name, f"whole{suffix}"}


def test_a_disk_that_is_full_at_the_end(scorer, calls, tmp_path, monkeypatch):
    """The same command goes on, and scores nothing again."""
    source, out = write(tmp_path / "in.jsonl", GIVEN), tmp_path / "o.parquet"
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(output, "write_parquet", full)
        with pytest.raises(OSError, match=f"no space left.*{lines_of(out)}"):
            score_file(scorer, source, out)
    assert score_file(scorer, source, out) == 0
    assert len(calls) == len(GIVEN)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", out.name}
    assert len(contents(out)) == len(GIVEN)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_file_does_not_go_on_with(scorer, model, tokenizer, tmp_path, suffix):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}"
    score_file(scorer, source, out)
    before = out.read_bytes()
    other = Scorer(model, tokenizer=tokenizer, depth=0.9, stop="?", **SETTINGS)
    with pytest.raises(ValueError, match=r"depth 0.6 there, 0.9 here; stop"):
        score_file(other, source, out)
    moved = deepcopy(model)
    with torch.no_grad():
        moved.lm_head.weight[5] += 1
    with pytest.raises(ValueError, match="weights"):
        score_file(Scorer(moved, tokenizer=tokenizer, **SETTINGS), source, out)
    sdpa = Scorer(model, tokenizer=tokenizer, attention="sdpa", **SETTINGS)
    with pytest.raises(ValueError, match=r"attention_in_use 'eager' there, 'sdpa' here"):
        score_file(sdpa, source, out)
    for changed in ({"prompt": "Who?"}, {"prompt": None}, {"answer": " 1931"}):
        write(source, [ROWS[0] | changed, *ROWS[1:]])
        with pytest.raises(ValueError, match="row 1 has another prompt or answer than in"):
            score_file(scorer, source, out)
    write(source, ROWS)
    busy = rf"out\{suffix} is being written by another program"
    with locked(out), pytest.raises(ValueError, match=busy):
        score_file(scorer, source, out)
    clashing = write(tmp_path / "c.jsonl", [ROWS[0] | {"score": 77, "row": 1, "tokens": "mine"}])
    with pytest.raises(ValueError, match=r"expected no fields \['row', 'score', 'tokens'\]"):
        score_file(scorer, clashing, tmp_path / "new.jsonl")
    for name in ("new.csv", "new.tsv", "new.txt", "new.json", "new", "new.xlsx"):
        with pytest.raises(ValueError, match=r"\.jsonl or \.parquet.*--sheet"):
            score_file(scorer, source, tmp_path / name)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "c.jsonl", out.name}
    for text in ("my notes\n", '{"prompt": "Who?"}\n', "[1]\n"):  # no rows of ours
        lines_of(out).write_text(text)
        with pytest.raises(ValueError, match=rf"{lines_of(out)}, line 1"):
            score_file(scorer, source, out)
        assert lines_of(out).read_text() == text


def test_what_json_lacks_is_not_written(scorer, tmp_path):
    """NaN of a table is a missing value; numbers of JSON stay as they are."""
    row = '{"prompt": "Who?", "answer": " a", "x": -0.0, "y": 123456789012345678901234567890}\n'
    (tmp_path / "in.jsonl").write_text(row)
    score_file(scorer, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_text()
    assert '"x": -0.0' in text
    assert parse_json(text)["y"] == 123456789012345678901234567890
    table = pd.DataFrame({"prompt": ["Who?", None], "answer": [" a", None], "x": [np.nan, 1.0]})
    table.to_parquet(tmp_path / "in.parquet")
    for suffix in SUFFIXES:
        score_file(scorer, tmp_path / "in.parquet", tmp_path / f"nan{suffix}")
        assert "NaN" not in str(contents(tmp_path / f"nan{suffix}"))


def test_batches_of_a_data_engine(tiny):
    score_table = BatchScorer(Scorer, str(tiny), **SETTINGS)
    table = pd.DataFrame(MIXED[:3], index=[7, 8, 9])
    found = score_table(table)
    first, second, _ = (outcome.result for outcome in score_table.scorer.score_many(MIXED[:3]))
    assert found["score"].tolist() == [first.score, second.score, pd.NA]
    assert found["error"].isna().tolist() == [True, True, False]
    assert (found["id"].tolist(), found["answer"][1]) == (list("abc"), second.answer)
    assert json.loads(found["signals"][0]) == first.signals
    # The columns of a batch without a score have their types.
    assert (score_table(table[2:]).dtypes == found.dtypes).all()
    arrays = {"prompt": [PROMPT] * 2, "answer": [np.array([7]), [8, 9]], "samples": [pd.NA, None]}
    assert score_table(arrays)["error"].isna().all()
    with pytest.raises(ValueError, match=r"columns \[.*'score'.*\] would be overwritten"):
        score_table(found)
