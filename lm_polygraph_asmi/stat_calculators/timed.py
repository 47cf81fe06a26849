"""LM-Polygraph's own calculators, with the seconds they take among their statistics."""

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lm_polygraph.stat_calculators import StatCalculator
from lm_polygraph.utils.model import Model


class TimedCalculator(StatCalculator):
    """Another calculator, unchanged, and the seconds per example it took.

    Args:
        calculator: the other one.
        phase: the statistic is called `seconds_PHASE`; see `results.names.SECONDS`.
    """

    def __init__(self, calculator: StatCalculator, phase: str) -> None:
        super().__init__()
        self.calculator, self.phase = calculator, phase

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return [], []  # whose names it makes depends on the other one: its entry lists them

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, Any]:
        """The other calculator's statistics and one more: a batch's seconds, shared evenly."""
        start = time.perf_counter()
        stats = self.calculator(dependencies, texts, model, max_new_tokens)
        seconds = (time.perf_counter() - start) / len(texts)
        return stats | {f"seconds_{self.phase}": [seconds] * len(texts)}


def load_stat_calculator(config: Mapping[str, Any], environment: Any) -> TimedCalculator:
    """Builder named in a config's `stat_calculators` entry.

    `builder` and `cfg` are what the entry of the other calculator would have, `phase` as above.
    """
    builder = import_module(config["builder"])
    return TimedCalculator(
        builder.load_stat_calculator(config["cfg"], environment), config["phase"]
    )
