"""Results in files and tables: what is written, what a killed run goes on with, and what not."""

import json

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi import Scorer, score_file
from lm_polygraph_asmi.files import locked, parse_json
from lm_polygraph_asmi.scoring import BatchScorer, Score, UnmaskedAnswer
from lm_polygraph_asmi.scoring.unmasked import fingerprints
from tests.scoring.conftest import PROMPT
from tests.scoring.test_rows import MIXED, contents

pytestmark = pytest.mark.usefixtures("unseen")

SUFFIXES = (".jsonl", ".csv", ".parquet")
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

    def counted(self, prompt, *rest):
        seen.append(prompt)
        return plain(self, prompt, *rest)

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
        assert found.settings == alone.settings | fingerprints(scorer)
        assert found.tokens == alone.tokens
        assert UnmaskedAnswer.of_row(row).signals == alone.signals
    assert (rows[0]["scored_text"], rows[2]["answer"]) == (" Brask</s>", [7, 8])
    assert [path.name for path in tmp_path.iterdir() if path.name[:3] == "out"] == [out.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_run_resumes(scorer, calls, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(tables, "BATCH", 2)
    given = [{"prompt": f"{PROMPT} {i % 4}", "answer": " Brask", "id": str(i)} for i in range(7)]
    given[1] = {"prompt": None, "id": "1"}
    source, out = write(tmp_path / "in.jsonl", given), tmp_path / f"killed{suffix}"

    def interrupt(row, _):
        if row.number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_file(scorer, source, out, seen=interrupt)
    assert [row["row"] for row in contents(out)] == [1, 2, 3, 4]
    if suffix != ".parquet":
        text = out.read_text().replace('"correct": null', '"correct": true')
        out.write_text(text + text.splitlines()[-1][:9] * (suffix == ".jsonl"))  # cut by the kill
    calls.clear()
    assert score_file(scorer, source, out) == 1
    assert len(calls) == 3  # of 5 to 7: the row without a prompt fails before
    rows = contents(out)
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[0]["correct"] is (True if suffix == ".jsonl" else None)  # labels are kept
    assert "expected a text" in rows[1]["error"]
    given[1] = {"prompt": PROMPT, "id": "1"}
    write(source, given)
    calls.clear()
    assert score_file(scorer, source, out) == 0  # a row that failed is tried again
    assert calls == [PROMPT]
    if suffix == ".csv":  # columns of others stay, and the order does not matter
        frame = pd.read_csv(out, dtype=str, keep_default_na=False)[::-1]
        frame.assign(mine="x").to_csv(out, index=False)
        assert score_file(scorer, write(source, [*given, given[0]]), out) == 0
        assert {row["mine"] for row in contents(out)[:7]} == {"x"}
        assert contents(out).pop()["scored_text"] == rows[0]["scored_text"]
        write(source, given)
    score_file(scorer, source, tmp_path / f"whole{suffix}")
    for row, other in zip(contents(out)[:7], contents(tmp_path / f"whole{suffix}"), strict=True):
        for name in other.keys() - {"seconds", "correct"}:
            assert row[name] == other[name], name


def test_a_table_that_was_labelled_elsewhere(scorer, tmp_path):
    """Other programs write true in their own way, and a mark at the start."""
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.csv"
    score_file(scorer, source, out)
    frame = pd.read_csv(out, dtype=str, keep_default_na=False)
    frame["correct"] = ["TRUE", "False", "1"]
    frame["answered"] = frame["answered"].str.upper()
    frame["score"] = [f"{float(value):.14g}" for value in frame["score"]]
    frame.to_csv(out, index=False, encoding="utf-8-sig", lineterminator="\r\n")
    rows = contents(out)
    assert [row["correct"] for row in rows] == [True, False, 1]
    assert all(UnmaskedAnswer.of_row(row) for row in rows)
    rows[0]["signals"]["msp"] += 0.001
    assert UnmaskedAnswer.of_row(rows[0]) is None


def test_what_a_file_does_not_go_on_with(scorer, model, tokenizer, tmp_path):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    score_file(scorer, source, out)
    before = out.read_bytes()
    other = Scorer(model, tokenizer=tokenizer, depth=0.9, stop="?", **SETTINGS)
    with pytest.raises(ValueError, match=r"other settings \(depth 0.6 there, 0.9 here; stop"):
        score_file(other, source, out)
    sdpa = Scorer(model, tokenizer=tokenizer, attention="sdpa", **SETTINGS)
    with pytest.raises(ValueError, match=r"attention_in_use 'eager' there, 'sdpa' here"):
        score_file(sdpa, source, out)
    for changed in ({"prompt": "Who?"}, {"prompt": None}, {"answer": " 1931"}):
        write(source, [ROWS[0] | changed, *ROWS[1:]])
        with pytest.raises(ValueError, match="row 1 has another prompt or answer than in"):
            score_file(scorer, source, out)
    write(source, ROWS)
    busy = r"out\.jsonl is being written by another program"
    with locked(out), pytest.raises(ValueError, match=busy):
        score_file(scorer, source, out)
    clashing = write(tmp_path / "c.jsonl", [ROWS[0] | {"score": 77, "row": 1, "tokens": "mine"}])
    with pytest.raises(ValueError, match=r"expected no fields \['row', 'score', 'tokens'\]"):
        score_file(scorer, clashing, tmp_path / "new.csv")
    assert out.read_bytes() == before
    assert not (tmp_path / "new.csv").exists()


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
    assert json.loads(found["details"][0])["signals"] == first.signals
    # The columns of a batch without a score have their types.
    assert (score_table(table[2:]).dtypes == found.dtypes).all()
    arrays = {"prompt": [PROMPT] * 2, "answer": [np.array([7]), [8, 9]], "samples": [pd.NA, None]}
    assert score_table(arrays)["error"].isna().all()
    with pytest.raises(ValueError, match=r"columns \[.*'score'.*\] would be overwritten"):
        score_table(found)
