"""Base class of the ASMI estimators: checks the settings and computes the score of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from lm_polygraph_asmi.config import ASMIConfig, depth_key
from lm_polygraph_asmi.core.mask_plan import operating_point
from lm_polygraph_asmi.core.scores import aggregate, discount, token_scores


def at_depth(stats: Mapping[str, Any], depth: float) -> list[dict[str, Any]]:
    """The statistic `asmi` of each example at a depth. KeyError names the depths that exist."""
    rows: Sequence[dict[float, dict[str, Any]]] = require(stats, "asmi")
    key = depth_key(depth)
    for row in rows:
        if key not in row:
            raise KeyError(
                f"statistic 'asmi' has no depth {key:g}, only {str([*row])[1:-1]}: add it to "
                "`depths` of the masked-heads calculator (`asmi.depths` of a config)"
            )
    return [row[key] for row in rows]


def require(stats: Mapping[str, Any], name: str) -> Any:
    """The statistic `name`. KeyError explains how to compute it."""
    if name not in stats:
        raise KeyError(
            f"statistic {name!r} is missing. Add its calculator to `stat_calculators` of the run, "
            "with this name in `stats` (docs/reference/config.md), or add "
            "`- /stat_calculators: asmi` to the defaults list"
        )
    return stats[name]


class _OurStatistic(str):
    """Name of a statistic of this package that adds advice to LM-Polygraph's errors.

    If no calculator of the run returns the statistic, LM-Polygraph raises an error whose f-string
    contains this name. The f-string calls `__format__`, which adds how to get the calculator.
    Everywhere else, this is a plain string.
    """

    def __format__(self, spec: str) -> str:
        return (
            f"{self!s} (of the package lm_polygraph_asmi: call its estimate_uncertainty in the "
            "place of LM-Polygraph's; pass available_stat_calculators="
            "lm_polygraph_asmi.available_stat_calculators(estimators) to UEManager; in a config, "
            "add `- stat_calculators: asmi`)"
        )


class MaskedHeadsEstimator(Estimator):
    """Score of an answer: mean, sum or maximum of per-token scores over its T tokens.

    The score is in nats, between 0 and ln S (for the sum: T ln S); higher = more uncertain. T
    counts every token of LM-Polygraph's greedy decoding, including the closing newline or end
    token, as LM-Polygraph's Perplexity does.

    The masked-heads calculator runs the masked passes with its own settings. The settings given
    here are the expected ones, and are part of the estimator's name. If the calculator used others,
    the score would have a wrong name, so an error is raised.

    Args:
        config: the expected settings, including the mask seed. With `closing_token` False, the
            score leaves out the closing token, unless it is the answer's only token. If a stop
            string has several tokens, only the last is left out.
        **settings: replace settings of the config.

    Raises:
        TypeError: a setting is unknown.
        ValueError: a setting is invalid.
    """

    symbol: str
    method: str | None = None
    """Value of the setting `method`: a key of `config.METHODS`."""

    def __init__(self, config: ASMIConfig | None = None, **settings: Any) -> None:
        if self.method is not None:
            settings |= {"method": self.method}
        self.config = (config or ASMIConfig()).replace(**settings)
        names = (_OurStatistic(n) if n.startswith("asmi") else n for n in self._dependencies())
        super().__init__(list(names), "sequence")

    def _dependencies(self) -> list[str]:
        return ["asmi", "asmi_closing"]

    def __str__(self) -> str:
        """Name in tables and saved runs: depth, K, and all settings that are not the default."""
        return self.config.label(self.symbol)

    @property
    def described(self) -> dict[str, Any]:
        """The score's entry in the part "methods" of a manifest."""
        return self.config.to_dict() | {"symbol": self.symbol}

    def __call__(self, stats: dict[str, Any]) -> np.ndarray:
        """One score for each example of the batch.

        Raises:
            KeyError: a statistic is missing; the message names its calculator.
            ValueError: the calculator used other settings, or a score is not finite.
        """
        others = {name: require(stats, name) for name in self._dependencies() if name != "asmi"}
        scores = []
        for row, masked in enumerate(at_depth(stats, self.config.depth)):
            self._check_settings(masked["settings"])
            example = masked | {name: values[row] for name, values in others.items()}
            tokens = self._token_scores(example)
            counted = self.config.counted(len(tokens), example["asmi_closing"])
            scores.append(aggregate(tokens[:counted], self.config.aggregation))
        if not np.isfinite(scores).all():
            raise ValueError(
                f"expected finite scores from {self}, got {scores}: the run stops, since "
                "LM-Polygraph would rank NaN as most confident"
            )
        return np.array(scores)

    def _check_settings(self, actual: dict[str, Any]) -> None:
        config = self.config
        derived = operating_point(actual["num_heads"], config.num_masks, config.mask_rate)
        expected = config.to_dict("masks") | derived._asdict()
        # Not the depth: the statistics were selected by it.
        if different := {k: v for k, v in expected.items() if k != "depth" and actual[k] != v}:
            raise ValueError(
                f"{self} expects {different}, but the masked-heads calculator used "
                f"{ {k: actual[k] for k in different} }: give both the same settings"
            )

    def _token_scores(self, example: Mapping[str, Any]) -> np.ndarray:
        """(T,) scores of the tokens, nats, from the fields of `asmi` and the other dependencies.

        Estimators of other scores override it.
        """
        alpha = discount(self.config, self._diversity(example))
        return token_scores(example["mi"], example["agreement"], alpha)

    def _diversity(self, example: Mapping[str, Any]) -> float | None:
        """div(x) of the sampled answers, from the other dependencies; None: not needed."""
        return None
