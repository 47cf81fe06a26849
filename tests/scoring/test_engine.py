"""Engines at several depths share one unmasked pass; their statistics are those of each alone."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import scoring_session
from lm_polygraph_asmi.scoring import engine as engine_module
from lm_polygraph_asmi.scoring.engine import Engine, score_depths
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics
from tests import brute_force
from tests.decoders import sequence
from tests.families import tiny_model
from tests.rounding import allowed
from tests.scoring.test_reuse import assert_close

pytestmark = pytest.mark.usefixtures("unseen")

PROMPT = 9
SETTINGS = {"num_masks": 6, "mask_rate": 0.4, "top_k": 8}
IDS = sequence(14)
ANSWER = (IDS[:PROMPT], IDS[PROMPT:].tolist())
TOKEN_STATISTICS = ("mi", "entropy", "log_likelihood", "entropy_of_mean", "tail_mass")


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def passes(monkeypatch):
    """Layers of each unmasked pass."""
    layers, run = [], engine_module.run_unmasked
    monkeypatch.setattr(
        engine_module, "run_unmasked", lambda *args: layers.append(args[3]) or run(*args)
    )
    return layers


@pytest.mark.parametrize("scope", SCOPES)
def test_engines_share_the_unmasked_pass(model, passes, scope):
    engines = [
        Engine(depth=0.3, scope=scope, **SETTINGS),
        Engine(depth=0.6, scope=scope, **SETTINGS),
        Engine(depth=0.6, scope=scope, seed=1, **SETTINGS),
    ]
    together = score_depths(engines, model, *ANSWER)
    assert passes == [[1, 2, 2]]
    for engine, shared in zip(engines, together, strict=True):
        apart = engine.score(model, *ANSWER)
        assert_close(shared, apart, allowed(model, IDS), TOKEN_STATISTICS)
        assert shared.mask_seed == apart.mask_seed
        assert shared.settings == apart.settings == engine.settings(model)
    assert len({tuple(each.mi.round(6)) for each in together}) == 3


def test_engines_that_cannot_share_are_refused(model):
    for engines in (
        [],
        [Engine(scope="all"), Engine(scope="response")],
        [Engine(attention="eager"), Engine()],
    ):
        with pytest.raises(ValueError, match="expected engines of one scope, attention"):
            score_depths(engines, model, *ANSWER)


def test_the_first_result_cache_serves_all(model, tmp_path):
    """An engine without one has no key of the model, so that nothing is stored under it."""
    without, kept = (
        Engine(depth=0.3, **SETTINGS),
        Engine(depth=0.6, **SETTINGS, result_cache=tmp_path),
    )
    for engines, reused in (
        ([without, kept], [False, False]),
        ([kept, without], [False, False]),
        ([kept, without], [True, True]),
        ([without, kept], [False, False]),
        ([kept], [True]),
    ):
        assert [each.reused for each in score_depths(engines, model, *ANSWER)] == reused


def test_a_draft_of_another_layer_is_not_used(model, passes):
    engines = [Engine(depth=depth, scope="response", **SETTINGS) for depth in (0.3, 0.6)]
    draft = engines[0].draft(model, *ANSWER)
    first = engines[0].score(model, *ANSWER, draft=draft)
    assert passes == [[1]]
    second = engines[1].score(model, *ANSWER, draft=draft)
    assert passes == [[1], [2]]
    assert_close(first, engines[0].score(model, *ANSWER), allowed(model, IDS))
    assert_close(second, engines[1].score(model, *ANSWER), allowed(model, IDS))


@pytest.mark.parametrize("scope", SCOPES)
def test_log_likelihoods_under_each_mask(model, scope):
    """Against full forward passes with a hook; masks change each by far more than rounding."""
    found = Engine(depth=0.6, scope=scope, details=True, **SETTINGS).score(model, *ANSWER)
    slow = brute_force.subnetwork_log_probs(
        model, "model.layers.2.self_attn.o_proj", 1, IDS, PROMPT,
        torch.from_numpy(found.masks).float(), scope,
    )  # fmt: skip
    expected = slow[:, range(len(ANSWER[1])), ANSWER[1]]
    most = allowed(model, IDS)
    np.testing.assert_allclose(found.masked_log_likelihood, expected, rtol=0, atol=most)
    assert np.ptp(found.masked_log_likelihood, axis=0).min() > 10 * most


def test_a_stream_has_the_statistics_of_the_finished_answer(model):
    settings = {"scope": "response", "seeded_by": "prompt", "details": True, **SETTINGS}
    engine = Engine(**settings)
    with scoring_session(model):
        stream = engine.start_stream(model, ANSWER[0])
        steps = [stream.step(token) for token in ANSWER[1]]
    found, expected = stream.statistics(), engine.score(model, *ANSWER)
    assert_close(found, expected, allowed(model, IDS), (*TOKEN_STATISTICS, "masked_log_likelihood"))
    for field in fields(AnswerStatistics):
        whole, finished = (getattr(each, field.name) for each in (found, expected))
        assert np.shape(whole) == np.shape(finished), field.name
        assert whole is not None
    for name in ("tokens", "mask_seed", "prompt_length", "settings", "top_token", "masks"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert [step.mi.tolist() for step in steps] == found.mi[:, None].tolist()
    assert sum(step.seconds for step in steps) < found.seconds
    stream.free()
    assert stream.statistics().mi.tolist() == found.mi.tolist()
