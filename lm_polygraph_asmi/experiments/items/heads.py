"""Which heads carry the disagreement, and whether it goes with uncertainty and errors.

Appendix "Head-Level Structural Analysis" of the paper, from runs that kept their masks and
divergences (`asmi_heads`). A dagger marks what the paper does not report.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import Clustered, Interval, cluster_interval
from lm_polygraph_asmi.experiments.analysis.coupling import (
    Coupling,
    criticality_coupling,
    high_stratum,
    sharpening,
)
from lm_polygraph_asmi.experiments.analysis.heads import (
    FEWEST_MASKS,
    head_criticality,
    permutation_null,
)
from lm_polygraph_asmi.experiments.dissected import dissected, dissected_depths, places
from lm_polygraph_asmi.experiments.items import figures
from lm_polygraph_asmi.report.item import Items, ReportItem, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once

DAGGER = "†: not in the paper."
NEEDS = f"no run saved masks and divergences of {FEWEST_MASKS} masks or more: needs asmi_heads"


@dataclass(frozen=True, eq=False)
class Profiles:
    """All tokens of one setting at one depth, concatenated: (N,) each.

    Attributes:
        settings: of ASMI.
        unknown_pairs: pairs of token and head without a criticality.
        answer: row in use of the setting.
        closing: whether the token ends its answer.
        mi: MI_t, nats.
        entropy: of the unmasked model, nats.
        z, p, heads, null: of the permutation null; effective heads and their mean in the null.
        limit: the largest possible z_t, that of one head with all criticality.
        positive: number of heads with positive criticality.
    """

    settings: dict[str, Any]
    unknown_pairs: int
    answer: np.ndarray
    closing: np.ndarray
    mi: np.ndarray
    entropy: np.ndarray
    z: np.ndarray
    p: np.ndarray
    heads: np.ndarray
    null: np.ndarray
    limit: np.ndarray
    positive: np.ndarray

    @property
    def defined(self) -> np.ndarray:
        return np.isfinite(self.z)

    @property
    def high(self) -> np.ndarray:
        """The high-MI stratum, of the tokens with z_t."""
        high = self.defined.copy()
        high[high] = high_stratum(self.mi[high])
        return high


def _columns(group: RunGroup, depth: float) -> Iterator[tuple[list[np.ndarray], int]]:
    """Columns of `Profiles` per answer, and its number of pairs without a criticality."""
    found = dissected(group, depth)
    assert found is not None
    run, saved = found
    for answer, row in places(group, run):
        kl, masks = (np.asarray(saved[row][name], dtype=float) for name in ("kl", "masks"))
        entropy = np.asarray(run.stats["asmi_entropy"][row], dtype=float)
        tokens = len(entropy)
        if kl.shape[1] != tokens:
            raise Unavailable(f"row {row} has {tokens} tokens and divergences of {kl.shape[1]}")
        closing = np.zeros(tokens, dtype=bool)
        closing[-1:] = run.stats["asmi_closing"][row]
        criticality = head_criticality(kl, masks)
        null = permutation_null(kl, masks, seed=int(saved[row]["mask_seed"]))
        with np.errstate(divide="ignore", invalid="ignore"):
            limit = (1 - null.null_mean) / null.null_sd
        yield [
            np.full(tokens, answer), closing, kl.mean(0), entropy, null.z, null.p,
            null.effective_heads, null.null_effective_heads, limit,
            np.nansum(criticality > 0, axis=1),
        ], null.unknown_pairs  # fmt: skip


@once
def profiles(group: RunGroup, depth: float) -> Profiles:
    """Statistics of a setting's tokens at a depth; takes seconds for a hundred answers."""
    run, saved = dissected(group, depth) or (None, [])
    if run is None or len(saved[0]["masks"]) < FEWEST_MASKS:
        raise Unavailable(NEEDS)
    if missing := run.lacks(("asmi_entropy", "asmi_closing")):
        raise Unavailable(f"{', '.join(missing)} not saved")
    if not places(group, run):
        raise Unavailable("no answer with masks is in use")
    parts, unknown = zip(*_columns(group, depth), strict=True)
    columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    tokens = Profiles(dict(saved[0]["settings"]), sum(unknown), *columns)
    if not tokens.defined.any():
        raise Unavailable("masks change no token: criticality is undefined everywhere")
    return tokens


def at_all_depths(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, float]]:
    """(setting, depth) for each depth with head data; for a setting without any, its own depth."""
    return [(g, depth) for g in groups for depth in dissected_depths(g) or [g.depth]]


def _label(group: tuple[RunGroup, float]) -> str:
    return group[0].label


def _setting_columns(group: RunGroup, depth: float) -> dict[str, Any]:
    return {"setting": group.label, "depth": f"{depth:.0%}"}


def _units(group: RunGroup, tokens: Profiles, unit: str = "clusters") -> np.ndarray:
    """Key of each token's cluster, or of its example if `unit` is "examples"."""
    keys = np.asarray(group.clusters) if unit == "clusters" else np.arange(len(group))
    return keys.astype(str)[tokens.answer]


def head_concentration(groups: Sequence[RunGroup]) -> Items:
    """Effective heads, and those of noise; column "n_eff" of table "op-coupling"."""
    title = "Concentration of the disagreement on heads"

    def compute(at_depth: tuple[RunGroup, float]) -> dict[str, Any]:
        group, depth = at_depth
        tokens = profiles(group, depth)
        high, used = tokens.high, tokens.settings
        excess, answers = excess_heads(group, depth), len(set(tokens.answer.tolist()))
        return _setting_columns(group, depth) | {
            "H": used["num_heads"],
            "S": used["num_masks"],
            "tokens": len(tokens.z),
            "tokens an answer": len(tokens.z) / answers,
            "without closing tokens": int((~tokens.closing).sum()) / answers,
            "n_eff (high MI)": float(tokens.heads[high].mean()),
            "n_eff of noise†": float(np.nanmean(tokens.null[high])),
            "n_eff minus noise†": excess,
            "median n_eff": float(np.median(tokens.heads[high])),
            "1 / mean HHI": float(1 / (1 / tokens.heads[high]).mean()),
            "mean z (high MI)†": float(tokens.z[high].mean()),
            "z at most†": float(tokens.limit[high].mean()),
            "p < .05 (high MI)†": float((tokens.p[high] < 0.05).mean()),
            "p < .05 (all)†": float((tokens.p[tokens.defined] < 0.05).mean()),
            "positive heads": float(tokens.positive[high].mean()),
            "without z": int((~tokens.defined).sum()),
            "unknown pairs": tokens.unknown_pairs,
        }

    notes = [
        "**Compare n_eff with that of noise, in the next column.** Divergences permuted over the "
        "masks have effective heads too: about ten for 32 heads and 300 masks, so the paper's 9.1 "
        "to 9.7 show no more than that; about 3 for 9 heads, 2 for 4. n_eff minus noise, 95 % "
        "over clusters: below 0, criticality is more concentrated than noise; above 0, more "
        "spread; interval includes 0: not significantly different from noise.",
        "Tokens an answer: with closing tokens, and without. n_eff: mean of 1/HHI over the tenth "
        "of the tokens with the highest MI_t; also its median and the inverse of the mean index. "
        "z: the index against 1,000 permutations, in standard deviations of the null. The null is "
        "skewed, so z beyond 1.96 is no test; p is the share "
        "of permutations. z at most: that of a single head with all criticality; small if heads "
        "are few. Without z: tokens without a head of positive criticality, or that no mask "
        "changes. Unknown pairs: of a token and a head that was never, or always, "
        "masked. " + DAGGER,
    ]
    return frame(
        "head_concentration", title, at_all_depths(groups), compute, notes,
        signed=("n_eff minus noise†",), label=_label,
    )  # fmt: skip


@once
def excess_heads(group: RunGroup, depth: float) -> Interval:
    """Effective heads minus those of noise on the high-MI stratum, over clusters."""
    tokens = profiles(group, depth)
    high = tokens.high
    excess = (tokens.heads - tokens.null)[high]
    clusters = _units(group, tokens)[high].tolist()
    return cluster_interval(lambda rows: float(excess[rows].mean()), Clustered(clusters))


@once
def coupled(group: RunGroup, depth: float, unit: str = "examples") -> Coupling:
    """The coupling of a setting at a depth."""
    tokens = profiles(group, depth)
    rows = tokens.defined
    if rows.sum() <= 2:
        raise Unavailable("too few tokens with z_t")
    return criticality_coupling(
        tokens.mi[rows], tokens.entropy[rows], tokens.z[rows],
        _units(group, tokens, unit)[rows].tolist(),
    )  # fmt: skip


@once
def sharpened(group: RunGroup) -> Interval:
    """Coupling at the deepest layer minus that at the shallowest one analysed."""
    depths = dissected_depths(group)
    if len(depths) < 2:
        raise Unavailable("only one depth was analysed")
    shallow, deep = (profiles(group, depth) for depth in (depths[0], depths[-1]))
    rows = shallow.defined & deep.defined
    first, second = ((tokens.mi[rows], tokens.z[rows]) for tokens in (shallow, deep))
    return sharpening(first, second, _units(group, shallow, "examples")[rows].tolist())


def head_coupling(groups: Sequence[RunGroup]) -> Items:
    """Table "op-coupling" of the paper, at every depth."""
    title = "Does disagreement correlate with concentrated criticality?"

    def compute(at_depth: tuple[RunGroup, float]) -> dict[str, Any]:
        coupling, by_cluster = (coupled(*at_depth, unit) for unit in ("examples", "clusters"))
        return _setting_columns(*at_depth) | {
            "tokens": coupling.tokens,
            "examples": coupling.units,
            "ρ(MI, z)": coupling.information,
            "ρ(H, z)": coupling.entropy,
            "ρ(MI, z), clusters†": by_cluster.information,
            "ρ(H, z), clusters†": by_cluster.entropy,
            "difference†": coupling.difference,
            "difference, clusters†": by_cluster.difference,
        }

    def notes(item: ReportItem) -> list[str]:
        changes = []
        for group in item.groups:
            with suppress(ValueError):  # one depth, or one without z_t
                changes.append(f"{group.label}: {sharpened(group)}")
        return [
            "Spearman correlations over tokens of z_t (higher: criticality more concentrated than "
            "noise) with MI_t and with the single-pass entropy H_t. Difference: the first minus "
            "the second, on the same resamples. 95 % intervals over examples, as in the paper, or "
            "over clusters (questions on one text are dependent) where marked. The raw index is "
            "not used: with heavy-tailed noise, it correlates with MI_t anyway. " + DAGGER,
            *([f"ρ(MI, z), deepest minus shallowest: {'; '.join(changes)}."] if changes else []),
        ]

    return frame(
        "head_coupling", title, at_all_depths(groups), compute, notes,
        figures.coupling,
        signed=(
            "ρ(MI, z)", "ρ(H, z)", "ρ(MI, z), clusters†", "ρ(H, z), clusters†", "difference†",
            "difference, clusters†",
        ),
        label=_label,
    )  # fmt: skip
