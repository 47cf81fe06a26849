"""The perturbation controls' verdict on models whose answer one component carries, through the
real passes."""

import numpy as np
import pytest
import torch

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.experiments.analysis import condition_comparisons, verdicts
from lm_polygraph_asmi.experiments.answers import Answer
from lm_polygraph_asmi.experiments.perturbations import load_perturbation
from lm_polygraph_asmi.experiments.scale import ScaleSearch
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics
from tests.families import tiny_model

CONDITIONS = ("pseudo_heads", "foreign", "mlp")
CONTEXT, QUESTIONS, TEXTS, HELD_OUT = 16, 15, 10, 2
YES, NO, WIDE = 1, 2, 32
"""Tokens of the answer; width of a head."""
SAYS, OTHER, UNREAD, CONSTANT, LARGE = 8, 9, 20, 31, 100.0
"""Places in the residual stream: the answer, what heads say besides, what the first layer says and
nothing reads, and what norms go by."""


def toy(carrier: str, rng: np.random.Generator):
    """A model in which each question's token says by itself how it is answered, and how fragile.

    Every question is answered with the same confidence. What differs is how much of that depends on
    a single head of four (or, where the MLP carries it, on a single neuron of four): from a quarter
    to all. The other component says things of no matter. Positions see themselves alone.

    Returns:
        The model, and for each question the share that depends on one part.
    """
    total = TEXTS * QUESTIONS
    model = tiny_model(
        "mistral-window", vocab_size=3 + CONTEXT + total, sliding_window=1, head_dim=WIDE,
        num_key_value_heads=4, intermediate_size=4, num_hidden_layers=2,
    )  # fmt: skip
    share = rng.uniform(0, 1, total)
    one = np.eye(4)[rng.integers(0, 4, total)]
    carried = 4 * (share[:, None] * one + (1 - share[:, None]) / 4)
    idle = rng.normal(scale=0.3, size=(total, 4))
    heads, neurons = (carried, idle) if carrier == "heads" else (idle, carried)
    unit = LARGE / 32**0.5  # of a place, after a norm
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        said = model.model.embed_tokens.weight
        said[:, CONSTANT] = LARGE
        # Elsewhere heads say something else about the answer, as loudly.
        context = torch.from_numpy(rng.choice([-3.0, 3.0], (CONTEXT, 4)))
        said[3 : 3 + CONTEXT, :4] = context.float()
        said[3 + CONTEXT :, :8] = torch.from_numpy(np.hstack([heads, neurons])).float()
        first, layer = model.model.layers
        first.self_attn.v_proj.weight[:, CONSTANT] = 1  # heads without a value cannot be told apart
        first.self_attn.o_proj.weight[UNREAD] = 1
        into, out = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        for head in range(4):
            own = slice(head * WIDE, head * WIDE + WIDE // 2)
            rest = slice(own.stop, (head + 1) * WIDE)
            into[own, head] = unit / (WIDE // 2)
            out[SAYS, own] = 1
            into[rest, CONSTANT] = 10 / LARGE * unit / (WIDE // 2)  # as long in every question
            out[OTHER + head, rest] = 1
        layer.mlp.gate_proj.weight[:, CONSTANT] = 10 / 32**0.5  # open
        layer.mlp.up_proj.weight[:, 4:8] = unit / 10 * torch.eye(4)
        layer.mlp.down_proj.weight[SAYS] = 1
        head = model.lm_head.weight
        head[:, CONSTANT] = -20 / 32**0.5
        head[YES, SAYS], head[YES, CONSTANT] = unit, 0
        head[NO, CONSTANT] = 2 / 32**0.5
    return model, share


def scores(model, texts, **how) -> tuple[np.ndarray, list[AnswerStatistics]]:
    """MI of every question, and the statistics of every text."""
    engine = Engine(num_masks=40, mask_rate=0.25, scope="response", details=True, **how)
    saved = [engine.score(model, torch.tensor(ids[:-QUESTIONS]), ids[-QUESTIONS:]) for ids in texts]
    return np.concatenate([own.mi for own in saved]), saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("carrier", "outcome", "condition"), [("heads", "special", None), ("mlp", "reproduced", "mlp")]
)
def test_what_carries_the_answer_decides_the_verdict(carrier, outcome, condition):
    """Fragile answers are bad ones; scales are matched by effect on texts that are not judged."""
    rng = np.random.default_rng(0)
    model, share = toy(carrier, rng)
    questions = np.arange(3 + CONTEXT, 3 + CONTEXT + TEXTS * QUESTIONS).reshape(TEXTS, QUESTIONS)
    texts = [[*rng.integers(3, 3 + CONTEXT, 6).tolist(), *own.tolist(), YES] for own in questions]
    heads, saved = scores(model, texts)
    used = saved[0].settings.to_dict()
    spare = [
        Answer(row, torch.tensor(texts[row]), len(texts[row]) - QUESTIONS,
               saved[row].log_likelihood)
        for row in range(HELD_OUT)
    ]  # fmt: skip
    scales = ScaleSearch(model, spare, used).matched(CONDITIONS)
    tested = slice(HELD_OUT * QUESTIONS, None)
    found = {
        name: scores(model, texts, change=load_perturbation(name, scales[name]["effect"]))[0][
            tested
        ]
        for name in CONDITIONS
    }
    quality = (1 - share + 0.2 * rng.normal(size=len(share)))[tested]
    answers = Labelled(quality=quality, clusters=range(len(quality)), resamples=500)
    compared = condition_comparisons(heads[tested], found, answers)
    (said,) = verdicts([compared])
    assert (said.outcome, said.condition) == (outcome, condition)
