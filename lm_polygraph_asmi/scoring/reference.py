"""A finished run as a yardstick: where a score lies among its answers, and whether it may speak."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from lm_polygraph_asmi.config import BETA, SCORE_KEY, TAU, VARIANTS, ASMIConfig
from lm_polygraph_asmi.saved.aggregation import MEAN, aggregated_by
from lm_polygraph_asmi.scoring.decision import SIGNALS, Decision

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult

    from lm_polygraph_asmi.saved.cells import Cell
    from lm_polygraph_asmi.scoring.result import Score

FORMAT = 2
ANEW = (
    "make a new one with `polygraph_asmi calibrate` from labelled answers, or with "
    "`polygraph_asmi reference` from a finished run"
)
ROWS = (".jsonl", ".ndjson")
"""Names of files that hold scored rows, whose parts may be labelled."""
COMPARED = (*SCORE_KEY, "layer", "weights", "tokenizer")
"""Settings that make a score another one; compared where both sides know them."""
NEEDED = tuple(
    own.name
    for own in fields(ASMIConfig)
    if own.metadata["key"] and not own.metadata["methods"] and own.name != "stop"
)
"""Settings without which a calibration run cannot be compared with a score."""
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
class Reference:
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
        settings: of ASMI, `variant` and `closing_token` among them.
        masking_response: mean MI_t of its tokens, nats; None where it was not saved.
        decision: the threshold below which answers are accepted; None where none was asked for.
        signals: how well each signal ranked the errors, by name; see `calibrate` of this folder.
        recommendation: which of them to use, in a sentence.
        promises: the thresholds of other risks and signals: for a table, not to choose from.
        reliability: the held-out reliability diagram of the probability, see
            `analysis.Reliability`; None where there were too few answers.
        calibration_error: debiased, of the same held-out probabilities, lower = better; with it.
        usual: name -> sorted values of what needs no labels, to tell whether answers still come
            as these did.
        unit: what was judged right or wrong, "answers" or "parts" of them. Where it is parts, read
            "part" for "answer" above; clusters are those of the answers' prompts.

    Example:
        >>> run = Reference.read("RUN")  # the folder of a finished run
        >>> run.n, run.unit, run.percentile(run.median)
        (60, 'answers', 50.0)
        >>> run.save("reference.json")
        >>> Reference.load("reference.json") == run
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
    promises: tuple[Decision, ...] = ()
    reliability: dict[str, Any] | None = None
    calibration_error: float | None = None
    usual: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "answers"

    @classmethod
    def read(
        cls,
        path: str | Path,
        config: ASMIConfig | None = None,
    ) -> "Reference":
        """A saved reference (.json), or one made of a run (manager file or folder) or of rows.

        Args:
            path: rows end in .jsonl, see `from_spans`.
            config: its variant, depth, source and aggregation say which score of a run.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: no run or several, no such score in it, no right or no wrong answers, or
                another kind of file.
        """
        if not str(path):
            raise ValueError("reference is an empty path: leave it out, or name a run")
        path = Path(path)
        if path.suffix.lower() in ROWS:
            return cls.from_spans(path)
        if path.suffix == ".json":
            return cls.load(path)
        return cls.from_run(path, config)

    @classmethod
    def from_run(
        cls,
        path: str | Path,
        config: ASMIConfig | None = None,
        metric: str | None = None,
    ) -> "Reference":
        """Fit on all answers of a finished run with finite scores. Arguments as for
        `read`; `metric` labels the answers, None: AlignScore, or the first one the run has.

        Raises:
            FileNotFoundError: no such run.
            ValueError: no run or several, no such score or metric in it, no right or no wrong
                answers.
        """
        from lm_polygraph_asmi.saved.cells import load_cells, same_depth, with_source

        asked = config or ASMIConfig()
        depth, source, aggregation = asked.depth, asked.source, asked.aggregation
        cell, *others = load_cells([path], metric, depth)
        if others:
            raise ValueError(f"{path} holds {1 + len(others)} runs over other answers: name one")
        cell = with_source(cell, source, aggregation)
        symbol = VARIANTS[asked.variant]
        if not same_depth(cell.depth, depth) or symbol not in cell.variants:
            raise ValueError(
                f"{path} has no score {symbol} at depth {depth:.0%}, source {source}, aggregation "
                f"{aggregation}, but {list(cell.scores)}: give a run with this variant, depth, "
                "source and aggregation, or score with those it has"
            )
        method = cell.variants[symbol]
        scores = cell.score(method)
        own = cell.tokens("asmi_log_likelihood")  # MSP as `score` computes it
        msp = cell.msp if own is None else np.array([-answer.sum() for answer in own])
        if msp is None:
            raise ValueError(f"{path} has saved neither MSP nor asmi_log_likelihood")
        return cls.fitted(
            path,
            scores,
            cell.wrong,
            cell.quality,
            cell.clusters,
            msp,
            name=cell.label,
            method=method,
            model=str(cell.run.recorded("model").get("path") or NOT_RECORDED),
            judged_by=cell.metric,
            settings=(cell.settings() or {})
            | {"variant": asked.variant}
            | _own_settings(cell, method),
            masking_response=None
            if cell.mi_tokens is None
            else float(np.concatenate(cell.mi_tokens).mean()),
        )

    @classmethod
    def from_spans(cls, path: str | Path) -> "Reference":
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
            method=" ".join(
                [VARIANTS[first["variant"]], "of parts", *aggregated_by(first["settings"])]
            ),
            model=first["model"],
            judged_by="their labels",
            settings=first["settings"] | {"variant": first["variant"]},
            unit="parts",
        )
        for row in others:
            other = found.other_settings(
                row["settings"] | {"variant": row["variant"], "model": row["model"]}
            )
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
        judged_by: str,
        method: str,
        unit: str = "answers",
        **described: Any,
    ) -> "Reference":
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
            quality=judged_by,
            n=len(wrong),
            clusters=len(set(clusters)),
            errors=int(wrong.sum()),
            unit=unit,
            **described,
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        own = {
            "prr": _plain(self.prr),
            "decision": self.decision and self.decision.to_dict(),
            "signals": {name: [*map(_plain, signal)] for name, signal in self.signals.items()},
            "promises": [decision.to_dict() for decision in self.promises],
        }
        content = {"format": FORMAT, **asdict(self), **own}
        text = json.dumps(content, indent=1, allow_nan=False)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: another kind of file.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if "format" not in content:
                raise ValueError(
                    f"{path} is not a saved reference: name what `polygraph_asmi calibrate` or "
                    "`reference` wrote (in Python Reference.save), or a run's folder"
                )
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path} is not a reference of the format {FORMAT}: {ANEW}")
            content["prr"] = _interval(content["prr"])
            content["signals"] = {
                name: Signal(*map(_interval, signal))
                for name, signal in content.get("signals", {}).items()
            }
            content["decision"] = content.get("decision") and Decision.from_dict(
                content["decision"]
            )
            content["promises"] = tuple(map(Decision.from_dict, content.get("promises", ())))
            content["calibration"] = [Step(*step) for step in content["calibration"]]
            content["brier"] = content["brier"] and tuple(content["brier"])
            return cls(**content)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a saved reference: {error!r}") from error

    @property
    def config(self) -> ASMIConfig:
        """The settings of its scores, for answers that are to be compared with them."""
        known = {own.name for own in fields(ASMIConfig)}
        used = {name: value for name, value in self.settings.items() if name in known}
        if "stop" in used:
            used["stop"] = tuple(used["stop"])
        return ASMIConfig(**used)

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
        own, other = self.settings, settings
        found = [
            FINGERPRINTS.get(name, f"{name} {own[name]} there, {other[name]} here")
            for name in COMPARED
            if name in own and name in other and own[name] != other[name]
        ]
        there, here = Path(self.model).name, Path(settings.get("model", "")).name
        lacking = [name for name in NEEDED if name not in own]
        if here and there == NOT_RECORDED:
            lacking.append("model")
        elif there and here and there != here:
            found.append(f"model {there} there, {here} here")
        if lacking:
            found.append(f"{', '.join(lacking)} not recorded there: {ANEW}")
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
    def promised(self) -> "pd.DataFrame":
        """A row per signal and promised risk: threshold, coverage, answers that would do.

        Each promise holds by itself: choosing the best of them is choosing by their results.
        """
        import pandas as pd

        columns = ["signal", "risk", "confidence", "threshold", "coverage", "answers_needed"]
        table = [
            {"signal": SIGNALS[one.signal]}
            | {name: getattr(one.found, name) for name in columns[1:]}
            for one in self.promises
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

    def unlike(self, values: Mapping[str, float | None]) -> list[str]:
        """What of one answer lies beyond all of the reference's, in sentences."""
        said = []
        for name, value in values.items():
            known = self.usual.get(name)
            if known and value is not None and not known[0] <= value <= known[-1]:
                said.append(
                    f"{USUAL[name]} {value:.4g} lies beyond the reference's, {known[0]:.4g} to "
                    f"{known[-1]:.4g}: it promises nothing for answers unlike its own."
                )
        return said

    def drifts(self, scores: "Sequence[Score]") -> list[Drift]:
        """Where answers scored with this reference no longer come as its own did."""
        now: dict[str, list[float]] = {"score": [one.score for one in scores]}
        now["msp"] = [one.msp for one in scores]
        now["prompt_tokens"] = [one.prompt_tokens for one in scores if one.prompt_tokens]
        return drifts(self.usual, now)

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
        if self.promises:
            yield Text("Coverage by promised risk; each promise holds by itself:")
            risks = list(dict.fromkeys(one.found.risk for one in self.promises))
            table = Table("signal", *(f"{risk:.0%}" for risk in risks), box=None,
                          header_style="dim")  # fmt: skip
            for kind in dict.fromkeys(one.signal for one in self.promises):
                cells = [
                    "-" if one.found.threshold is None else f"{one.found.coverage:.0%}"
                    for one in self.promises
                    if one.signal == kind
                ]
                table.add_row(SIGNALS[kind], *cells)
            yield table
        if self.decision is not None:
            yield Text(f"Decision {self.decision}.")

    def refusal(self, settings: dict[str, Any]) -> str | None:
        """Why nothing can be said of a score made with these settings; None if something can."""
        there = "the reference run" if self.unit == "answers" else "the reference"
        other = self.other_settings(settings)
        if other:
            return (
                f"{there} used other settings ({'; '.join(other)}), which make another score. "
                "Score with those, or take a reference made with these."
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
            f"Higher than {self.percentile(score):.0f} % of the reference run. Of the {step.n} "
            f"answers on its step of the calibration {step.errors} were wrong: probability of "
            f"error {shown} [{rate.low:.2f}, {rate.high:.2f}], against "
            f"{self.errors / self.n:.2f} overall. {self.worth}"
            f"Ground: {self.ground}."
        ]
        if not self.scores[0] <= score <= self.scores[-1]:
            said.append("No answer of the reference run had a score like this.")
        return said


def _shown(interval: Interval) -> str:
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _plain(interval: Interval) -> list[float | None]:
    return [None if math.isnan(bound) else bound for bound in interval]


def _interval(bounds: Sequence[float | None]) -> Interval:
    return Interval(*(float("nan") if bound is None else bound for bound in bounds))


def of_answers_and_parts(
    given: "Reference | str | Path | Sequence[Reference | str | Path] | None",
    config: ASMIConfig | None = None,
) -> tuple[Reference | None, Reference | None]:
    """The reference of answers and that of parts; None for each that was not given.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no reference, or two of a kind.
    """
    several = [given] if isinstance(given, str | Path | Reference) else given
    found: dict[str, Reference] = {}
    if not (several is None or isinstance(several, list | tuple)):
        several = [several]  # type: ignore[list-item]  # refused below
    for one in several or ():
        if not isinstance(one, str | Path | Reference):
            raise ValueError(
                "reference must be a Reference, or the path of a saved one, of a finished run or "
                f"of labelled rows; got {one!r:.80}"
            )
        read = one
        if not isinstance(read, Reference):
            read = Reference.read(read, config)
        if read.unit in found:
            raise ValueError(
                f"two references of {read.unit}, {found[read.unit].name} and {read.name}: give "
                "one, and besides at most one of labelled parts"
            )
        found[read.unit] = read
    return found.get("answers"), found.get("parts")


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
            _ = [row[name] for name in ("row", "prompt", "variant", "model", "settings")]
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


def _own_settings(cell: "Cell", method: str) -> dict[str, Any]:
    """What a run says of a score besides the masks: closing token, aggregation, gate."""
    from lm_polygraph_asmi.saved.cells import variant

    parsed = variant(method)
    found: dict[str, Any] = {
        "closing_token": "no closing token" not in method,
        "aggregation": MEAN if parsed is None else parsed.aggregation,
    }
    config = cell.run.recorded("config")
    generation = config.get("generation_params")
    if isinstance(generation, dict):
        stop = generation.get("stop_strings") or []
        found["stop"] = [stop] if isinstance(stop, str) else sorted(stop)
    if method.startswith(VARIANTS["adapt"]):
        for name, default in (("tau", TAU), ("beta", BETA)):  # a name says what is no default
            named = re.search(rf"{name}=([\d.e+-]+)", method)
            found[name] = float(named[1]) if named else default
        asmi = config.get("asmi")
        if isinstance(asmi, dict) and "num_samples" in asmi:
            found["num_samples"] = asmi["num_samples"]
    return found
