"""LM-Polygraph's calculators and this plugin's, for a `UEManager` built by hand."""

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
from lm_polygraph_asmi.results.names import DIVERSITY, masked_head_stats

OPTIONS = ("result_cache", "details", "context_regex", "without_context")
"""What the masked-heads calculator takes besides a config."""


def available_stat_calculators(
    estimators: Sequence[Estimator],
    output_attentions: bool = False,
    sentence_claims: bool = False,
    **options: Any,
) -> list[StatCalculatorContainer]:
    """What `UEManager(available_stat_calculators=...)` needs for a list of estimators.

    Args:
        estimators: those of the manager, of LM-Polygraph and of this plugin; depths and settings of
            ASMI are read from them.
        output_attentions: whether greedy decoding returns attention maps; RAUQ needs it, and eager
            attention.
        sentence_claims: whether claims, for estimators of that level, are sentences; else
            LM-Polygraph's extractor asks a chat model for them.
        **options: `attention`, `memory_budget`, and what the masked-heads calculator takes besides
            a config, `OPTIONS`.

    Raises:
        ValueError: estimators of this plugin with different settings, which one calculator cannot
            serve at once; or an option that is read from the estimators, or that there is not.

    Example:
        >>> from lm_polygraph_asmi import SemASMI
        >>> found = available_stat_calculators([SemASMI()])
        >>> "MaskedHeadsCalculator" in {calculator.name for calculator in found}
        True
    """
    unknown = sorted(set(options) - {*OPTIONS, *ASMIConfig.names("machine")})
    if unknown:
        known = ", ".join([*ASMIConfig.names("machine"), *OPTIONS])
        raise ValueError(
            f"options are {known}; got {', '.join(unknown)}. Depths and all that is "
            "part of a score are settings of the estimators"
        )
    ours = [e for e in estimators if isinstance(e, MaskedHeadsEstimator)]
    configs = [estimator.config for estimator in ours] or [ASMIConfig()]
    shared = [
        config.replace(depth=0.5, source="all").to_dict("masks", "machine") for config in configs
    ]
    if any(other != shared[0] for other in shared):
        raise ValueError(
            f"the estimators {', '.join(map(str, ours))} have different settings besides their "
            "depth and source: one manager serves one S, p, K, sampler, scope and seed, one "
            "attention and one memory budget. Use several managers"
        )
    samples = {config.num_samples for config in configs if config.method == "adapt"}
    if samples - {ASMIConfig.num_samples}:
        raise ValueError(
            f"num_samples is {', '.join(map(str, sorted(samples)))}, but LM-Polygraph's own "
            f"calculator always draws {ASMIConfig.num_samples} answers: leave it out, or register "
            "stat_calculators/sampling.py by hand"
        )
    depths = sorted({config.depth for config in configs})
    sources = list(dict.fromkeys(config.source for config in configs))
    own = configs[0].to_dict("masks", "machine") | options
    masked_heads = StatCalculatorContainer(
        name="MaskedHeadsCalculator",
        builder="lm_polygraph_asmi.stat_calculators.masked_heads",
        cfg=OmegaConf.create({"depths": depths, "sources": sources, **own}),
        stats=masked_head_stats(
            depths, bool(options.get("details")), sources, bool(options.get("without_context"))
        ),
        dependencies=["greedy_tokens"],
    )
    diversity = StatCalculatorContainer(
        name="ResponseDiversityCalculator",
        builder="lm_polygraph_asmi.stat_calculators.response_diversity",
        cfg=OmegaConf.create({"attention": own["attention"]}),
        stats=list(DIVERSITY),
        dependencies=["sample_tokens"],
    )
    claims = StatCalculatorContainer(
        name="SentenceClaimsCalculator",
        builder="lm_polygraph_asmi.stat_calculators.sentence_claims",
        cfg=OmegaConf.create({}),
        stats=["claims", "claim_texts_concatenated", "claim_input_texts_concatenated"],
        dependencies=["greedy_texts", "greedy_tokens"],
    )
    return [
        *register_default_stat_calculators("Whitebox", output_attentions=output_attentions),
        masked_heads,
        diversity,
        *([claims] if sentence_claims else []),
    ]
