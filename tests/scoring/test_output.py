"""Results in files and tables: what is written, what a stopped run goes on with, and what not."""

import errno
import io
import json
import random
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch

from lm_polygraph_asmi import Scorer, score_file
from lm_polygraph_asmi.files import locked, parse_json
from lm_polygraph_asmi.scoring import BatchScorer, Score, UnmaskedAnswer, output
from lm_polygraph_asmi.tables import Row
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


@pytest.fixture(scope="module")
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


def lines_of(out):
    """The file that grows, from which a Parquet file is made."""
    return out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.partial")


def expected_row(scorer, number, given, label):
    """A written row, from the score of its prompt and answer alone."""
    if given["prompt"] is None:
        return {"row": number, **given, "correct": label}
    found = scorer.score(given["prompt"], given.get("answer")).to_dict()
    found["settings"] = found["settings"] | scorer.fingerprints()
    left_out = ("digest", "unit", "highest", "explanation", "seconds")
    result = {name: value for name, value in found.items() if name not in left_out}
    plain = parse_json(json.dumps(result))
    return plain | {"row": number, **given, "correct": label}


def full_disk(patch, room, opened=Path.open):
    """It takes so many bytes of lines, a part of one perhaps, then no more."""
    left = [room]

    class Full(io.FileIO):
        def write(self, line):
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken, left[0] = line[: left[0]], max(0, left[0] - len(line))
            return super().write(taken)

    def full(path, mode="r", *args, **options):
        return Full(path, mode) if mode == "ab" else opened(path, mode, *args, **options)

    patch.setattr(Path, "open", full)


def stopped(draw, scorer, source, out):
    """A call that ends before its work is done: by a kill, or a disk that is full at some moment."""
    last = draw.randint(1, 4)

    def seen(row, _, count=iter(range(1, 99))):  # noqa: B008 - one count for each call
        if next(count) == last:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        how = draw.choice(["killed", "full", "full", "full at the end"])
        if how == "full":
            full_disk(patch, draw.choice([0, 9, draw.randint(1, 15_000)]))
        elif how == "full at the end":
            no_room = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(output, "write_parquet", Mock(side_effect=no_room))
        try:
            score_file(scorer, source, out, seen=seen if how == "killed" else None)
        except OSError as error:
            assert f"{lines_of(out)}" in str(error)
            assert "no space left" in str(error)
        except KeyboardInterrupt:
            pass


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_stops_a_run_the_same_call_goes_on(scorer, calls, tmp_path, suffix, seed):
    """Rows that are finished stay, with labels that a person wrote; no other is left out."""
    draw = random.Random(seed)
    given = [{"prompt": f"{PROMPT} {n % 3}", "answer": " Brask", "id": str(n)} for n in range(5)]
    given = [*ROWS, *given]
    for at in draw.sample(range(8), 2):
        given[at] = given[at] | {"prompt": None}
    source, out, labels = write(tmp_path / "in.jsonl", given), tmp_path / f"out{suffix}", {}
    finished = list[int]()
    for _ in range(3):
        calls.clear()
        stopped(draw, scorer, source, out)
        lines = lines_of(out) if lines_of(out).exists() else write(lines_of(out), contents(out))
        rows = [parse_json(line) for line in lines.read_text().splitlines()]  # each is whole
        done = [row["row"] for row in rows if "error" not in row]
        assert done[: len(finished)] == finished
        waiting = [n for n, row in enumerate(given, 1) if row["prompt"] and n not in finished]
        assert done[len(finished) :] == waiting[: len(done) - len(finished)]
        tried = [given[n - 1]["prompt"] for n in waiting]
        assert calls in (tried[: len(calls)], [])
        assert len(calls) - (len(done) - len(finished)) in (0, 1)
        finished = done
        for row in rows:
            if row["row"] in done and draw.random() < 0.5:
                row["correct"] = labels[row["row"]] = draw.random() < 0.5
        text = "\n".join(json.dumps(row) for row in rows)
        cut = draw.choice(["\n", "", '\n{"row": 6, "prompt": "Who', '\n{"row": 6'])
        lines.write_text(text + cut if rows else text)
        if draw.random() < 0.5:  # what failed is corrected
            given = [row if row["prompt"] else row | {"prompt": "Who?"} for row in given]
            write(source, given)
    failed = [n for n, row in enumerate(given, 1) if not row["prompt"]]
    assert score_file(scorer, source, out) == len(failed)
    rows = contents(out)
    assert [row["row"] for row in rows][: len(finished)] == finished
    for row in rows:
        number = row["row"]
        expected = expected_row(scorer, number, given[number - 1], labels.get(number))
        assert row.items() >= expected.items()
        assert ("error" in row and row["error"] is not None) == (number in failed)
        if number not in failed:
            found = Score.from_dict(row)
            assert UnmaskedAnswer.of_row(row).signals == found.signals
    assert sorted(row["row"] for row in rows) == list(range(1, 9))
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", out.name}
    calls.clear()
    again = [*given, given[-1]]
    score_file(scorer, write(source, again), out)
    assert calls == [given[-1]["prompt"]] * bool(given[-1]["prompt"])


def rows_of(*contents):
    return [Row(number, content) for number, content in enumerate(contents, start=1)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_file_does_not_go_on_with(scorer, model, tokenizer, tmp_path, suffix):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}"
    score_file(scorer, source, out)
    before, moved = out.read_bytes(), deepcopy(model)
    with torch.no_grad():
        moved.lm_head.weight[5] += 1
    for other, settings, word in (
        (model, {"depth": 0.9, "stop": "?"}, "depth 0.6 there, 0.9 here; stop"),
        (moved, {}, "weights"),
        (model, {"attention": "sdpa"}, "attention_in_use 'eager' there, 'sdpa' here"),
    ):
        with pytest.raises(ValueError, match=word):
            score_file(Scorer(other, tokenizer=tokenizer, **SETTINGS, **settings), source, out)
    for changed in ({"prompt": "Who?"}, {"prompt": None}, {"answer": " 1931"}):
        with pytest.raises(ValueError, match="row 1 has another prompt or answer"):
            score_file(scorer, rows_of(ROWS[0] | changed, *ROWS[1:]), out)
    with locked(out), pytest.raises(ValueError, match="being written by another"):
        score_file(scorer, source, out)
    with pytest.raises(ValueError, match=r"\['row', 'score', 'tokens'\]"):
        score_file(scorer, rows_of(ROWS[0] | {"score": 7, "row": 1, "tokens": "x"}), out)
    for name in ("new.csv", "new.tsv", "new.txt", "new.json", "new", "new.xlsx"):
        with pytest.raises(ValueError, match=r"\.jsonl or \.parquet.*--sheet"):
            score_file(scorer, source, tmp_path / name)
    assert out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", out.name}
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
    assert '"x": -0.0, "y": 123456789012345678901234567890' in text
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
    with pytest.raises(ValueError, match="'score'.*rename"):
        score_table(found)
