"""Draw figures from values that were computed elsewhere."""

import math
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from functools import reduce, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.style import context as style_context
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.coverage import TOP_K
from lm_polygraph_asmi.analysis.selective import Quadrants
from lm_polygraph_asmi.results.manifest import PHASES

BLUE, ORANGE, GREEN, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#999999", "#222222"
PURPLE, SKY, AMBER = "#CC79A7", "#56B4E9", "#E69F00"
"""Okabe and Ito's palette for colour blindness. Marks and line styles differ as well."""
LINES = {"MSP": (GREEN, ":"), "entropy": (BLACK, "--"), "u_sem": (BLUE, "-")}
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lm_polygraph_asmi",  # without it, ids in the file are random
    "text.parse_math": False,  # names may contain dollar signs
}


styled = style_context(STYLE, after_reset=True)
"""Decorator: while the function draws, `STYLE` is used instead of a user's matplotlibrc."""


@styled
def save(figure: Figure, path: str | Path, description: str = "") -> None:
    """Write a figure in the format of the path's suffix; ValueError if the format is unknown.

    Its layout is computed once and kept.
    """
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)  # "none" would leave one, and the next format its layout
        for ax in figure.axes:
            _thin_numbers(ax)
    # Leave out the time, so that the same runs write the same files.
    metadata: dict[str, dict[str, Any]] = {
        ".png": {"Description": description},
        ".svg": {"Description": description, "Date": None},
        ".pdf": {"CreationDate": None},
    }
    figure.savefig(path, dpi=200, bbox_inches="tight", metadata=metadata.get(Path(path).suffix))


def _thin_numbers(ax: Axes) -> None:
    """Leave out every second number of a horizontal axis until none touches the next."""
    low, high = sorted(ax.get_xlim())
    labels = [
        label
        for label in ax.get_xticklabels()
        if label.get_visible() and not label.get_rotation()
        if low <= label.get_position()[0] <= high
    ]
    boxes = [label.get_window_extent() for label in labels]
    if any(left.x1 + left.height / 3 > right.x0 for left, right in pairwise(boxes)):
        kept = {label.get_position()[0]: label.get_text() for label in labels[::2]}
        ax.set_xticks(list(kept), list(kept.values()))
        _thin_numbers(ax)


PAGE = (7.2, 9.6)
"""Largest size of a figure, in inches."""
MANY = 6
"""If a figure has more panels than this, they are small and share one page and legend."""
SMALL: Any = {
    "font.size": 6, "axes.titlesize": 6, "axes.labelsize": 6, "xtick.labelsize": 5,
    "ytick.labelsize": 5, "legend.fontsize": 6, "axes.linewidth": 0.6, "lines.linewidth": 1,
    "lines.markersize": 2.5,
}  # fmt: skip


def _axes(
    panels: int, columns: int, width: float, height: float, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of this size in inches, with `panels` panels, `columns` per row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    rows = math.ceil(panels / columns)
    axes = figure.subplots(rows, columns, sharex=sharex, squeeze=False).ravel()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, list(axes[:panels])


def grid(panels: int, width: float, height: float, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with panels of this size, `columns` per row; 4 per row if more than `MANY`."""
    if panels > MANY:
        rcParams.update(SMALL)  # restored when the drawing function ends
        columns, width = 4, PAGE[0] / 4
        height = min(1.1 * width, PAGE[1] / math.ceil(panels / columns))
    columns = 2 if panels == 4 and columns == 3 else min(panels, columns)
    rows = math.ceil(panels / columns)
    return _axes(panels, columns, min(width * columns, PAGE[0]), min(height * rows, PAGE[1]))


def panel_title(ax: Axes, label: str) -> None:
    lines = label.replace(", ", ",\n", 1).splitlines()
    width = 34 if rcParams["font.size"] > SMALL["font.size"] else 38
    ax.set_title("\n".join(textwrap.fill(line, width) for line in lines))


def panel_legend(figure: Figure, axes: Sequence[Axes], band: str = "", **arguments: Any) -> None:
    """Add one legend for all panels below them, where it covers nothing.

    `band`: label of the shaded area.
    """
    handles: dict[str, Any] = {}
    for ax in axes:
        artists, labels = ax.get_legend_handles_labels()
        handles |= {n: h for n, h in zip(labels, artists, strict=True) if n not in handles}
    if band:
        handles[f"{band}, shaded"] = Patch(facecolor=GREY, alpha=0.3)
    place: Any = {"loc": "outside lower center", "fontsize": 6, **arguments}
    legend, columns = figure.legend(handles.values(), handles.keys(), ncols=4, **place), 4
    while columns > 1 and legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        columns -= 1
        legend = figure.legend(handles.values(), handles.keys(), ncols=columns, **place)


Panel = TypeVar("Panel")


def panelled(
    width: float, height: float, columns: int = 3, **legend: Any
) -> Callable[[Callable[[Axes, Panel], str | None]], Callable[[Mapping[str, Panel]], Figure]]:
    """Turn a function that draws one panel into one that draws a figure of panels by title.

    What the function returns is added to the title of its panel. With arguments of `panel_legend`,
    the figure gets a legend.
    """

    def declare(
        draw: Callable[[Axes, Panel], str | None],
    ) -> Callable[[Mapping[str, Panel]], Figure]:
        @styled
        @wraps(draw)
        def draw_all(panels: Mapping[str, Panel]) -> Figure:
            figure, axes = grid(len(panels), width, height, columns)
            for ax, (title, values) in zip(axes, panels.items(), strict=True):
                added = draw(ax, values)
                panel_title(ax, f"{title}\n{added}" if added else title)
            if legend:
                panel_legend(figure, axes, **legend)
            return figure

        return draw_all

    return declare


@styled
def forest(
    panels: Mapping[str, Mapping[str, Interval | None]],
    label: str,
    black: Container[str] = (),
    chance: float = 0,
) -> Figure:
    """Values with intervals: one panel per group, all on the same scale.

    Markers are filled if the interval excludes `chance`. Rows named in `black` are baselines.
    """
    finite = {
        title: {name: i for name, i in rows.items() if i and np.isfinite(i.value)}
        for title, rows in panels.items()
    }
    union = list(dict.fromkeys(name for rows in finite.values() for name in rows))
    widest, width = max(map(len, union), default=10), 48
    # Inches that names need at least, and a panel's title and axis.
    tall = 0.14 * len(union) * math.ceil(widest / width) + 0.6
    if small := len(finite) > MANY or math.ceil(len(finite) / 2) * tall > PAGE[1]:
        rcParams.update(SMALL)
        width = widest
    # Names that would take much of each panel are written once, left of panels with equal rows.
    most = 2 * min(map(len, finite.values()), default=0) > len(union)
    alike = small or (len(finite) > 1 and widest > 26 and most)
    names = {title: (union if alike else list(rows))[::-1] for title, rows in finite.items()}
    longest = max(map(len, names.values())) * math.ceil(widest / width)
    columns = min(len(finite), 4 if small else 2)
    height = math.ceil(len(finite) / columns) * (0.02 * rcParams["font.size"] * (longest + 10))
    figure, axes = _axes(len(finite), columns, PAGE[0], min(PAGE[1], height), sharex=True)
    size = rcParams["font.size"] / 2.2
    for number, (ax, (title, rows)) in enumerate(zip(axes, finite.items(), strict=True)):
        ax.set_yticks(
            range(len(names[title])), [textwrap.fill(name, width) for name in names[title]]
        )
        for y, name in enumerate(names[title]):
            if interval := rows.get(name):
                colour = BLACK if name in black else BLUE
                filled = colour if interval.excludes(chance) else "white"
                if np.isfinite(interval.low):
                    ax.plot(interval[1:], [y, y], color=colour, linewidth=size / 3.5)
                ax.plot(
                    interval.value, y, "o", markersize=size, color=colour, markerfacecolor=filled
                )
        ax.axvline(chance, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
        ax.tick_params(
            labelleft=number % columns == 0 or not alike,
            labelbottom=number + columns >= len(finite),
        )
        ax.set_ylim(-0.6, max(len(names[title]), 1) - 0.4)
        panel_title(ax, title)
    explanation = f"{label}; filled: the interval excludes {chance:g}; open: it includes it"
    figure.supxlabel(
        textwrap.fill(explanation, int(900 / rcParams["font.size"])),
        fontsize=rcParams["axes.labelsize"],
    )
    return figure


def by_setting(
    table: pd.DataFrame, columns: Mapping[str, str], label: str, chance: float = 0
) -> Figure:
    """Draw columns of a table with `forest`: a panel for each column, a row for each setting."""
    panels = {
        title: dict(zip(table["setting"], table[column], strict=True))
        for title, column in columns.items()
        if table[column].notna().any()
    }
    return forest(panels, label, chance=chance)


DepthCurves = tuple[Sequence[float], Mapping[str, np.ndarray], np.ndarray, np.ndarray]
"""The D depths; PRR (D,) by setting; mean PRR (D,) over settings; 95 % band (2, D) of the mean."""
BAND = "95 % band"


@panelled(3.4, 2.8, band=BAND)
def depths(ax: Axes, curves: DepthCurves) -> None:
    """PRR over depth, one panel per variant: each setting, and their mean with its band.

    More than `MANY` settings are drawn in grey; the table by method tells them apart.
    """
    relative_depths, groups, mean, band = curves
    percent = [100 * depth for depth in relative_depths]
    colours = (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
    of_many = len(groups) > MANY
    for number, (name, row) in enumerate(groups.items()):
        ax.plot(
            percent,
            row,
            marker="osv^Dx"[number % 6],
            linewidth=0.6,
            markersize=3,
            color=GREY if of_many else colours[number],
            label=f"{len(groups)} settings" if of_many else name,
        )
    ax.plot(percent, mean, color=BLACK, linewidth=2, label="mean")
    ax.fill_between(percent, *band, color=BLACK, alpha=0.2, linewidth=0)
    ax.set_xticks(percent, [f"{p:g} %" for p in percent])
    ax.set(xlabel="relative depth of the masked layer", ylabel="PRR")
    ax.sharey(ax.figure.axes[0])


@panelled(2.6, 2.5)
def quadrants(ax: Axes, split: Quadrants) -> str:
    """Error rates by confidence and fragility: figure "confident-fragile" (a) of the paper."""
    ax.imshow(split.error_rate, cmap="Oranges", vmin=0, vmax=1)
    for (i, j), rate in np.ndenumerate(split.error_rate):
        shown = "–" if np.isnan(rate) else f"{rate:.0%}"
        ax.text(
            j,
            i,
            f"{shown}\nn = {split.count[i, j]}",
            ha="center",
            va="center",
            color="white" if rate > 0.6 else BLACK,
        )
    ax.set_xticks([0, 1], ["robust", "fragile"])
    ax.set_yticks([0, 1], ["confident", "unconfident"])
    ax.set(xlabel="by u_sem", ylabel="by MSP")
    return "error rate"


Curve = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Positions (n,), error rates at these (n,), and their pointwise 95 % band (2, m) at m positions
that are evenly spread over the same range."""


def _error_curves(ax: Axes, curves: Mapping[str, Curve], label: str, **axes: str) -> None:
    """Error rate curves by signal, over the same range in all panels.

    `label` is a format string for the signal's name; `axes` names the axes.
    """
    ax.sharex(ax.figure.axes[0])
    highest = 0.0
    for name, (x, errors, band) in curves.items():
        colour, style = LINES[name]
        ax.plot(x, errors, color=colour, linestyle=style, label=label.format(name))
        band_x = np.linspace(x[0], x[-1], band.shape[1])
        ax.fill_between(band_x, *band, color=colour, alpha=0.12, linewidth=0)
        # The error rate of the first few answers is 0 or 1, and would flatten the rest of the
        # curve.
        first = x[0] + np.ptp(x) / 20
        heights = np.r_[errors[x >= first], band[:, band_x >= first].ravel()]
        highest = max(highest, np.fmax.reduce(heights, initial=0))
    ax.set(ylim=(0, min(1, 1.05 * highest) or 1), **axes)


@panelled(2.8, 2.4, band=BAND)
def payoff(ax: Axes, curves: Mapping[str, Curve]) -> None:
    """Error rate of accepted confident answers over abstention: figure "payoff" of the paper."""
    _error_curves(
        ax, curves, "by {}", xlabel="abstained, % of the confident", ylabel="retained error"
    )


@panelled(2.8, 2.4, band=BAND)
def risk_coverage(ax: Axes, curves: Mapping[str, Curve]) -> None:
    """Risk over coverage for each signal."""
    _error_curves(ax, curves, "{}", xlabel="coverage", ylabel="error rate, accepted")


@panelled(2.8, 2.4, band=BAND, title="tokens by MI")
def coverage(ax: Axes, bands: tuple[pd.DataFrame, Mapping[str, np.ndarray]]) -> None:
    """Mass of the top K in bands of MI_t, one row each, with pointwise 95 % bands (2, k)."""
    mass, ends = bands
    styles = {
        "low": (GREEN, ":", "^"),
        "mid": (BLUE, "--", "s"),
        "high": (ORANGE, "-", "o"),
        "all": (GREY, "-", ""),
    }
    for tokens, row in mass.iterrows():
        colour, style, mark = styles[tokens.split()[0]]
        ax.plot(TOP_K, row, color=colour, linestyle=style, marker=mark, markersize=3, label=tokens)
        ax.fill_between(TOP_K, *ends[tokens], color=colour, alpha=0.15, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(TOP_K[::2], [str(k) for k in TOP_K[::2]])
    ax.set(xlabel="K", ylabel="mass of the top K")
    ax.sharey(ax.figure.axes[0])


FEWEST_VALUES = 10
"""Of fewer values no density is drawn, but each value."""


@panelled(2.8, 2.4, columns=2)
def violins(ax: Axes, scored: tuple[str, np.ndarray, np.ndarray]) -> None:
    """Scores (n,) of right and of wrong answers: figure "error-separation" of the paper.

    The name of the score comes first. Panels of one score have the same scale.
    """
    name, scores, wrong = scored
    ax.set(xticks=[], xlim=(-0.6, 1.6), ylabel=f"{name}, nats")
    ax.sharey(next(other for other in ax.figure.axes if other.get_ylabel() == ax.get_ylabel()))
    positive = scores[scores > 0]
    foot = np.quantile(positive, 0.01) if len(positive) else 1e-12
    for side, (kind, chosen, colour) in enumerate(
        (("right", ~wrong, BLUE), ("wrong", wrong, ORANGE))
    ):
        # Logarithmic, since MI spans orders of magnitude. Zeros are drawn at the lower end.
        values = np.log10(np.maximum(scores[chosen], foot))
        few = len(values) < FEWEST_VALUES
        if not few and np.ptp(values) > 0:
            parts: Any = ax.violinplot(values, [side], showextrema=False, widths=0.8)
            for body in parts["bodies"]:
                body.set(facecolor=colour, alpha=0.5)
        counted = f"n = {len(values)}"
        if len(values):  # without values, the layout would put an empty line into the corner
            shown = values if few else [np.median(values)]
            mark: Any = {"marker": "x" if few else "o", "markersize": 4, "linestyle": ""}
            ax.plot([side] * len(shown), shown, color=colour, clip_on=False, zorder=3, **mark)
            zeros = np.mean(scores[chosen] == 0)
            counted += f"\n{zeros:.0%} zero" if zeros > 0.05 else ""
        ax.text(
            side,
            -0.04,
            f"{kind}\n{counted}",
            ha="center",
            va="top",
            transform=ax.get_xaxis_transform(),
        )
    ax.yaxis.set_major_formatter(lambda exponent, _: f"{float(f'{10**exponent:.2g}'):g}")


def _log_ticks(low: float, high: float) -> Locator:
    """Ticks with numbers of a logarithmic axis with these ends: not only of decades."""
    if high < 10 * low:
        return MaxNLocator(4)
    return LogLocator(subs=(1, 3) if high < 100 * low else (1,), numticks=4)


@panelled(2.8, 2.6)
def joint(ax: Axes, tokens: tuple[np.ndarray, np.ndarray, float]) -> str:
    """MI_t and A_t of tokens, and their correlation: figure "mechanism" (a) of the paper."""
    mi, agreement, r = tokens
    ax.sharex(ax.figure.axes[0])
    ax.sharey(ax.figure.axes[0])
    foot = np.quantile(mi[mi > 0], 0.01) if (mi > 0).any() else 1e-12
    hexagons = ax.hexbin(
        np.maximum(mi, foot),
        agreement,
        gridsize=28,
        bins="log",
        mincnt=1,
        # Without the lightest blues, in which single tokens would not be seen.
        cmap=ListedColormap(colormaps["Blues"](np.linspace(0.3, 1, 256))),
        xscale="log",
        linewidths=0,
    )
    bar = ax.figure.colorbar(
        hexagons, ax=ax, label="tokens, log scale", format="{x:.0f}", ticks=LogLocator(subs=(1, 3))
    )
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_locator(_log_ticks(*ax.get_xlim()))  # of the panels so far
    ax.xaxis.set_major_formatter(
        lambda x, _: f"{x:.3g}" if x >= 1e-3 else f"{x:.0e}".replace("e-0", "e-")
    )
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="MI_t, nats", ylabel="A_t")
    return f"Pearson r = {r:.2f}".replace("-", "−")


@panelled(3.6, 3.2)
def cosines(ax: Axes, candidates: tuple[np.ndarray, Sequence[str]]) -> None:
    """Pairwise cosines of a token's top candidates: figure "mechanism" (b) of the paper."""
    matrix, texts = candidates
    image = ax.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    names = [repr(text)[1:-1] for text in texts]
    ax.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    for (i, j), value in np.ndenumerate(matrix):
        ax.text(
            j,
            i,
            f"{value:.1f}",
            ha="center",
            va="center",
            fontsize=5,
            color="white" if abs(value) > 0.6 else BLACK,
        )
    ax.figure.colorbar(image, ax=ax, label="cosine")


@styled
def operating_point(table: pd.DataFrame, tolerated: int) -> Figure:
    """Coverage and fidelity over p, from `plan_table`: figure "supp_fidelity" of the paper."""
    rates, masks, feasible = table["p"], table["S"], table["admissible"]
    figure, (left, right) = grid(2, 3.6, 3.0)
    left.plot(rates, masks, color=BLUE)
    left.fill_between(
        rates[feasible],
        masks[feasible],
        10 * max(masks),
        color=BLUE,
        alpha=0.15,
        label="feasible",
        linewidth=0,
    )
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:.0f}")
    left.set(ylim=(min(masks) / 1.5, max(masks)), ylabel="fewest masks S that cover every head")
    right.plot(rates, table["heads, Gaussian"], color=BLACK, linestyle="--", label="Gaussian bound")
    right.step(rates, table["heads, exact"], color=BLUE, where="mid", label="exact binomial")
    right.axhline(tolerated, color=ORANGE, linewidth=1, label=f"tolerated: {tolerated}")
    right.set_ylabel("heads masked at once, 95 % quantile")
    for ax in (left, right):
        ax.legend(fontsize=7)
        ax.set_xlabel("mask rate p")
    if feasible.any():
        p, fewest = rates[feasible].iloc[-1], masks[feasible].iloc[-1]
        for ax in (left, right):
            ax.axvline(p, color=GREY, linewidth=0.8, linestyle=":")
        left.plot(p, fewest, "o", color=ORANGE)
        left.annotate(
            f"p = {p:g}, S = {fewest}",
            (p, fewest),
            textcoords="offset points",
            xytext=(8, 8),
            fontsize=8,
        )
    return figure


RUN = ("scope", "S", "K", "at depth", "mask seed", "masks", "device")
"""Columns that tell runs of one setting apart."""


@styled
def seconds(table: pd.DataFrame) -> Figure:
    """Median seconds per answer by phase, stacked."""
    phases = [name for name in table if name in PHASES.values()]
    parts = [f"{name} " + table[name].astype(str) for name in RUN if name in table]
    differ, common = ([p for p in parts if (p.nunique() > 1) is each] for each in (True, False))
    names = reduce(lambda first, part: first + ", " + part, differ, table["setting"].astype(str))
    number = names.groupby(names).cumcount() + 1
    names = names.where(~names.duplicated(keep=False), names + ", run " + number.astype(str))
    figure, (ax,) = grid(1, 4.5 + 0.06 * names.map(len).max(), 1.2 + 0.3 * len(table))
    left = np.zeros(len(table))
    colours = dict(zip(phases, (GREY, ORANGE, GREEN, BLUE, AMBER, PURPLE, SKY), strict=False))
    for phase in phases:
        values = table[phase].fillna(0).to_numpy(dtype=float)
        ax.barh(range(len(table)), values, left=left, color=colours[phase], label=phase)
        left += values
    ax.set_yticks(range(len(table)), names, fontsize=7)
    ax.invert_yaxis()
    about = "; ".join(part.iloc[0] for part in common)
    ax.set_xlabel(f"seconds per answer (sum of medians)\n{textwrap.fill(about, 72)}")
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    return figure
