"""Every door to a score gives that of the paper's formulas over full passes; the calls of a row."""

from cProfile import Profile
from functools import partial
from pathlib import Path
from statistics import mean

import pytest
import torch

import lm_polygraph_asmi
from lm_polygraph_asmi import ASMI, Scorer, SemASMI
from lm_polygraph_asmi.core.maths import example_seed, sample_head_masks
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from tests import brute_force
from tests.tiny_lm import whitebox

PACKAGE = f"{Path(lm_polygraph_asmi.__file__).parent}/"
QUESTION, ANSWER = "Who built it?", [40, 77, 131]
USED = {"num_masks": 8, "mask_rate": 0.3, "top_k": 4}
MOST_CALLS = 1000


@pytest.fixture(scope="module")
def model():
    return whitebox()


@pytest.fixture(scope="module")
def slow(model):
    """MI_t and A_t of each token, by full passes and loops."""
    ids = torch.tensor([*model.tokenize([QUESTION])["input_ids"][0], *ANSWER])
    seed = example_seed(0, [2, *ids.tolist()])
    masks = sample_head_masks(8, 4, 0.3, torch.Generator().manual_seed(seed))
    log_probs = brute_force.subnetwork_log_probs(
        model.model, "model.layers.2.self_attn.o_proj", 1, ids, len(ids) - len(ANSWER), masks
    )
    agreement = brute_force.semantic_agreement(log_probs, model.model.lm_head.weight, 4)
    return [*zip(brute_force.mutual_information(log_probs, 4), agreement, strict=True)]


def of_a_run(model, method, used=USED):
    stats = MaskedHeadsCalculator(**used)({"greedy_tokens": [ANSWER]}, [QUESTION], model)
    return {"asmi": ASMI, "sem": SemASMI}[method](**used)(stats)[0]


def of_one_answer(model, method):
    return Scorer(model, method=method, **USED).score(QUESTION, ANSWER).score


def beside_another(model, method):
    """From what a `Score` holds."""
    return Scorer(model, method="asmi", **USED).score(QUESTION, ANSWER).signals[method]


@pytest.mark.parametrize(("method", "alpha"), [("asmi", 0), ("sem", 1)])
@pytest.mark.parametrize("door", [of_a_run, of_one_answer, beside_another])
def test_every_door_gives_the_score_of_the_formulas(model, slow, door, method, alpha):
    expected = mean(mi * (1 - alpha * agreement) for mi, agreement in slow)
    assert door(model, method) == pytest.approx(expected, abs=1e-5)


def test_a_warm_row_makes_few_calls(model):
    """With the number of masks of a run, so that a call for each of them is seen."""
    row, profile = partial(of_a_run, model, "sem", {}), Profile(builtins=False)
    row()  # the first is cold
    profile.runcall(row)
    own = [call for call in profile.getstats() if call.code.co_filename.startswith(PACKAGE)]
    assert 50 < sum(call.callcount for call in own) < MOST_CALLS
