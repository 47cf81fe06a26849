"""Mean, sum and maximum over tokens: the same passes, three scores that do not mix."""

import json
import math

import numpy as np
import pytest
import torch

from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI, maths
from lm_polygraph_asmi.config import AGGREGATIONS
from lm_polygraph_asmi.scoring import Score
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import brute_force
from tests.scoring.conftest import PROMPT

FEW = {"num_masks": 5, "mask_rate": 0.4, "top_k": 6}
ANSWER = " in Brask\n 1931"
SAMPLES = [" in Brask", " the ferry", " 1931"]
KINDS = {"asmi": ASMI, "sem": SemASMI, "adapt": AdaptASMI}


@pytest.fixture(scope="module")
def scored(model, tokenizer):
    return {
        (variant, aggregation): Scorer(
            model, tokenizer=tokenizer, method=variant, aggregation=aggregation, **FEW
        ).score(PROMPT, ANSWER, SAMPLES if variant == "adapt" else None)
        for variant in KINDS
        for aggregation in AGGREGATIONS
    }


@pytest.fixture(scope="module")
def slow(model, tokenizer, scored):
    """MI_t and A_t of the answer: a full pass per mask, then loops."""
    found = scored["sem", "mean"]
    ids = [token.id for token in found.tokens]
    prompt = tokenizer(PROMPT)["input_ids"]
    used, every = found.settings, [*prompt, *ids]
    _, masks = maths.example_masks(
        used["num_masks"], used["num_heads"], used["mask_rate"], used["mask_sampler"],
        used["seed"], used["layer"], every,
    )  # fmt: skip
    log_probs = brute_force.subnetwork_log_probs(
        model, f"model.layers.{used['layer']}.self_attn.o_proj", 1, torch.tensor(every),
        len(prompt), masks,
    )  # fmt: skip
    information = brute_force.mutual_information(log_probs, FEW["top_k"])
    agreement = brute_force.semantic_agreement(log_probs, model.lm_head.weight, FEW["top_k"])
    return information, agreement


@pytest.mark.parametrize("variant", KINDS)
def test_brute_force(scored, slow, variant):
    """Full forward passes with weights taken out, loops over masks and tokens."""
    gate = {"asmi": 0.0, "sem": 1.0, "adapt": scored["adapt", "mean"].gate}[variant]
    total, highest, tokens = 0.0, -math.inf, 0
    for information, agreement in zip(*slow, strict=True):
        u = information * (1 - gate * agreement)
        total, highest, tokens = total + u, max(highest, u), tokens + 1
    found = {how: float(scored[variant, how]) for how in AGGREGATIONS}
    assert found == pytest.approx({"mean": total / tokens, "sum": total, "max": highest}, abs=1e-5)
    assert found["mean"] < found["max"] < found["sum"]  # the three are told apart


@pytest.mark.parametrize("kind", KINDS.values())
def test_estimators_agree_with_calls(scored, kind):
    """The estimator's score of saved statistics is the call's, and the name says which it is."""
    for aggregation in AGGREGATIONS:
        estimator = kind(aggregation=aggregation, **FEW)
        variant = next(name for name in KINDS if KINDS[name] is kind)
        found = scored[variant, aggregation]
        masked = {n: np.array([getattr(t, n) for t in found.tokens]) for n in ("mi", "agreement")}
        stats = {
            "asmi": [{0.6: masked | {"settings": found.settings}}],
            "asmi_closing": [True],
            "asmi_diversity_second_last": [found.diversity],
        }
        assert estimator(stats)[0] == pytest.approx(float(found), rel=1e-12)
        named = "" if aggregation == "mean" else f", aggregation={aggregation}"
        assert str(estimator) == f"{estimator.symbol} (60%, K=6, S=5, p=0.4{named})"
        without = kind(aggregation=aggregation, closing_token=False, **FEW)
        tokens = [token.u for token in found.tokens[:-1]]
        expected = {"mean": sum(tokens) / len(tokens), "sum": sum(tokens), "max": max(tokens)}
        assert without(stats)[0] == pytest.approx(expected[aggregation])
    with pytest.raises(ValueError, match="aggregation must be one of 'mean', 'sum', 'max'"):
        kind(aggregation="median")


def test_what_a_result_says(scored):
    mean, total, highest = (scored["sem", how] for how in AGGREGATIONS)
    assert [one.label for one in (mean, total, highest)] == [
        "Sem-ASMI", "Sem-ASMI (aggregation=sum)", "Sem-ASMI (aggregation=max)",
    ]  # fmt: skip
    tokens = len(mean.tokens)
    assert total.highest == pytest.approx(tokens * mean.highest)
    assert highest.highest == mean.highest == math.log(FEW["num_masks"])
    assert f"(0 to {mean.highest:.2f}; higher" in mean.explanation[0]
    assert mean.explanation[0].endswith(f"the mean over {tokens} tokens.")
    assert f"(0 to {total.highest:.2f}; higher" in total.explanation[0]
    assert total.explanation[0].endswith(f"the sum over {tokens} tokens.")
    assert highest.explanation[0].endswith(f"the maximum over {tokens} tokens.")
    for one in (mean, total, highest):
        content = json.loads(json.dumps(one.to_dict()))
        assert content["settings"]["aggregation"] == one.config.aggregation
        assert Score.from_dict(content).config.aggregation == one.config.aggregation
        assert one.explanation[0] in one.to_html()
        assert one.signals["sem"] == float(one)
        assert one.signals["asmi"] == pytest.approx(float(scored["asmi", one.config.aggregation]))
        assert one.signals["entropy"] == mean.signals["entropy"]
