"""The measured counterparts of the paper's numbers on heads; see `report.items.measured`."""

from collections.abc import Sequence

from lm_polygraph_asmi.analysis.clusters import cluster_interval
from lm_polygraph_asmi.experiments.dissected import dissected, dissected_depths
from lm_polygraph_asmi.experiments.items.heads import NEEDS, coupled, profiles
from lm_polygraph_asmi.experiments.items.probe import probed, rates
from lm_polygraph_asmi.report.items.measured import OPERATING, Measure, Value, alike
from lm_polygraph_asmi.results.paper import MASK_RATE, Published
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, same_depth

MASKS = 300
"""Masks of the paper's analysis of heads."""


def _dissected(
    number: Published, groups: Sequence[RunGroup], deep: bool = False
) -> tuple[RunGroup, float]:
    """A setting with the masks of the paper's analysis at 60 %, and a depth of it.

    Args:
        deep: the deepest one instead of 60 %.
    """
    others = []
    for group in alike(number, groups):
        for depth in [d for d in dissected_depths(group) if same_depth(d, OPERATING)]:
            found = dissected(group, depth)
            assert found is not None
            used = found[1][0]["settings"]
            masks = {name: used[name] for name in ("num_masks", "mask_rate", "scope", "top_k")}
            if masks == {"num_masks": MASKS, "mask_rate": MASK_RATE, "scope": "all", "top_k": 64}:
                return group, dissected_depths(group)[-1] if deep else depth
            others.append(", ".join(f"{name} {value}" for name, value in masks.items()))
    if others:
        raise Unavailable(f"heads were analysed with {others[0]}, not {MASKS} masks as there")
    raise Unavailable(NEEDS)


def coupling(number: Published, groups: Sequence[RunGroup]) -> Value:
    group, depth = _dissected(number, groups, deep="from the top" in number.quantity)
    if number.quantity.startswith("n_eff"):
        tokens = profiles(group, depth)
        heads = tokens.heads[tokens.high]
        high = group.answers.take(tokens.answer[tokens.high])
        return cluster_interval(lambda rows: float(heads[rows].mean()), high)
    measured = coupled(group, depth)
    if "from the top" in number.quantity:
        return measured.information.value
    return measured.information if "MI_t" in number.quantity else measured.entropy


def flips(number: Published, groups: Sequence[RunGroup]) -> Value:
    group, _ = _dissected(number, groups)
    level = "low" if "low MI" in number.quantity else "high"
    for probe in probed(group):
        measured = rates(probe, f"{level} MI, critical heads")
        if measured:
            by_k = dict(zip(probe.probe.k, measured[1], strict=True))
            if level == "low":
                return max(rate.value for rate in by_k.values())
            k = int(number.quantity.rpartition(" = ")[2])
            if k in by_k:
                return by_k[k]
    raise Unavailable("no probe of heads")


MEASURES: dict[str, Measure] = {"head_coupling": coupling, "causal_probe": flips}
