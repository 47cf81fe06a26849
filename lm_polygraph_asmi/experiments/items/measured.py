"""The measured counterparts of the paper's numbers on heads; see `report.items.measured`."""

from collections.abc import Sequence

from lm_polygraph_asmi.experiments.items import heads
from lm_polygraph_asmi.experiments.items.probe import probed, rates
from lm_polygraph_asmi.report.items.measured import OPERATING, Measure, Value, alike
from lm_polygraph_asmi.results.paper import MASK_RATE, Published
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable

SETTINGS = {"num_masks": 300, "mask_rate": MASK_RATE, "scope": "all", "top_k": 64}
"""Of the paper's analysis of heads."""


def _dissected(number: Published, groups: Sequence[RunGroup]) -> RunGroup:
    """A setting with the masks of the paper's analysis at 60 % of depth."""
    reason = heads.NEEDS
    for group in alike(number, groups):
        if found := heads.dissected(group, OPERATING):
            used = {name: found[1][0]["settings"][name] for name in SETTINGS}
            if used == SETTINGS:
                return group
            named = ", ".join(f"{name} {value}" for name, value in used.items())
            reason = f"heads were analysed with {named}, not 300 masks as there"
    raise Unavailable(reason)


def coupling(number: Published, groups: Sequence[RunGroup]) -> Value:
    group = _dissected(number, groups)
    if number.quantity.startswith("n_eff"):
        return heads.effective_heads(group, OPERATING)
    if "from the top" in number.quantity:
        return heads.coupled(group, heads.dissected_depths(group)[-1]).information.value
    measured = heads.coupled(group, OPERATING)
    return measured.information if "MI_t" in number.quantity else measured.entropy


def flips(number: Published, groups: Sequence[RunGroup]) -> Value:
    level = "low" if "low MI" in number.quantity else "high"
    for probe in probed(_dissected(number, groups)):
        _, by_k = rates(probe, f"{level} MI, critical heads") or (0, [])
        if level == "low" and by_k:
            return max(rate.value for rate in by_k)
        for k, rate in zip(probe.probe.k, by_k, strict=False):
            if number.quantity.endswith(f"k = {k}"):
                return rate
    raise Unavailable("no probe of heads")


MEASURES: dict[str, Measure] = {"head_coupling": coupling, "causal_probe": flips}
