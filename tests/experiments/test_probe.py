"""The causal probe on a model in which one head decides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from lm_polygraph_asmi.experiments import probe as room
from lm_polygraph_asmi.experiments.analysis import head_criticality
from lm_polygraph_asmi.experiments.analysis.probe import ablations, critical_first
from lm_polygraph_asmi.experiments.answers import answers_of
from lm_polygraph_asmi.experiments.probe import CausalProbe, Tokens, probe_of
from lm_polygraph_asmi.experiments.probe_file import read_probe, write_probe
from lm_polygraph_asmi.model import subnetwork_log_probs
from lm_polygraph_asmi.model.check import PASSES
from tests.scoring.saved import QUESTIONS, scored_run
from tests.tiny_lm import tokenizer, whitebox

HEAD, LAYER, DECIDED = 1, 2, 5
SCORED = {"num_masks": 60, "mask_rate": 0.3, "details": True}


def decided_by_one_head():
    """Without head 1 of layer 2 the model says token 5; with it, anything else."""
    model = whitebox().model
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0
        for layer in model.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        target = model.model.layers[LAYER].self_attn
        nn.init.zeros_(target.v_proj.weight)
        target.v_proj.weight[0, 0] = 1.0
        target.o_proj.weight[0, HEAD * 8] = -10.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[DECIDED] = 10.0 * torch.eye(32)[0]
    return model


@pytest.fixture(scope="module")
def planted():
    model = decided_by_one_head()
    run = scored_run(model, scope="response", **SCORED)
    tokens = Tokens.of(run, 0.6)
    answers = {answer.row: answer for answer in answers_of(run, tokenizer())}
    used = run.stats["asmi"][0][0.6]["settings"]
    return model, used, tokens, answers


def asked(planted, **settings) -> CausalProbe:
    model, used, tokens, _ = planted
    return CausalProbe(model, used, tokens, **{"count": 6, "draws": 40} | settings)


@pytest.fixture(scope="module")
def probed(planted, tmp_path_factory):
    manager = tmp_path_factory.mktemp("probe") / "ue_manager_seed1"
    write_probe(asked(planted).run(planted[-1]), manager)
    return read_probe(manager)


def test_a_decisive_head_flips_every_prediction(probed):
    found = probed
    assert found.k == (1, 2, 4)
    for group in ("high", "low"):
        assert len(found.groups[group]) == 6
        assert (found.flipped("critical", group) == 1).all()
    assert (np.nanargmax(found.criticality, axis=1) == HEAD).all()


def test_no_head_ablated_flips_nothing(probed):
    found = probed
    assert (found.tokens["replayed"] == found.tokens["argmax"]).all()
    assert (found.tokens["argmax"] != DECIDED).all()


def test_passes_without_an_ablation_are_run_with_those_that_ablate(planted, monkeypatch):
    """As a mask among others: flips are told from them, not from a kept state."""
    ran = []
    for passes in PASSES.values():
        for name, run in passes.items():

            def noted(*how, run=run):
                ran.append(how[2:4])
                return run(*how)

            monkeypatch.setitem(passes, name, noted)
    asked(planted, count=1, draws=1).run(planted[-1])
    assert {layer for layer, _ in ran} == {LAYER}
    for _, masks in ran:
        kept = masks.all(1).tolist()
        assert any(kept)
        assert not all(kept)


def test_flips_are_counted_from_the_passes_without_an_ablation(probed):
    """Where rounding tells these from the unmasked pass, that is no flip."""

    def rounded(name):
        moved = np.full_like(probed.tokens[name], DECIDED)
        return replace(probed, tokens=probed.tokens | {name: moved})

    assert (rounded("argmax").flipped("critical", "high") == 1).all()
    assert (rounded("replayed").flipped("critical", "high") == 0).all()


@pytest.mark.parametrize("scope", ["response", "all"])
def test_predictions_are_those_of_masked_passes(scope):
    """One mask at a time, where the run masked; flips are frequent in a random model."""
    model = whitebox().model
    run = scored_run(model, QUESTIONS[:2], scope=scope, **SCORED)
    tokens, used = Tokens.of(run, 0.6), run.stats["asmi"][0][0.6]["settings"]
    answers = {answer.row: answer for answer in answers_of(run, tokenizer())}
    probe = CausalProbe(model, used, tokens, count=2, draws=1)
    found = probe.run(answers)
    masked = run.at(0.6)
    flips = 0
    for place, (row, at) in enumerate(
        zip(found["tokens"]["row"], found["tokens"]["position"], strict=True)
    ):
        known = head_criticality(masked[row]["kl"], masked[row]["masks"])[at]
        assert found["tokens"]["positive"][place] == (known > 0).sum()
        kept = ablations(critical_first(known), [1, 2, 4])
        log_probs = subnetwork_log_probs(
            model, answers[row].input_ids, answers[row].prompt_length, used["layer"],
            torch.from_numpy(kept).float(), attention="sdpa", scope=scope,
        )  # fmt: skip
        assert log_probs[:, at].argmax(-1).tolist() == found["predicted"]["critical"][place]
        flips += (log_probs[:, at].argmax(-1) != found["tokens"]["replayed"][place]).sum()
    assert flips > 0


def test_each_token_has_random_heads_of_its_own(planted):
    """Two of one answer, too."""
    probe, answer = asked(planted), planted[-1][0]
    first, second, *_ = np.flatnonzero(probe.tokens.row[probe.chosen] == 0)
    drawn = [probe._masks(place, answer)["random"] for place in (first, second)]
    assert not np.array_equal(*drawn)


def test_random_heads_flip_as_often_as_they_hit(probed):
    """k of 4 heads hold the decisive one with chance k / 4."""
    found = probed
    rate = found.flipped("random", "high").mean(0)
    np.testing.assert_allclose(rate, [0.25, 0.5, 1], atol=0.1)
    assert np.ptp(found.flipped("random", "high")[:, 0]) > 0  # each token has draws of its own


def test_own_masks(probed):
    """The run's masks take the head away with p = 0.3."""
    found = probed
    assert found.tokens["own_flips"].mean() == pytest.approx(0.3, abs=0.1)


def test_it_does_not_depend_on_the_budget(planted, monkeypatch):
    whole = asked(planted, count=1, draws=1).run(planted[-1])
    monkeypatch.setattr(room, "STATES", 1)
    assert asked(planted, count=1, draws=1, memory_budget=1).run(planted[-1]) == whole


def test_a_probe_that_was_killed_goes_on_where_it_stopped(planted, tmp_path):
    done = []

    class Killed(Exception):
        pass

    def stop():
        done.append(1)
        if len(done) == 2:
            raise Killed

    with pytest.raises(Killed):
        asked(planted, draws=1, result_cache=tmp_path).run(planted[-1], stop)
    probe, ran = asked(planted, draws=1, result_cache=tmp_path), []
    predict = probe._predict
    probe._predict = lambda *how: ran.append(how[0].input_ids) or predict(*how)
    found = probe.run(planted[-1])
    assert len({tuple(ids.tolist()) for ids in ran}) == len(probe.rows) - 2
    assert found == asked(planted, draws=1).run(planted[-1])


def test_another_seed_draws_other_heads(planted):
    few = {"draws": 2, "count": 2}
    one, other = (asked(planted, seed=seed, **few).run(planted[-1]) for seed in (0, 1))
    assert one["predicted"]["random"] != other["predicted"]["random"]
    assert one["predicted"]["critical"] == other["predicted"]["critical"]


def test_another_model_than_the_run_s_is_refused(planted):
    _, used, tokens, answers = planted
    with pytest.raises(ValueError, match="another likelihood with this model"):
        CausalProbe(whitebox().model, used, tokens, count=2).run(answers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"count": 0}, "tokens must be at least 1"),
        ({"count": -1}, "tokens must be at least 1"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"draws": 2.5}, "draws must be a whole number"),
    ],
)
def test_nothing_to_probe_is_told(planted, settings, said):
    with pytest.raises(ValueError, match=said):
        asked(planted, **settings)


def test_a_single_token_is_neither_high_nor_low(planted):
    run = scored_run(planted[0], QUESTIONS[:1], tokens=1, scope="response", **SCORED)
    with pytest.raises(ValueError, match="no two tokens"):
        CausalProbe(planted[0], planted[1], Tokens.of(run, 0.6))


def test_a_run_without_masks_is_refused(monkeypatch):
    run = scored_run(decided_by_one_head(), num_masks=5, mask_rate=0.3, texts=QUESTIONS[:1])
    monkeypatch.setattr(room, "load_run", lambda _: run)
    with pytest.raises(ValueError, match=r"lacks masks at depth 0\.6: .*asmi_heads"):
        probe_of("run", "tiny")
    with pytest.raises(ValueError, match=r"no ASMI score at depth 0\.9; its depths: 0\.6"):
        probe_of("run", "tiny", depth=0.9)
