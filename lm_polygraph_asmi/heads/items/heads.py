"""Items on heads: which heads carry the disagreement, and does this go with uncertainty?

They follow appendix "Head-Level Structural Analysis" of the paper, and need runs that saved masks
and divergences (`asmi_heads`). A dagger marks what the paper does not report.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import Clustered, Interval, cluster_interval
from lm_polygraph_asmi.heads.analysis.coupling import (
    Coupling,
    criticality_coupling,
    high_stratum,
    sharpening,
)
from lm_polygraph_asmi.heads.analysis.heads import FEWEST_MASKS, permutation_null
from lm_polygraph_asmi.report.figures import forest
from lm_polygraph_asmi.report.item import Items, computed, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once
from lm_polygraph_asmi.results.runs import Run

DAGGER = "†: not in the paper."


def dissected(group: RunGroup, depth: float) -> tuple[Run, list[dict[str, Any]]] | None:
    """The run with the most masks at a depth, among those that saved details; with its rows."""
    details = ((run, run.at(depth, "masks", "kl")) for run in group.runs)
    saved = [(run, rows) for run, rows in details if rows]
    return max(saved, key=lambda each: len(each[1][0]["masks"]), default=None)


@once
def dissected_depths(group: RunGroup) -> list[float]:
    """Depths at which a run saved masks and divergences."""
    depths = {used["depth"] for run in group.runs for used in run.settings()}
    return sorted(depth for depth in depths if dissected(group, depth))


@once
def profiles(group: RunGroup, depth: float) -> pd.DataFrame:
    """Tokens of a setting at a depth. This takes seconds for a hundred answers.

    Columns: answer (number among the rows in use), mi (nats), entropy of the unmasked model (nats),
    z, heads (effective number), noise (the same for the null), and high: whether the token is in
    the high-MI stratum of the tokens with a defined z.
    """
    run, saved = dissected(group, depth) or (None, [])
    if run is None or len(saved[0]["masks"]) < FEWEST_MASKS:
        raise Unavailable(
            f"no run saved masks and divergences of {FEWEST_MASKS} masks or more: needs asmi_heads"
        )
    if run.lacks(["asmi_entropy"]):
        raise Unavailable("asmi_entropy not saved")
    entropy = run.stats["asmi_entropy"]
    parts = [
        _profile(saved[row]).assign(answer=answer, entropy=np.asarray(entropy[row]))
        for answer, row in enumerate(group.rows)
    ]
    tokens = pd.concat(parts, ignore_index=True)
    defined = tokens["z"].notna()
    if not defined.any():
        raise Unavailable("masks change no token: criticality is undefined everywhere")
    tokens["high"] = False
    tokens.loc[defined, "high"] = high_stratum(tokens["mi"][defined])
    return tokens


def _profile(saved: dict[str, Any]) -> pd.DataFrame:
    """Concentration of criticality for each token of one answer, from its masks."""
    kl = np.asarray(saved["kl"], dtype=float)
    null = permutation_null(kl, saved["masks"], seed=int(saved["mask_seed"]))
    return pd.DataFrame(
        {
            "mi": kl.mean(0),
            "z": null.z,
            "heads": null.effective_heads,
            "noise": null.null_effective_heads,
        }
    )


def _rows(group: RunGroup, tokens: pd.DataFrame, unit: str = "clusters") -> Clustered:
    """The tokens in the setting's clusters; if `unit` is "examples", each answer is a cluster."""
    keys = np.asarray(group.clusters) if unit == "clusters" else np.arange(len(group))
    return Clustered(keys.astype(str)[tokens["answer"]])


@once
def effective_heads(group: RunGroup, depth: float) -> Interval:
    """n_eff: mean of 1/HHI_t over the high-MI stratum, with an interval over clusters."""
    high = profiles(group, depth).query("high")
    heads = high["heads"].to_numpy()
    return cluster_interval(lambda rows: float(heads[rows].mean()), _rows(group, high))


@once
def coupled(group: RunGroup, depth: float, unit: str = "examples") -> Coupling:
    """Correlations of MI and entropy with z, for a setting at a depth."""
    tokens = profiles(group, depth).dropna(subset="z")
    if len(tokens) <= 2:
        raise Unavailable("too few tokens with z_t")
    return criticality_coupling(
        tokens["mi"], tokens["entropy"], tokens["z"], _rows(group, tokens, unit)
    )


@once
def sharpened(group: RunGroup, depth: float) -> Interval | None:
    """Coupling at a depth minus that at the shallowest depth; None at the shallowest depth."""
    first = dissected_depths(group)[0]
    if depth == first:
        return None
    shallow, deep = profiles(group, first), profiles(group, depth)
    both = shallow["z"].notna() & deep["z"].notna()
    before, after = ((tokens["mi"][both], tokens["z"][both]) for tokens in (shallow, deep))
    return sharpening(before, after, _rows(group, shallow[both], "examples"))


def at_all_depths(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, float]]:
    """Each setting with each depth that has head data; with its own depth if none has."""
    return [(g, depth) for g in groups for depth in dissected_depths(g) or [g.depth]]


def head_coupling(groups: Sequence[RunGroup]) -> Items:
    """Table "op-coupling" of the paper, at every depth."""

    def compute(at_depth: tuple[RunGroup, float]) -> dict[str, Any]:
        group, depth = at_depth
        coupling, tokens = coupled(group, depth), profiles(group, depth)
        defined, saved = tokens["z"].notna(), dissected(group, depth)
        return {
            "setting": group.label,
            "depth": f"{depth:.0%}",
            "S": len(saved[1][0]["masks"]) if saved else None,
            "examples": tokens["answer"][defined].nunique(),
            "tokens": int(defined.sum()),
            "without z": int((~defined).sum()),
            "ρ(MI, z)": coupling.information,
            "ρ(H, z)": coupling.entropy,
            "n_eff (high MI)": effective_heads(group, depth),
            "n_eff of noise†": float(tokens["noise"][tokens["high"]].mean()),
            "difference†": coupling.difference,
            "ρ(MI, z), clusters†": coupled(group, depth, "clusters").information,
            "minus shallowest†": sharpened(group, depth),
        }

    notes = [
        "**Compare n_eff with that of noise, in the next column.** Divergences that are permuted "
        "over the masks have effective heads, too: about ten for 32 heads and 300 masks, so the "
        "paper's 9.1 to 9.7 are no more than noise has; about 3 for 9 heads, and 2 for 4. n_eff: "
        "mean of 1/HHI over the tenth of the tokens with the highest MI_t, 95 % over clusters.",
        "z: the index HHI minus its mean over 1,000 permutations, in standard deviations of "
        "these; higher: criticality is more concentrated than noise. Without z: tokens without a "
        "head of positive criticality, or that no mask changes. ρ: Spearman correlations over "
        "tokens with MI_t and with the token entropy H_t of the unmasked model. Difference: the "
        "first minus the second. Minus shallowest: ρ(MI, z) minus its value at the shallowest "
        "depth. 95 % intervals are over examples, as in the paper, or over clusters (questions "
        "on one text are dependent) where marked. " + DAGGER,
    ]
    return frame(
        "head_coupling",
        "Does disagreement correlate with concentrated criticality?",
        computed(at_all_depths(groups), compute, lambda at_depth: at_depth[0].label),
        notes,
        _figure,
        signed=(
            "ρ(MI, z)",
            "ρ(H, z)",
            "difference†",
            "ρ(MI, z), clusters†",
            "minus shallowest†",
        ),
    )


def _figure(table: pd.DataFrame) -> Figure:
    """Coupling of MI_t and of H_t at all depths, one panel per setting."""
    panels = {
        str(setting): {
            f"{name}, {row['depth']}": row[f"ρ({name}, z)"]
            for name in ("MI", "H")
            for _, row in rows.iterrows()
        }
        for setting, rows in table.groupby("setting", sort=False)
    }
    return forest(panels, "ρ with z, 95 % over examples")
