"""Predictions that flip without some heads: table "causal-flip" of the paper, and random heads."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.experiments.analysis.probe import flip_rates
from lm_polygraph_asmi.experiments.dissected import runs_of
from lm_polygraph_asmi.experiments.items import figures
from lm_polygraph_asmi.experiments.items.heads import DAGGER
from lm_polygraph_asmi.experiments.probe_file import Probe, read_probe
from lm_polygraph_asmi.report.item import Items, ReportItem, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, clusters_of, once
from lm_polygraph_asmi.results.runs import Run

ROWS = {
    "high MI, critical heads": ("high", "critical"),
    "low MI, critical heads": ("low", "critical"),
    "high MI, random heads†": ("high", "random"),
    "low MI, random heads†": ("low", "random"),
}
"""Row of the table -> group of tokens, and the rule by which their heads were chosen."""
OTHERWISE = (
    "no run has a probe: polygraph_asmi experiments probe RUN --model MODEL --device-map auto"
)


class Probed(NamedTuple):
    """The probe of a setting's run."""

    group: RunGroup
    run: Run
    probe: Probe

    def clusters(self, rows: np.ndarray) -> list[str]:
        """Cluster keys of rows, numbered as in the run."""
        keys = clusters_of(self.run)
        return [keys[row] for row in rows]


@once
def probed(group: RunGroup) -> list[Probed]:
    """Probes saved with a setting's runs."""
    return [
        Probed(group, run, probe)
        for run in runs_of(group)
        if (probe := read_probe(run.path)) is not None
    ]


def rates(probed: Probed, name: str) -> tuple[int, list[Interval]] | None:
    """Tokens of one of `ROWS`, and their flip rates in percent for each k; None without tokens."""
    group, rule = ROWS[name]
    chosen = probed.probe.groups[group]
    if not len(chosen):
        return None
    rows = probed.probe.tokens["row"][chosen]
    flips = flip_rates(probed.probe.flipped(rule, group), probed.clusters(rows))
    return len(chosen), [Interval(*(100 * value for value in interval)) for interval in flips]


def causal_probe(groups: Sequence[RunGroup]) -> Items:
    """Table "causal-flip" of the paper; also with random heads."""
    title = "Do predictions depend on critical heads?"

    def compute(group: RunGroup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows, panels = [], {}
        for probe in probed(group):
            of_tokens, curves = of_probe(probe)
            if not of_tokens:
                raise Unavailable("the probe has no token")
            rows += of_tokens
            panels[group.label] = curves
        return rows, panels

    def of_probe(probed: Probed) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
        probe, rows, curves = probed.probe, [], {}
        for name, (level, _) in ROWS.items():
            flipped = rates(probed, name)
            if flipped is None:
                continue
            tokens, curves[name] = flipped
            flips = probe.tokens["own_flips"][probe.groups[level]]
            rows.append(
                {"setting": probed.group.label, "tokens and heads": name, "tokens": tokens}
                | {f"k = {k}": rate for k, rate in zip(probe.k, curves[name], strict=True)}
                | {"run's own masks†": 100 * float(np.mean(flips))}
            )
        return rows, (probe.k, curves)

    def notes(item: ReportItem) -> list[str]:
        return [
            "**High-MI tokens flip under random heads by construction**: MI_t is disagreement "
            "under random masks. Compare the rows of critical heads with those of random ones.",
            "Percentage of tokens whose most likely token changes under the ablation, compared "
            "with the same passes without an ablation; 95 % intervals over clusters (Wilson's if "
            "none or all flip). Critical: heads by criticality on that token, highest first; "
            "after the positive heads follow those that help. Random: mean over the draws. Run's "
            "own masks: share of the masks that chose tokens and heads under which the token "
            "flips. " + DAGGER,
            *(_size_note(probe) for group in item.groups for probe in probed(group)),
        ]

    return frame(
        "causal_probe", title, groups, compute, notes, figures.flips, digits=0,
        otherwise=OTHERWISE,
    )  # fmt: skip


def _size_note(probed: Probed) -> str:
    """Size and layer of a probe, in one line."""
    probe, tokens = probed.probe, probed.probe.tokens
    high, low = (probe.groups.get(name, np.array([], dtype=int)) for name in ("high", "low"))
    chosen = np.concatenate([high, low])
    other = int((tokens["argmax"][chosen] != tokens["token"][chosen]).sum())
    changed = int((tokens["replayed"][chosen] != tokens["argmax"][chosen]).sum())
    positive = float(tokens["positive"][high].mean()) if len(high) else float("nan")
    used = probe.settings
    return (
        f"{probed.group.label}: {len(high)} tokens of the highest and {len(low)} of the lowest "
        f"MI_t at layer {used.get('layer')}, scope {used.get('scope')}; on {other} of them the "
        f"unmasked model's most likely token is not the answer's; on {changed} the passes without "
        f"an ablation, which flips are counted against, predict another one; {positive:.1f} heads "
        "of positive criticality on the high ones."
    )
