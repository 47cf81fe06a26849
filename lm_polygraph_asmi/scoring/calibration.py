"""Calibrations: percentile, probability of error and decision for the score of an answer."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from lm_polygraph_asmi.analysis.calibration import (
    Reliability,
    Step,
    calibrate,
    held_out_brier,
    probability_at,
    step_at,
)
from lm_polygraph_asmi.analysis.clusters import Interval, text_clusters, wilson_interval
from lm_polygraph_asmi.analysis.drift import Drift, drifts
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.signals import RankedSignal
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import parse_json, read_json, write_whole
from lm_polygraph_asmi.scoring.decision import SIGNALS, Decision
from lm_polygraph_asmi.scoring.provenance import made_from, prompt_format

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult


FORMAT = 4
ADVICE = (
    "write a new one with `polygraph_asmi calibrate` (labelled answers) or "
    "`polygraph_asmi export` (finished run)"
)
DERIVED = ("num_masks", "mask_rate")
"""Settings derived from the model's number of heads if None."""
ROWS = (".jsonl", ".jsonlines", ".ndjson")
"""Suffixes of files with scored rows, whose parts may be labelled."""
NOT_RECORDED = "not recorded"
"""Name of the model of a run without a manifest."""
QUANTITIES = {"prompt_tokens": "The number of prompt tokens", "msp": "The answer's MSP"}
"""Quantities that need no labels -> their names in sentences."""
FINGERPRINTS = {
    "weights": "weights or their precision differ",
    "tokenizer": "tokenizer, chat template or end tokens differ",
}
"""Messages for settings whose values are hashes of the model's."""
SYSTEM = {"system": "the system message differs"}
CIRCUMSTANCES = ("layer", "attention_in_use", "samples", "prompt_format", *FINGERPRINTS, *SYSTEM)
"""Settings to compare besides those of `ASMIConfig.score_key`."""


@dataclass(frozen=True)
class Calibration:
    """Interprets a score by a finished run, or by labelled answers or parts of answers.

    Attributes:
        name: model and dataset.
        method: name of the score in that run.
        model: name of its model.
        scores: (n,) its scores, ascending, nats; higher = more fragile.
        median, msp_median: of the score and of the answers' negative log-likelihood, nats.
        prr: PRR of the score on that run, with its 95 % interval over clusters.
        calibration: steps of an isotonic fit of the errors, ascending; see `calibrate`.
        brier: Brier scores of the calibrated probability and of the constant share of errors, on
            held-out answers, lower = better; see `held_out_brier`.
        quality: metric of the correctness label (wrong: below 0.5).
        n, clusters, errors: answers, clusters, wrong answers.
        settings: as in `Score.settings`.
        masking_response: mean MI_t of its tokens, nats; None if not saved.
        decision: signal and threshold that decide accept or abstain; None without.
        signals: how well each signal ranks the errors, by name; see `scoring.calibrate`.
        recommendation: which signal to use, in a sentence.
        other_thresholds: thresholds for other risks and signals: to display, not to choose from.
        reliability: the held-out reliability diagram of the probability, see
            `analysis.Reliability`; None if there were too few answers.
        calibration_error: debiased, of the same held-out probabilities, lower = better.
        reference_range: name -> sorted values of quantities without labels, to detect drift.
        unit: what the labels are of, "answers" or "parts" of answers. If parts, read "part" for
            "answer" above; clusters are those of the prompts.

    Example:
        >>> run = Calibration.read("RUN")  # the folder of a finished run
        >>> run.n, run.unit, run.percentile(run.median)
        (60, 'answers', 50.0)
        >>> run.save("calibration.json")
        >>> Calibration.load("calibration.json") == run
        True
    """

    name: str
    method: str
    model: str
    scores: list[float]
    median: float
    msp_median: float
    prr: Interval
    calibration: list[Step]
    brier: tuple[float, float] | None
    quality: str
    n: int
    clusters: int
    errors: int
    settings: dict[str, Any]
    masking_response: float | None = None
    decision: Decision | None = None
    signals: dict[str, RankedSignal] = field(default_factory=dict)
    recommendation: str = ""
    other_thresholds: tuple[Decision, ...] = ()
    reliability: dict[str, Any] | None = None
    calibration_error: float | None = None
    reference_range: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "answers"

    @property
    def config(self) -> ASMIConfig:
        """Settings to score other answers in the same way, without those of the machine."""
        machine = ASMIConfig.names("machine")
        settings = {name: value for name, value in self.settings.items() if name not in machine}
        return ASMIConfig.from_dict(settings)

    @classmethod
    def read(cls, path: str | Path, **settings: Any) -> "Calibration":
        """Load a saved calibration (.json), or fit one on a finished run or on rows.

        Args:
            path: .json; manager file or folder of a run; or .jsonl rows, see `from_spans`.
            **settings: settings that the score must have.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another kind of file, no run or several, no such score, only right or only
                wrong answers, or a score with other settings.
        """
        if not str(path):
            raise ValueError(
                "calibration: expected a path, got an empty one. Leave it out, or name a run"
            )
        path = Path(path)
        if path.suffix.lower() in ROWS or path.suffix == ".json":
            if not path.exists():
                raise FileNotFoundError(
                    f"{path}: no such calibration: `polygraph_asmi calibrate` or `export` writes it"
                )
            calibration = cls.load(path) if path.suffix == ".json" else cls.from_spans(path)
            calibration.check_wanted(settings)
            return calibration
        return cls.from_run(path, **settings)

    def check_wanted(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if the score has other settings than these."""
        different = _differences(self.config, _override(self.config, settings))
        if different:
            raise ValueError(
                f"settings differ from the calibration {self.name} ({different}): leave them "
                "out to use the calibration's, or pass a calibration made with them"
            )

    @classmethod
    def from_run(
        cls, path: str | Path, metric: str | None = None, **settings: Any
    ) -> "Calibration":
        """Fit on all answers of a finished run with finite scores.

        Args:
            metric: metric of the correctness label; None: AlignScore, or the run's first.
            **settings: of the score, such as `method="asmi"`. Settings left out: those of
                the run; of several methods, Sem-ASMI.

        Raises:
            FileNotFoundError: no such run.
            ValueError: no run or several, no such score or metric, or only right or only wrong
                answers.
        """
        from lm_polygraph_asmi.results.run_groups import load_run_groups, of_config

        depth = settings.get("depth", ASMIConfig.depth)
        group, *others = load_run_groups([path], metric, depth)
        if others:
            raise ValueError(
                f"{path}: expected one run, got {1 + len(others)} over different answers. Name one"
            )
        required = {"method": ASMIConfig.method} | ASMIConfig.check_names(settings)

        def fits(config: ASMIConfig) -> bool:
            return _override(config, required).score_key() == config.score_key()

        if not group.methods:
            raise ValueError(
                f"{path} records no score's settings: expected a manifest, which runs with the "
                "callback RunRecord write"
            )
        method = next((name for name, config in group.methods.items() if fits(config)), None)
        if method is None:
            nearest = min(
                group.methods, key=lambda name: group.methods[name].method != required["method"]
            )
            config = group.methods[nearest]
            raise ValueError(
                f"{path}: expected a score with the settings {_listed(settings)}; {nearest} has "
                f"others ({_differences(config, _override(config, required))}). Leave these "
                "settings out to use the run's, or name another run"
            )
        config = group.methods[method]
        group = of_config(group, config)
        scores = group.score(method)
        tokens = group.tokens("asmi_log_likelihood")  # MSP as `score` computes it
        msp = group.msp if tokens is None else np.array([-answer.sum() for answer in tokens])
        if msp is None:
            raise ValueError(f"{path}: expected saved MSP or asmi_log_likelihood, got neither")
        recorded = group.run.recorded("config") if group.run.manifest else {}
        # LM-Polygraph makes a user message of each prompt.
        prompts = prompt_format([] if recorded.get("instruct") else "")
        run_settings = group.settings()
        if run_settings is None:
            raise ValueError(f"{path} has not saved asmi_settings: its masks are unknown")
        return cls.fitted(
            path,
            scores,
            group.wrong,
            group.quality,
            group.clusters,
            msp,
            name=group.label,
            method=method,
            model=str(group.run.recorded("model").get("path") or NOT_RECORDED),
            labelled_by=group.metric,
            settings=run_settings | config.besides_masks() | prompts,
            masking_response=None
            if group.mi_tokens is None
            else float(np.concatenate(group.mi_tokens).mean()),
        )

    @classmethod
    def from_spans(cls, path: str | Path) -> "Calibration":
        """Fit on labelled parts of answers.

        Args:
            path: JSON lines of `polygraph_asmi score --out`, each with a list `spans_correct`:
                true, false, or null (unlabelled) for each of its `spans`. `offsets` of the input
                choose the parts.

        Raises:
            FileNotFoundError: no such file.
            ValueError: rows without spans or labels, of several models or settings, or only right
                or only wrong parts.
        """
        path = Path(path)
        rows = _labelled_rows(path)
        (first, *others) = rows
        config = ASMIConfig.from_dict(first["settings"])
        prompts = [row["prompt"] for row in rows]
        keys = text_clusters([p if isinstance(p, str) else json.dumps(p) for p in prompts])
        labelled = [
            (span, not correct, cluster)
            for row, cluster in zip(rows, keys, strict=True)
            for span, correct in zip(row["spans"], row["spans_correct"], strict=True)
            if correct is not None
        ]
        if not labelled:
            raise ValueError(f"no part of an answer in {path} has a label")
        spans = [span for span, _, _ in labelled]
        wrong = np.array([label for _, label, _ in labelled], dtype=bool)
        calibration = cls.fitted(
            path,
            np.array([span["u"] for span in spans]),
            wrong,
            (~wrong).astype(float),
            [cluster for _, _, cluster in labelled],
            np.array([span["tokens"] * span["perplexity"] for span in spans]),
            name=path.name,
            method=" ".join([config.symbol, "of parts", *config.describe("aggregation")]),
            model=first["model"],
            labelled_by="their labels",
            settings=first["settings"] | prompt_format(first["prompt"]),
            unit="parts",
        )
        for row in others:
            described = row["settings"] | prompt_format(row["prompt"]) | {"model": row["model"]}
            other = calibration.other_settings(described)
            if other:
                raise ValueError(
                    f"rows {first['row']} and {row['row']} of {path} have different settings "
                    f"({'; '.join(other)}): score all rows with the same"
                )
        return calibration

    @classmethod
    def fitted(
        cls,
        path: str | Path,
        scores: Float[np.ndarray, " n"],
        wrong: Bool[np.ndarray, " n"],
        quality: Float[np.ndarray, " n"],
        clusters: Sequence[str],
        msp: Float[np.ndarray, " n"],
        *,
        labelled_by: str,
        method: str,
        unit: str = "answers",
        **described: Any,
    ) -> "Calibration":
        """Fit answers or parts; quality: higher = better; scores and MSP in nats."""
        from lm_polygraph_asmi.analysis.comparison import prr_intervals

        # Answers that are all right may give a threshold; a ranking of errors is undefined.
        if wrong.all() or (unit == "parts" and not wrong.any()):
            kind = "wrong" if wrong.any() else "right"
            raise ValueError(
                f"{path}: expected right and wrong {unit}, got {len(wrong)}, all {kind}"
            )
        answers = Labelled(wrong, clusters, quality)
        intervals, _ = prr_intervals({method: scores}, answers)
        return cls(
            method=method,
            scores=np.sort(scores).tolist(),
            median=float(np.median(scores)),
            msp_median=float(np.median(msp)),
            prr=intervals[method],
            calibration=calibrate(scores, wrong),
            brier=held_out_brier(scores, answers),
            quality=labelled_by,
            n=len(answers),
            clusters=answers.n_clusters,
            errors=int(wrong.sum()),
            unit=unit,
            **described,
        )

    def save(self, path: str | Path) -> None:
        """Write or replace it as JSON.

        Raises:
            ValueError: another program is writing this file.
        """
        write_whole(path, self.to_json())

    def to_json(self) -> str:
        """What `save` writes."""
        from pydantic_core import to_json

        return to_json({"format": FORMAT, **vars(self)}, indent=1, inf_nan_mode="null").decode()

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another kind of file.
        """
        from pydantic import TypeAdapter, ValidationError

        try:
            content = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is not a saved calibration: {error}") from error
        try:
            if "format" not in content:
                raise ValueError(
                    f"{path} is not a saved calibration: name a file that `polygraph_asmi "
                    "calibrate`, `export` or Calibration.save wrote, or a run's folder"
                )
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path}: expected a calibration of format {FORMAT}: {ADVICE}")
            for bounds in (content["prr"], *chain(*content["signals"].values())):
                bounds[:] = [math.nan if bound is None else bound for bound in bounds]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a saved calibration: {error!r}") from error
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]]
            raise ValueError(f"{path} is not a saved calibration: {'; '.join(wrong)}") from error

    @property
    def identity(self) -> str:
        """Hash of all values."""
        from pydantic_core import to_json

        return hashlib.sha256(to_json(vars(self), inf_nan_mode="null")).hexdigest()

    @property
    def ranks(self) -> bool:
        """Whether the score ranks this run's errors: the whole PRR interval is above 0."""
        return self.prr.low > 0

    def other_settings(self, settings: dict[str, Any]) -> list[str]:
        """Differences between the settings of a score and of this run, in words."""
        messages = FINGERPRINTS | SYSTEM
        run_key, score_key = _compared_settings(self.settings), _compared_settings(settings)
        differences = [
            messages.get(name, f"{name} {run_key[name]} there, {score_key[name]} here")
            for name in run_key
            if name in score_key and run_key[name] != score_key[name]
        ]
        names = [*self.config.score_key(), "prompt_format"]
        missing = [name for name in names if name not in (*self.settings, "stop")]
        if missing:
            differences.append(f"{', '.join(missing)} not recorded there: {ADVICE}")
        unknown = [name for name in FINGERPRINTS if name in self.settings and name not in settings]
        if unknown:
            differences.append(
                f"{', '.join(unknown)} not recorded here: score again with this calibration"
            )
        ends = self.settings.get("answer_ends", ())
        if ends and (end := settings.get("answer_end", ends[0])) not in ends:
            differences.append(f"answers {' or '.join(ends)} there, {end} here")
        run_model, score_model = Path(self.model).name, Path(settings.get("model", "")).name
        if score_model and run_model == NOT_RECORDED:
            differences.append(f"model not recorded there: {ADVICE}")
        elif run_model and score_model and run_model != score_model:
            differences.append(f"model {run_model} there, {score_model} here")
        return differences

    def error_probability_interval(self, score: float) -> Interval | None:
        """`error_probability` with the 95 % Wilson interval of its step; None if not `ranks`.

        The interval treats answers as independent: with clusters it is too narrow.
        """
        if not self.ranks:
            return None
        step = step_at(self.calibration, score)
        low, high = wilson_interval(step.errors, step.n)[1:]
        return Interval(probability_at(self.calibration, score), low, high)

    def percentile(self, score: float) -> float | None:
        """Share of this run's answers with a lower score, in %; None if not `ranks`."""
        if not self.ranks:
            return None
        return 100 * float(np.searchsorted(self.scores, score, side="left")) / self.n

    def error_probability(self, score: float) -> float | None:
        """Probability of error at this score (nats), never 0 or 1; None if not `ranks`."""
        return probability_at(self.calibration, score) if self.ranks else None

    @property
    def ground(self) -> str:
        """The run in a line: answers, errors, PRR with its interval."""
        return (
            f"{self.name}: {self.n} {self.unit}, {self.errors} wrong by {self.quality}, PRR of "
            f"{self.method} {_interval_text(self.prr)}"
        )

    @property
    def brier_sentence(self) -> str:
        """Brier score of the probability on held-out answers; empty if it is unknown."""
        if self.brier is None:
            return ""
        calibrated, constant = self.brier
        return (
            f"Brier score on held-out {self.unit} {calibrated:.3f}; always predicting the overall "
            f"share of errors scores {constant:.3f} (lower = better)"
            + (": no gain. " if calibrated >= constant else ". ")
        )

    @property
    def threshold_table(self) -> "pd.DataFrame":
        """One row per signal and risk: threshold, coverage, answers needed.

        Each risk guarantee holds for a row chosen in advance; picking the best row voids it.
        """
        import pandas as pd

        columns = ["signal", "risk", "confidence", "threshold", "coverage", "answers_needed"]
        table = [
            {"signal": SIGNALS[decision.signal]}
            | {name: getattr(decision.guarantee, name) for name in columns[1:]}
            for decision in self.other_thresholds
        ]
        return pd.DataFrame(table, columns=columns)

    @property
    def diagram(self) -> Reliability | None:
        """`reliability` as `report.figures` draws it."""
        if self.reliability is None:
            return None
        columns: dict[str, Any] = {
            name: np.asarray(value) if isinstance(value, list) else value
            for name, value in self.reliability.items()
        }
        return Reliability(**columns)

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per calibration step: lowest score (nats), answers, errors, error rate.

        `low` and `high`: 95 % Wilson interval, which treats answers as independent.
        """
        import pandas as pd

        rates = [wilson_interval(step.errors, step.n) for step in self.calibration]
        table = [{**step._asdict(), "rate": r.value, "low": r.low, "high": r.high}
                 for step, r in zip(self.calibration, rates, strict=True)]  # fmt: skip
        return pd.DataFrame(table)

    def out_of_range(self, values: Mapping[str, float | None]) -> list[str]:
        """Values of one answer outside the calibration's range, in sentences.

        A low MSP is none if MSP decides: the answer is more certain than those that were tested.
        Else it may be shorter than these.
        """
        warnings = []
        decider = None if self.decision is None else self.decision.signal
        for name, value in values.items():
            reference = self.reference_range.get(name)
            if not reference or value is None or (name == decider and value < reference[0]):
                continue
            if not reference[0] <= value <= reference[-1]:
                warnings.append(
                    f"{QUANTITIES[name]} ({value:.4g}) is outside the calibration's range, "
                    f"{reference[0]:.4g} to {reference[-1]:.4g}: the risk guarantee may not hold "
                    "for such questions. To be safe, abstain."
                )
        return warnings

    def drifts(self, scores: Sequence[Any]) -> list[Drift]:
        """Tests whether the distributions of these answers differ from the calibration's.

        Args:
            scores: with `score`, `msp` and `prompt_tokens`, as a `Score`.
        """
        current: dict[str, list[float]] = {"score": [score.score for score in scores]}
        current["msp"] = [score.msp for score in scores]
        current["prompt_tokens"] = [score.prompt_tokens for score in scores if score.prompt_tokens]
        return drifts(self.reference_range, current)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """All results, for a terminal."""
        from rich.table import Table
        from rich.text import Text

        yield Text(f"{self.ground}; {self.clusters} clusters.\n")
        if self.signals:
            table = Table("signal", "PRR", "AUROC", "AUGRC (lower = better)", box=None,
                          header_style="dim")  # fmt: skip
            for name, signal in self.signals.items():
                table.add_row(name, *map(_interval_text, signal))
            yield table
        if self.recommendation:
            yield Text(f"{self.recommendation}\n")
        yield Text(f"Error rate by {self.method}, with 95 % Wilson intervals:")
        table = Table("from (nats)", "answers", "wrong", "rate", box=None, header_style="dim")
        for row in self.steps.itertuples():
            rate = _interval_text(Interval(row.rate, row.low, row.high))
            table.add_row(f"{row.start:.4f}", str(row.n), str(row.errors), rate)
        yield table
        if self.reliability is not None:
            yield Text(
                f"{self.brier_sentence}Calibration error {self.calibration_error:.3f} (debiased; "
                f"test for miscalibration: p = {self.reliability['p_value']:.2g})."
            )
        if self.other_thresholds:
            yield Text(
                "\nShare of answers accepted, by risk (-: no threshold). For planning only: "
                "choosing from this table voids the guarantee."
            )
            guarantees = {(d.signal, d.guarantee.risk): d.guarantee for d in self.other_thresholds}
            risks = list(dict.fromkeys(risk for _, risk in guarantees))
            table = Table("signal", *(f"{risk:.0%}" for risk in risks), box=None,
                          header_style="dim")  # fmt: skip
            for kind in dict.fromkeys(signal for signal, _ in guarantees):
                shares = [
                    "-" if guarantee.threshold is None else f"{guarantee.coverage:.0%}"
                    for (signal, _), guarantee in guarantees.items()
                    if signal == kind
                ]
                table.add_row(SIGNALS[kind], *shares)
            yield table
        if self.decision is not None:
            guarantee = self.decision.guarantee
            if guarantee.threshold is None:
                yield Text(
                    f"\nNo threshold {self.decision}. Abstain on every answer. Each further "
                    f"attempt adds up to {100 * (1 - guarantee.confidence):g}% to the probability "
                    "that the guarantee fails."
                )
            else:
                yield Text(
                    f"\nDecision: accept an answer if its {SIGNALS[self.decision.signal]} is at "
                    f"most {guarantee.threshold:.4g} nats.\n"
                    f"Risk guarantee: with {100 * guarantee.confidence:g}% confidence, at most "
                    f"{100 * guarantee.risk:g}% of accepted answers are wrong.\n"
                    f"Of these {guarantee.answers} answers, {guarantee.coverage:.0%} are accepted; "
                    f"{guarantee.error_rate:.1%} of the accepted ones are wrong."
                )

    def __str__(self) -> str:
        """All results, as `polygraph_asmi calibrate` prints them."""
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        console = Console(
            file=text, width=80, force_terminal=False, force_jupyter=False, color_system=None
        )
        console.print(self, highlight=False)
        return "\n".join(map(str.rstrip, text.getvalue().splitlines()))

    def mismatch(self, settings: dict[str, Any]) -> str | None:
        """Why there is no verdict on a score with these settings; None if there is one."""
        differences = self.other_settings(settings)
        if differences:
            return (
                f"the calibration used other settings ({'; '.join(differences)}). Score with "
                "those, or pass a calibration made with these."
            )
        if self.prr.high < 0:
            return (
                f"on the calibration {self.unit} ({self.ground}) the score has a negative PRR: it "
                "ranks errors worse than chance."
            )
        if not self.ranks and math.isnan(self.prr.low):
            return (
                "the PRR has no interval: there are too few clusters, wrong or right calibration "
                f"{self.unit} ({self.ground})."
            )
        if not self.ranks:
            return (
                f"on the calibration {self.unit} ({self.ground}) there is no evidence that the "
                "score ranks errors: the PRR interval includes 0."
            )
        return None

    def verdict(self, score: float, settings: dict[str, Any]) -> list[str]:
        """Percentile and probability of error of a score (nats), in sentences."""
        reason = self.mismatch(settings)
        if reason is not None:
            return [f"No verdict: {reason}"]
        step = step_at(self.calibration, score)
        chance = probability_at(self.calibration, score)
        shown = (
            "below 0.01" if chance < 0.005 else "above 0.99" if chance > 0.995 else f"{chance:.2f}"
        )
        rate = wilson_interval(step.errors, step.n)
        lines = [
            f"By {self.method}: higher than {self.percentile(score):.0f} % of the calibration "
            f"{self.unit}; probability of error {shown} [{rate.low:.2f}, {rate.high:.2f}] "
            f"(smoothed; wrong: {step.errors} of the {step.n} calibration {self.unit} with similar "
            f"scores); overall {self.errors / self.n:.2f}. "
            f"{self.brier_sentence}Calibration: {self.ground}."
        ]
        if not self.scores[0] <= score <= self.scores[-1]:
            lines.append("The score is outside the range of the calibration.")
        return lines


def _interval_text(interval: Interval) -> str:
    if math.isnan(interval.value):
        return "undefined"
    if math.isnan(interval.low):
        return f"{interval.value:.2f} (no interval)"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


CalibrationLike: TypeAlias = "Calibration | str | Path | Sequence[Calibration | str | Path] | None"
"""What `score` accepts as `calibration`."""


def of_answers_and_parts(
    calibration: CalibrationLike, settings: Mapping[str, Any]
) -> tuple[Calibration | None, Calibration | None]:
    """The calibration of answers and that of parts; None for each not passed.

    Args:
        calibration: as for `score`.
        settings: explicit settings of the score.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a calibration, two of a kind, or one with other settings.
    """
    sources = [calibration] if isinstance(calibration, str | Path | Calibration) else calibration
    by_unit: dict[str, Calibration] = {}
    if not (sources is None or isinstance(sources, list | tuple)):
        sources = [sources]  # type: ignore[list-item]  # raises below
    for source in sources or ():
        if not isinstance(source, str | Path | Calibration):
            raise ValueError(
                "calibration: expected a Calibration, or the path of a saved one, of a finished "
                f"run or of labelled rows; got {source!r:.80}"
            )
        run = source if isinstance(source, Calibration) else Calibration.read(source, **settings)
        run.check_wanted(settings)
        if run.unit in by_unit:
            raise ValueError(
                "expected at most one calibration of answers and one of parts, got two of "
                f"{run.unit}: {by_unit[run.unit].name} and {run.name}"
            )
        by_unit[run.unit] = run
    answers, parts = by_unit.get("answers"), by_unit.get("parts")
    different = _differences(parts.config, answers.config) if answers and parts else ""
    if different:
        raise ValueError(
            f"the calibrations of parts (there) and of answers (here) differ: {different}. "
            "Score both with the same settings"
        )
    return answers, parts


def settled(
    calibration: CalibrationLike, config: ASMIConfig | None, settings: Mapping[str, Any]
) -> tuple[ASMIConfig, Calibration | None, Calibration | None]:
    """The settings of a score, and its calibrations of answers and of parts.

    Settings in neither `config` nor `settings` are the calibration's, else the defaults. A
    config sets all its settings, except stop strings, number of masks and rate if None.

    Raises:
        FileNotFoundError, TypeError, ValueError: as `of_answers_and_parts` and `ASMIConfig`.
    """
    explicit = ASMIConfig.check_names(settings)
    unset: list[str] = []
    if config is not None:
        values = config.to_dict("masks", "score")
        unset = [n for n in ("stop", *DERIVED) if values[n] is None and n not in explicit]
        explicit = {n: value for n, value in values.items() if n not in unset} | explicit
    answers, parts = of_answers_and_parts(calibration, explicit)
    run = answers or parts
    base = config or ASMIConfig()
    if run is not None:
        of_run = run.config
        base = of_run if config is None else base.replace(**{n: getattr(of_run, n) for n in unset})
    return base.replace(**settings), answers, parts


def _labelled_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of `score --out` with a label for each span."""
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            labels, parts = row["spans_correct"], len(row["spans"])
            fit = len(labels) == parts and all(label in (True, False, None) for label in labels)
            _ = [row[name] for name in ("row", "prompt", "model", "settings")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path}: expected a line of `polygraph_asmi score --out` with "
                f"`spans_correct`, a list of true or false for its `spans`; got {error!r}"
            ) from error
        if not fit:
            raise ValueError(
                f"line {number} of {path}: expected `spans_correct` as a list of true, false or "
                f"null, one for each of its {parts} `spans`; got {labels!r:.60}"
            )
        if not made_from(row):
            raise ValueError(
                f"line {number} of {path}: prompt, answer or settings differ from those of its "
                "scores, or an older release wrote it: score it again"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: expected at least one row, got none")
    return rows


def _override(config: ASMIConfig, settings: Mapping[str, Any]) -> ASMIConfig:
    """A config with these settings, except those derived in either."""
    explicit = {
        name: value
        for name, value in settings.items()
        if name not in DERIVED or None not in (value, getattr(config, name))
    }
    return config.replace(**explicit)


def _differences(config_there: ASMIConfig, config_here: ASMIConfig) -> str:
    """Settings that differ and change the score, in words."""
    key_there, key_here = config_there.score_key(), config_here.score_key()
    return "; ".join(
        f"{name} {key_there[name]!r} there, {value!r} here"
        for name, value in key_here.items()
        if value != key_there.get(name, value)
    )


def _compared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that two scores must share, among those saved."""
    key = ASMIConfig.key_of({"method": ASMIConfig.method} | dict(settings))
    return key | {n: settings[n] for n in CIRCUMSTANCES if n in settings}


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "of Sem-ASMI"
