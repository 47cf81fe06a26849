"""Five commands with one file: model and settings are named once."""

import re
import shutil

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_polygraph_asmi.decisions import Calibration, Decision, calibrate_rows
from lm_polygraph_asmi.scoring.rows import read_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm
from tests.decisions.conftest import labelled, limited, run, write
from tests.scoring.conftest import PROMPT


def done(*arguments):
    code, said = run(*arguments)
    assert code == 0, said
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory, few_resamples):  # noqa: ARG001 - no test below asks for intervals
    """A model in a folder; scored rows of labels, an empty answer and one without a label."""
    place = tmp_path_factory.mktemp("flow")
    tiny_lm.save(place / "model")
    rows = [*labelled(60), {"prompt": PROMPT, "answer": "", "correct": True, "cluster": "blank"}]
    write(place / "rows.jsonl", [*rows, {"prompt": "Where?", "answer": " x", "cluster": "none"}])
    done("score", place / "rows.jsonl", "--model", place / "model", "--out", place / "answers.csv",
         "--num-masks", 4, "--mask-rate", 0.3, "--top-k", 8, "--stop", "\\n", "--scope", "response",
    )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def calibrated(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
        said = done("calibrate", folder / "answers.csv", "--risk", 0.9, "--out", folder / "c.json")
    assert "Rows left out: 1 without a label, 1 empty." in said
    assert "Promise: with 95% confidence, at most 90% of accepted answers are wrong, if" in said
    return folder / "c.json"


def test_from_scores_to_the_gate(folder, calibrated, tmp_path):
    found = Calibration.load(calibrated)
    assert (found.n, found.name, found.model) == (60, "answers.csv", str(folder / "model"))
    config = found.config
    assert (config.scope, config.stop, config.num_masks) == ("response", ("\n",), 4)
    new = [{"prompt": f"Later {i}: {PROMPT}", "answer": " Brask", "id": f"n{i}"} for i in range(25)]
    write(tmp_path / "new.jsonl", labelled(1) + new)
    out, model = tmp_path / "decided.csv", shutil.copytree(folder / "model", tmp_path / "model")
    words = ("decide", tmp_path / "new.jsonl", "--model", model, "--out", out, "--calibration")
    limited(found, 1e9, "sem").save(tmp_path / "sem.json")
    code, said = run(*words, tmp_path / "sem.json", "--scope", "all")
    assert "settings differ from the calibration answers.csv (scope 'response' there" in said
    limited(found, None).save(tmp_path / "none.json")
    assert "Warning: No threshold by " in done(*words, tmp_path / "none.json")
    out.unlink()
    said = done(*words, tmp_path / "none.json", "--attention", "eager")
    assert "attention_in_use 'sdpa' there, 'eager' here" in said
    out.unlink()
    said = done(*words, calibrated)
    assert f"n0 Accept: {found.title} " in said
    assert ("n18 " in said, "n19 " in said) == (True, False)  # the file has all
    assert re.search(r"26 scored, .*\d+ accept, (\d+ abstain, )?[\d.]+ rows per second\.", said)
    lines = [row.content for row in read_rows(out)]
    for line in lines:
        assert line["accept"] == (line["value"] <= found.guarantee.threshold)
        assert line["digest"] == Decision.digest(line)
    code, said = run("gate", calibrated, out)
    assert (code, 'row 1: "answer": the calibration has seen it' in said) == (1, True)
    table = pd.read_csv(out, dtype=str, keep_default_na=False)[1:]
    assert set(table["correct"]) == {""}
    table["correct"] = ["true" if accept == "True" else "" for accept in table["accept"]]
    table.to_csv(out, index=False)
    code, said = run("gate", calibrated, out)
    assert (code, said.split(":")[0]) in ((0, "holds"), (4, "inconclusive"))
    assert f"0 of {(table['accept'] == 'True').sum()} accepted answers are wrong" in said


def test_only_the_learned_signal_loads_the_model(folder, tmp_path):
    """That which the rows name; changed weights are refused."""
    out, asked = tmp_path / "c.json", ("--risk", 0.9, "--signal", "learned")
    said = done("calibrate", folder / "answers.csv", *asked, "--out", out)
    found = Calibration.load(out)
    assert found.learning in said
    changed = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    scorer = Scorer(changed, found.config, tokenizer=tiny_lm.tokenizer())
    with pytest.raises(ValueError, match="row 1 was scored with another model or other settings"):
        calibrate_rows(folder / "answers.csv", 0.9, signal="learned", scorer=scorer)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("answers.csv --out c.json", 1, "c.json exists: name another file, or"),
        ("answers.csv --out new", 2, "expected a .json file, as `decide` needs it"),
        ("answers.csv --out no/new.json", 1, "its folder does not exist"),
        ("--out new.json", 2, "expected either ROWS of labelled answers or a finished run (--run)"),
        ("answers.csv --run . --out new.json", 2, "expected either ROWS of labelled answers or"),
        ("answers.csv --metric x --out new.json", 2, "--metric needs --run, and --unlabelled ROWS"),
    ],
)
@pytest.mark.usefixtures("calibrated")
def test_what_calibrate_refuses(folder, monkeypatch, words, status, said):
    monkeypatch.chdir(folder)
    code, printed = run("calibrate", "--risk", 0.9, *words.split())
    assert (code, said in printed) == (status, True), printed
    assert not (folder / "new.json").exists()
