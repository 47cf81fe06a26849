"""The forest plot of docs/should-i-use-it.md: each setting's PRR, and its gain beyond baselines."""

import io

import pandas as pd
from evidence import Table
from matplotlib import rc_context
from matplotlib.figure import Figure

from lm_polygraph_asmi.report import figures

SCORES = {
    "MSP": (figures.GREEN, "s"),
    "Perplexity": (figures.ORANGE, "D"),
    "Sem-ASMI": (figures.BLUE, "o"),
}
SIGNIFICANT = 1.96
"""|z| of two-sided p = .05."""


def draw_forest(table: Table) -> Figure:
    """A row a setting: PRR with 95 % intervals, and z of the generalised covariance measure."""
    rows = pd.read_csv(io.StringIO(table.csv()))
    heights = [-float(i) for i in range(len(rows))]
    with rc_context(figures.STYLE | {"font.size": 8, "axes.titlesize": 8}):
        figure = Figure(figsize=(7.2, 0.32 * len(rows) + 1.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2.4, 1))
        for place, (name, (colour, mark)) in enumerate(SCORES.items()):
            at = [height + 0.24 * (1 - place) for height in heights]
            prr = rows[f"PRR of {name}"]
            reach = prr - rows[f"PRR of {name}, low"], rows[f"PRR of {name}, high"] - prr
            left.errorbar(prr, at, xerr=reach, fmt=mark, color=colour,
                          markersize=4, linewidth=1.1, label=name)  # fmt: skip
        left.axvline(0, color=figures.GREY, linewidth=0.8)
        left.set_xlabel("PRR with 95 % intervals")
        left.set_yticks(heights, rows["setting"])
        left.tick_params(axis="y", length=0)
        # The column holds a text where there are too few errors.
        z = pd.to_numeric(rows["gain beyond free baselines, Sem-ASMI, z"], errors="coerce")
        right.axvspan(-SIGNIFICANT, SIGNIFICANT, color=figures.GREY, alpha=0.2, linewidth=0)
        right.axvline(0, color=figures.GREY, linewidth=0.8)
        right.plot(z, heights, "o", color=figures.BLUE, markersize=5)
        reach = max(4.0, *(z.abs().dropna() + 0.5))
        right.set_xlim(-reach, reach)
        right.set_xticks([-2, 0, 2])
        right.set_xlabel("z (grey: not significant)")
        right.set_title("Sem-ASMI added to\nMSP, entropy, length")
        right.tick_params(axis="y", length=0)
        for axes in (left, right):
            axes.spines["left"].set_visible(False)
            for height in heights[1:]:
                axes.axhline(height + 0.5, color=figures.GREY, linewidth=0.3, alpha=0.5)
            axes.set_ylim(heights[-1] - 0.5, 0.5)
        left.legend(loc="lower left", bbox_to_anchor=(-0.03, 1), ncols=3,
                    columnspacing=1.0, handletextpad=0.3)  # fmt: skip
    return figure
