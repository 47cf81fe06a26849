import math

import pytest
import torch

from lm_polygraph_asmi.config import MASK_SAMPLERS
from lm_polygraph_asmi.core.maths.masks import example_seed, sample_head_masks


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_zeros_and_ones_at_the_mask_rate():
    masks = sample_head_masks(4000, 32, 0.15, generator())
    assert masks.shape == (4000, 32)
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    rate = 1 - masks.mean().item()
    standard_error = math.sqrt(0.15 * 0.85 / masks.numel())
    assert abs(rate - 0.15) < 4 * standard_error
    # Heads are independent: the number masked together is binomial.
    masked = (1 - masks).sum(1)
    assert abs(masked.var().item() / (32 * 0.15 * 0.85) - 1) < 0.1


@pytest.mark.parametrize("heads", [3, 9, 32])
def test_more_masks_extend_fewer(heads):
    few = sample_head_masks(40, heads, 0.15, generator())
    many = sample_head_masks(300, heads, 0.15, generator())
    assert torch.equal(many[:40], few)
    assert not torch.equal(few, sample_head_masks(40, heads, 0.15, generator(4)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"mask_rate": p}, r"mask_rate \(p\) must lie in \(0, 1\)") for p in (0, 1, -0.1, 1.5)),
        *(({"num_masks": s}, r"num_masks \(S\) must be at least 2") for s in (1, 0, -3)),
        ({"num_heads": 0}, r"num_heads \(H\) must be at least 1"),
        ({"sampler": "latin"}, "mask_sampler must be one of 'bernoulli', 'balanced'"),
    ],
)
def test_refusals(given, message):
    usual = {"num_masks": 40, "num_heads": 32, "mask_rate": 0.15, "generator": generator()}
    with pytest.raises(ValueError, match=message):
        sample_head_masks(**usual | given)


DRAWS = 100


def balanced(num_masks: int, rate: float, seed: int = 0) -> torch.Tensor:
    return sample_head_masks(num_masks, 32, rate, generator(seed), "balanced")


@pytest.mark.parametrize(
    ("num_masks", "rate"), [(7, 0.15), (10, 0.15), (40, 0.15), (80, 0.15), (56, 0.09), (3, 0.9)]
)
def test_balanced_masks_hit_every_head_equally_often(num_masks, rate):
    masks = torch.stack([balanced(num_masks, rate, seed) for seed in range(DRAWS)])
    times = (1 - masks).sum(1)
    expected = rate * num_masks
    assert set(times.unique().tolist()) <= {math.floor(expected), math.ceil(expected)}
    assert times.min() >= 1
    # The mean is pS over draws, and in every mask a head is as likely to be masked as in another.
    standard_error = 0.5 / math.sqrt(times.numel())
    assert abs(times.mean().item() - expected) < 4 * standard_error + 1e-6
    in_each_mask = (1 - masks).mean(dim=(0, 2))
    assert (in_each_mask - rate).abs().max() < 5 * math.sqrt(rate * (1 - rate) / (DRAWS * 32))


def test_balanced_masks_are_otherwise_random():
    masks = 1 - torch.stack([balanced(40, 0.15, seed) for seed in range(DRAWS)])
    # Heads are drawn independently: the number masked together varies as a binomial does.
    assert abs(masks.sum(-1).var().item() / (32 * 0.15 * 0.85) - 1) < 0.1
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(1 - balanced(40, 0.15), masks[0])


def test_too_few_balanced_masks_for_the_rate_still_cover_every_head():
    assert ((1 - balanced(5, 0.15)).sum(0) == 1).all()


@pytest.mark.parametrize("sampler", MASK_SAMPLERS)
def test_another_default_type_draws_the_same_masks(sampler):
    expected = sample_head_masks(20, 5, 0.3, generator(), sampler)
    torch.set_default_dtype(torch.float64)
    try:
        found = sample_head_masks(20, 5, 0.3, generator(), sampler)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_the_seed_of_masks_depends_on_all_it_should():
    seed = example_seed(0, [19, 5, 6, 7])
    assert seed == example_seed(0, [19, 5, 6, 7])
    others = (1, [19, 5, 6, 7]), (0, [20, 5, 6, 7]), (0, [19, 5, 6, 8]), (0, [19, 6, 5, 7])
    assert len({seed, *(example_seed(*other) for other in others)}) == 5
    assert 0 <= seed < 2**63
    # A changed value would silently change the masks of every published run.
    assert example_seed(0, [19, 1, 2, 3]) == 6731509327771676214
