"""Traits that no class of the registry has: scored right, or refused by name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import subnetwork_log_probs
from lm_polygraph_asmi.model.check import ways_seen_right
from tests.odd_decoders import HEADS, WIDTH, Layer, heads_masked, odd_decoder

PROMPT, TARGET = 15, 1


def masks() -> Tensor:
    return sample_head_masks(9, HEADS, 0.4, torch.Generator().manual_seed(0))


def text(seed: int, length: int = 24) -> Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed))


def apart(model: nn.Module, ids: Tensor) -> float:
    """Total variation between the package and the judge, at the worst position."""
    found = subnetwork_log_probs(model, ids, PROMPT, TARGET, masks())
    expected = heads_masked(model, ids, PROMPT, TARGET, masks())
    assert (expected.exp() - expected[:1].exp()).abs().max() > 1e-3
    return (found.exp() - expected.exp()).abs().sum(-1).max().item() / 2


def test_a_plain_decoder_is_right():
    model = odd_decoder()
    assert apart(model, text(1)) < 1e-5
    assert ways_seen_right(model, "all") == {"the layers above again"}


class Capacity(Layer):
    """Experts that take so many tokens of a whole batch and no more."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chance, expert = self.router(tokens).softmax(-1).max(-1)
        place = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
        taken = chance * (place <= int(2 * len(tokens) / 4 + 1))
        return super().mlp(x) * taken.view(*x.shape[:2], 1)


def test_rows_that_touch_each_other_are_run_one_at_a_time():
    """In some texts more than in others: what was seen of one makes the rest doubtful."""
    model = odd_decoder(Capacity)
    for seed in range(12):
        assert apart(model, text(seed)) < 1e-5, seed
    assert "whole passes, one mask at a time" in ways_seen_right(model, "all")
