"""Results in files and tables: what is written, what a stopped run goes on with, and what not."""

import errno
import io
import json
import random
from copy import deepcopy
from dataclasses import replace
from functools import partial
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
from tests.scoring.conftest import CHAT, MESSAGES, PROMPT, templated
from tests.scoring.test_rows import MIXED, contents

pytestmark = pytest.mark.usefixtures("unseen")

SUFFIXES = (".jsonl", ".parquet")
ROWS = [
    {"prompt": PROMPT, "answer": " Brask", "id": "007", "gold": "Brask"},
    {"prompt": 'Where do the "blue kites" start,\nand when?', "gold": "NA", "id": "2"},
    {"prompt": "True or False?", "answer": [7, 8], "gold": "true", "id": "3"},
]
WITH_DOCUMENTS = {"prompt": MESSAGES, "answer": " Brask", "documents": [{"text": "Brask"}]}
SETTINGS = {"num_masks": 6, "mask_rate": 0.4, "max_new_tokens": 3}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=templated(tokenizer, CHAT + "{{ documents }}"), **SETTINGS)


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


def stopped(draw, how, passed, scorer, source, out):
    """A call that is killed after a row more than `passed`, or finds a full disk at some moment;
    what it says of the disk."""
    seen = Mock(side_effect=[None] * passed + [KeyboardInterrupt]) if how == "killed" else None
    with pytest.MonkeyPatch.context() as patch:
        if how == "full":
            full_disk(patch, draw.choice([0, 9, draw.randint(1, 15_000)]))
        elif how == "full at the end":
            patch.setattr(output, "write_parquet", Mock(side_effect=OSError(errno.ENOSPC, "Full")))
        try:
            score_file(scorer, source, out, seen=seen)
        except (OSError, KeyboardInterrupt) as error:
            return str(error)


def check_row(scorer, row, given, label):
    """A written row is the input's, with a label and the score of its prompt and answer alone."""
    given = {"id": None, "cluster": None} | given
    assert (row | {n: row.get(n) for n in given}).items() >= (given | {"correct": label}).items()
    if given["prompt"] is None:
        assert "prompt" in row["error"]
        return
    found, alone = Score.from_dict(row), scorer.score(given["prompt"], given.get("answer"))
    known = alone.settings | scorer.fingerprints()
    assert replace(found, seconds=0) == replace(alone, seconds=0, settings=known)
    assert UnmaskedAnswer.of_row(row).signals == alone.signals


@pytest.mark.parametrize(("seed", "suffix"), zip(range(4), SUFFIXES * 2, strict=True))
def test_whatever_stops_a_run_the_same_call_goes_on(scorer, calls, tmp_path, suffix, seed):
    """Rows that are finished stay, with labels of a person, and are not scored again."""
    draw, source, out = random.Random(seed), tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    more = {"answer": " Brask", "correct": True}
    given = [*ROWS, *(more | {"prompt": f"{PROMPT} {n}"} for n in range(3))]
    for at in draw.sample(range(6), 2):
        given[at] = given[at] | {"prompt": None}
    finished, labels = list[int](), {}
    for how in draw.sample(["killed", "full", "full at the end"], 3):
        calls.clear()
        said = stopped(draw, how, seed, scorer, write(source, given), out)
        assert not said or str(lines_of(out)) in said  # where the rows are
        lines = lines_of(out) if lines_of(out).exists() else write(lines_of(out), contents(out))
        rows = [parse_json(line) for line in lines.read_text().splitlines()]  # each is whole
        good = [row for row in rows if row.get("error") is None]
        waiting = [n for n, row in enumerate(given, 1) if row["prompt"] and n not in finished]
        assert [row["row"] for row in good] == (finished + waiting)[: len(good)]
        assert calls == [given[n - 1]["prompt"] for n in waiting][: len(calls)]
        assert len(finished) <= len(good) <= len(finished) + len(calls) <= len(good) + 1
        finished = [row["row"] for row in good]
        for row in good:
            row["correct"] = labels[row["row"]] = draw.random() < 0.5
        text = write(lines, rows).read_text()
        lines.write_text(
            draw.choice([text, text[:-1], text + '{"row": 6, "pro', text + '{"row": 6'])
        )
        if draw.random() < 0.5:  # what failed is corrected
            given = [row if row["prompt"] else row | {"prompt": "Who?"} for row in given]
        if draw.random() < 0.5:  # fields that are only copied change
            more = draw.choice([{"cluster": "a", "id": 4}, {"cluster": "b"}, {}])
            asked = {"prompt", "answer", "gold", "correct"}
            given = [{n: row[n] for n in row.keys() & asked} | more for row in given]
    assert score_file(scorer, write(source, given), out) == sum(not row["prompt"] for row in given)
    rows = contents(out)
    assert [row["row"] for row in rows][: len(finished)] == finished
    assert sorted(row["row"] for row in rows) == [1, 2, 3, 4, 5, 6]
    for row in rows:
        own = given[row["row"] - 1]
        check_row(scorer, row, own, labels.get(row["row"], own.get("correct")))
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", out.name}


def rows_of(*contents):
    return [Row(number, content) for number, content in enumerate(contents, start=1)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_file_does_not_go_on_with(scorer, model, tmp_path, suffix):
    rows, out = [*ROWS, WITH_DOCUMENTS], tmp_path / f"out{suffix}"
    score_file(scorer, rows_of(*rows), out)
    before, moved, ending = out.read_bytes(), deepcopy(model), deepcopy(model)
    with torch.no_grad():
        moved.lm_head.weight[5] += 1
    ending.generation_config.eos_token_id = [2, 7]
    other = partial(Scorer, tokenizer=scorer.tokenizer, **SETTINGS)
    for another, given, name, words in (
        (other(model, depth=0.9, stop="?"), rows, out.name, "depth 0.6 there, 0.9 here; stop"),
        (other(moved), rows, out.name, "weights"),
        (other(ending), rows, out.name, "tokenizer"),
        (other(model, attention="sdpa"), rows, out.name,
         "attention_in_use 'eager' there, 'sdpa' here"),
        (scorer, [ROWS[0] | {"prompt": "Who?"}, *rows[1:]], out.name, "row 1 has another"),
        (scorer, [ROWS[0] | {"prompt": None}, *rows[1:]], out.name, "row 1 has another"),
        (scorer, [ROWS[0] | {"answer": " 1931"}, *rows[1:]], out.name, "row 1 has another"),
        (scorer, [ROWS[0] | {"samples": [" Orla"]}, *rows[1:]], out.name, "row 1 has another"),
        *((scorer, [*ROWS, WITH_DOCUMENTS | {"documents": documents}], out.name,
           "row 4 has another") for documents in (None, [{"text": "Orla"}])),
        (scorer, [ROWS[0] | {"score": 7, "row": 1, "tokens": "x"}], out.name,
         r"\['row', 'score', 'tokens'\]"),
        *((scorer, rows, name, r"\.jsonl or \.parquet.*--sheet")
          for name in ("new.csv", "new.tsv", "new.txt", "new.json", "new", "new.xlsx")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            score_file(another, rows_of(*given), tmp_path / name)
    with locked(out), pytest.raises(ValueError, match="being written by another"):
        score_file(scorer, rows_of(*rows), out)
    assert (out.read_bytes(), [*tmp_path.iterdir()]) == (before, [out])
    for text in ("my notes\n", '{"prompt": "Who?"}\n', "[1]\n"):  # no rows of ours
        lines_of(out).write_text(text)
        with pytest.raises(ValueError, match=rf"{lines_of(out)}, line 1"):
            score_file(scorer, rows_of(*rows), out)
        assert lines_of(out).read_text() == text


def test_batches_of_a_data_engine(tiny):
    """Columns have their types in a batch without a score, too; lists and objects are JSON."""
    score_table = BatchScorer(Scorer, str(tiny), **SETTINGS)
    table = pd.DataFrame(MIXED[:3], index=[7, 8, 9])
    found = score_table(table)
    one, two, _ = (outcome.result for outcome in score_table.scorer.score_many(MIXED[:3]))
    columns = {name: found[name].tolist() for name in ("id", "score", "answer")}
    answers = [one.answer, two.answer, ""]
    assert columns == {"id": [*"abc"], "score": [one.score, two.score, pd.NA], "answer": answers}
    assert json.loads(found["signals"][0]) == one.signals
    assert (score_table(table[2:]).dtypes == found.dtypes).all()
    prompts = [PROMPT, PROMPT, "\ud83d", MESSAGES, [MESSAGES[0] | {"content": "\ud83d"}]]
    arrays = {"prompt": prompts, "answer": [np.array([7]), [8, 9], *[" x"] * 3], "samples": pd.NA}
    assert score_table(arrays)["error"].isna().tolist() == [True, True, False, False, False]
    with pytest.raises(ValueError, match=r"'score'.*rename"):
        score_table(found)
