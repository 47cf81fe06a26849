"""The causal probe on a model in which one head decides."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from lm_polygraph_asmi.core.model.choice import PASSES
from lm_polygraph_asmi.heads import analysis, probe as room
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
    attention, head = model.model.layers[LAYER].self_attn, model.lm_head.weight
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 3.0
        for name, weight in model.named_parameters():
            weight *= not name.endswith(("o_proj.weight", "down_proj.weight"))
        attention.v_proj.weight.zero_()[0, 0] = 1.0
        attention.o_proj.weight[0, HEAD * 8] = -10.0
        head[:, 0] = 0.0
        head[DECIDED] = 10.0 * torch.eye(32)[0]
    return model


def material(model, *how, **settings):
    """What the probe of a run is made from: settings of ASMI, tokens, answers."""
    run = scored_run(model, *how, **SCORED | settings)
    saved = run.at(0.6, "masks", "kl")
    return model, saved[0]["settings"], room.tokens_of(saved), room.answers_of(run, tokenizer())


@pytest.fixture(scope="module")
def planted():
    return material(decided_by_one_head(), scope="response")


def test_a_decisive_head_flips_every_prediction_and_none_ablated_flips_nothing(planted, tmp_path):
    manager = tmp_path / "ue_manager_seed1"
    write_probe(room.probe_tokens(*planted, count=6, draws=40), probe_path(manager))
    probed = read_probe(manager)
    assert probed.k == (1, 2, 4)
    for group in ("high", "low"):
        assert probed.flipped("critical", group).tolist() == [[1, 1, 1]] * 6
    argmax, replayed, row = (probed.tokens[name] for name in ("argmax", "replayed", "row"))
    assert replayed.tolist() == argmax.tolist()
    assert DECIDED not in argmax
    # k of 4 random heads hold the decisive one with chance k / 4.
    np.testing.assert_allclose(probed.flipped("random", "high").mean(0), [0.25, 0.5, 1], atol=0.1)
    hit = probed.predicted["random"][row == 0] == DECIDED
    assert (hit[0] != hit[1]).any()  # also two tokens of one answer have heads of their own


@pytest.mark.usefixtures("unseen")
def test_flips_are_counted_against_the_same_passes_without_an_ablation(planted, monkeypatch):
    """Here these differ from the unmasked pass by more than rounding."""
    packed = PASSES["response"]["packed"]
    monkeypatch.setitem(PASSES["response"], "packed", lambda *given: -packed(*given))
    tokens = room.probe_tokens(*planted, count=6, draws=1)["tokens"]
    assert DECIDED not in tokens["argmax"]
    assert set(tokens["replayed"]) == {DECIDED}


@pytest.mark.parametrize("scope", ["response", "all"])
def test_predictions_are_those_of_masked_passes(scope):
    """One mask at a time, where the run masked; flips are frequent in a random model."""
    model, used, tokens, answers = material(whitebox().model, QUESTIONS[:2], scope=scope)
    masked = scored_run(model, QUESTIONS[:2], scope=scope, **SCORED).at(0.6)
    found = room.probe_tokens(model, used, tokens, answers, count=2, draws=1)
    columns, expected = found["tokens"], []
    for row, at in zip(columns["row"], columns["position"], strict=True):
        answer, details = answers[row], masked[row]
        known = analysis.head_criticality(details["kl"], details["masks"])[at]
        kept = torch.from_numpy(room.ablations(np.argsort(-known), [1, 2, 4])).float()
        log_probs = subnetwork_log_probs(
            model, answer.input_ids, answer.prompt_length, used["layer"], kept,
            attention="sdpa", scope=scope,
        )  # fmt: skip
        expected.append((answer.response[at], log_probs[:, at].argmax(-1).tolist()))
    critical = found["predicted"]["critical"]
    assert [*zip(columns["token"], critical, strict=True)] == expected
    assert (np.transpose(critical) != columns["replayed"]).any()


def test_masks_of_a_token_ablate_its_critical_heads_and_random_ones_of_its_own():
    criticality = np.array([0.1, np.nan, 0.3, -0.2])
    masks, other = (room.token_masks([2, 7, at], criticality, [1, 2], 20, 0) for at in (0, 1))
    assert masks[:3].tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1]]
    assert masks[3:].sum(1).tolist() == [3, 2] * 20
    assert not torch.equal(masks[3:], other[3:])
    assert not torch.equal(masks, room.token_masks([2, 7, 0], criticality, [1, 2], 20, 1))


def test_what_cannot_be_probed(planted, monkeypatch):
    model, used, tokens, answers = planted
    both_ways = [  # their median is 0
        a._replace(log_likelihood=a.log_likelihood + np.array([2, 2, -2, -2])) for a in answers
    ]
    named = used | {"structure": "projection=mixer.out"}  # as the run was
    for given, error, word in (
        (material(model, QUESTIONS[:1], tokens=1), ValueError, "two tokens"),
        ((whitebox().model, used, tokens, answers), ValueError, "likelihood"),
        ((model, used, tokens, both_ways), ValueError, "likelihood"),
        ((model, named, tokens, answers), TypeError, "mixer.out"),
    ):
        with pytest.raises(error, match=word):
            room.probe_tokens(*given, count=2)

    run = scored_run(model, num_masks=5, mask_rate=0.3, texts=QUESTIONS[:1])
    for change, word in (({"input_texts": ["Who?"]}, "tokenizer"), ({}, "lacks input_texts")):
        others = {name: run.stats[name] for name in run.stats if name != "input_texts"} | change
        with pytest.raises(ValueError, match=word):
            room.answers_of(replace(run, stats=others), tokenizer())
    monkeypatch.setattr(room, "load_run", lambda _: run)
    with pytest.raises(ValueError, match=r"depth 0\.9 .*0\.6"):
        room.probe_run("run", "tiny", depth=0.9)
