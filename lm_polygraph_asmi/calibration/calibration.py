"""`Calibration`: what labelled answers say of later ones of the same model."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.calibration import Step, probability_at, step_at
from lm_polygraph_asmi.analysis.clusters import Interval, wilson_interval
from lm_polygraph_asmi.analysis.learned import LearnedScore
from lm_polygraph_asmi.analysis.risk_control import RiskThreshold
from lm_polygraph_asmi.analysis.signals import RankedSignal
from lm_polygraph_asmi.calibration.decision import Decision
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import read_json, write_whole
from lm_polygraph_asmi.scoring.signals import LEARNED, SIGNALS, TITLES

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderResult

    from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
    from lm_polygraph_asmi.scoring.result import Score

FORMAT = 6
COMMAND = "polygraph_asmi calibrate {} --risk RISK --out FILE.json"
ADVICE = f"make it again: `{COMMAND.format('ROWS --model MODEL')}`, or with --run RUN"
NOT_RECORDED = "not recorded"
"""Name of the model of a run without a manifest."""
MACHINE = {
    "weights": "weights or their precision differ",
    "tokenizer": "tokenizer, chat template or end tokens differ",
}
"""Messages for settings whose values are hashes of the model's."""
HASHED = MACHINE | {"system": "the system message differs"}
CIRCUMSTANCES = ("attention_in_use", "prompt_format", *HASHED)
"""Settings to compare besides those of the signal."""


def unequal(settings: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Settings in both that differ, in words."""
    return [
        HASHED.get(name, f"{name} {value!r} there, {settings[name]!r} here")
        for name, value in saved.items()
        if name in settings and value != settings[name]
    ]


@dataclass(frozen=True)
class Calibration:
    """A threshold on one signal with its risk guarantee, and the probability of error.

    All numbers are of the signal that decides, on the answered rows, unless stated.

    Attributes:
        name: of the rows or of the run.
        signal: the signal that decides, a key of `scoring.signals.SIGNALS`.
        guarantee: the threshold, with its risk guarantee.
        values: (n,) of the signal, ascending, nats; higher = more uncertain.
        error_steps: steps of an isotonic fit of the errors, ascending; see `analysis.calibrate`.
        brier: Brier scores of the probability of error and of the constant share of errors, on
            held-out answers, lower = better; None if there were too few.
        signals: how well each signal ranks the errors, by its name in sentences.
        recommendation: which signal to use, in a sentence.
        errors: wrong answers.
        label_source: "their labels", or the quality metric of a run.
        right_from: lowest quality of a right answer; None: 0.5, on a scale of 0 to 1.
        model: its name.
        settings: those that all answers share.
        prompt_tokens: (n,) lengths of the prompts, ascending; empty if not saved.
        answer_digests: digests of the answers, see `digests_of`.
        learned: the learned score, if it is the signal; the log-odds of an error, in nats.
        learning: whether it was learned, and what it gains, in a sentence; empty if not asked for.

    Example:
        >>> calibration.n, calibration.signal, calibration.guarantee.threshold
        (8, 'msp', None)
        >>> calibration.save("saved.json")
        >>> Calibration.load("saved.json") == calibration
        True
    """

    name: str
    signal: str
    guarantee: RiskThreshold
    values: list[float]
    error_steps: list[Step]
    brier: tuple[float, float] | None
    signals: dict[str, RankedSignal]
    recommendation: str
    errors: int
    label_source: str
    model: str
    settings: dict[str, Any]
    prompt_tokens: list[float]
    answer_digests: list[str]
    learned: LearnedScore | None = None
    learning: str = ""
    right_from: float | None = None

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise ValueError(f"expected a signal of {list(SIGNALS)}, got {self.signal!r}")
        if (self.signal == LEARNED) != (self.learned is not None):
            raise ValueError(
                f"expected weights of a learned score exactly if it is the signal, got "
                f"{self.signal!r} and {self.learned!r:.40}"
            )

    @property
    def n(self) -> int:
        """Number of answers."""
        return len(self.values)

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return self.guarantee.clusters

    @property
    def title(self) -> str:
        """The signal in sentences, such as "MSP"."""
        return TITLES[self.signal]

    @property
    def prr(self) -> Interval:
        """PRR of the signal, with its 95 % interval over clusters."""
        return self.signals[self.title].prr

    @property
    def ranks(self) -> bool:
        """Whether the signal ranks errors: its whole PRR interval is above 0."""
        return self.prr.low > 0

    @property
    def config(self) -> ASMIConfig:
        """Settings to score other answers in the same way, without those of the machine."""
        machine = ASMIConfig.names("machine")
        settings = {name: value for name, value in self.settings.items() if name not in machine}
        return ASMIConfig.from_dict(settings)

    def configured(
        self, config: ASMIConfig | None = None, settings: Mapping[str, Any] | None = None
    ) -> ASMIConfig:
        """The config to decide with: settings left out are the calibration's.

        Args:
            config: sets all its settings, except stop strings, number of masks and rate if None.
            settings: override those of `config`; TypeError for an unknown one, ValueError for one
                out of range, or that the signal depends on and that differs.
        """
        derived = ("num_masks", "mask_rate")  # from the model's heads, if None
        explicit = ASMIConfig.check_names(settings or {})
        if config is not None:
            unset = [n for n in ("stop", *derived) if getattr(config, n) is None]
            explicit = {n: v for n, v in config.to_dict().items() if n not in unset} | explicit
        explicit = {n: v for n, v in explicit.items() if not (v is None and n in derived)}
        saved = self.config
        config = saved.replace(**explicit)
        known = {n: v for n, v in saved.to_dict().items() if not (v is None and n in derived)}
        if differences := self._differences(config.to_dict(), known):
            raise ValueError(
                f"settings differ from the calibration {self.name} ({'; '.join(differences)}): "
                "leave them out to use the calibration's, or pass a calibration made with them"
            )
        return config

    def _key(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that the signal depends on, among those saved."""
        key = ASMIConfig.key_of({"method": ASMIConfig.method} | dict(settings))
        key |= {n: settings[n] for n in ("layer", "samples", "hidden_width") if n in settings}
        key = {n: v for n, v in key.items() if n in SIGNALS[self.signal].settings}
        if self.signal == "adapt" and "max_new_tokens" in settings:  # also of its samples
            key["max_new_tokens"] = settings["max_new_tokens"]
        return key | {n: settings[n] for n in CIRCUMSTANCES if n in settings}

    def _differences(self, settings: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """Settings in both that differ, in words."""
        return unequal(self._key(settings), self._key(saved))

    def other_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """Differences between the settings of an answer and of the calibration, in words.

        Only settings that the signal depends on count: masks do not change MSP. `settings` are
        `compared_settings` of a `Score` or an `UnmaskedAnswer`.
        """
        differences = self.other_circumstances(settings)
        needed = [*self._key(self.config.to_dict()), "prompt_format"]
        recorded = (*self.settings, "stop")  # which scores of token ids lack
        missing = [name for name in needed if name not in recorded]
        if missing:
            differences.append(f"{', '.join(missing)} not recorded there: {ADVICE}")
        unknown = [name for name in MACHINE if name in self.settings and name not in settings]
        if unknown:
            differences.append(f"{', '.join(unknown)} not recorded here: use `decide`")
        ends = self.settings.get("answer_ends", ())
        if ends and (end := settings.get("answer_end", ends[0])) not in ends:
            differences.append(f"answers {' or '.join(ends)} there, {end} here")
        return differences

    def other_circumstances(self, settings: Mapping[str, Any]) -> list[str]:
        """Those of `other_settings` that are recorded on both sides, and the model's name."""
        differences = self._differences(settings, self.settings)
        model, model_here = Path(self.model).name, Path(settings.get("model", "")).name
        if model_here and model == NOT_RECORDED:
            differences.append(f"model not recorded there: {ADVICE}")
        elif model and model_here and model != model_here:
            differences.append(f"model {model} there, {model_here} here")
        return differences

    def decide(self, answer: "Score | UnmaskedAnswer") -> Decision:
        """What it says of a `Score`, or for a signal without masked passes an `UnmaskedAnswer`.

        Example:
            >>> from lm_polygraph_asmi.scoring import read
            >>> decision = calibration.decide(read(scorer, prompt, " Edda Holm"))
            >>> decision.accept, decision.reason[:31]  # a scorer does not hash the weights
            (None, 'No decision: this answer differ')
        """
        from lm_polygraph_asmi.scoring.result import Score

        other, limit = self.other_settings(answer.compared_settings), self.guarantee.threshold
        signals = self._signals(answer)
        value = signals.get(self.signal)
        accept, probability, percentile, warnings, notes = None, None, None, [], []
        if answer.answered and not other and value is not None:
            accept = None if limit is None else bool(value <= limit)
            if probability := self.error_probability(value):
                percentile = self.percentile(value)
            warnings = self.out_of_range(value, answer.prompt_tokens, accept)
            notes = [*self._doubts, self.ground]
        return Decision(
            accept=accept,
            reason=self._reason(answer.answered, other, value),
            signal=self.signal,
            value=value,
            signals=signals,
            threshold=limit,
            error_probability=probability and probability.value,
            error_interval=probability and (probability.low, probability.high),
            percentile=percentile,
            warnings=(*warnings, *answer.warnings),
            notes=tuple(notes),
            prompt=answer.prompt,
            answer=answer.answer,
            text=answer.scored_text,
            ids=answer.ids,
            prompt_tokens=answer.prompt_tokens,
            settings=answer.settings,
            model=answer.model,
            calibration=self.name,
            score=answer if isinstance(answer, Score) else None,
        )

    def _signals(self, answer: "Score | UnmaskedAnswer") -> dict[str, float]:
        """Those of the answer, and the learned one if it has what that reads, in equal widths."""
        features = getattr(answer, "features", {})
        weights = {} if self.learned is None else self.learned.weights
        lengths = {name: len(features.get(name, ())) for name in weights}
        if self.learned is None or lengths != {name: len(w) for name, w in weights.items()}:
            return answer.signals
        values = self.learned({name: features[name][None] for name in weights})
        return answer.signals | {LEARNED: float(values[0])}

    def _reason(self, answered: bool, other: Sequence[str], value: float | None) -> str:
        if not answered:
            return "No decision: the answer is empty."
        if other:
            return f"No decision: this answer differs from the calibration's ({'; '.join(other)})."
        if value is None:
            return f"No decision: {self.title} of this answer is unknown: use `decide`."
        limit = self.guarantee.threshold
        if limit is None:
            return f"No threshold by {self.title}: {self.guarantee}."
        if value > limit:
            return f"Abstain: {self.title} {value:.4g} nats is above {limit:.4g}."
        return (
            f"Accept: {self.title} {value:.4g} nats is at most {limit:.4g}. Risk guarantee: with "
            f"{100 * self.guarantee.confidence:g}% confidence, the error rate of accepted answers "
            f"is at most {100 * self.guarantee.risk:g}%."
        )

    @property
    def _doubts(self) -> list[str]:
        """Why there is no probability of error, or how much it is worth."""
        if self.ranks:
            return [self.brier_sentence] if self.brier_sentence else []
        if self.prr.high < 0:
            why = f"{self.title} has a negative PRR: it ranks errors worse than chance"
        elif math.isnan(self.prr.low):
            why = "the PRR has no interval: there are too few clusters, wrong or right answers"
        else:
            why = f"no evidence that {self.title} ranks errors: the PRR interval includes 0"
        return [f"No probability of error: on the calibration answers, {why}."]

    def error_probability(self, value: float) -> Interval | None:
        """Probability of error at this value (nats), never 0 or 1; None if not `ranks`.

        With the 95 % Wilson interval of its step, which takes answers as independent: with clusters
        it is too narrow.
        """
        if not self.ranks:
            return None
        step = step_at(self.error_steps, value)
        low, high = wilson_interval(step.errors, step.n)[1:]
        return Interval(probability_at(self.error_steps, value), low, high)

    def percentile(self, value: float) -> float:
        """Share of the calibration answers with a lower value, in %."""
        return 100 * float(np.searchsorted(self.values, value, side="left")) / self.n

    def out_of_range(
        self, value: float | None, prompt_tokens: int | None, accept: bool | None
    ) -> list[str]:
        """How an answer lies outside the calibration's range, in sentences."""
        warnings, (low, high) = [], (self.values[0], self.values[-1])
        if value is not None and not low <= value <= high:
            warnings.append(
                f"{self.title} {value:.4g} is outside the calibration's range, {low:.4g} to "
                f"{high:.4g}."
            )
        lengths, tokens = self.prompt_tokens, prompt_tokens
        if accept and lengths and tokens is not None and not lengths[0] <= tokens <= lengths[-1]:
            warnings.append(
                f"The prompt has {tokens} tokens, those of the calibration {lengths[0]:g} to "
                f"{lengths[-1]:g}: the risk guarantee may not hold for such questions. To be safe, "
                "abstain."
            )
        return warnings

    def save(self, path: str | Path) -> None:
        """Write or replace it as JSON; ValueError if another program is writing this file."""
        write_whole(path, self.to_json())

    def to_json(self) -> str:
        """What `save` writes."""
        from pydantic_core import to_json

        return to_json({"format": FORMAT, **vars(self)}, indent=1, inf_nan_mode="null").decode()

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what `save` or `polygraph_asmi calibrate` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: another kind of file, such as a finished run or rows; the message has the
                command that makes a calibration of it.
        """
        from pydantic import TypeAdapter, ValidationError

        path = _json_file(path)
        try:
            content = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is not a saved calibration: {error}") from error
        try:
            if "format" not in content:
                raise ValueError(
                    f"{path} is not a saved calibration: name a file that `polygraph_asmi "
                    "calibrate` or Calibration.save wrote"
                )
            if (number := content.pop("format")) != FORMAT:
                raise ValueError(
                    f"{path}: expected a calibration of format {FORMAT}, got {number}: {ADVICE}"
                )
            for bounds in chain(*content["signals"].values()):
                bounds[:] = [math.nan if bound is None else bound for bound in bounds]
            return TypeAdapter(cls).validate_python(content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a saved calibration: {error!r}") from error
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]]
            raise ValueError(f"{path} is not a saved calibration: {'; '.join(wrong)}") from error

    @property
    def identity(self) -> str:
        """Hash of all values."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def ground(self) -> str:
        """The answers in a line: number, errors, PRR of the signal with its interval."""
        return (
            f"Calibration {self.name}: {self.n} answers, {self.errors} wrong by "
            f"{self.label_source}, PRR of {self.title} {interval_text(self.prr)}."
        )

    @property
    def brier_sentence(self) -> str:
        """Brier score of the probability on held-out answers; empty if it is unknown."""
        if self.brier is None:
            return ""
        calibrated, constant = self.brier
        return (
            f"Brier score on held-out answers {calibrated:.3f}; always predicting the overall "
            f"share of errors scores {constant:.3f} (lower = better)"
            + (": no gain." if calibrated >= constant else ".")
        )

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per error step: lowest value (nats), answers, errors, error rate.

        `low` and `high`: 95 % Wilson interval, which takes answers as independent.
        """
        import pandas as pd

        rates = [wilson_interval(step.errors, step.n) for step in self.error_steps]
        table = [{**step._asdict(), "rate": r.value, "low": r.low, "high": r.high}
                 for step, r in zip(self.error_steps, rates, strict=True)]  # fmt: skip
        return pd.DataFrame(table)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """All results, for a terminal."""
        from rich.table import Table
        from rich.text import Text

        yield Text(
            f"{self.name}: {self.n} answers from {self.clusters} clusters, {self.errors} wrong by "
            f"{self.label_source}.\n"
        )
        table = Table("signal", "PRR", "AUROC", "AUGRC (lower = better)", box=None,
                      header_style="dim")  # fmt: skip
        for name, signal in self.signals.items():
            table.add_row(name, *map(interval_text, signal))
        yield table
        yield Text(f"{self.recommendation}\n")
        if self.learning:
            yield Text(f"{self.learning}\n")
        guarantee = self.guarantee
        if guarantee.threshold is None:
            yield Text(
                f"No threshold by {self.title}: {guarantee}. Abstain on every answer. Each further "
                f"attempt adds up to {100 * (1 - guarantee.confidence):g}% to the probability that "
                "the guarantee fails."
            )
        else:
            yield Text(
                f"Decision: accept an answer if its {self.title} is at most "
                f"{guarantee.threshold:.4g} nats.\n"
                f"Risk guarantee: with {100 * guarantee.confidence:g}% confidence, at most "
                f"{100 * guarantee.risk:g}% of accepted answers are wrong.\n"
                f"Of these {guarantee.answers} answers, {guarantee.coverage:.0%} are accepted; "
                f"{guarantee.error_rate:.1%} of the accepted ones are wrong."
            )
        yield Text(f"\nError rate by {self.title}, with 95 % Wilson intervals:")
        table = Table("from (nats)", "answers", "wrong", "rate", box=None, header_style="dim")
        for row in self.steps.itertuples():
            rate = interval_text(Interval(row.rate, row.low, row.high))
            table.add_row(f"{row.start:.4f}", str(row.n), str(row.errors), rate)
        yield table
        if self.brier_sentence:
            yield Text(self.brier_sentence)

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


def opened(calibration: "Calibration | str | Path") -> Calibration:
    """A calibration, or that of a file."""
    if isinstance(calibration, Calibration):
        return calibration
    if not isinstance(calibration, str | Path):
        raise ValueError(
            f"calibration: expected a Calibration or the path of one, got {calibration!r:.80}"
        )
    return Calibration.load(calibration)


def _json_file(path: str | Path) -> Path:
    """The path of a .json file that exists."""
    if not str(path):
        raise ValueError("calibration: expected the path of a .json file, got an empty one")
    path = Path(path)
    if path.suffix == ".json":
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such calibration: `polygraph_asmi calibrate` "
                                    "writes it")  # fmt: skip
        return path
    from lm_polygraph_asmi.scoring.rows import ROWS

    rows = path.suffix.lower() in ROWS
    source = f"{path} --model MODEL" if rows else f"--run {path}"
    raise ValueError(
        f"calibration: expected a .json file, got {path}. Make one of "
        f"{'labelled rows' if rows else 'a finished run'}: `{COMMAND.format(source)}`"
    )


def interval_text(interval: Interval) -> str:
    """A value with its interval, in two digits."""
    if math.isnan(interval.value):
        return "undefined"
    if math.isnan(interval.low):
        return f"{interval.value:.2f} (no interval)"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
