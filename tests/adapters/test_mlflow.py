"""The scorer of MLflow, in its own evaluation."""
# ruff: noqa: E402 - what follows needs the extra, and skips without it

import json

import pytest

from lm_polygraph_asmi.adapters.contract import open_scorer

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("mlflow.genai")

from lm_polygraph_asmi.adapters.mlflow import asmi

PROMPT = "Who built the ferry?"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A local folder that runs are kept in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield
    mlflow.set_tracking_uri(before)


@pytest.mark.usefixtures("runs")
def test_an_evaluation(folder):
    answers = [" Brask", " True or False", " Yes", " No"]
    rows = [{"inputs": {"prompt": PROMPT}, "outputs": answer} for answer in answers]
    rows += [{"inputs": {"question": PROMPT}, "outputs": " I"}]
    found = mlflow.genai.evaluate(data=rows, scorers=[asmi(str(folder), scope="response")])
    scorer = open_scorer(str(folder), scope="response")
    expected = {answer: scorer.score(PROMPT, answer) for answer in answers}
    seen = 0
    for _, row in found.result_df.iterrows():
        (feedback,) = row["assessments"]
        if json.loads(json.dumps(row["request"])) == {"question": PROMPT}:
            assert "expected inputs with the field 'prompt'" in str(feedback)
            continue
        score = expected[row["response"]]
        assert row["asmi/value"] == pytest.approx(score.score, abs=1e-6)
        assert row["asmi/rationale"] == "No decision: there is no calibration."
        metadata = feedback["metadata"]
        assert float(metadata["entropy"]) == pytest.approx(score.signals["entropy"], abs=1e-5)
        assert (metadata["decision"], "error_probability" in metadata) == ("none", False)
        seen += 1
    assert seen == len(answers)


def test_what_is_given_is_checked(folder):
    scorer = asmi(str(folder), scope="response", prompt="messages", name="fragile")
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    found = scorer(inputs=chat, outputs="Brask")
    assert (found.name, found.value > 0) == ("fragile", True)
    with pytest.raises(TypeError, match="expected the answer as a text, got dict"):
        scorer(inputs=chat, outputs={"text": "Brask"})
