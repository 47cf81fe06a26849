"""Traits that no class of the registry has: scored right, or unsupported by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import structure_of, subnetwork_log_probs
from lm_polygraph_asmi.model.check import strategies_seen_right
from tests.odd_decoders import HEADS, WIDTH, Attention, Layer, heads_masked, odd_decoder

PROMPT, TARGET = 15, 1


def masks() -> Tensor:
    return sample_head_masks(9, HEADS, 0.4, torch.Generator().manual_seed(0))


def text(seed: int, length: int = 24) -> Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed))


def apart(model: nn.Module, ids: Tensor) -> float:
    """Total variation between the package and the ground truth, at the worst position."""
    found = subnetwork_log_probs(model, ids, PROMPT, TARGET, masks())
    expected = heads_masked(model, ids, PROMPT, TARGET, masks())
    assert (expected.exp() - expected[:1].exp()).abs().max() > 1e-3
    return (found.exp() - expected.exp()).abs().sum(-1).max().item() / 2


def test_a_plain_decoder_is_right():
    model = odd_decoder()
    assert apart(model, text(1)) < 1e-5
    assert strategies_seen_right(model, "all") == {"suffix replay"}


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
    for seed in range(6):
        assert apart(model, text(seed)) < 1e-5, seed
    assert "full forward passes, one mask at a time" in strategies_seen_right(model, "all")


class SecondWay(Attention):
    """A narrow projection beside the first."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.low, self.high = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def project(self, heads: Tensor) -> Tensor:
        return super().project(heads) + self.high(self.low(heads.flatten(2)))


class TwoAttentions(Layer):
    """One beside the other, each with a projection of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.other = Attention(index + 4)

    def attend(self, x, past):
        return self.attn(x, past) + self.other(x, past)


@pytest.mark.parametrize("trait", [SecondWay, TwoAttentions])
def test_heads_that_leave_a_layer_on_two_ways_are_refused(trait):
    with pytest.raises(TypeError, match=r"at layer 0, .* by another path"):
        structure_of(odd_decoder(trait))


class MiddleMixed(Attention):
    """Two heads in the middle lend each other a little; the first and the last are plain."""

    share = 0.3

    def project(self, heads: Tensor) -> Tensor:
        mixer = torch.eye(HEADS)
        mixer[1, 2] = mixer[2, 1] = self.share
        return super().project(torch.einsum("gh,bthw->btgw", mixer, heads))


class BarelyMixed(MiddleMixed):
    share = 0.01


@pytest.mark.parametrize("trait", [MiddleMixed, BarelyMixed])
def test_heads_that_are_mixed_a_little_or_in_the_middle_are_refused(trait):
    with pytest.raises(TypeError, match=r"head 1 of 4 has no block .* heads are mixed"):
        structure_of(odd_decoder(trait))


class BentHeads(Attention):
    def project(self, heads: Tensor) -> Tensor:
        return super().project(heads.tanh())


class ScaledHeads(Attention):
    def project(self, heads: Tensor) -> Tensor:
        return super().project(F.rms_norm(heads.flatten(2), (WIDTH,)).view_as(heads))


@pytest.mark.parametrize("trait", [BentHeads, ScaledHeads])
def test_heads_with_a_block_to_themselves_are_found(trait):
    """A curve bends what each of them says; a norm over all scales it."""
    assert list(structure_of(odd_decoder(trait)).sites) == [0, 1, 2, 3]


class Calibrated(Attention):
    """Takes a scale from the first text it sees, and keeps it."""

    def project(self, heads: Tensor) -> Tensor:
        if getattr(self, "scale", None) is None:
            self.scale = heads.std()
        return super().project(heads / self.scale)


class Counting(Attention):
    """Writes a running mean into a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(HEADS, 8), persistent=False)

    def project(self, heads: Tensor) -> Tensor:
        self.mean.mul_(0.99).add_(0.01 * heads.mean((0, 1)))
        return super().project(heads - self.mean)


@pytest.mark.parametrize(("trait", "name"), [(Calibrated, "scale"), (Counting, "mean")])
def test_what_a_pass_leaves_in_tensors_is_seen(trait, name):
    with pytest.raises(TypeError, match=f"changes itself in a pass: .*{name}.*attn"):
        structure_of(odd_decoder(trait))


class Remembering(Attention):
    """Keeps what it said, and looks at it no more."""

    said: Tensor | None = None

    def project(self, heads: Tensor) -> Tensor:
        self.said = heads
        return super().project(heads)


def test_what_no_later_pass_takes_up_may_stay():
    model = odd_decoder(Remembering)
    assert apart(model, text(1)) < 1e-5


class Dropping(Attention):
    """Dropout that is never switched off."""

    def weights(self, scores: Tensor) -> Tensor:
        return F.dropout(super().weights(scores), 0.1, training=True)


def test_a_model_that_does_not_repeat_itself_is_refused_with_that_reason():
    with pytest.raises(TypeError, match="is not deterministic"):
        structure_of(odd_decoder(Dropping))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    """NaN is unequal to itself, but the model is deterministic."""
    model = odd_decoder(Attention)
    with torch.no_grad():
        next(model.parameters())[:] = value
    with pytest.raises(TypeError, match="returns states that are not finite"):
        structure_of(model)
