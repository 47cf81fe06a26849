"""A finished run as a yardstick: where a score lies among its answers, and whether it may speak."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import Interval

FORMAT = 1
VARIANTS = {"asmi": "ASMI", "sem": "Sem-ASMI", "adapt": "Adapt-ASMI"}
"""Name in `score` -> symbol in tables."""
COMPARED = (
    "variant", "depth", "layer", "num_masks", "mask_rate", "top_k", "mask_sampler", "scope",
    "closing_token",
)  # fmt: skip
"""Settings that make a score another one."""


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
        calibration: points (score, probability of error) of an increasing fit, in between linear.
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
    calibration: list[tuple[float, float]]
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
            ValueError: no run, no such score in it, or too few right or wrong answers.
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
        from sklearn.isotonic import IsotonicRegression

        from lm_polygraph_asmi.analysis.comparison import prr_intervals
        from lm_polygraph_asmi.report.cells import load_cells, same_depth

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
        fit = IsotonicRegression(y_min=0, y_max=1, increasing=True, out_of_bounds="clip")
        fit.fit(scores, cell.wrong.astype(float))
        alone, _ = prr_intervals({method: scores}, cell.quality, cell.clusters)
        return cls(
            name=cell.label,
            method=method,
            model=str(cell.run.recorded("model").get("path", "")),
            scores=np.sort(scores).tolist(),
            median=float(np.median(scores)),
            msp_median=float(np.median(msp)),
            prr=alone[method],
            calibration=[
                (float(x), float(y))
                for x, y in zip(fit.X_thresholds_, fit.y_thresholds_, strict=True)
            ],
            quality=cell.metric,
            n=len(cell),
            clusters=len(set(cell.clusters)),
            errors=int(cell.wrong.sum()),
            settings=(cell.settings() or {})
            | {"variant": variant, "closing_token": "no closing token" not in method},
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
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path} is not a reference of the format {FORMAT}")
            content["prr"] = Interval(
                *(float("nan") if bound is None else bound for bound in content["prr"])
            )
            content["calibration"] = [(x, y) for x, y in content["calibration"]]
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
            if name in self.settings and self.settings[name] != settings.get(name)
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
        """Of an answer with this score; None where the score does not rank."""
        if not self.ranks:
            return None
        scores, probabilities = zip(*self.calibration, strict=True)
        return float(np.interp(score, scores, probabilities))

    def verdict(self, score: float, settings: dict[str, Any]) -> list[str]:
        """What this run allows to be said of a score, in sentences."""
        interval = f"{self.prr.value:.2f} [{self.prr.low:.2f}, {self.prr.high:.2f}]"
        ground = (
            f"{self.name}: {self.n} answers, {self.errors} wrong by {self.quality}, PRR of "
            f"{self.method} {interval}"
        )
        other = self.other_settings(settings)
        if other:
            return [
                f"No verdict: the reference run used other settings ({'; '.join(other)}), which "
                "make another score."
            ]
        if not self.ranks:
            return [
                f"No verdict: on the reference run ({ground}) the score is not known to rank "
                "errors, since this interval does not lie above zero."
            ]
        chance = self.error_probability(score)
        said = [
            f"Higher than {self.percentile(score):.0f} % of the reference run; answers like this "
            f"were wrong there with probability {chance:.2f}, {self.errors / self.n:.2f} overall "
            "(isotonic fit on these same answers: surer than it will prove, most of all at its "
            f"ends). Ground: {ground}."
        ]
        if not self.scores[0] <= score <= self.scores[-1]:
            said.append("No answer of the reference run had a score like this.")
        return said
