"""Predictions that flip without some heads: table "causal-flip" of the paper, with controls."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.experiments.analysis.probe import (
    flip_contrasts,
    flip_differences,
    flip_rates,
)
from lm_polygraph_asmi.experiments.conditions import conditions, runs_of_heads
from lm_polygraph_asmi.experiments.items import figures
from lm_polygraph_asmi.experiments.items.heads import DAGGER
from lm_polygraph_asmi.experiments.probe_file import Probe, read_probe
from lm_polygraph_asmi.report.item import Items, ReportItem, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, clusters_of, once
from lm_polygraph_asmi.results.runs import Run

ROWS: dict[str, tuple[tuple[str, str], ...]] = {
    "high MI, critical heads": (("high", "critical"),),
    "low MI, critical heads": (("low", "critical"),),
    "high MI, random heads†": (("high", "random"),),
    "low MI, random heads†": (("low", "random"),),
    "high MI, least critical heads†": (("high", "least"),),
    "high MI, heads of other masks†": (
        ("high_first", "held_second"), ("high_second", "held_first"),
    ),
    "low MI, heads of other masks†": (("low_first", "held_second"), ("low_second", "held_first")),
    "high MI, matched by entropy†": (("high_matched", "critical"),),
    "low MI, matched by entropy†": (("low_matched", "critical"),),
    "high MI, top token at .9 or more†": (("high_confident", "critical"),),
    "low MI, top token at .9 or more†": (("low_confident", "critical"),),
    "high MI, random heads of another layer†": (("high", "control_random"),),
}  # fmt: skip
"""Row of the table -> groups of tokens, and the rule by which their heads were chosen."""
RUN_MASKS = "own"
"""Instead of a rule: the masks of the run that chose tokens and heads."""
DIFFERENCES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "high MI": (("high", "critical", "random"),),
    "low MI": (("low", "critical", "random"),),
    "high MI, least critical": (("high", "critical", "least"),),
    "high MI, heads of other masks": (
        ("high_first", "held_second", "random"), ("high_second", "held_first", "random"),
    ),
    "high MI, run's own masks": (("high", "critical", RUN_MASKS),),
    "high MI, matched by entropy": (("high_matched", "critical", "random"),),
    "high MI, top token at .9 or more": (("high_confident", "critical", "random"),),
    "high MI, another layer": (("high", "critical", "control_random"),),
}  # fmt: skip
"""Groups of tokens, each with two rules that are compared on the same tokens."""
AGAINST = {
    "random": "random heads", "least": "the least critical heads", RUN_MASKS: "the run's own masks",
    "control_random": "random heads of another layer",
}  # fmt: skip
OTHERWISE = (
    "no run has a probe: polygraph_asmi experiments probe RUN --model MODEL --device-map auto"
)
CONTROLS = tuple(name for name in DIFFERENCES if name.startswith("high"))
"""All of these are above 0 if identifiable heads carry the fragility."""


class Probed(NamedTuple):
    """The probe of a setting's run: of "heads", or of one of its control conditions."""

    group: RunGroup
    condition: str
    run: Run
    probe: Probe

    @property
    def label(self) -> str:
        return self.group.label + ("" if self.condition == "heads" else f" ({self.condition})")

    def clusters(self, rows: np.ndarray) -> list[str]:
        """Cluster keys of rows, numbered as in the run."""
        keys = clusters_of(self.run)
        return [keys[row] for row in rows]


@once
def probed(group: RunGroup) -> list[Probed]:
    """Probes saved with a setting's runs and with those of its conditions."""
    runs = [("heads", run) for run in runs_of_heads(group)]
    runs += [(condition.condition, condition.run) for condition in conditions(group, partly=True)]
    return [
        Probed(group, condition, run, probe)
        for condition, run in runs
        if (probe := read_probe(run.path)) is not None
    ]


def rates(probed: Probed, parts: Sequence[tuple[str, str]]) -> tuple[int, list[Interval]] | None:
    """Number of tokens, and their flip rates in percent for each k; None if not run."""
    return _percentages(probed, parts, flip_rates)


def differences(probed: Probed, pair: str) -> tuple[int, list[Interval]] | None:
    """Number of tokens, and one of `DIFFERENCES` in percentage points; None if not run."""
    return _percentages(probed, DIFFERENCES[pair], flip_differences)


def _percentages(
    probed: Probed,
    parts: Sequence[tuple[str, ...]],
    statistic: Callable[[np.ndarray, Sequence[str]], list[Interval]],
) -> tuple[int, list[Interval]] | None:
    pooled = _pooled(probed.probe, parts)
    if pooled is None:
        return None
    flips, rows = pooled
    return len(flips), _percent(statistic(flips, probed.clusters(rows)))


def _pooled(probe: Probe, parts: Sequence[tuple[str, ...]]) -> tuple[np.ndarray, np.ndarray] | None:
    """(m, K) flips over groups of tokens, minus those by a second rule if one is given, and their
    rows in the run; None if no part was run."""
    tables, rows = [], []
    for group, *rules in parts:
        if group not in probe.groups or not {*rules} <= {*probe.predicted, RUN_MASKS}:
            continue
        chosen = probe.groups[group]
        first, *others = (
            probe.tokens["own_flips"][chosen][:, None]
            if rule == RUN_MASKS
            else probe.flipped(rule, group)
            for rule in rules
        )
        table = first - others[0] if others else first
        complete = np.isfinite(table).all(1)
        tables.append(table[complete])
        rows.append(probe.tokens["row"][chosen][complete])
    return (np.concatenate(tables), np.concatenate(rows)) if sum(map(len, tables)) else None


def _percent(intervals: Iterable[Interval]) -> list[Interval]:
    return [Interval(*(100 * value for value in interval)) for interval in intervals]


def numbers_of(probed: Probed, pair: str) -> list[int]:
    """The k at which a control of `CONTROLS` is informative.

    Beyond half of the heads, other choices contain mostly the critical ones too. A mask of the run
    removes p H heads on average, so it is compared with the k next to p H.
    """
    heads = probed.probe.criticality.shape[1]
    few = [k for k in probed.probe.k if k <= heads // 2]
    if pair != "high MI, run's own masks":
        return few
    removed = probed.probe.settings["mask_rate"] * heads
    return [k for k in few if not any(removed <= j < k or k < j <= removed for j in few)]


def widenings(probed: Probed, most: int) -> list[Interval] | None:
    """Growth of the gap between high and low MI from each k to the next, up to `most`, percent.

    None if critical heads were not run on both, or for a single k.
    """
    high, low = (_pooled(probed.probe, [(group, "critical")]) for group in ("high", "low"))
    steps = sum(k <= most for k in probed.probe.k)
    if steps < 2 or high is None or low is None:
        return None
    tables: list[Any] = []
    for flips, rows in (high, low):
        tables += [np.diff(flips[:, :steps], axis=1), probed.clusters(rows)]
    return _percent(flip_contrasts(*tables))


def all_probes(groups: Sequence[RunGroup]) -> tuple[list[Probed], list[tuple[str, str]]]:
    """All probes, and the settings with a damaged one."""
    probes: list[Probed] = []
    damaged = []
    for group in groups:
        try:
            probes += probed(group)
        except ValueError as error:
            damaged.append((group.label, str(error)))
    return probes, damaged


def causal_probe(groups: Sequence[RunGroup]) -> Items:
    """Table "causal-flip" of the paper; also with random heads, and on matched tokens."""
    title = "Do predictions depend on critical heads?"
    probes, damaged = all_probes(groups)

    def compute(probed: Probed) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        probe = probed.probe
        rows, curves = [], {}
        for name, parts in ROWS.items():
            flipped = rates(probed, parts)
            if flipped is None:
                continue
            tokens, curves[name] = flipped
            group = parts[0][0]
            flips = probe.tokens["own_flips"][probe.groups[group]] if len(parts) == 1 else []
            rows.append(
                {"setting": probed.label, "tokens and heads": name, "tokens": tokens}
                | {f"k = {k}": rate for k, rate in zip(probe.k, curves[name], strict=True)}
                | {"run's own masks†": 100 * float(np.mean(flips)) if len(flips) else None}
            )
        if not rows:
            raise Unavailable("the probe has no token")
        return rows, {probed.label: (probe.k, curves)}

    def notes(item: ReportItem) -> list[str]:
        return [
            "**High-MI tokens flip under random heads by construction**: MI_t is disagreement "
            "under random masks. The next table shows what critical heads flip beyond that; "
            "without it, this table is partly a tautology.",
            "Percentage of tokens whose most likely token changes under the ablation, compared "
            "with the same passes without an ablation; 95 % intervals over clusters (Wilson's if "
            "none or all flip). Critical: heads by criticality on that token, highest first; "
            "after the positive heads follow those that help. Run's own masks: share of the masks "
            "that chose tokens and heads under which the token flips. Other masks: tokens chosen "
            "by MI_t of one half of the masks, heads by the other, and swapped. Matched: pairs of "
            "a high and a low token whose H_t differ by at most .1 nats. " + DAGGER,
            *(_size_note(probed) for probed in probes if probed.group in item.groups),
        ]

    return frame(
        "causal_probe", title, probes, compute, notes, figures.flips, digits=0,
        reasons=damaged, otherwise=OTHERWISE,
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
        f"{probed.label}: {len(high)} tokens of the highest and {len(low)} of the lowest MI_t at "
        f"layer {used.get('layer')}, scope {used.get('scope')}; on {other} of them the unmasked "
        f"model's most likely token is not the answer's; on {changed} the passes without an "
        f"ablation, which flips are counted against, predict another one; {positive:.1f} heads of "
        "positive criticality on the high ones."
    )


def causal_differences(groups: Sequence[RunGroup]) -> Items:
    """Flips by critical heads minus flips by as many others, same tokens; not in the paper."""
    title = "Critical heads against as many others†"
    probes, damaged = all_probes(groups)

    def compute(probed: Probed) -> list[dict[str, Any]]:
        rows = []
        for name, ((_, _, second), *_) in DIFFERENCES.items():
            gaps = differences(probed, name)
            if gaps is None:
                continue
            tokens, by_k = gaps
            rows.append(
                {"setting": probed.label, "tokens": name, "against": AGAINST[second], "n": tokens}
                | {f"k = {k}": gap for k, gap in zip(probed.probe.k, by_k, strict=True)}
            )
        if not rows:
            raise Unavailable("the probe ablated no other heads")
        return rows

    widest = max((probed.probe.k for probed in probes), key=len, default=())
    notes = [
        "Percentage points of tokens, critical minus others, paired by token; 95 % intervals over "
        "clusters. Random: mean over the draws. Identifiable heads carry the fragility if every "
        "row of high MI is above 0, for all k up to 8 and to half of the heads (against the run's "
        "own masks: for the k next to the mean number of heads that they remove). The table of "
        "claims names the rows that are not, or were not run. " + DAGGER
    ]
    return frame(
        "causal_differences", title, probes, compute, notes, digits=0,
        signed=tuple(f"k = {k}" for k in widest), reasons=damaged,
        otherwise=OTHERWISE,
    )  # fmt: skip
