"""Every door goes through the two modules of Algorithm 1; the calls of a row."""

import sys
from cProfile import Profile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lm_polygraph_asmi
from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core import algorithm, scores
from lm_polygraph_asmi.estimators import SemASMI
from lm_polygraph_asmi.results.run_groups import RunGroup
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.tiny_lm import whitebox

PACKAGE = f"{Path(lm_polygraph_asmi.__file__).parent}/"
QUESTION, ANSWER = "Who built it?", [40, 77, 131]
MOST_CALLS = 1000


def host_score(model) -> float:
    stats = MaskedHeadsCalculator()({"greedy_tokens": [ANSWER]}, [QUESTION], model)
    return float(SemASMI()(stats)[0])


def own_score(model) -> float:
    return Scorer(model).score(QUESTION, ANSWER).score


DOORS = host_score, own_score


@pytest.fixture(scope="module")
def model():
    """Its structure and check are known."""
    model = whitebox()
    own_score(model)
    return model


def again(model) -> float:
    """From what a `Score` holds."""
    return Scorer(model, method="asmi").score(QUESTION, ANSWER).signals["sem"]


def saved(_) -> float:
    """From what a run saved of its tokens."""
    group = RunGroup("", "", "", (), None, "", 0.6, np.array([0]), (), ASMIConfig())
    tokens = {"mi_tokens": [np.array([0.2, 0.4])], "agreement_tokens": [np.array([0.5, 0.1])]}
    vars(group).update(tokens, methods={}, scores={})
    return float(group.u_sem[0])


@pytest.mark.parametrize("name", ["token_scores", "aggregate"])
@pytest.mark.parametrize("score", [*DOORS, again, saved])
def test_line_9_makes_every_score(model, monkeypatch, score, name):
    """Wherever it is imported: a score that is computed beside it does not change with it."""
    right, real = score(model), getattr(scores, name)

    def scaled(*how):
        return 1.5 * real(*how)

    for path, module in list(sys.modules.items()):
        if path.startswith("lm_polygraph_asmi.") and vars(module).get(name) is real:
            monkeypatch.setattr(module, name, scaled)
    assert score(model) == pytest.approx(1.5 * right)


def test_no_other_code_calls_a_decoder_layer(model, monkeypatch):
    """Without Algorithm 1 nothing of the package reaches the layers of a given answer."""
    for name in ("run_unmasked", "run_subnetworks"):
        monkeypatch.setattr(algorithm, name, Mock(side_effect=NotImplementedError))
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda *_, **__: pytest.fail("called"))
    for score in DOORS:
        with pytest.raises(NotImplementedError):
            score(model)


def test_a_warm_row_makes_few_calls(model):
    calculator, estimator, profile = MaskedHeadsCalculator(), SemASMI(), Profile(builtins=False)

    def row():
        estimator(calculator({"greedy_tokens": [ANSWER]}, [QUESTION], model))

    row()  # the first is cold
    profile.runcall(row)
    own = [call for call in profile.getstats() if call.code.co_filename.startswith(PACKAGE)]
    assert 50 < sum(call.callcount for call in own) < MOST_CALLS
