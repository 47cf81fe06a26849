"""`Calibration`: a threshold found on labelled answers, for later answers of the same model."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.risk_control import RiskThreshold
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions.decision import EMPTY, Decision
from lm_polygraph_asmi.decisions.learned import LearnedScore
from lm_polygraph_asmi.files import read_json, write_whole
from lm_polygraph_asmi.results.manifest import model_of
from lm_polygraph_asmi.scoring.provenance import NAMES, names_that_count, short_hash
from lm_polygraph_asmi.scoring.result import Score, UnmaskedAnswer
from lm_polygraph_asmi.scoring.signals import LEARNED, signal_of, unit_of

FORMAT = 11
COMMAND = "`polygraph_asmi calibrate ROWS --risk RISK --out FILE.json`, or --run RUN for ROWS"
MACHINE = {
    "weights": "weights or their precision differ",
    "tokenizer": "tokenizer, chat template or end tokens differ",
}
"""Settings that are hashes of the model, and what it means if they differ."""
HASHED = MACHINE | {
    "system": "the system message, or its role, differs",
    "template": "tools or chat_template_kwargs differ, or only one has documents",
}
REVISION = ("model", "revision", "attention_in_use", "prompt_format", *HASHED)
"""Settings that identify the model and the form of its prompts."""
OPTIONAL = (*HASHED, "attention_in_use", "layer", "samples", "stop")
"""Settings that a calibration may lack, because its answers differ in them or because a run does
not record them."""
USUAL_SAMPLING = "LM-Polygraph's defaults"
"""Value of `sampling` if `score` draws the samples. The temperature is a setting of its own."""
COPIED = ("prompt", "answer", "ids", "prompt_tokens", "settings", "model")
"""Fields that a decision copies from the answer."""
UNKNOWN = "unknown"
FEW_CLUSTERS = 50
"""With fewer clusters of labelled answers than this, the calibration warns."""


@cache
def _revision(model: str) -> str:
    return str(model_of({"path": model})["revision"]) if model else UNKNOWN


def config_of(settings: Mapping[str, Any]) -> ASMIConfig:
    """The saved settings for scoring other answers alike, without those of the machine."""
    machine = ASMIConfig.names("machine")
    return ASMIConfig.from_dict({n: v for n, v in settings.items() if n not in machine})


class RankedSignal(NamedTuple):
    """How well a signal ranks errors, with intervals over clusters."""

    prr: Interval  # 1 = all errors come first, 0 = chance, negative = worse than chance
    auroc: Interval  # 0.5 = chance


class Sample(NamedTuple):
    """The answers of a calibration, as its tests read them."""

    values: Float[np.ndarray, " n"]  # the deciding signal, higher = more uncertain
    wrong: Float[np.ndarray, " n"]  # 1: wrong, 0: right, NaN: no label (in a sorted sheet)
    clusters: Sequence[str]
    unlabelled: Float[np.ndarray, " m"] | None = None  # values of other answers: thresholds to test
    chose: Bool[np.ndarray, " n"] | None = None  # True: learns, so does not test


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A threshold on one signal with its risk guarantee.

    Example:
        >>> isinstance(calibration, Calibration), calibration.n, calibration.signal
        (True, 8, 'msp')
    """

    name: str = "labelled answers"  # or the name of the file, or of the run
    signal: str  # the signal that decides, a key of `scoring.signals.SIGNALS`
    guarantee: RiskThreshold
    n: int  # number of answers
    signals: dict[str, RankedSignal]  # title of a signal -> how well it ranks errors
    errors: int
    label_source: str  # "their labels", or the quality metric of a run
    model: str  # name of the model
    settings: dict[str, Any]  # settings that all answers share
    prompt_tokens: list[float]  # (n,) lengths of the prompts, ascending; empty if unknown
    question_digests: list[str]  # of `digest_of_texts`; `monitor` rejects these questions
    learned: LearnedScore | None = None  # for signal "learned": gives the log-odds of an error
    learning: str = ""  # for "learned": whether a score was learned, and what it gains
    following: str = ""  # for an ordered sheet: what to label next
    left_out: str = field(default="", compare=False)  # how many rows were left out, and why
    right_from: float | None = None  # lowest quality of a right answer; None: 0.5 in [0, 1]
    sample: Any = field(default=None, compare=False, repr=False)  # a `Sample`, which is not saved

    def __post_init__(self) -> None:
        signal_of(self.signal)  # raises ValueError for an unknown signal

    @property
    def title(self) -> str:
        """Name of the signal in sentences, such as "MSP"."""
        return signal_of(self.signal).title

    @property
    def made_with(self) -> dict[str, Any]:
        """Fields that all decisions of this calibration have in common."""
        return {
            "calibration": self.name,
            "signal": self.signal,
            "threshold": self.guarantee.threshold,
        }

    @property
    def config(self) -> ASMIConfig:
        """The settings for scoring other answers in the same way, without those of the machine."""
        return config_of(self.settings)

    def configured(self, settings: Mapping[str, Any]) -> ASMIConfig:
        """The config to decide with. Settings that are left out are the calibration's.

        Raises ValueError: a setting on which the signal depends differs. Raises TypeError: a
        setting is unknown.
        """
        derived = ("num_masks", "mask_rate")  # None: derived from the model, as in the calibration
        given = {n: v for n, v in settings.items() if not (v is None and n in derived)}
        config = self.config.replace(**given)
        there, here = (self._key(each.to_dict()) for each in (self.config, config))
        if differences := [_difference(n, there[n], here[n]) for n in there if there[n] != here[n]]:
            raise ValueError(
                f"parameters differ from the calibration {self.name} ({'; '.join(differences)}): "
                "leave them out to use the calibration's, or pass a calibration that was made "
                "with them"
            )
        return config

    def _key(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that must be equal for a decision: of the signal, the model and the prompt."""
        needed = signal_of(self.signal).settings
        key = ASMIConfig.key_of({"method": ASMIConfig.method} | dict(settings))
        more = [*REVISION, *(n for n in ("layer", "samples") if n in needed)]
        if self.signal == "adapt":  # it also depends on how the samples were drawn
            more += ["max_new_tokens", "temperature", "sampling"]
            if settings.get("samples") == "drawn":
                settings = {**settings, "sampling": USUAL_SAMPLING}
        known = {n: key[n] for n in key if n in needed and n in settings}
        return known | {name: settings[name] for name in more if name in settings}

    def differences(self, settings: Mapping[str, Any]) -> list[str]:
        """How an answer differs from the calibration's ("there"); empty if it can be decided on.

        `settings`: `compared_settings` of a `Score` or an `UnmaskedAnswer`. Only settings on which
        the signal depends are compared: for example, masks do not change MSP.
        """
        there = self._key({**self.settings, "model": Path(self.model).name})
        here = self._key({**settings, "model": Path(settings.get("model", "")).name})
        if "revision" in there:
            here["revision"] = _revision(settings.get("model", ""))
        counted = names_that_count(there, here)
        unnamed = [
            n for n in NAMES if n not in counted or {"", UNKNOWN} & {there.get(n), here.get(n)}
        ]
        differing = [
            _difference(name, there[name], here[name])
            for name in there
            if name in here and there[name] != here[name] and name not in unnamed
        ]
        differing += [
            f"{name} not recorded there: make it again: {COMMAND}"
            for name in here
            if name not in (*there, *OPTIONAL)
        ]
        differing += [
            f"{name} not recorded here: use `decide`"
            for name in MACHINE
            if name in there and name not in here
        ]
        ends = self.settings.get("answer_ends", ())
        if ends and (end := settings.get("answer_end", ends[0])) not in ends:
            differing.append(f"answers {' or '.join(ends)} there, {end} here")
        return differing

    def decide(self, answer: Score | UnmaskedAnswer) -> Decision:
        """Decide on a `Score`; or on an `UnmaskedAnswer`, if the signal needs no masked pass."""
        signals = self._signals(answer)
        value = signals.get(self.signal)
        accept, reason = self._verdict(answer, value)
        unlike = self._length_warning(answer.prompt_tokens) if accept else []
        return Decision(
            accept=accept,
            reason=reason,
            signal=self.signal,
            value=value,
            signals=signals,
            threshold=self.guarantee.threshold,
            warnings=(*unlike, *answer.warnings),
            text=answer.scored_text,
            calibration=self.name,
            **{name: getattr(answer, name) for name in COPIED},
            score=answer if isinstance(answer, Score) else None,
        )

    def _verdict(
        self, answer: Score | UnmaskedAnswer, value: float | None
    ) -> tuple[bool | None, str]:
        """Whether to accept (None: no decision), and a sentence that says why."""
        rule, title, unit = self.guarantee, self.title, unit_of(self.signal)
        if not answer.answered:
            return None, EMPTY
        if other := self.differences(answer.compared_settings):
            return None, (
                f"No decision: this answer differs from the calibration's ({'; '.join(other)}). "
                "Score it with that model and those parameters, or calibrate again."
            )
        if value is None:
            return None, f"No decision: {title} of this answer is unknown: use `decide`."
        if rule.threshold is None:
            return None, f"No threshold by {title} could be shown to hold. {rule.limits}".rstrip()
        if value <= rule.threshold:
            return True, (
                f"Accept: {title} {value:.4g}{unit} is at most {rule.threshold:.4g}. Risk "
                f"guarantee: {rule.promise}."
            )
        return False, f"Abstain: {title} {value:.4g}{unit} is above {rule.threshold:.4g}."

    def _signals(self, answer: Score | UnmaskedAnswer) -> dict[str, float]:
        """The answer's signals, with the learned one if the answer has its features."""
        features = getattr(answer, "features", None)
        if self.learned is None or not features:
            return answer.signals
        (value,) = self.learned({name: values[None] for name, values in features.items()})
        return answer.signals | {LEARNED: float(value)}

    def _length_warning(self, tokens: int) -> list[str]:
        """A warning if the prompt is shorter or longer than every prompt of the calibration."""
        lengths = self.prompt_tokens
        if not lengths or lengths[0] <= tokens <= lengths[-1]:
            return []
        return [
            f"The prompt has {tokens} tokens, but those of the calibration have {lengths[0]:g} to "
            f"{lengths[-1]:g}. The guarantee holds only for questions like the labelled ones."
        ]

    def save(self, path: str | Path) -> None:
        """Write or replace a JSON file. ValueError if another program is writing the file."""
        from pydantic_core import to_json

        fields = {name: value for name, value in vars(self).items() if name != "sample"}
        content = json.loads(to_json({"format": FORMAT, **fields}, inf_nan_mode="null"))
        write_whole(path, json.dumps(content | {"digest": _digest(content)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what `save` or `polygraph_asmi calibrate` wrote; ValueError for other files.

        The message names the command that makes a calibration.
        """
        from pydantic import TypeAdapter

        if not isinstance(path, str | Path) or Path(path).suffix != ".json":
            raise ValueError(
                f"calibration: expected a Calibration or a .json file, got {str(path)!r:.80}. "
                f"Make one from labelled rows or a finished run: {COMMAND}"
            )
        try:
            content = read_json(path)
            if (number := content.pop("format")) != FORMAT:
                raise ValueError(
                    f"expected format {FORMAT}, got {number}: make it again: {COMMAND}"
                )
            if content.pop("digest") != _digest({"format": FORMAT, **content}):
                raise ValueError(f"it was changed by hand: make it again: {COMMAND}")
            for bounds in chain(*content["signals"].values()):
                bounds[:] = [math.nan if bound is None else bound for bound in bounds]
            return TypeAdapter(cls).validate_python(content)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a saved calibration: {' '.join(str(error).split())}"
            ) from error

    def promise(self) -> Iterator[str]:
        """Lines on the guarantee, its labels, and the share of answers that it accepts."""
        rule, unit, accepted = self.guarantee, unit_of(self.signal), "Accepts: nothing."
        if rule.threshold is None:
            yield (
                f"Guarantee: none yet. More labels may show: {rule.promise}."
                if "Next test" in self.following
                else f"Guarantee: none. No threshold by {self.title} could be shown to hold: "
                f"{rule.promise}. Abstain on every answer. Another risk or signal needs other "
                "labels."
            )
        else:
            yield f"Guarantee: {rule.promise}."
            rate = rule.error_rate
            seen = "" if rate is None else f" Of those with a label, {rate:.0%} are wrong."
            accepted = (
                f"Accepts: {rule.coverage:.0%} of such answers, those whose {self.title} is at "
                f"most {rule.threshold:.4g}{unit}.{seen} Try no other risk or signal on these "
                "labels."
            )
        left_out = f" Rows left out: {self.left_out}." if self.left_out else ""
        tested = (
            f"; {rule.tested} clusters test"
            if rule.labels is None and rule.tested not in (None, self.n)
            else ""
        )
        given = (
            f"answers from {rule.clusters} clusters"
            if rule.labels is None
            else f"of {rule.answers} answers, the surest first"
        )
        yield (
            f"Labels: {self.n} {given}, {self.errors} wrong by {self.label_source}{tested}."
            f"{rule.thinning}{left_out}"
        )
        yield f"{accepted} {rule.limits}".rstrip()
        if rule.clusters < FEW_CLUSTERS:
            yield f"Warning: fewer than {FEW_CLUSTERS} clusters (passages) say little of others."
        if self.following:
            yield self.following

    def __str__(self) -> str:
        """All results, in the form that `polygraph_asmi calibrate` prints."""
        lines = [*self.promise()]
        if self.signals:
            width = max(map(len, self.signals))
            lines += ["", "How well each signal ranks errors, with 95 % intervals:"]
        for name, ranks in self.signals.items():
            prr, auroc = (str(each).replace("+", "").replace("nan", "?") for each in ranks)
            lines.append(f"{name:{width}}  PRR {prr}  AUROC {auroc}")
        if self.signals and not any(ranks.prr.low > 0 for ranks in self.signals.values()):
            lines.append("No evidence that a signal ranks errors: no PRR interval is above 0.")
        return "\n".join([*lines, self.learning]).rstrip()


def _digest(content: Mapping[str, Any]) -> str:
    return short_hash(json.dumps(content, sort_keys=True))


def _difference(name: str, there: Any, here: Any) -> str:
    return HASHED.get(name, f"{name} {there!r} there, {here!r} here")
