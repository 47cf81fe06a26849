"""AlignScore of passage and answer: what is compared, and that it is no quality metric."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from lm_polygraph_asmi.estimators.grounded_align_score import GroundedAlignScore, load_estimator
from tests.report import runs
from tests.stand_ins import make_stand_ins

STATS = {
    "input_texts": [
        "Read.\nPassage:\nThe ferry was built.\nIn Brask.\nQuestion: Where?\nAnswer:",
        "Read.\nStory: Kites are blue.\n\nQuestion: Which?\nAnswer:",
        "Read.\nPassage:\nNo Question: at all\nQuestion: Why?\nAnswer:",
    ],
    "greedy_texts": [" Brask", " ", "no"],
}


class Spy:
    found = (0.1, 0.6, 1.0)

    def score(self, contexts, claims):
        self.asked = list(zip(contexts, claims, strict=True))
        return self.found


def test_passage_and_answer_are_compared(monkeypatch):
    spy = Spy()
    estimator = load_estimator({})
    monkeypatch.setattr(estimator, "_scorer", spy)
    assert estimator(STATS) == pytest.approx([0.9, 0.4, 0.0])  # higher = more uncertain
    assert spy.asked == [
        ("The ferry was built.\nIn Brask.", " Brask"),
        ("Kites are blue.", "(empty)"),
        ("No Question: at all", "no"),
    ]
    assert str(estimator) == "GroundedAlignScore"
    assert str(GroundedAlignScore(passage="<(.*)>")) == "GroundedAlignScore (passage=<(.*)>)"


def test_prompts_without_a_passage_are_refused():
    closed = {"input_texts": ["Question: Who?\nAnswer:"], "greedy_texts": ["I"]}
    with pytest.raises(ValueError, match="GroundedAlignScore finds no passage in the prompt"):
        GroundedAlignScore()(closed)
    with pytest.raises(ValueError, match="passage: expected a group"):
        GroundedAlignScore(passage="no group")


def test_scores_that_are_none_are_refused(monkeypatch):
    estimator = GroundedAlignScore()
    broken = Spy()
    broken.found = (0.1, np.nan, 1.0)
    monkeypatch.setattr(estimator, "_scorer", broken)
    with pytest.raises(ValueError, match="damaged weights"):
        estimator(STATS)


def test_it_is_a_baseline_and_no_quality_metric(tmp_path):
    from lm_polygraph_asmi.results.run_groups import load_run_groups

    saved = runs.content()
    saved["estimations"]["sequence", "GroundedAlignScore"] = np.linspace(0, 1, 60).tolist()
    (group,) = load_run_groups([runs.save(tmp_path / "run", saved)])
    assert group.metric == "AlignScore"
    assert "GroundedAlignScore" in group.baselines
    assert list(group.run.quality) == ["AlignScore"]


RUN = """
import sys
from lm_polygraph.generation_metrics.alignscore import AlignScore
from lm_polygraph_asmi.estimators import GroundedAlignScore
stats = {"input_texts": ["Read.\\nPassage:\\nThe ferry was built. In Brask.\\nQuestion: Where?"],
         "greedy_texts": ["Brask"]}
passage = "The ferry was built. In Brask."
judge = AlignScore(ckpt_path=sys.argv[1], target_is_claims=False)
print(GroundedAlignScore(sys.argv[1])(stats)[0], 1 - judge(stats, [passage])[0])
"""


PACKAGE = """
import sys, types
import torch

class Lightning(torch.nn.Module):
    def save_hyperparameters(self):
        pass

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path, model, strict):
        made = cls(model=model)
        made.load_state_dict(torch.load(checkpoint_path)["state_dict"], strict=strict)
        return made

sys.modules["pytorch_lightning"] = types.SimpleNamespace(LightningModule=Lightning)
from alignscore.alignscore import AlignScore
from lm_polygraph_asmi.estimators import GroundedAlignScore

long = " ".join(f"Ferry number {n} was built in Brask by Edda Holm." for n in range(90))
passages = ["The ferry was built. In Brask.", long, "Kites are blue."]
answers = ["Brask", "Edda Holm built it. It was the ninth.", "No kite at all"]
stats = {"input_texts": [f"Read.\\nPassage:\\n{p}\\nQuestion: Where?" for p in passages],
         "greedy_texts": answers}
package = AlignScore("roberta-large", 2, "cpu", sys.argv[1], verbose=False)
theirs = package.score(passages, answers)
print(*GroundedAlignScore(sys.argv[1])(stats), *(1 - score for score in theirs))
"""


def numbers(code, made):
    """What a program prints, run where the stand-ins are."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(made.align_score)],
        cwd=made.working_directory,
        env=os.environ | made.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(map(float, done.stdout.split()))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("alignscore") is None,
    reason="pip install --no-deps alignscore-speedofmagic==0.1.4",
)
def test_it_is_the_number_of_the_package_alignscore(tmp_path):
    """With random weights. The package wants older releases of NumPy and transformers, and
    Lightning to load a file; its scoring runs without."""
    found = numbers(PACKAGE, make_stand_ins(tmp_path / "stand-ins"))
    assert found[:3] == pytest.approx(found[3:], abs=1e-6)
    assert len(set(found[:3])) == 3


@pytest.mark.slow
def test_it_is_align_score_with_the_passage_in_the_place_of_the_reference(tmp_path):
    """With random weights: LM-Polygraph's metric, given the passage as the reference."""
    made = make_stand_ins(tmp_path / "stand-ins")
    own, tested = numbers(RUN, made)
    assert own == pytest.approx(tested)
