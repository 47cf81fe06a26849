"""Tables of the page on controls: other parts perturbed instead of heads."""

from collections.abc import Mapping
from dataclasses import dataclass

from evidence import CONDITIONS, Evidence, Table, labelled, p_text, runs_like, signed, table

from lm_polygraph_asmi.experiments.analysis import (
    ConditionComparison,
    condition_comparisons,
    verdicts,
)

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
