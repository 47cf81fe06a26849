"""Traits that no class of the registry has: scored right, slower, or unsupported by name."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import structure_of
from lm_polygraph_asmi.model.check import passes_in_use
from tests import decoders
from tests.odd_decoders import HEADS, WIDTH, Attention, Layer, heads_masked, odd_decoder
from tests.subnetworks import subnetwork_log_probs

PROMPT, TARGET = 15, 1
both_scopes = pytest.mark.parametrize("scope", SCOPES)


def apart(model: nn.Module, ids: Tensor, scope: str) -> float:
    """Total variation between the package and the ground truth, at the worst position."""
    masks = sample_head_masks(5, HEADS, 0.4, torch.Generator().manual_seed(0))
    found = subnetwork_log_probs(model, ids, PROMPT, TARGET, masks, scope=scope)
    expected = heads_masked(model, ids, PROMPT, TARGET, masks, scope)
    assert (expected.exp() - expected[:1].exp()).abs().max() > 1e-3
    return decoders.apart(found, expected)


class Capacity(Layer):
    """Experts that take so many tokens of a whole batch and no more."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chance, expert = self.router(tokens).softmax(-1).max(-1)
        place = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
        taken = chance * (place <= int(len(tokens) / 4 + 1))
        return super().mlp(x) * taken.view(*x.shape[:2], 1)


class Calibrated(Attention):
    """Takes a scale from the first text it sees, and keeps it."""

    scale: Tensor | None = None

    def project(self, heads: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = heads.std().detach()
        return super().project(heads / self.scale)


class ByLength(Attention):
    """Scores that get sharper with the number of keys there are."""

    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores * (1 + scores.shape[-1] / 20))


FULL, ROWS = "full passes", "rows after the prompt"


@both_scopes
@pytest.mark.parametrize(
    ("trait", "ways"),
    [
        (Layer, ("suffix", ROWS)),  # its layers ignore a mask, so nothing can be packed
        (Capacity, (FULL, FULL)),
        (Calibrated, ("suffix", ROWS)),
        (ByLength, ("suffix", FULL)),
    ],
)
def test_what_a_faster_pass_gets_wrong_is_told_once_and_run_slower(trait, ways, scope, caplog):
    caplog.set_level(logging.WARNING, "lm_polygraph")
    model = odd_decoder(trait)
    model(decoders.sequence(20, seed=9)[None])  # the first text it sees is not that of the package
    for length, seed in ((24, 0), (24, 1), (20, 2), (60, 3), (30, 4)):
        ids = decoders.sequence(length, seed=seed)
        assert apart(model, ids, scope) < 1e-5, (length, seed)
    assert passes_in_use(model, scope) == [ways[SCOPES.index(scope)]]
    told = [
        record.message for record in caplog.records if "failed the self-check" in record.message
    ]
    assert len(told) == len({message.split("(")[0] for message in told})
    assert all(f"(scope {scope})" in message for message in told)


class Counting(Attention):
    """Writes a running mean into a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(HEADS, 8), persistent=False)

    def project(self, heads: Tensor) -> Tensor:
        self.mean.mul_(0.99).add_(0.01 * heads.mean((0, 1)))
        return super().project(heads - self.mean)


def test_a_model_that_does_not_repeat_itself_is_refused():
    with pytest.raises(TypeError, match="is not deterministic"):
        structure_of(odd_decoder(Counting))


class Late(Layer):
    """Noise that sets in with the length of a text."""

    def mlp(self, x: Tensor) -> Tensor:
        return super().mlp(x) * (1 + torch.rand(()) * (x.shape[1] > 13))


def test_a_model_that_does_not_repeat_itself_in_longer_texts_is_refused():
    with pytest.raises(RuntimeError, match="final states do not give the model's distributions"):
        apart(odd_decoder(Late), decoders.sequence(24), "all")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    """NaN is unequal to itself, but the model is deterministic."""
    model = odd_decoder()
    with torch.no_grad():
        next(model.parameters())[:] = value
    with pytest.raises(FloatingPointError, match=r"no distribution: NaN.* check its weights"):
        structure_of(model)
