"""Predictions that flip without some heads: table "causal-flip" of the paper, and random heads."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

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
"""Row of the table -> group of tokens, the rule by which their heads were chosen, and its curve."""
OTHERWISE = "no run has a probe: polygraph_asmi heads probe RUN --model MODEL --device-map auto"


class Probed(NamedTuple):
    """The probe of a run of a setting."""

    group: RunGroup
    run: Run
    probe: Probe


def probed(group: RunGroup) -> list[Probed]:
    """Probes saved with a setting's runs."""
    probes = ((run, read_probe(run.path)) for run in group.runs)
    return [Probed(group, run, probe) for run, probe in probes if probe is not None]


def rates(probed: Probed, name: str) -> tuple[int, list[Interval]] | None:
    """Number of tokens of one of `ROWS`, and their flip rate in percent for each k.

    None if there is no such token.
    """
    level, rule, _ = ROWS[name]
    chosen = probed.probe.groups[level]
    if not len(chosen):
        return None
    clusters = np.asarray(probed.run.cluster_keys)[probed.probe.tokens["row"][chosen]]
    flips = flip_rates(probed.probe.flipped(rule, level), Clustered(clusters))
    return len(chosen), [Interval(*(100 * value for value in interval)) for interval in flips]


def causal_probe(groups: Sequence[RunGroup]) -> Items:
    """Table "causal-flip" of the paper, with random heads as a control."""

    def compute(group: RunGroup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows, panels = [], {}
        for each in probed(group):
            found = {name: flips for name in ROWS if (flips := rates(each, name))}
            k = each.probe.k
            rows += [
                {"setting": group.label, "tokens and heads": name, "tokens": tokens}
                | {f"k = {k}": rate for k, rate in zip(k, curve, strict=True)}
                for name, (tokens, curve) in found.items()
            ]
            panels[group.label] = k, {name: curve for name, (_, curve) in found.items()}
        return rows, panels

    found = computed(groups, compute)
    notes = [
        "**High-MI tokens flip under random heads by construction**: MI_t is disagreement "
        "under random masks. Compare the rows of critical heads with those of random ones.",
        "Percentage of tokens whose most likely token changes under the ablation, compared "
        "with the same passes without an ablation; 95 % intervals over clusters (Wilson's if "
        "none or all flip). Critical: heads by criticality on that token, highest first; "
        "after the positive heads follow those that help. Random: mean over the draws. " + DAGGER,
        *(_note(each) for group in found.groups for each in probed(group)),
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


def _note(probed: Probed) -> str:
    """Where heads were ablated, and on how many tokens predictions differ without an ablation."""
    used, tokens = probed.probe.settings, probed.probe.tokens
    other = int((tokens["argmax"] != tokens["token"]).sum())
    changed = int((tokens["replayed"] != tokens["argmax"]).sum())
    return (
        f"{probed.group.label}: layer {used.get('layer')}, scope {used.get('scope')}; on {other} "
        "of the tokens the unmasked model's most likely token is not the answer's; on "
        f"{changed} the passes without an ablation, which flips are counted against, predict "
        "another one."
    )


@figures.styled
def _figure(panels: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[Interval]]]]) -> Figure:
    """Share of tokens that flip over the number of ablated heads, a panel per setting."""
    figure, axes = figures.grid(len(panels), 3.2, 2.5)
    for ax, (title, (k, curves)) in zip(axes, panels.items(), strict=True):
        for name, curve in curves.items():
            colour, style, mark = ROWS[name][2]
            value, low, high = np.array(curve, dtype=float).T
            ax.plot(k, value, color=colour, linestyle=style, marker=mark, markersize=3, label=name)
            ax.fill_between(k, low, high, facecolor=colour, alpha=0.1, linewidth=0)
            # Bands overlap: edges distinguish them.
            ax.plot(k, np.column_stack([low, high]), color=colour, linestyle=style, linewidth=0.5)
        ax.set_xscale("log", base=2)
        ax.set_xticks(k, [str(number) for number in k])
        ax.set_ylim(bottom=0)
        ax.set_xlabel("heads ablated")
        ax.set_ylabel("predictions that flip, %")
        figures.panel_title(ax, title)
    figures.panel_legend(figure, axes, band="95 % over clusters")
    return figure
