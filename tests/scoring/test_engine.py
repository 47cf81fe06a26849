"""Several depths share one unmasked pass; their statistics are those of each alone."""

import numpy as np
import pytest
import torch

from lm_polygraph_asmi import algorithm
from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.scoring.engine import Engine
from tests import brute_force
from tests.decoders import sequence
from tests.families import tiny_model
from tests.rounding import allowed

pytestmark = pytest.mark.usefixtures("unseen")

PROMPT = 9
SETTINGS = {"num_masks": 6, "mask_rate": 0.4, "top_k": 8}
IDS = sequence(14)
ANSWER = (IDS[:PROMPT], IDS[PROMPT:].tolist())
TOKEN_STATISTICS = ("mi", "entropy", "log_likelihood", "entropy_of_mean", "tail_mass")


def assert_close(found, expected, most, names):
    """Statistics of tokens that differ by at most `most`."""
    for name in names:
        own, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(own, other, rtol=0, atol=most, err_msg=name)


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def passes(monkeypatch):
    """Layers of each unmasked pass."""
    layers, run = [], algorithm.run_unmasked
    monkeypatch.setattr(
        algorithm, "run_unmasked", lambda *args: layers.append(args[3]) or run(*args)
    )
    return layers


@pytest.mark.parametrize("scope", SCOPES)
def test_depths_share_the_unmasked_pass(model, passes, scope):
    engine, depths = Engine(scope=scope, **SETTINGS), [0.3, 0.6, 0.9]
    together = engine.score(model, *ANSWER, depths=depths)
    assert passes == [[1, 2, 3]]
    for depth, shared in zip(depths, together, strict=True):
        (apart,) = Engine(scope=scope, depth=depth, **SETTINGS).score(model, *ANSWER)
        assert_close(shared, apart, allowed(model, IDS), TOKEN_STATISTICS)
        assert shared.mask_seed == apart.mask_seed
        assert shared.settings == apart.settings == engine.settings(model, depth)
    assert len({tuple(each.mi.round(6)) for each in together}) == 3


def test_depths_are_reused_one_by_one(model, passes, tmp_path):
    without, kept = Engine(**SETTINGS), Engine(**SETTINGS, result_cache=tmp_path)
    for engine, depths, reused in (
        (without, [0.3], [False]),
        (kept, [0.6], [False]),
        (kept, [0.3, 0.6], [False, True]),
        (kept, [0.6, 0.3], [True, True]),
        (without, [0.3], [False]),
    ):
        found = engine.score(model, *ANSWER, depths=depths)
        assert [each.reused for each in found] == reused
    assert passes == [[1], [2], [1], [1]]


@pytest.mark.parametrize("scope", SCOPES)
def test_log_likelihoods_under_each_mask(model, scope):
    """Against full forward passes with a hook; masks change each by far more than rounding."""
    (found,) = Engine(depth=0.6, scope=scope, details=True, **SETTINGS).score(model, *ANSWER)
    slow = brute_force.subnetwork_log_probs(
        model, "model.layers.2.self_attn.o_proj", 1, IDS, PROMPT,
        torch.from_numpy(found.masks).float(), scope,
    )  # fmt: skip
    expected = slow[:, range(len(ANSWER[1])), ANSWER[1]]
    most = allowed(model, IDS)
    np.testing.assert_allclose(found.masked_log_likelihood, expected, rtol=0, atol=most)
    assert np.ptp(found.masked_log_likelihood, axis=0).min() > 10 * most
