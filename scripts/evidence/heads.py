"""Tables of the page on heads: which carry the disagreement, and whether other parts would do."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from evidence import (
    CONDITIONS,
    MODELS,
    SETTINGS,
    Evidence,
    Table,
    labelled,
    others,
    p_text,
    signed,
    table,
)

from lm_polygraph_asmi.analysis import cluster_interval
from lm_polygraph_asmi.experiments.analysis import (
    ConditionComparison,
    condition_comparisons,
    criticality_coupling,
    high_stratum,
    verdicts,
)

EVIDENCE = Path(__file__).parents[2] / "docs/evidence"
OWN_MASKS = ("run's own masks†",)
RESAMPLES = 10_000
"""As in the report: the rule's own."""
FREE = ("MSP", "Perplexity")


@dataclass(frozen=True)
class Controlled:
    """The answers of a setting that were scored with other parts than heads perturbed.

    Attributes:
        heads: the answers, scored with heads.
        conditions: name -> the same answers in the same order.
    """

    heads: Evidence
    conditions: Mapping[str, Evidence]

    @classmethod
    def of(cls, own: Evidence, evidence: list[Evidence]) -> "Controlled | None":
        """None where no condition was run.

        Raises:
            ValueError: conditions have different answers.
        """
        conditions = {condition.run: condition for condition in others(own, evidence, CONDITIONS)}
        if not conditions:
            return None
        shared = [own.shared_with(condition) for condition in conditions.values()]
        if any(list(one.answers["id"]) != list(shared[0].answers["id"]) for one in shared):
            raise ValueError(
                f"{own.label}: conditions have different answers: {', '.join(conditions)}"
            )
        return cls(shared[0], conditions)

    def against(self, correctness: str, method: str, *free: str) -> dict[str, ConditionComparison]:
        """Heads against each condition, and against signals that are free, where they are named."""
        scores = {name: condition.score(method) for name, condition in self.conditions.items()}
        scores |= {name: self.heads.signals[name] for name in free}
        quality, clusters = self.heads.quality(correctness), self.heads.clusters
        return condition_comparisons(self.heads.score(method), scores, quality, clusters, RESAMPLES)


def controlled(evidence: list[Evidence], correctness: str) -> list[Controlled]:
    found = (Controlled.of(own, evidence) for own in labelled(evidence, correctness))
    return [one for one in found if one is not None]


def verdict_table(evidence: list[Evidence], correctness: str, method: str = "Sem-ASMI") -> Table:
    """PRR of heads minus that of each condition at matched effect, and what the rule says of it."""
    found = controlled(evidence, correctness)
    compared = [one.against(correctness, method) for one in found]
    rows = []
    for one, conditions, said in zip(found, compared, verdicts(compared), strict=True):
        gaps = [
            signed(conditions[name].difference) if name in conditions else "" for name in CONDITIONS
        ]
        outcome = f"{said.outcome} ({said.condition})" if said.condition else said.outcome
        rows.append(
            [
                one.heads.label,
                one.heads.size,
                str(int(one.heads.wrong(correctness).sum())),
                signed(next(iter(conditions.values())).heads),
                *gaps,
                outcome,
                p_text(said.p_special),
                p_text(said.p_reproduced),
                "" if said.questions is None else f"{said.questions:,}",
            ]
        )
    columns = [
        "setting", "answers / clusters", "wrong", "PRR of heads",
        *(f"PRR, heads − {name}" for name in CONDITIONS), "verdict", "p of special (Holm)",
        "p of reproduced (Holm)", "questions needed to decide",
    ]  # fmt: skip
    return table(columns, rows)


def conditions_table(evidence: list[Evidence], correctness: str) -> Table:
    """PRR of every condition, beside the free baselines."""
    rows = []
    for one in controlled(evidence, correctness):
        for method in ("ASMI", "Sem-ASMI"):
            found = one.against(correctness, method, *FREE)
            heads = next(iter(found.values())).heads
            alone = [
                signed(found[name].condition) if name in found else ""
                for name in (*CONDITIONS, *FREE)
            ]
            rows.append([one.heads.label, method, signed(heads), *alone])
    return table(
        ["setting", "score", *(f"PRR of {n}" for n in ("heads", *CONDITIONS, *FREE))], rows
    )


def conditions_added_table(evidence: list[Evidence], correctness: str) -> Table:
    """Whether heads, and every condition, add to the free baselines."""
    rows = []
    for one in controlled(evidence, correctness):
        for method in ("ASMI", "Sem-ASMI"):
            runs = {"heads": one.heads, **one.conditions}
            shown = [
                one.heads.beyond_free(runs[name].score(method), correctness) if name in runs else ""
                for name in ("heads", *CONDITIONS)
            ]
            rows.append([one.heads.label, method, *shown])
    columns = [f"gain beyond free baselines, {name}: z (p)" for name in ("heads", *CONDITIONS)]
    return table(["setting", "score", *columns], rows)


def concentration_table(evidence: list[Evidence]) -> Table:
    """Effective heads beside those of noise, and how MI and entropy go with concentration."""
    rows = []
    for e in [e for e in evidence if e.run == "heads"]:
        keys = np.repeat(np.asarray(e.clusters), e.length)
        entropy = np.concatenate(e.column("asmi_entropy"))
        depths = [depth for depth in (60, 90) if f"z_d{depth}" in e.answers]
        for depth in depths:
            z, mi, own, null = (
                np.concatenate(e.column(f"{name}_d{depth}"))
                for name in ("z", "asmi_mi", "effective_heads", "null_effective_heads")
            )
            known = np.isfinite(z)
            high = np.flatnonzero(known)[high_stratum(mi[known])]
            excess = (own - null)[high]
            fewer = cluster_interval(
                lambda chosen, excess=excess: float(excess[chosen].mean()), list(keys[high])
            )
            coupled = criticality_coupling(mi[known], entropy[known], z[known], list(keys[known]))
            rows.append(
                [e.label, f"{depth} %", f"{len(e.answers)} / {known.sum()}",
                 f"{own[high].mean():.2f}", f"{null[high].mean():.2f}", signed(fewer),
                 *(signed(x) for x in (coupled.information, coupled.entropy, coupled.difference))]
            )  # fmt: skip
    columns = [
        "setting", "depth", "answers / tokens", "effective heads at high MI",
        "effective heads of noise", "effective heads, difference", "rank correlation of MI and z",
        "rank correlation of entropy and z", "rank correlations, difference",
    ]  # fmt: skip
    return table(columns, rows)


def probe_table(_: list[Evidence], kept: str = "causal_probe", sign: str = "") -> Table:
    """What the causal probe found, in percent of tokens, from the report's own tables.

    Args:
        kept: which of them, kept beside the evidence as MODEL/SETTING.KEPT.csv.
        sign: "+" for differences.
    """
    rows, columns = [], [""]
    for file in sorted(EVIDENCE.glob(f"*/*.{kept}.csv")):
        found = pd.read_csv(file).iloc[:, 1:]  # all but the setting
        numbers = [name for name in found if re.fullmatch(r"k = \d+", name)]
        named = [name for name in found if not name.startswith("k = ") and name not in OWN_MASKS]
        label = f"{MODELS[file.parent.name].name}, {SETTINGS[file.name.split('.')[0]]}"
        columns = ["setting", *named, *numbers]
        for row in found.to_dict("records"):
            shown = (
                "{:{s}.0f} [{:{s}.0f}, {:{s}.0f}]".format(
                    *(row[name + end] for end in ("", " low", " high")), s=sign
                ).replace("-", "−")
                for name in numbers
            )
            rows.append([label, *(str(row[name]).rstrip("†") for name in named), *shown])
    return table(columns, rows)
