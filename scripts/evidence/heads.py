"""Tables of the page on heads: which heads carry the disagreement, and control conditions."""

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
    p_text,
    runs_like,
    signed,
    table,
)

from lm_polygraph_asmi.analysis import Clustered, cluster_interval
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
"""As in the report."""
FREE = ("MSP", "Perplexity")


@dataclass(frozen=True)
class Controlled:
    """Answers of a setting that were also scored under control conditions.

    Attributes:
        heads: the answers, scored with masked heads.
        conditions: name -> the same answers in the same order.
    """

    heads: Evidence
    conditions: Mapping[str, Evidence]

    @classmethod
    def of(cls, e: Evidence, evidence: list[Evidence]) -> "Controlled | None":
        """None where no condition was run.

        Raises:
            ValueError: conditions have different answers.
        """
        conditions = {condition.run: condition for condition in runs_like(e, evidence, CONDITIONS)}
        if not conditions:
            return None
        shared = [e.shared_with(condition) for condition in conditions.values()]
        if any(list(run.answers["id"]) != list(shared[0].answers["id"]) for run in shared):
            raise ValueError(
                f"{e.label}: conditions have different answers: {', '.join(conditions)}"
            )
        return cls(shared[0], conditions)

    def against(self, correctness: str, method: str, *free: str) -> dict[str, ConditionComparison]:
        """Compare heads with each condition, and with the free baselines that are named."""
        scores = {name: condition.score(method) for name, condition in self.conditions.items()}
        scores |= {name: self.heads.signals[name] for name in free}
        answers = self.heads.labels(correctness, RESAMPLES)
        return condition_comparisons(self.heads.score(method), scores, answers)


def controlled(evidence: list[Evidence], correctness: str) -> list[Controlled]:
    settings = (Controlled.of(e, evidence) for e in labelled(evidence, correctness))
    return [setting for setting in settings if setting is not None]


def verdict_table(evidence: list[Evidence], correctness: str, method: str = "Sem-ASMI") -> Table:
    """PRR of heads minus that of each condition at matched effect, and the rule's verdict."""
    settings = controlled(evidence, correctness)
    compared = [setting.against(correctness, method) for setting in settings]
    rows = []
    for setting, conditions, verdict in zip(settings, compared, verdicts(compared), strict=True):
        gaps = [
            signed(conditions[name].difference) if name in conditions else "" for name in CONDITIONS
        ]
        outcome = verdict.outcome + (f" ({verdict.condition})" if verdict.condition else "")
        rows.append(
            [
                setting.heads.label,
                setting.heads.size,
                str(int(setting.heads.wrong(correctness).sum())),
                signed(next(iter(conditions.values())).heads),
                *gaps,
                outcome,
                p_text(verdict.p_special),
                p_text(verdict.p_reproduced),
                "" if verdict.questions is None else f"{verdict.questions:,}",
            ]
        )
    columns = [
        "setting", "answers / clusters", "wrong", "PRR of heads",
        *(f"PRR, heads − {name}" for name in CONDITIONS), "verdict", "p of special (Holm)",
        "p of reproduced (Holm)", "questions needed to decide",
    ]  # fmt: skip
    return table(columns, rows)


def conditions_table(evidence: list[Evidence], correctness: str) -> Table:
    """PRR of heads, every condition and the free baselines."""
    rows = []
    for setting in controlled(evidence, correctness):
        for method in ("ASMI", "Sem-ASMI"):
            compared = setting.against(correctness, method, *FREE)
            heads = next(iter(compared.values())).heads
            prr = [
                signed(compared[name].condition) if name in compared else ""
                for name in (*CONDITIONS, *FREE)
            ]
            rows.append([setting.heads.label, method, signed(heads), *prr])
    return table(
        ["setting", "score", *(f"PRR of {n}" for n in ("heads", *CONDITIONS, *FREE))], rows
    )


def conditions_added_table(evidence: list[Evidence], correctness: str) -> Table:
    """Whether heads, and every condition, add to the free baselines."""
    rows = []
    for setting in controlled(evidence, correctness):
        for method in ("ASMI", "Sem-ASMI"):
            runs = {"heads": setting.heads, **setting.conditions}
            scores = {name: run.score(method) for name, run in runs.items()}
            shown = [
                setting.heads.beyond_free(scores[name], correctness) if name in scores else ""
                for name in ("heads", *CONDITIONS)
            ]
            rows.append([setting.heads.label, method, *shown])
    columns = [f"gain beyond free baselines, {name}: z (p)" for name in ("heads", *CONDITIONS)]
    return table(["setting", "score", *columns], rows)


def concentration_table(evidence: list[Evidence]) -> Table:
    """Effective heads against noise, and rank correlations of MI and entropy with concentration."""
    rows = []
    for e in [e for e in evidence if e.run == "heads"]:
        keys = np.repeat(np.asarray(e.clusters), e.length)
        entropy = np.concatenate(e.column("asmi_entropy"))
        depths = [depth for depth in (60, 90) if f"z_d{depth}" in e.answers]
        for depth in depths:
            z, mi, effective, null = (
                np.concatenate(e.column(f"{name}_d{depth}"))
                for name in ("z", "asmi_mi", "effective_heads", "null_effective_heads")
            )
            known = np.isfinite(z)
            high = np.flatnonzero(known)[high_stratum(mi[known])]
            excess = (effective - null)[high]
            difference = cluster_interval(
                lambda chosen, excess=excess: float(excess[chosen].mean()),
                Clustered(list(keys[high])),
            )
            coupled = criticality_coupling(mi[known], entropy[known], z[known], list(keys[known]))
            rows.append(
                [e.label, f"{depth} %", f"{len(e.answers)} / {known.sum()}",
                 f"{effective[high].mean():.2f}", f"{null[high].mean():.2f}", signed(difference),
                 *(signed(x) for x in (coupled.information, coupled.entropy, coupled.difference))]
            )  # fmt: skip
    columns = [
        "setting", "depth", "answers / tokens", "effective heads at high MI",
        "effective heads of noise", "effective heads, difference", "rank correlation of MI and z",
        "rank correlation of entropy and z", "rank correlations, difference",
    ]  # fmt: skip
    return table(columns, rows)


def probe_table(_: list[Evidence], kept: str = "causal_probe", sign: str = "") -> Table:
    """Results of the causal probe, in percent of tokens, from the tables of the report.

    Args:
        kept: name of the report's table, saved as docs/evidence/MODEL/SETTING.KEPT.csv.
        sign: "+" for differences.
    """
    rows, columns = [], [""]
    for file in sorted(EVIDENCE.glob(f"*/*.{kept}.csv")):
        report = pd.read_csv(file).iloc[:, 1:]  # all but the setting
        numbers = [name for name in report if re.fullmatch(r"k = \d+", name)]
        texts = [name for name in report if not name.startswith("k = ") and name not in OWN_MASKS]
        label = f"{MODELS[file.parent.name].name}, {SETTINGS[file.name.split('.')[0]]}"
        columns = ["setting", *texts, *numbers]
        for row in report.to_dict("records"):
            shown = (
                "{:{s}.0f} [{:{s}.0f}, {:{s}.0f}]".format(
                    *(row[name + end] for end in ("", " low", " high")), s=sign
                ).replace("-", "−")
                for name in numbers
            )
            rows.append([label, *(str(row[name]).rstrip("†") for name in texts), *shown])
    return table(columns, rows)
