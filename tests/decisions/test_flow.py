"""From questions to a tested guarantee: settings are named once, labels come in sheets."""

import re
import shutil

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_polygraph_asmi.decisions import Calibration, calibrate_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm
from tests.decisions.conftest import WORDS, done, labelled, run, write
from tests.scoring.conftest import PROMPT


@pytest.fixture(scope="module")
def folder(tmp_path_factory, few_resamples):  # noqa: ARG001 - no test below asks for intervals
    """A model in a folder; scored rows of labels, an empty answer and one without a label."""
    place = tmp_path_factory.mktemp("flow")
    tiny_lm.save(place / "model")
    rows = [*labelled(12), {"prompt": PROMPT, "answer": "", "correct": True, "cluster": "blank"}]
    write(place / "rows.jsonl", [*rows, {"prompt": "Where?", "answer": " x", "cluster": "none"}])
    done("score", place / "rows.jsonl", "--model", place / "model",
         "--out", place / "answers.jsonl", "--sheet", place / "labels.csv",
         "--num-masks", 4, "--mask-rate", 0.3, "--top-k", 8, "--stop", "\\n", "--scope", "response",
         "--max-new-tokens", 3,
    )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def calibrated(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
        path = folder / "c.json"
        said = done("calibrate", folder / "answers.jsonl", "--risk", 0.9, "--out", path)
    words = "Rows left out: 1 without a label, 1 empty.", "at most 90% of accepted answers are"
    assert [part for part in words if part not in said] == []
    return path


def test_from_scores_to_the_monitor(folder, calibrated, tmp_path):
    """Questions are new but the first, which was labelled; another folder has the same weights."""
    found = Calibration.load(calibrated)
    assert (found.n, found.name, found.model) == (12, "answers.jsonl", str(folder / "model"))
    assert (found.config.scope, found.config.stop) == ("response", ("\n",))
    new = [{"prompt": f"Later {i}: {PROMPT}", "answer": " Brask", "id": f"n{i}"} for i in range(25)]
    new[20]["answer"] = f" {' '.join(WORDS)}" * 3
    write(tmp_path / "new.jsonl", [labelled(1)[0] | {"correct": None, "cluster": None}, *new])
    out, sheet = tmp_path / "decided.jsonl", tmp_path / "sheet.csv"
    model = shutil.copytree(folder / "model", tmp_path / "model")
    words = ("decide", "--model", model, "--calibration", calibrated)
    one = (write(tmp_path / "one.jsonl", new[:1]), "--out", tmp_path / "other.jsonl")
    said = done(*words, *one, "--attention", "eager")
    assert "Warning: No decision: " in said
    assert "'sdpa' there, 'eager' here" in said
    said = done(*words, tmp_path / "new.jsonl", "--out", out, "--sheet", sheet)
    assert re.search(r"26 scored, .*\d+ accept, \d+ abstain, [\d.]+ rows per second\.", said), said
    table = pd.read_csv(sheet, dtype=str, keep_default_na=False)
    accepted = table["accept"] == "True"
    assert re.findall("The first 10|Accept(?=: )|Abstain(?=: )", said) == [  # the file has all
        *["The first 10"] * (max(sum(accepted), sum(~accepted)) > 10),
        *["Accept"] * min(10, sum(accepted)), *["Abstain"] * min(10, sum(~accepted)),
    ]  # fmt: skip
    table["correct"] = accepted.map({True: "WAHR", False: ""})
    for rows, codes, words in (
        (
            table.iloc[::-1].assign(prompt="?"),
            {1},
            'row 1: "prompt": a question of the calibration',
        ),
        (table[1:5], {0, 4}, f"0 of {sum(accepted[1:5])} accepted answers are wrong"),
    ):
        rows.to_csv(sheet, index=False, sep=";", encoding="utf-8-sig")
        code, said = run("monitor", calibrated, out, "--labels", sheet)
        assert (code in codes, words in said) == (True, True), said
    assert f"Left out {sum(accepted) - sum(accepted[1:5])} accepted answers without" in said


def test_labels_of_a_sheet_and_the_model_that_the_rows_name(folder, calibrated, tmp_path):
    """Labels in any order, here the opposite of those of the rows; changed weights are refused."""
    table = pd.read_csv(folder / "labels.csv", dtype=str, keep_default_na=False)
    flipped = table["correct"].map({"True": "false", "False": "WAHR", "": ""})
    table.assign(correct=flipped)[::-1].to_csv(tmp_path / "labels.csv", index=False, sep="\t")
    words = ("--risk", 0.9, "--labels", tmp_path / "labels.csv", "--out", tmp_path / "c.json")
    said = done("calibrate", folder / "answers.jsonl", *words, "--signal", "learned")
    found, other = Calibration.load(tmp_path / "c.json"), Calibration.load(calibrated)
    assert (found.n, found.errors) == (other.n, other.n - other.errors)
    assert (found.question_digests, found.learning in said) == (other.question_digests, True)
    changed = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    scorer = Scorer(changed, found.config, tokenizer=tiny_lm.tokenizer())
    with pytest.raises(ValueError, match="row 1 was scored with another model"):
        calibrate_rows(folder / "answers.jsonl", 0.9, signal="learned", scorer=scorer)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("answers.jsonl --out c.json", 1, "c.json exists: name another file, or"),
        ("answers.jsonl --out new", 2, "expected a .json file, as `decide` needs it"),
        ("answers.jsonl --out no/new.json", 1, "its folder does not exist"),
        ("--out new.json", 2, "expected either ROWS of labelled answers or a finished run (--run)"),
        ("answers.jsonl --run . --out new.json", 2, "expected either ROWS of labelled answers or"),
        (
            "answers.jsonl --metric x --out new.json",
            2,
            "--metric needs --run; --unlabelled",
        ),
    ],
)
@pytest.mark.usefixtures("calibrated")
def test_what_calibrate_refuses(folder, monkeypatch, words, status, said):
    monkeypatch.chdir(folder)
    code, printed = run("calibrate", "--risk", 0.9, *words.split())
    assert (code, said in printed) == (status, True), printed
    assert not (folder / "new.json").exists()
