"""Builder of LM-Polygraph's own sampling calculator with another number of samples.

The host's builder takes no arguments and always draws ten.
"""

from collections.abc import Mapping
from typing import Any

from lm_polygraph.stat_calculators import SamplingGenerationCalculator


def load_stat_calculator(config: Mapping[str, Any], _: Any) -> SamplingGenerationCalculator:
    """Builder named in a config's `stat_calculators` entry; `samples_n` responses per example."""
    return SamplingGenerationCalculator(samples_n=config["samples_n"])
