"""A finished run as a yardstick: where a score lies among its answers, and whether it may speak."""

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
from lm_polygraph_asmi.analysis.signals import Signal
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.scales import with_scale
from lm_polygraph_asmi.scoring.decision import SIGNALS, Decision

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult

    from lm_polygraph_asmi.scoring.result import Score

FORMAT = 3
ANEW = (
    "make a new one with `polygraph_asmi calibrate` from labelled answers, or with "
    "`polygraph_asmi calibration` from a finished run"
)
DERIVED = ("num_masks", "mask_rate")
"""Settings that follow from the model's heads where they are None."""
ROWS = (".jsonl", ".ndjson")
"""Names of files that hold scored rows, whose parts may be labelled."""
NOT_RECORDED = "not recorded"
"""In place of a model's name, where a run has no manifest."""
USUAL = {"prompt_tokens": "The number of the prompt's tokens", "msp": "The answer's MSP"}
"""What is said of quantities that need no labels."""
FINGERPRINTS = {
    "weights": "other weights there, or another precision of them",
    "tokenizer": "another tokenizer or chat template there",
}
"""What is said of settings whose values mean nothing to a reader."""


@dataclass(frozen=True)
class Calibration:
    """What `score` takes from a finished run, or from labelled parts of answers.

    Attributes:
        name: model and dataset.
        method: name of the score in that run.
        model: name of its model.
        scores: (n,) its scores, ascending, nats.
        median, msp_median: of the score and of the answers' negative log-likelihood, nats.
        prr: of the score on that run, with its 95 % interval over clusters.
        calibration: steps of an isotonic fit of the errors, ascending; see `calibrate`.
        brier: Brier scores of the calibrated probability and of the share of errors alone, on
            answers held out, lower = better; see `held_out_brier`.
        quality: metric by which its answers were judged wrong (below 0.5).
        n, clusters, errors: answers, clusters, wrong answers.
        settings: as in `Score.settings`.
        masking_response: mean MI_t of its tokens, nats; None where it was not saved.
        decision: the threshold below which answers are accepted; None where none was asked for.
        signals: how well each signal ranked the errors, by name; see `calibrate` of this folder.
        recommendation: which of them to use, in a sentence.
        other_thresholds: the thresholds of other risks and signals: for a table, not to choose
            from.
        reliability: the held-out reliability diagram of the probability, see
            `analysis.Reliability`; None where there were too few answers.
        calibration_error: debiased, of the same held-out probabilities, lower = better; with it.
        reference_range: name -> sorted values of what needs no labels, to tell whether answers
            still come as these did.
        unit: what was judged right or wrong, "answers" or "parts" of them. Where it is parts, read
            "part" for "answer" above; clusters are those of the answers' prompts.

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
    signals: dict[str, Signal] = field(default_factory=dict)
    recommendation: str = ""
    other_thresholds: tuple[Decision, ...] = ()
    reliability: dict[str, Any] | None = None
    calibration_error: float | None = None
    reference_range: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "answers"

    @property
    def config(self) -> ASMIConfig:
        """Settings for other answers to be scored as these were; of the machine none."""
        machine = ASMIConfig.names("machine")
        known = {name: of for name, of in self.settings.items() if name not in machine}
        return ASMIConfig.from_dict(known)

    @classmethod
    def read(cls, path: str | Path, **wanted: Any) -> "Calibration":
        """A saved calibration run (.json), or one made of a run (manager file or folder) or of
        rows.

        Args:
            path: rows end in .jsonl, see `from_spans`.
            **wanted: settings of the score.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: no run or several, no such score in it, no right or no wrong answers, or
                another kind of file; or it is of a score with other settings.
        """
        if not str(path):
            raise ValueError("calibration run is an empty path: leave it out, or name a run")
        path = Path(path)
        if path.suffix.lower() in ROWS or path.suffix == ".json":
            found = cls.load(path) if path.suffix == ".json" else cls.from_spans(path)
            found.check_wanted(wanted)
            return found
        return cls.from_run(path, **wanted)

    def check_wanted(self, wanted: Mapping[str, Any]) -> None:
        """Raise ValueError where this is of a score with other settings than are wanted."""
        different = _differences(self.config, with_scale(_with(self.config, wanted)))
        if different:
            raise ValueError(
                f"the calibration run {self.name} is of another score ({different}): leave these "
                "settings out, which takes the calibration run's, or take a calibration run made "
                "with them"
            )

    @classmethod
    def from_run(cls, path: str | Path, metric: str | None = None, **wanted: Any) -> "Calibration":
        """Fit on all answers of a finished run with finite scores.

        Args:
            metric: correctness labels the answers; None: AlignScore, or the first one the run has.
            **wanted: settings of the score, such as `method="asmi"`; of those that are left out the
                run's, and Sem-ASMI of several methods.

        Raises:
            FileNotFoundError: no such run.
            ValueError: no run or several, no such score or metric in it, no right or no wrong
                answers.
        """
        from lm_polygraph_asmi.results.run_groups import load_run_groups, of_config

        depth = wanted.get("depth", ASMIConfig.depth)
        group, *others = load_run_groups([path], metric, depth)
        if others:
            raise ValueError(f"{path} holds {1 + len(others)} runs over other answers: name one")
        asked = {"method": ASMIConfig.method} | ASMIConfig.check_names(wanted)

        def fits(config: ASMIConfig) -> bool:
            return _with(config, asked).score_key() == config.score_key()

        if not group.methods:
            raise ValueError(
                f"{path} says of no score which settings it had: only runs with the callback "
                "RunRecord write a manifest, which says it"
            )
        method = next((name for name, config in group.methods.items() if fits(config)), None)
        if method is None:
            raise ValueError(
                f"{path} has no score with the settings {_said(wanted)}, but {list(group.scores)}: "
                "give a run with these, or score with those it has"
            )
        config = group.methods[method]
        group = of_config(group, config)
        scores = group.score(method)
        own = group.tokens("asmi_log_likelihood")  # MSP as `score` computes it
        msp = group.msp if own is None else np.array([-answer.sum() for answer in own])
        if msp is None:
            raise ValueError(f"{path} has saved neither MSP nor asmi_log_likelihood")
        used = group.settings()
        if used is None:
            raise ValueError(f"{path} has not saved asmi_settings: nobody knows what masks it had")
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
            settings=used | config.besides_masks(),
            masking_response=None
            if group.mi_tokens is None
            else float(np.concatenate(group.mi_tokens).mean()),
        )

    @classmethod
    def from_spans(cls, path: str | Path) -> "Calibration":
        """Fit on labelled parts of answers.

        Args:
            path: JSON lines as `polygraph_asmi score --out` writes them, each with `wrong`: true,
                false, or null where nobody judged, for each of its `spans`. Parts whose labels
                were known before are named by `offsets`.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: rows without spans or labels, of several models or settings, or with
                nothing but right or wrong parts.
        """
        path = Path(path)
        rows = _labelled_rows(path)
        (first, *others) = rows
        config = ASMIConfig.from_dict(first["settings"])
        prompts = [row["prompt"] for row in rows]
        same = text_clusters([p if isinstance(p, str) else json.dumps(p) for p in prompts])
        labelled = [
            (span, wrong, cluster)
            for row, cluster in zip(rows, same, strict=True)
            for span, wrong in zip(row["spans"], row["wrong"], strict=True)
            if wrong is not None
        ]
        if not labelled:
            raise ValueError(f"no part of an answer in {path} has a label")
        spans = [span for span, _, _ in labelled]
        wrong = np.array([label for _, label, _ in labelled], dtype=bool)
        found = cls.fitted(
            path,
            np.array([span["u"] for span in spans]),
            wrong,
            (~wrong).astype(float),
            [cluster for _, _, cluster in labelled],
            np.array([span["tokens"] * math.log(span["perplexity"]) for span in spans]),
            name=path.name,
            method=" ".join([config.symbol, "of parts", *config.said("aggregation")]),
            model=first["model"],
            labelled_by="their labels",
            settings=first["settings"],
            unit="parts",
        )
        for row in others:
            other = found.other_settings(row["settings"] | {"model": row["model"]})
            if other:
                raise ValueError(
                    f"rows {first['row']} and {row['row']} of {path} are of other scores "
                    f"({'; '.join(other)}): score all of them alike"
                )
        return found

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
        """What both kinds learn; quality: higher = better."""
        from lm_polygraph_asmi.analysis.comparison import prr_intervals

        if wrong.all() or not wrong.any():
            kind = "wrong" if wrong.any() else "right"
            raise ValueError(
                f"all {len(wrong)} {unit} of {path} are {kind}: nothing can be learnt from it"
            )
        alone, _ = prr_intervals({method: scores}, quality, clusters)
        return cls(
            method=method,
            scores=np.sort(scores).tolist(),
            median=float(np.median(scores)),
            msp_median=float(np.median(msp)),
            prr=alone[method],
            calibration=calibrate(scores, wrong),
            brier=held_out_brier(scores, wrong, clusters),
            quality=labelled_by,
            n=len(wrong),
            clusters=len(set(clusters)),
            errors=int(wrong.sum()),
            unit=unit,
            **described,
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        from pydantic_core import to_json

        content = {"format": FORMAT, **vars(self)}
        Path(path).write_bytes(to_json(content, indent=1, inf_nan_mode="null"))

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: another kind of file.
        """
        from pydantic import TypeAdapter, ValidationError

        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if "format" not in content:
                raise ValueError(
                    f"{path} is not a saved calibration run: name what `polygraph_asmi calibrate` "
                    "or "
                    "`calibration` wrote (in Python Calibration.save), or a run's folder"
                )
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path} is not a calibration run of the format {FORMAT}: {ANEW}")
            for bounds in (content["prr"], *chain(*content["signals"].values())):
                bounds[:] = [math.nan if bound is None else bound for bound in bounds]
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a saved calibration run: {error!r}") from error
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]]
            raise ValueError(
                f"{path} is not a saved calibration run: {'; '.join(wrong)}"
            ) from error

    @property
    def identity(self) -> str:
        """What tells its verdicts and decisions from another's."""
        return self.ground if self.decision is None else f"{self.ground}; {self.decision}"

    @property
    def ranks(self) -> bool:
        """Whether the score ranked this run's errors: its PRR interval lies above zero."""
        return self.prr.low > 0

    def other_settings(self, settings: dict[str, Any]) -> list[str]:
        """Where the settings of a score are not those of this run, which makes it another score."""
        own, other = _compared(self.settings), _compared(settings)
        found = [
            FINGERPRINTS.get(name, f"{name} {own[name]} there, {other[name]} here")
            for name in own
            if name in other and own[name] != other[name]
        ]
        lacking = [name for name in self.config.score_key() if name not in (*self.settings, "stop")]
        if lacking:
            found.append(f"{', '.join(lacking)} not recorded there: {ANEW}")
        there, here = Path(self.model).name, Path(settings.get("model", "")).name
        if here and there == NOT_RECORDED:
            found.append(f"model not recorded there: {ANEW}")
        elif there and here and there != here:
            found.append(f"model {there} there, {here} here")
        return found

    def probability_of_error(self, score: float) -> Interval | None:
        """`error_probability` with Wilson's interval of its step, which takes answers as
        independent: with clusters it is too narrow.
        """
        if not self.ranks:
            return None
        step = step_at(self.calibration, score)
        low, high = wilson_interval(step.errors, step.n)[1:]
        return Interval(probability_at(self.calibration, score), low, high)

    def percentile(self, score: float) -> float | None:
        """Share of this run's answers with a lower score, in %; None where it does not rank."""
        if not self.ranks:
            return None
        return 100 * float(np.searchsorted(self.scores, score, side="left")) / self.n

    def error_probability(self, score: float) -> float | None:
        """Of an answer with this score, never 0 or 1; None where the score does not rank."""
        return probability_at(self.calibration, score) if self.ranks else None

    @property
    def ground(self) -> str:
        """The run in a line: answers, errors, PRR with its interval."""
        return (
            f"{self.name}: {self.n} {self.unit}, {self.errors} wrong by {self.quality}, PRR of "
            f"{self.method} {self.prr.value:.2f} [{self.prr.low:.2f}, {self.prr.high:.2f}]"
        )

    @property
    def worth(self) -> str:
        """What the probability was worth on answers that were held out; empty if not known."""
        if self.brier is None:
            return ""
        own, base = self.brier
        return (
            f"On {self.unit} held out such probabilities had a Brier score of {own:.3f}, that "
            f"overall share alone {base:.3f} (lower = better). "
        )

    @property
    def threshold_table(self) -> "pd.DataFrame":
        """A row per signal and promised risk: threshold, coverage, answers that would do.

        Each promise holds by itself: choosing the best of them is choosing by their results.
        """
        import pandas as pd

        columns = ["signal", "risk", "confidence", "threshold", "coverage", "answers_needed"]
        table = [
            {"signal": SIGNALS[one.signal]}
            | {name: getattr(one.found, name) for name in columns[1:]}
            for one in self.other_thresholds
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
        """A row per step of the calibration: its lowest score, answers, errors, and their rate.

        The interval is Wilson's, 95 %, which takes answers as independent.
        """
        import pandas as pd

        rates = [wilson_interval(step.errors, step.n) for step in self.calibration]
        table = [{**step._asdict(), "rate": r.value, "low": r.low, "high": r.high}
                 for step, r in zip(self.calibration, rates, strict=True)]  # fmt: skip
        return pd.DataFrame(table)

    def out_of_range(self, values: Mapping[str, float | None]) -> list[str]:
        """What of one answer lies beyond all of the calibration run's, in sentences."""
        said = []
        for name, value in values.items():
            known = self.reference_range.get(name)
            if known and value is not None and not known[0] <= value <= known[-1]:
                said.append(
                    f"{USUAL[name]} {value:.4g} lies beyond the calibration run's, {known[0]:.4g} "
                    "to "
                    f"{known[-1]:.4g}: it promises nothing for answers unlike its own."
                )
        return said

    def drifts(self, scores: "Sequence[Score]") -> list[Drift]:
        """Where answers scored with this calibration run no longer come as its own did."""
        now: dict[str, list[float]] = {"score": [one.score for one in scores]}
        now["msp"] = [one.msp for one in scores]
        now["prompt_tokens"] = [one.prompt_tokens for one in scores if one.prompt_tokens]
        return drifts(self.reference_range, now)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """What was found, for a terminal."""
        from rich.table import Table
        from rich.text import Text

        yield Text(f"{self.ground}; {self.clusters} clusters.")
        if self.signals:
            table = Table("signal", "PRR", "AUROC", "AUGRC (lower = better)", box=None,
                          header_style="dim")  # fmt: skip
            for name, signal in self.signals.items():
                table.add_row(name, *map(_shown, signal))
            yield table
        if self.recommendation:
            yield Text(self.recommendation)
        yield Text(f"Rate of errors by {self.method}, with Wilson's intervals:")
        table = Table("from", "answers", "wrong", "rate", box=None, header_style="dim")
        for row in self.steps.itertuples():
            rate = _shown(Interval(row.rate, row.low, row.high))
            table.add_row(f"{row.start:.4f}", str(row.n), str(row.errors), rate)
        yield table
        if self.reliability is not None:
            yield Text(
                f"Held out, these probabilities have a debiased calibration error of "
                f"{self.calibration_error:.3f}; p = {self.reliability['p_value']:.2g} that right "
                "ones are off by as much."
            )
        if self.other_thresholds:
            yield Text("Coverage by promised risk; each promise holds by itself:")
            risks = list(dict.fromkeys(one.found.risk for one in self.other_thresholds))
            table = Table("signal", *(f"{risk:.0%}" for risk in risks), box=None,
                          header_style="dim")  # fmt: skip
            for kind in dict.fromkeys(one.signal for one in self.other_thresholds):
                groups = [
                    "-" if one.found.threshold is None else f"{one.found.coverage:.0%}"
                    for one in self.other_thresholds
                    if one.signal == kind
                ]
                table.add_row(SIGNALS[kind], *groups)
            yield table
        if self.decision is not None:
            yield Text(f"Decision {self.decision}.")

    def refusal(self, settings: dict[str, Any]) -> str | None:
        """Why nothing can be said of a score made with these settings; None if something can."""
        there = "the calibration run run" if self.unit == "answers" else "the calibration run"
        other = self.other_settings(settings)
        if other:
            return (
                f"{there} used other settings ({'; '.join(other)}), which make another score. "
                "Score with those, or take a calibration run made with these."
            )
        if self.prr.high < 0:
            return (
                f"on {there} ({self.ground}) the score ranks errors the wrong way: this interval "
                "lies below zero."
            )
        if not self.ranks:
            return (
                f"on {there} ({self.ground}) the score is not known to rank errors, since this "
                "interval does not lie above zero."
            )
        return None

    def verdict(self, score: float, settings: dict[str, Any]) -> list[str]:
        """What this run allows to be said of a score, in sentences."""
        refusal = self.refusal(settings)
        if refusal is not None:
            return [f"No verdict: {refusal}"]
        step = step_at(self.calibration, score)
        chance = probability_at(self.calibration, score)
        shown = (
            "below 0.01" if chance < 0.005 else "above 0.99" if chance > 0.995 else f"{chance:.2f}"
        )
        rate = wilson_interval(step.errors, step.n)
        said = [
            f"Higher than {self.percentile(score):.0f} % of the calibration run run. Of the "
            f"{step.n} "
            f"answers on its step of the calibration {step.errors} were wrong: probability of "
            f"error {shown} [{rate.low:.2f}, {rate.high:.2f}], against "
            f"{self.errors / self.n:.2f} overall. {self.worth}"
            f"Ground: {self.ground}."
        ]
        if not self.scores[0] <= score <= self.scores[-1]:
            said.append("No answer of the calibration run run had a score like this.")
        return said


def _shown(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


Given: TypeAlias = "Calibration | str | Path | Sequence[Calibration | str | Path] | None"
"""What `score` takes for a calibration run."""


def of_answers_and_parts(
    given: Given, wanted: Mapping[str, Any]
) -> tuple[Calibration | None, Calibration | None]:
    """The calibration run of answers and that of parts; None for each that was not given.

    Args:
        wanted: settings of the score, those that were said.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no calibration run, two of a kind, or one of a score with other settings.
    """
    several = [given] if isinstance(given, str | Path | Calibration) else given
    found: dict[str, Calibration] = {}
    if not (several is None or isinstance(several, list | tuple)):
        several = [several]  # type: ignore[list-item]  # refused below
    for one in several or ():
        if not isinstance(one, str | Path | Calibration):
            raise ValueError(
                "calibration run must be a Calibration, or the path of a saved one, of a finished "
                "run or "
                f"of labelled rows; got {one!r:.80}"
            )
        read = one if isinstance(one, Calibration) else Calibration.read(one, **wanted)
        read.check_wanted(wanted)
        if read.unit in found:
            raise ValueError(
                f"two calibration runs of {read.unit}, {found[read.unit].name} and {read.name}: "
                "give "
                "one, and besides at most one of labelled parts"
            )
        found[read.unit] = read
    answers, parts = found.get("answers"), found.get("parts")
    different = _differences(parts.config, answers.config) if answers and parts else ""
    if different:
        raise ValueError(
            f"calibration runs of two scores, of parts there, of answers here: {different}. Score "
            "both "
            "with the same settings"
        )
    return answers, parts


def settled(
    given: Given, config: ASMIConfig | None, settings: Mapping[str, Any]
) -> tuple[ASMIConfig, Calibration | None, Calibration | None]:
    """The settings of a score, and its calibration runs of answers and of parts.

    What neither `config` nor `settings` says is the calibration run's, else the default. A config
    says all of its settings, but for stop strings, masks and rate that are None.

    Raises:
        FileNotFoundError, TypeError, ValueError: as `of_answers_and_parts` and `ASMIConfig`.
    """
    said = ASMIConfig.check_names(settings)
    unsaid: list[str] = []
    if config is not None:
        own = config.to_dict("masks", "score")
        unsaid = [n for n in ("stop", *DERIVED) if own[n] is None and n not in said]
        said = {n: value for n, value in own.items() if n not in unsaid} | said
    answers, parts = of_answers_and_parts(given, said)
    known = answers or parts
    base = config or ASMIConfig()
    if known is not None:
        theirs = known.config
        base = theirs if config is None else base.replace(**{n: getattr(theirs, n) for n in unsaid})
    return base.replace(**settings), answers, parts


def _labelled_rows(path: Path) -> list[dict[str, Any]]:
    """Rows that `score --out` wrote, each with a label for each of its spans."""
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            labels, parts = row["wrong"], len(row["spans"])
            fit = len(labels) == parts and all(label in (True, False, None) for label in labels)
            _ = [row[name] for name in ("row", "prompt", "model", "settings")]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is no scored row with labels ({error!r}): wanted what "
                "`polygraph_asmi score --out` writes, with `wrong`, a list of true and false for "
                "its `spans`"
            ) from error
        if not fit:
            raise ValueError(
                f"line {number} of {path}: `wrong` must be a list of true, false or null, one for "
                f"each of its {parts} `spans`; got {labels!r:.60}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no row")
    return rows


def _with(config: ASMIConfig, wanted: Mapping[str, Any]) -> ASMIConfig:
    """A config with these settings, but for what is derived in one of both."""
    said = {
        name: value
        for name, value in wanted.items()
        if name not in DERIVED or None not in (value, getattr(config, name))
    }
    return config.replace(**said)


def _differences(there: ASMIConfig, here: ASMIConfig) -> str:
    """Settings that make two scores different ones, in words."""
    own, other = there.score_key(), here.score_key()
    return "; ".join(
        f"{name} {own[name]!r} there, {value!r} here"
        for name, value in other.items()
        if value != own.get(name, value)
    )


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What two scores must share, as far as saved settings say it."""
    key = ASMIConfig.key_of({"method": ASMIConfig.method} | dict(settings))
    return key | {n: settings[n] for n in ("layer", *FINGERPRINTS) if n in settings}


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "of Sem-ASMI"
