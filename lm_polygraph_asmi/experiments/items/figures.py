"""Figures of experiments; those of the report are in `lm_polygraph_asmi.report.figures`."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.report.figures import (
    AMBER,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    grid,
    panel_legend,
    panel_title,
    styled,
)


@styled
def coupling(table: pd.DataFrame) -> Figure:
    """Coupling of MI_t and H_t with concentration by setting, and of MI_t over depth."""
    labels = list(dict.fromkeys(table["setting"]))
    depths = sorted(set(table["depth"]), key=lambda depth: float(depth.rstrip("%")))
    figure = Figure(figsize=(PAGE[0], min(PAGE[1], 1.6 + 0.35 * len(labels))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, colour, mark, shift in (("MI", BLUE, "o", -0.14), ("H", BLACK, "s", 0.14)):
        for place, label in enumerate(labels):
            rows = table[table["setting"] == label].iloc[0]
            _whisker(left, rows[f"ρ({name}, z)"], place + shift, colour, mark)
    shown = table.drop_duplicates("setting")["depth"].tolist()  # first of each setting
    alike = len(set(shown)) == 1
    names = [
        label if alike else f"{label}, {depth}" for label, depth in zip(labels, shown, strict=True)
    ]
    left.set_yticks(range(len(labels)), [textwrap.fill(name, 30) for name in names])
    left.set_ylim(len(labels) - 0.5, -0.5)
    left.axvline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    left.set_xlabel(f"ρ at {shown[0]} of depth" if alike else "ρ at the depth named")
    signals = [
        Line2D([], [], color=colour, marker=mark, markersize=4, label=f"ρ({name}, z)")
        for name, colour, mark in (("MI", BLUE, "o"), ("H", BLACK, "s"))
    ]
    left.legend(handles=signals, fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    marks, colours = "osv^Dx+*PX<>", (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER, GREY)
    for number, label in enumerate(labels):
        rows = table[table["setting"] == label]
        at = [depths.index(depth) + 0.04 * (number - len(labels) / 2) for depth in rows["depth"]]
        intervals = list(rows["ρ(MI, z)"])
        colour = colours[number % len(colours)]
        right.plot(at, [i.value for i in intervals], marker=marks[number % len(marks)], linewidth=1,
                   markersize=4, color=colour, label=label)  # fmt: skip
        for x, i in zip(at, intervals, strict=True):
            right.plot([x, x], [i.low, i.high], color=colour, linewidth=0.8)
            right.plot(x, i.value, marks[number % len(marks)], markersize=4, color=colour,
                       markerfacecolor=colour if i.excludes(0) else "white")  # fmt: skip
    right.set_xticks(range(len(depths)), depths)
    right.set_xlim(-0.5, len(depths) - 0.5)
    right.axhline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    right.set_xlabel("relative depth of the masked layer")
    right.set_ylabel("ρ(MI, z)")
    figure.suptitle("filled: the interval (95 % over examples) excludes 0; open: it includes it",
                    fontsize=rcParams["axes.labelsize"])  # fmt: skip
    if len(labels) > 1:
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3,
                      fontsize=6)  # fmt: skip
    return figure


def _whisker(ax: Axes, interval: Interval, place: float, colour: str, mark: str) -> None:
    """A value with its interval, filled if the interval excludes 0."""
    if not np.isfinite(interval.value):
        return
    if np.isfinite(interval.low):
        ax.plot([interval.low, interval.high], [place, place], color=colour, linewidth=1.2)
    ax.plot(interval.value, place, mark, markersize=4, color=colour,
            markerfacecolor=colour if interval.excludes(0) else "white")  # fmt: skip


FLIPS: Any = {
    "high MI, critical heads": (BLUE, "-", "o"),
    "high MI, random heads†": (ORANGE, "--", "s"),
    "low MI, critical heads": (BLACK, "-.", "^"),
}
"""Rows of the probe that its figure shows."""


@styled
def flips(panels: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[Interval]]]]) -> Figure:
    """Share of tokens that flip over the number of ablated heads, a panel per setting."""
    figure, axes = grid(len(panels), 3.2, 2.5)
    for ax, (title, (k, curves)) in zip(axes, panels.items(), strict=True):
        for name, (colour, style, mark) in FLIPS.items():
            if name not in curves:
                continue
            value, low, high = np.array(curves[name], dtype=float).T
            ax.plot(k, value, color=colour, linestyle=style, marker=mark, markersize=3, label=name)
            ax.fill_between(k, low, high, facecolor=colour, alpha=0.1, linewidth=0)
            # Bands overlap: edges distinguish them.
            ax.plot(k, np.column_stack([low, high]), color=colour, linestyle=style, linewidth=0.5)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.set_xticks(k)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("heads ablated")
        ax.set_ylabel("predictions that flip, %")
        panel_title(ax, title)
    panel_legend(figure, axes)
    return figure
