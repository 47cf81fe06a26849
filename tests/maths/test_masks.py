"""Head masks: their rates and coverage over many draws, and what seeds them."""

import math

import pytest
import torch

from lm_polygraph_asmi.config import MASK_SAMPLERS
from lm_polygraph_asmi.core.maths.masks import example_seed, sample_head_masks

DRAWS, HEADS = 100, 32


def draw(num_masks, rate, sampler="bernoulli", seed=0, heads=HEADS):
    return sample_head_masks(num_masks, heads, rate, torch.Generator().manual_seed(seed), sampler)


@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
@pytest.mark.parametrize(
    ("num_masks", "rate"),
    [(5, 0.15), (7, 0.15), (10, 0.15), (40, 0.15), (80, 0.15), (56, 0.09), (3, 0.9)],
)
def test_heads_are_masked_at_the_rate(num_masks, rate, sampler):
    masks = torch.stack([draw(num_masks, rate, sampler, seed) for seed in range(DRAWS)])
    assert masks.shape == (DRAWS, num_masks, HEADS)
    assert masks.unique().tolist() == [0, 1]
    if sampler == "balanced":  # at least once
        rate = max(rate, 1 / num_masks)
    masked, expected = 1 - masks, rate * num_masks
    times = masked.sum(1)
    spread = math.sqrt(expected * (1 - rate)) if sampler == "bernoulli" else 0.5
    assert abs(times.mean().item() - expected) < 4 * spread / math.sqrt(times.numel()) + 1e-6
    # In every mask a head is as likely to be masked as in another.
    in_each_mask = masked.mean(dim=(0, 2))
    assert (in_each_mask - rate).abs().max() < 5 * math.sqrt(rate * (1 - rate) / (DRAWS * HEADS))
    # Heads are independent: the number masked together is binomial.
    together = masked.sum(-1).var().item() / (HEADS * rate * (1 - rate))
    assert abs(together - 1) < 6 / math.sqrt(DRAWS * num_masks)
    if sampler == "balanced":  # equally often
        assert set(times.unique().tolist()) <= {math.floor(expected), math.ceil(expected)}


@pytest.mark.parametrize("heads", [3, 9, 32])
def test_more_masks_extend_fewer(heads):
    few = draw(40, 0.15, heads=heads)
    assert torch.equal(draw(300, 0.15, heads=heads)[:40], few)
    assert not torch.equal(draw(40, 0.15, seed=4, heads=heads), few)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        *(({"mask_rate": p}, "mask_rate") for p in (0, 1, -0.1, 1.5)),
        *(({"num_masks": s}, "num_masks") for s in (1, 0, -3)),
        ({"num_heads": 0}, "num_heads"),
        ({"sampler": "latin"}, "mask_sampler"),
    ],
)
def test_refusals(given, word):
    usual = {"num_masks": 40, "num_heads": 32, "mask_rate": 0.15, "generator": torch.Generator()}
    with pytest.raises(ValueError, match=word):
        sample_head_masks(**usual | given)


@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
def test_only_the_generator_is_drawn_from_in_its_own_type(sampler):
    """With 21 balanced masks some heads are masked once more than others."""
    expected, state = draw(21, 0.3, sampler), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(draw(21, 0.3, sampler), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_seed_of_masks_depends_on_all_it_should():
    seeds = [(0, [19, 5, 6, 7]), (1, [19, 5, 6, 7]), (0, [20, 5, 6, 7]), (0, [19, 6, 5, 7])]
    assert len({example_seed(*content) for content in seeds}) == 4
    assert all(0 <= example_seed(*content) < 2**63 for content in seeds)
    # A changed value would silently change the masks of every published run.
    assert example_seed(0, [19, 1, 2, 3]) == 6731509327771676214
