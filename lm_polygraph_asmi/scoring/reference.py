"""A finished run as a yardstick: where a score lies among its answers, and whether it may speak."""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.calibration import (
    Step,
    calibrate,
    held_out_brier,
    probability_at,
    step_at,
)
from lm_polygraph_asmi.analysis.clusters import Interval, wilson_interval
from lm_polygraph_asmi.validation import BETA, TAU, VARIANTS

if TYPE_CHECKING:
    from lm_polygraph_asmi.saved.cells import Cell

FORMAT = 2
COMPARED = (
    "variant", "depth", "layer", "num_masks", "mask_rate", "top_k", "mask_sampler", "scope",
    "closing_token", "stop", "tau", "beta", "num_samples",
)  # fmt: skip
"""Settings that make a score another one; compared where both sides know them."""


@dataclass(frozen=True)
class Reference:
    """What `score` takes from a finished run.

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

    @classmethod
    def read(cls, path: str | Path, variant: str = "sem", depth: float = 0.6) -> "Reference":
        """A saved reference (.json), or one made from a run (manager file or folder).

        Raises:
            FileNotFoundError: nothing there.
            ValueError: no run or several, no such score in it, no right or no wrong answers, or
                another kind of JSON file.
        """
        path = Path(path)
        return cls.load(path) if path.suffix == ".json" else cls.from_run(path, variant, depth)

    @classmethod
    def from_run(cls, path: str | Path, variant: str = "sem", depth: float = 0.6) -> "Reference":
        """Fit on all answers of a finished run with finite scores. Arguments as for `score`.

        Raises:
            FileNotFoundError: no such run.
            ValueError: no run or several, no such score in it, no right or no wrong answers.
        """
        from lm_polygraph_asmi.analysis.comparison import prr_intervals
        from lm_polygraph_asmi.saved.cells import load_cells, same_depth

        cell, *others = load_cells([path], depth=depth)
        if others:
            raise ValueError(f"{path} holds {1 + len(others)} runs over other answers: name one")
        symbol = VARIANTS[variant]
        if not same_depth(cell.depth, depth) or symbol not in cell.variants:
            raise ValueError(
                f"{path} has no score {symbol} at depth {depth:.0%}, but {list(cell.scores)}: give "
                "a run with this variant and depth, or score with those it has"
            )
        method = cell.variants[symbol]
        if cell.wrong.all() or not cell.wrong.any():
            kind = "wrong" if cell.wrong.all() else "right"
            raise ValueError(
                f"all {len(cell)} answers of {path} are {kind}: nothing can be learnt from it"
            )
        scores = cell.score(method)
        own = cell.tokens("asmi_log_likelihood")  # MSP as `score` computes it
        msp = cell.msp if own is None else np.array([-answer.sum() for answer in own])
        if msp is None:
            raise ValueError(f"{path} has saved neither MSP nor asmi_log_likelihood")
        alone, _ = prr_intervals({method: scores}, cell.quality, cell.clusters)
        return cls(
            name=cell.label,
            method=method,
            model=str(cell.run.recorded("model").get("path", "")),
            scores=np.sort(scores).tolist(),
            median=float(np.median(scores)),
            msp_median=float(np.median(msp)),
            prr=alone[method],
            calibration=calibrate(scores, cell.wrong),
            brier=held_out_brier(scores, cell.wrong, cell.clusters),
            quality=cell.metric,
            n=len(cell),
            clusters=len(set(cell.clusters)),
            errors=int(cell.wrong.sum()),
            settings=(cell.settings() or {}) | {"variant": variant} | _own_settings(cell, method),
            masking_response=None
            if cell.mi_tokens is None
            else float(np.concatenate(cell.mi_tokens).mean()),
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        prr = [None if math.isnan(bound) else bound for bound in self.prr]
        content = {"format": FORMAT, **asdict(self), "prr": prr}
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
                    f"{path} is not a saved reference: name the run's folder or manager file, or "
                    "what Reference.save wrote"
                )
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path} is not a reference of the format {FORMAT}")
            content["prr"] = Interval(
                *(float("nan") if bound is None else bound for bound in content["prr"])
            )
            content["calibration"] = [Step(*step) for step in content["calibration"]]
            content["brier"] = content["brier"] and tuple(content["brier"])
            return cls(**content)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a saved reference: {error!r}") from error

    @property
    def ranks(self) -> bool:
        """Whether the score ranked this run's errors: its PRR interval lies above zero."""
        return self.prr.low > 0

    def other_settings(self, settings: dict[str, Any]) -> list[str]:
        """Where the settings of a score are not those of this run, which makes it another score."""
        found = [
            f"{name} {self.settings[name]} there, {settings[name]} here"
            for name in COMPARED
            if name in self.settings and name in settings and self.settings[name] != settings[name]
        ]
        there, here = Path(self.model).name, Path(settings.get("model", "")).name
        if there and here and there != here:
            found.append(f"model {there} there, {here} here")
        return found

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
            f"{self.name}: {self.n} answers, {self.errors} wrong by {self.quality}, PRR of "
            f"{self.method} {self.prr.value:.2f} [{self.prr.low:.2f}, {self.prr.high:.2f}]"
        )

    @property
    def _worth(self) -> str:
        """What the probability was worth on answers that were held out."""
        if self.brier is None:
            return ""
        own, base = self.brier
        return (
            f"On answers held out such probabilities had a Brier score of {own:.3f}, that overall "
            f"share alone {base:.3f} (lower = better). "
        )

    def verdict(self, score: float, settings: dict[str, Any]) -> list[str]:
        """What this run allows to be said of a score, in sentences."""
        other = self.other_settings(settings)
        if other:
            return [
                f"No verdict: the reference run used other settings ({'; '.join(other)}), which "
                "make another score."
            ]
        if not self.ranks:
            return [
                f"No verdict: on the reference run ({self.ground}) the score is not known to rank "
                "errors, since this interval does not lie above zero."
            ]
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
            f"{self.errors / self.n:.2f} overall. {self._worth}"
            f"Ground: {self.ground}."
        ]
        if not self.scores[0] <= score <= self.scores[-1]:
            said.append("No answer of the reference run had a score like this.")
        return said


def _own_settings(cell: "Cell", method: str) -> dict[str, Any]:
    """What a run says of a score besides the masks: closing token, and the gate of Adapt-ASMI."""
    found: dict[str, Any] = {"closing_token": "no closing token" not in method}
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
