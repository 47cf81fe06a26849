"""Four commands with one file: model and settings are named once."""

import json
import re
import shutil

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.decisions import Calibration, Decision, calibrate_rows
from lm_polygraph_asmi.decisions.rows import loadable
from lm_polygraph_asmi.host import smollm2
from lm_polygraph_asmi.scoring.rows import read_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm
from tests.decisions.conftest import labelled, limited
from tests.scoring.conftest import PROMPT

OPTIONS = ("--num-masks", 4, "--mask-rate", 0.3, "--top-k", 8, "--stop", "\\n", "--scope",
           "response")  # fmt: skip


def run(*arguments):
    found = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return found.exit_code, " ".join(found.output.split())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, few_resamples):  # noqa: ARG001 - no test below asks for intervals
    """A model in a folder; scored rows of labels, an empty answer and one without a label."""
    place = tmp_path_factory.mktemp("flow")
    tiny_lm.save(place / "model")
    rows = [*labelled(60), {"prompt": PROMPT, "answer": "", "correct": True, "cluster": "blank"}]
    write(place / "rows.jsonl", [*rows, {"prompt": "Where?", "answer": " x", "cluster": "none"}])
    code, said = run("score", place / "rows.jsonl", "--model", place / "model", *OPTIONS,
                     "--out", place / "answers.csv")  # fmt: skip
    assert code == 0, said
    return place


@pytest.fixture(scope="module")
def calibrated(folder):
    """The file of a calibration, and what was said; no model was loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
        out = folder / "calibration.json"
        code, said = run("calibrate", folder / "answers.csv", "--risk", 0.9, "--out", out)
    assert code == 0, said
    return out, said


def test_model_and_settings_are_named_once(folder, calibrated, tmp_path):
    path, said = calibrated
    assert "Rows left out: 1 without a label, 1 empty." in said
    assert "Promise: with 95% confidence, at most 90% of accepted answers are wrong." in said
    found = Calibration.load(path)
    assert (found.n, found.name) == (60, "answers.csv")
    assert found.model == str(folder / "model")
    config = found.config
    assert (config.scope, config.stop, config.num_masks) == ("response", ("\n",), 4)
    new = [{"prompt": f"Later {i}: {PROMPT}", "answer": " Brask", "id": f"n{i}"} for i in range(25)]
    write(tmp_path / "new.jsonl", new)
    out = tmp_path / "decided.csv"
    code, said = run("decide", tmp_path / "new.jsonl", "--calibration", path, "--out", out)
    assert code == 0, said
    assert f"n0 Accept: {found.title} " in said
    assert "n19 " in said
    assert "n20 " not in said  # the file has all
    assert "Brask 25 scored, " in said
    assert re.search(r", \d+ accept, \d+ abstain, [\d.]+ rows per second\.", said), said
    lines = [row.content for row in read_rows(out)]
    assert [line["accept"] for line in lines] == [
        line["value"] <= found.guarantee.threshold for line in lines
    ]
    assert {line["correct"] for line in lines} == {None}
    assert [Decision.digest(line) for line in lines] == [line["digest"] for line in lines]
    code, said = run("gate", path, out)
    assert (code, 'row 1: expected "correct"' in said) == (1, True)
    table = pd.read_csv(out, dtype=str, keep_default_na=False)
    table["correct"] = ["true" if accept == "True" else "" for accept in table["accept"]]
    table.to_csv(out, index=False)
    code, said = run("gate", path, out)
    assert (code, said.split(":")[0]) in ((0, "holds"), (4, "inconclusive"))
    assert f"0 of {(table['accept'] == 'True').sum()} accepted answers are wrong" in said


def test_only_the_learned_signal_loads_the_model(folder, tmp_path):
    """That which the rows name; changed weights are refused."""
    words = ("calibrate", folder / "answers.csv", "--risk", 0.9, "--signal", "learned", "--out")
    code, said = run(*words, tmp_path / "c.json")
    assert code == 0, said
    assert Calibration.load(tmp_path / "c.json").learning in said
    changed = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    scorer = Scorer(changed, Calibration.load(tmp_path / "c.json").config,
                    tokenizer=tiny_lm.tokenizer())  # fmt: skip
    with pytest.raises(ValueError, match="row 1 was scored with another model or other settings"):
        calibrate_rows(folder / "answers.csv", 0.9, signal="learned", scorer=scorer)


def test_a_model_that_moved_and_other_settings(folder, calibrated, tmp_path):
    path, _ = calibrated
    write(tmp_path / "new.jsonl", [{"prompt": PROMPT, "answer": " Brask"}])
    words = ("decide", tmp_path / "new.jsonl", "--calibration")
    moved = shutil.copytree(folder / "model", tmp_path / "model")
    code, said = run(*words, path, "--model", moved, "--out", tmp_path / "a.csv")
    assert (code, "No decision" in said) == (0, False), said
    limited(Calibration.load(path), 1e9, "sem").save(tmp_path / "sem.json")
    code, said = run(*words, tmp_path / "sem.json", "--scope", "all", "--out", tmp_path / "d.csv")
    assert code == 1
    assert "settings differ from the calibration answers.csv (scope 'response' there" in said
    limited(Calibration.load(path), None).save(tmp_path / "none.json")
    code, said = run(*words, tmp_path / "none.json")
    assert (code, "Warning: No threshold by " in said) == (0, True)


def test_what_calibrate_refuses(folder, calibrated, tmp_path):
    out, answers = tmp_path / "c.json", folder / "answers.csv"
    for words, status, said in (
        (
            (folder / "rows.jsonl", "--out", out),
            1,
            "row 1: expected a row with scores, got the fie",
        ),
        ((answers, "--out", calibrated[0]), 1, "calibration.json exists: name another file, or"),
        ((answers, "--out", tmp_path / "c"), 2, "expected a .json file, as `decide` needs it"),
        (("--out", out), 2, "expected either ROWS of labelled answers or a finished run (--run)"),
        ((answers, "--run", folder, "--out", out), 2, "expected either ROWS"),
        (
            (answers, "--metric", "x", "--out", out),
            2,
            "--metric needs --run, and --unlabelled ROWS",
        ),
        (("--run", folder, "--unlabelled", answers, "--out", out), 2, "--unlabelled ROWS"),
        ((answers, "--out", tmp_path / "no" / "c.json"), 1, "its folder does not exist"),
    ):
        code, printed = run("calibrate", "--risk", 0.9, *words)
        assert (code, said in printed) == (status, True), printed
    assert not out.exists()


def test_the_demo_s_model_is_known_by_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "smollm2_source", lambda: (tmp_path, None))
    assert (loadable(str(tmp_path)), loadable("m")) == ("smollm2", "m")
