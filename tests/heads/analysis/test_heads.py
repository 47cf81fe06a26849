"""Criticality, its concentration, and what pure noise gives."""

import statistics
from functools import partial

import numpy as np
import pytest

from lm_polygraph_asmi.heads.analysis import concentration, head_criticality, heads as room

S, T, H = 40, 5, 6


def drawn(seed=0, masks=S, tokens=T, heads=H, rate=0.3):
    """Divergences that know nothing of their masks."""
    rng = np.random.default_rng(seed)
    return rng.exponential(size=(masks, tokens)), rng.random((masks, heads)) >= rate


def slow_criticality(kl, masks):
    """From the definition, one token and head at a time."""
    found = np.full((kl.shape[1], masks.shape[1]), np.nan)
    for t, h in np.ndindex(found.shape):
        ablated, kept = kl[~masks[:, h], t].tolist(), kl[masks[:, h], t].tolist()
        if ablated and kept:
            found[t, h] = statistics.mean(ablated) - statistics.mean(kept)
    return found


def slow_concentration(profile):
    positive = [max(b, 0.0) for b in profile if not np.isnan(b)]
    total = sum(positive)
    return sum((b / total) ** 2 for b in positive) if total > 0 else float("nan")


def slow_null(kl, masks, shuffles, seed):
    """z, effective heads and those of noise of every token, one shuffle at a time."""
    orders = np.tile(np.arange(len(masks)), (shuffles, 1))
    shuffled = [kl, *(kl[order] for order in np.random.default_rng(seed).permuted(orders, axis=1))]
    indices = [map(slow_concentration, slow_criticality(draw, masks)) for draw in shuffled]
    rows = []
    for own, *drawn_indices in zip(*indices, strict=True):
        null = [index for index in drawn_indices if not np.isnan(index)]
        spread = np.std(null, ddof=1) if len(null) > 1 else 0
        z = (own - np.mean(null)) / spread if spread > 1e-12 else np.nan
        rows.append([z, 1 / own, np.mean(1 / np.array(null)) if null else np.nan])
    return np.reshape(rows, (-1, 3)).T


def test_criticality_is_the_definition():
    kl, masks = drawn()
    masks[:, 1], masks[:, 4] = True, False  # no mask ablates one, none keeps the other
    np.testing.assert_allclose(head_criticality(kl, masks), slow_criticality(kl, masks))
    found = concentration(head_criticality(kl, masks))
    np.testing.assert_allclose(found, [slow_concentration(p) for p in slow_criticality(kl, masks)])


@pytest.mark.parametrize(
    ("tokens", "heads", "undefined"),
    [
        (slice(T), slice(H), [0, 2, 3]),
        (slice(1, 2), slice(1), [0]),  # it has all there is, in every draw: no null that varies
        (slice(0), slice(H), []),
    ],
)
def test_the_null_is_the_definition(tokens, heads, undefined, monkeypatch):
    """Of a huge divergence on a mask that keeps all heads, which makes every head negative; of one
    that lands there in some draws; of tokens without differences; and of an ordinary one."""
    kl, masks = drawn()
    masks[0], masks[1, 0] = True, False
    kl[:, :3], kl[:, 3] = 0, 0.1
    kl[0, 0] = kl[1, 1] = 9
    kl, masks = kl[:, tokens], masks[:, heads]
    monkeypatch.setattr(room, "SHUFFLES", 30)
    found = room.permutation_null(kl, masks, seed=3)
    np.testing.assert_allclose(found, slow_null(kl, masks, 30, 3))
    assert np.flatnonzero(np.isnan(found.z)).tolist() == undefined
    tiny = room.permutation_null(3e-8 * kl + 2e-7, masks, seed=3)
    np.testing.assert_allclose(tiny, found, rtol=1e-6)


@pytest.mark.parametrize(
    ("kl", "masks", "said"),
    [
        (np.zeros((4, 2)), np.ones((5, 3)), "row per"),
        (np.full((4, 2), np.nan), np.ones((4, 3)), "finite"),
        (np.zeros((4, 2)), np.full((4, 3), 0.5), "ablated"),
        (np.zeros((0, 2)), np.ones((0, 3)), "one mask"),
    ],
)
def test_what_is_no_run_is_refused(kl, masks, said):
    for wrong in (head_criticality, partial(room.permutation_null, seed=0)):
        with pytest.raises(ValueError, match=said):
            wrong(kl, masks)
