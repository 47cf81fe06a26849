"""Draw the three methods: docs/concepts/method.png.

    python scripts/methods_figure.py

Distributions are invented, as the figure states; the functions that score answers compute all its
numbers from them.
"""

from pathlib import Path

import click
import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.maths import adaptive_gate, mutual_information, semantic_agreement
from lm_polygraph_asmi.maths.scores import token_scores
from lm_polygraph_asmi.report.figures import BLUE, GREY, ORANGE, SKY, STYLE, save

FIGURE = Path(__file__).parents[1] / "docs/concepts/method.png"
LABEL = "#555555"
MASKS = np.array([[1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1]])
DISAGREEING = np.array([[0.9, 0.1], [0.1, 0.9], [0.85, 0.15], [0.2, 0.8]])
"""Probabilities of two tokens under four masks."""
CASES = {
    "all agree": (("Holm", "Brask"), np.tile([[0.9, 0.1]], (4, 1)), 0.0),
    "two names": (("Holm", "Brask"), DISAGREEING, 0.0),
    "two near-synonyms": (("built", "constructed"), DISAGREEING, 0.9),
}
"""Title -> tokens, distributions, cosine of the two tokens' rows in the output projection."""


def measured(probabilities: np.ndarray, cosine: float) -> tuple[float, float]:
    """MI in nats, and A."""
    log_probs = torch.tensor(probabilities).log()[:, None]
    rows = torch.tensor([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]], dtype=torch.float64)
    return mutual_information(log_probs, 2).item(), semantic_agreement(log_probs, rows, 2).item()


def masks_panel(ax: Axes) -> None:
    ax.imshow(MASKS, cmap="Blues", vmin=0, vmax=1.6, aspect="equal")
    for s, h in zip(*np.nonzero(MASKS == 0), strict=True):
        ax.text(h, s, "×", ha="center", va="center", color=ORANGE, fontsize=14)
    ax.set_xticks(range(6), [str(h + 1) for h in range(6)])
    ax.set_yticks(range(4), [f"mask {s + 1}" for s in range(4)])
    ax.set_xlabel("heads of one layer")
    ax.set_title("1. Mask heads,\nre-score the same answer")
    ax.tick_params(length=0)


def case_panel(ax: Axes, name: str) -> None:
    tokens, probabilities, cosine = CASES[name]
    mi, agreement = measured(probabilities, cosine)
    heights, (first, second) = np.arange(4)[::-1], probabilities.T
    ax.barh(heights, first, color=BLUE, height=0.7)
    ax.barh(heights, second, left=first, color=SKY, height=0.7)
    ax.barh(-1.3, first.mean(), color=BLUE, height=0.7, alpha=0.6)
    ax.barh(-1.3, second.mean(), left=first.mean(), color=SKY, height=0.7, alpha=0.6)
    for x, side, token in ((0.02, "left", tokens[0]), (0.98, "right", tokens[1])):
        ax.text(x, 3.62, token, ha=side, va="bottom", color=BLUE if side == "left" else "#2b7bb0")
    ax.set_yticks([*heights, -1.3], [*(str(s + 1) for s in range(4)), "mean"])
    ax.set_xticks([])
    ax.set_xlim(0, 1)
    ax.set_ylim(-1.8, 4.3)
    ax.spines["bottom"].set_visible(False)
    ax.set_title(name)
    ax.set_xlabel(
        f"ASMI: MI = {mi:.2f} nats\nagreement A = {agreement:.2f}\n"
        f"Sem-ASMI: {token_scores(mi, agreement):.2f} nats"
    )


def gate_panel(ax: Axes) -> None:
    mi, agreement = measured(*CASES["two near-synonyms"][1:])
    diversity = np.linspace(0, 1, 101)
    u = [mi * (1 - adaptive_gate(float(x)) * agreement) for x in diversity]
    ax.plot(diversity, u, color=BLUE)
    ax.axhline(mi, color=GREY, linestyle="--", linewidth=0.8)
    ax.axhline(token_scores(mi, agreement), color=GREY, linestyle="--", linewidth=0.8)
    ax.text(0.02, mi, "ASMI", va="bottom", color=LABEL)
    ax.text(0.98, token_scores(mi, agreement), "Sem-ASMI", va="bottom", ha="right", color=LABEL)
    ax.axvline(ASMIConfig.tau, color=GREY, linewidth=0.6, linestyle=":")
    ax.text(ASMIConfig.tau + 0.02, mi * 0.12, "τ", color=LABEL)
    ax.set_ylim(0, mi * 1.15)
    ax.set_xlabel("div: how far sampled\nanswers differ")
    ax.set_ylabel("u of the near-synonyms, nats")
    ax.set_title("3. Adapt-ASMI: discount only\nif the samples agree")


def draw() -> Figure:
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    figure.patch.set_facecolor("white")
    left, middle, right = figure.subfigures(1, 3, width_ratios=[2.3, 5.4, 2.8])
    masks_panel(left.subplots())
    middle.suptitle("2. Next-token distribution under each mask (invented numbers)", fontsize=9)
    for ax, name in zip(middle.subplots(1, 3), CASES, strict=True):
        case_panel(ax, name)
    gate_panel(right.subplots())
    return figure


@click.command(help=__doc__)
def main() -> None:
    with rc_context(STYLE):
        save(draw(), FIGURE, "The three methods")


if __name__ == "__main__":
    main()
