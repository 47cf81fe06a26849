"""The causal probe on a model in which one head decides."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from lm_polygraph_asmi.heads import probe as room
from lm_polygraph_asmi.heads.analysis import head_criticality
from lm_polygraph_asmi.heads.analysis.probe import ablations
from lm_polygraph_asmi.heads.probe_file import probe_path, read_probe, write_probe
from lm_polygraph_asmi.results.runs import Run
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from tests.families import subnetwork_log_probs
from tests.tiny_lm import tokenizer, whitebox

HEAD, LAYER, DECIDED = 1, 2, 5
QUESTIONS = ("Who built it?", "Where do the kites start?", "True or False?", "The ferry Ondine")
SCORED = {"num_masks": 60, "mask_rate": 0.3, "details": True}


def scored_run(model, texts=QUESTIONS, tokens: int = 4, **settings: object) -> Run:
    """A finished run as it would be read from disk; its answers are random tokens."""
    host = whitebox()
    host.model = model
    answers = np.random.default_rng(0).integers(3, len(host.tokenizer), (len(texts), tokens))
    stats = MaskedHeadsCalculator(**settings)({"greedy_tokens": answers.tolist()}, texts, host)
    scores = pd.DataFrame({"score": np.zeros(len(texts))})
    return Run(Path("run/ue_manager_seed1"), scores, scores, stats | {"input_texts": texts})


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


def material(model, *how, **settings):
    """What the probe of a run is made from: settings of ASMI, tokens, answers."""
    run = scored_run(model, *how, **SCORED | settings)
    saved = run.at(0.6, "masks", "kl")
    return model, saved[0]["settings"], room.tokens_of(saved), room.answers_of(run, tokenizer())


@pytest.fixture(scope="module")
def planted():
    return material(decided_by_one_head(), scope="response")


@pytest.fixture(scope="module")
def probed(planted, tmp_path_factory):
    manager = tmp_path_factory.mktemp("probe") / "ue_manager_seed1"
    write_probe(room.probe_tokens(*planted, count=6, draws=40), probe_path(manager))
    return read_probe(manager)


def test_a_decisive_head_flips_every_prediction_and_none_ablated_flips_nothing(probed):
    assert probed.k == (1, 2, 4)
    for group in ("high", "low"):
        assert probed.flipped("critical", group).tolist() == [[1, 1, 1]] * 6
    assert (probed.tokens["replayed"] == probed.tokens["argmax"]).all()
    assert (probed.tokens["argmax"] != DECIDED).all()
    # k of 4 random heads hold the decisive one with chance k / 4.
    np.testing.assert_allclose(probed.flipped("random", "high").mean(0), [0.25, 0.5, 1], atol=0.1)
    hit = probed.predicted["random"][probed.tokens["row"] == 0] == DECIDED
    assert (hit[0] != hit[1]).any()  # also two tokens of one answer have heads of their own


@pytest.mark.parametrize("scope", ["response", "all"])
def test_predictions_are_those_of_masked_passes(scope):
    """One mask at a time, where the run masked; flips are frequent in a random model."""
    model, used, tokens, answers = material(whitebox().model, QUESTIONS[:2], scope=scope)
    masked = scored_run(model, QUESTIONS[:2], scope=scope, **SCORED).at(0.6)
    found = room.probe_tokens(model, used, tokens, answers, count=2, draws=1)
    columns, flips = found["tokens"], 0
    for place, (row, at) in enumerate(zip(columns["row"], columns["position"], strict=True)):
        known = head_criticality(masked[row]["kl"], masked[row]["masks"])[at]
        kept = ablations(np.argsort(-known), [1, 2, 4])
        log_probs = subnetwork_log_probs(
            model, answers[row].input_ids, answers[row].prompt_length, used["layer"],
            torch.from_numpy(kept).float(), attention="sdpa", scope=scope,
        )  # fmt: skip
        predicted = log_probs[:, at].argmax(-1)
        assert predicted.tolist() == found["predicted"]["critical"][place]
        assert columns["token"][place] == answers[row].response[at]
        flips += (predicted != columns["replayed"][place]).sum()
    assert flips > 0


def test_masks_of_a_token_ablate_its_critical_heads_and_random_ones_of_its_own():
    criticality = np.array([0.1, np.nan, 0.3, -0.2])
    masks, other = (room.token_masks([2, 7, at], criticality, [1, 2], 20, 0) for at in (0, 1))
    assert masks[:3].tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1]]
    assert masks[3:].sum(1).tolist() == [3, 2] * 20
    assert not torch.equal(masks[3:], other[3:])
    assert not torch.equal(masks, room.token_masks([2, 7, 0], criticality, [1, 2], 20, 1))


def test_what_cannot_be_probed(planted, monkeypatch):
    with pytest.raises(ValueError, match="no two tokens"):
        room.probe_tokens(*material(planted[0], QUESTIONS[:1], tokens=1))
    away = np.array([2, 2, -2, -2])  # their median is 0
    both_ways = [a._replace(log_likelihood=a.log_likelihood + away) for a in planted[3]]
    for other in ((whitebox().model, *planted[1:]), (*planted[:3], both_ways)):
        with pytest.raises(ValueError, match="another likelihood with this model"):
            room.probe_tokens(*other, count=2)
    run = scored_run(planted[0], num_masks=5, mask_rate=0.3, texts=QUESTIONS[:1])
    monkeypatch.setattr(room, "load_run", lambda _: run)
    with pytest.raises(ValueError, match=r"lacks masks at depth 0\.9 \(its depths: 0\.6\)"):
        room.probe_run("run", "tiny", depth=0.9)
    named = planted[1] | {"structure": "projection=mixer.out"}  # as the run was
    with pytest.raises(TypeError, match=r"no layer at .* has a module mixer\.out"):
        room.probe_tokens(planted[0], named, *planted[2:], count=2)
