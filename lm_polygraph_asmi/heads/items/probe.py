"""Item on predictions that flip without some heads: table "causal-flip" of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lm_polygraph_asmi.analysis.clusters import Clustered, Interval
from lm_polygraph_asmi.heads.analysis.probe import flip_rates
from lm_polygraph_asmi.heads.items.heads import DAGGER
from lm_polygraph_asmi.heads.probe_file import Probe, read_probe
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, computed, frame
from lm_polygraph_asmi.results.run_groups import RunGroup
from lm_polygraph_asmi.results.runs import Run

ROWS: dict[str, tuple[str, str, Any]] = {
    "high MI, critical heads": ("high", "critical", (figures.BLUE, "-", "o")),
    "low MI, critical heads": ("low", "critical", (figures.BLACK, "-.", "^")),
    "high MI, random heads†": ("high", "random", (figures.ORANGE, "--", "s")),
    "low MI, random heads†": ("low", "random", (figures.GREY, ":", "D")),
}
"""Row of the table -> group of tokens, rule that chose their heads, and style of the curve."""
OTHERWISE = "no run has a probe: polygraph_asmi heads probe RUN --model MODEL --device-map auto"


def probed(group: RunGroup) -> list[tuple[Run, Probe]]:
    """The runs of a setting that have a probe, each with its probe."""
    probes = ((run, read_probe(run.path)) for run in group.runs)
    return [(run, probe) for run, probe in probes if probe is not None]


def rates(run: Run, probe: Probe, name: str) -> list[Interval]:
    """Flip rates in percent of the tokens in one of `ROWS`, for each number k of heads."""
    level, rule, _ = ROWS[name]
    clusters = np.asarray(run.cluster_keys)[probe.tokens["row"][probe.groups[level]]]
    flips = flip_rates(probe.flipped(rule, level), Clustered(clusters))
    return [Interval(*(100 * value for value in interval)) for interval in flips]


def causal_probe(groups: Sequence[RunGroup]) -> Items:
    """Table "causal-flip" of the paper, with random heads as a control."""

    def compute(group: RunGroup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows, panels = [], {}
        for run, probe in probed(group):
            curves = {name: rates(run, probe, name) for name in ROWS}
            for name, curve in curves.items():
                rows.append(
                    {
                        "setting": group.label,
                        "tokens and heads": name,
                        "tokens": len(probe.groups[ROWS[name][0]]),
                    }
                    | {f"k = {k}": rate for k, rate in zip(probe.k, curve, strict=True)}
                )
            panels[group.label] = probe.k, curves
        return rows, panels

    found = computed(groups, compute)
    notes = [
        "**High-MI tokens flip under random heads by construction**: MI_t is disagreement "
        "under random masks. Compare the rows of critical heads with those of random ones.",
        "Percentage of tokens whose most likely token changes with the ablation, compared with "
        "the same passes without an ablation; 95 % intervals over clusters (Wilson's if none or "
        "all flip). Critical: heads by criticality on that token, highest first, so that heads of "
        "negative criticality follow the positive ones. Random: mean over the draws. " + DAGGER,
        *(_note(group, probe) for group in found.groups for _, probe in probed(group)),
    ]
    return frame(
        "causal_probe",
        "Do predictions depend on critical heads?",
        found,
        notes,
        _figure,
        digits=0,
        otherwise=OTHERWISE,
    )


def _note(group: RunGroup, probe: Probe) -> str:
    """Where heads were ablated, and for how many tokens predictions differ without an ablation."""
    used, tokens = probe.settings, probe.tokens
    other = int((tokens["argmax"] != tokens["token"]).sum())
    changed = int((tokens["replayed"] != tokens["argmax"]).sum())
    return (
        f"{group.label}: layer {used.get('layer')}, scope {used.get('scope')}. For {other} of the "
        f"tokens, the unmasked model's most likely token is not the answer's. For {changed}, the "
        "passes without an ablation, against which flips are counted, predict another token than "
        "the unmasked model."
    )


@figures.panelled(3.2, 2.5, band="95 % over clusters")
def _figure(ax: Axes, shares: tuple[Sequence[int], Mapping[str, Sequence[Interval]]]) -> None:
    """Share of tokens that flip over the number of ablated heads, one panel per setting."""
    k, curves = shares
    ax.sharex(ax.figure.axes[0])
    ax.sharey(ax.figure.axes[0])
    for name, curve in curves.items():
        colour, style, mark = ROWS[name][2]
        value, low, high = np.array(curve, dtype=float).T
        ax.plot(k, value, color=colour, linestyle=style, marker=mark, markersize=3, label=name)
        ax.fill_between(k, low, high, facecolor=colour, alpha=0.1, linewidth=0)
        # Bands overlap, so draw their edges, too.
        ax.plot(k, np.column_stack([low, high]), color=colour, linestyle=style, linewidth=0.5)
    ax.set_xscale("log", base=2)
    ax.set_xticks(k, [str(number) for number in k])
    ax.autoscale(axis="y")  # over the panels so far
    ax.set_ylim(bottom=0)
    ax.set(xlabel="heads ablated", ylabel="predictions that flip, %")
