"""Calculators of LM-Polygraph and this plugin, for a `UEManager` built by hand."""

from collections.abc import Sequence
from typing import Any

from lm_polygraph.defaults.register_default_stat_calculators import (
    register_default_stat_calculators,
)
from lm_polygraph.estimators import Estimator
from lm_polygraph.utils.factory_stat_calculator import StatCalculatorContainer
from omegaconf import OmegaConf

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.base import MaskedHeadsEstimator
from lm_polygraph_asmi.host.configs import CALCULATOR_OPTIONS
from lm_polygraph_asmi.results.names import DIVERSITY, MASKED_HEADS


def available_stat_calculators(
    estimators: Sequence[Estimator],
    output_attentions: bool = False,
    **options: Any,
) -> list[StatCalculatorContainer]:
    """Value of `UEManager(available_stat_calculators=...)` for a list of estimators.

    Args:
        estimators: those of the manager, from LM-Polygraph and this plugin. Depths and settings of
            ASMI are read from them.
        output_attentions: whether greedy decoding returns attention maps; RAUQ needs them, and
            eager attention.
        **options: `attention`, `memory_budget`, and `host.configs.CALCULATOR_OPTIONS`.

    Raises:
        ValueError: estimators of this plugin with different settings, which one calculator cannot
            serve; an unknown option, or one that is read from the estimators.

    Example:
        >>> from lm_polygraph_asmi import SemASMI
        >>> calculators = available_stat_calculators([SemASMI()])
        >>> "MaskedHeadsCalculator" in {calculator.name for calculator in calculators}
        True
    """
    unknown = sorted(set(options) - {*CALCULATOR_OPTIONS, *ASMIConfig.names("machine")})
    if unknown:
        known = ", ".join([*ASMIConfig.names("machine"), *CALCULATOR_OPTIONS])
        raise ValueError(
            f"expected options among {known}; got {', '.join(unknown)}. Depths and other "
            "settings of a score belong to the estimators"
        )
    asmi_estimators = [e for e in estimators if isinstance(e, MaskedHeadsEstimator)]
    configs = [estimator.config for estimator in asmi_estimators] or [ASMIConfig()]
    shared = [config.replace(depth=0.5).to_dict("masks", "machine") for config in configs]
    if any(other != shared[0] for other in shared):
        raise ValueError(
            f"the estimators {', '.join(map(str, asmi_estimators))} have different settings "
            "besides their depth, but one manager has one S, p, K, sampler, scope, "
            "seed, attention and memory budget. Use several managers"
        )
    samples = {config.num_samples for config in configs if config.method == "adapt"}
    if samples - {ASMIConfig.num_samples}:
        raise ValueError(
            f"expected num_samples={ASMIConfig.num_samples}, as LM-Polygraph's calculator always "
            f"draws, got {', '.join(map(str, sorted(samples)))}: leave it out, or register "
            "stat_calculators/sampling.py by hand"
        )
    depths = sorted({config.depth for config in configs})
    arguments = configs[0].to_dict("masks", "machine") | options
    masked_heads = StatCalculatorContainer(
        name="MaskedHeadsCalculator",
        builder="lm_polygraph_asmi.stat_calculators.masked_heads",
        cfg=OmegaConf.create({"depths": depths, **arguments}),
        stats=list(MASKED_HEADS),
        dependencies=["greedy_tokens"],
    )
    diversity = StatCalculatorContainer(
        name="ResponseDiversityCalculator",
        builder="lm_polygraph_asmi.stat_calculators.response_diversity",
        cfg=OmegaConf.create({name: arguments[name] for name in ("attention", "structure")}),
        stats=list(DIVERSITY),
        dependencies=["sample_tokens"],
    )
    return [
        *register_default_stat_calculators("Whitebox", output_attentions=output_attentions),
        masked_heads,
        diversity,
    ]
