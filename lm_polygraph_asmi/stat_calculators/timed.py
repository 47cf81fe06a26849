"""LM-Polygraph's calculators, with their run time as one more statistic."""

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lm_polygraph.stat_calculators import StatCalculator
from lm_polygraph.utils.model import Model


class TimedCalculator(StatCalculator):
    """Wraps a calculator and adds the seconds it takes per example.

    Args:
        calculator: the wrapped one.
        phase: the statistic is called `seconds_PHASE`; see `results.names.SECONDS`.
    """

    def __init__(self, calculator: StatCalculator, phase: str) -> None:
        super().__init__()
        self.calculator, self.phase = calculator, phase

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return [], []  # depends on the wrapped one: the config entry lists them

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, Any]:
        """The wrapped statistics, and the seconds of the batch divided evenly."""
        start = time.perf_counter()
        stats = self.calculator(dependencies, texts, model, max_new_tokens)
        seconds = (time.perf_counter() - start) / len(texts)
        return stats | {f"seconds_{self.phase}": [seconds] * len(texts)}


def load_stat_calculator(config: Mapping[str, Any], environment: Any) -> TimedCalculator:
    """Builder named in a config's `stat_calculators` entry.

    `builder` and `cfg` are those of the wrapped calculator's entry; `phase` as above.
    """
    builder = import_module(config["builder"])
    return TimedCalculator(
        builder.load_stat_calculator(config["cfg"], environment), config["phase"]
    )
