"""Use estimators of this plugin without a benchmark: on one answer, or in a `UEManager`."""

from collections.abc import Sequence
from typing import Any

import lm_polygraph
from lm_polygraph.defaults.register_default_stat_calculators import (
    register_default_stat_calculators,
)
from lm_polygraph.estimators import Estimator
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.estimate_uncertainty import UncertaintyOutput
from lm_polygraph.utils.factory_stat_calculator import StatCalculatorContainer
from lm_polygraph.utils.model import Model
from omegaconf import OmegaConf

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.base import MaskedHeadsEstimator
from lm_polygraph_asmi.host.configs import CALCULATOR_OPTIONS
from lm_polygraph_asmi.host.model import attention_readers
from lm_polygraph_asmi.results.names import DIVERSITY, MASKED_HEADS
from lm_polygraph_asmi.stat_calculators.checks import check_kinds, check_request


def estimate_uncertainty(
    model: Model, estimator: Estimator, input_text: str, input_image: Any = None
) -> UncertaintyOutput:
    """LM-Polygraph's function of this name, which also supports this plugin's estimators.

    The model generates a greedy answer with its `generation_parameters`, and this answer is scored.
    A benchmark with the same parameters gives the same score. Samples depend only on the prompt and
    the seed.

    Args:
        model: the estimators of this plugin need a `WhiteboxModel` of type CausalLM.
        estimator: one of this plugin, or of LM-Polygraph.
        input_text: the prompt; with `model.instruct`, the user's message.
        input_image: as in LM-Polygraph, for its models that take images.

    Returns:
        LM-Polygraph's output. `uncertainty` is in nats for the estimators of this plugin; higher =
        more uncertain. `generation_tokens` lack the last token.

    Raises:
        TypeError: an argument has the wrong type, or the model's heads cannot be masked.
        ValueError: the generation parameters do not give a greedy answer, or the samples that an
            estimator needs; or a side model or training data are missing.

    Example:
        >>> from lm_polygraph_asmi import SemASMI
        >>> from lm_polygraph_asmi.host.loading import load_named
        >>> from lm_polygraph.utils.generation_parameters import GenerationParameters
        >>> short = GenerationParameters(max_new_tokens=4)
        >>> model = lm_polygraph.WhiteboxModel(*load_named("smollm2"), generation_parameters=short)
        >>> output = estimate_uncertainty(model, SemASMI(), "Who built the ferry?")
        >>> print(output.estimator, output.uncertainty > 0)
        Sem-ASMI (60%, K=64) True
    """
    check_kinds(model, estimator, input_text)
    whitebox = isinstance(model, lm_polygraph.WhiteboxModel)
    if not (whitebox or isinstance(estimator, MaskedHeadsEstimator)):
        return lm_polygraph.estimate_uncertainty(model, estimator, input_text, input_image)
    available = available_stat_calculators([estimator])
    if whitebox:  # for other models, ASMI's builder raises
        check_request(model, estimator, input_image, available)
    manager = lm_polygraph.UEManager(
        lm_polygraph.Dataset([input_text], [""], 1),
        model,
        [estimator],
        BuilderEnvironmentStatCalculator(model),
        available,
        [],
        [],
        [],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=model.generation_parameters.max_new_tokens,
    )
    manager()
    return UncertaintyOutput(
        manager.estimations[estimator.level, str(estimator)][0],
        input_text,
        manager.stats["greedy_texts"][0],
        manager.stats["greedy_tokens"][0][:-1],
        model.model_path,
        str(estimator),
    )


def available_stat_calculators(
    estimators: Sequence[Estimator], **options: Any
) -> list[StatCalculatorContainer]:
    """Value for `UEManager(available_stat_calculators=...)` with a list of estimators.

    Args:
        estimators: those of the manager, from LM-Polygraph and this plugin. Depths and settings
            of ASMI are read from them. An estimator that reads attention maps, such as RAUQ, needs
            a model with eager attention.
        **options: `attention`, `memory_budget`, and `host.configs.CALCULATOR_OPTIONS`.

    Raises:
        ValueError: estimators of this plugin have different settings, but one calculator has only
            one value of each; or an option is unknown, or is read from the estimators.

    Example:
        >>> from lm_polygraph_asmi import SemASMI
        >>> calculators = available_stat_calculators([SemASMI()])
        >>> "MaskedHeadsCalculator" in {calculator.name for calculator in calculators}
        True
    """
    known = [*ASMIConfig.names("machine"), *CALCULATOR_OPTIONS]
    if unknown := sorted(set(options) - {*known}):
        raise ValueError(
            f"expected options among {', '.join(known)}; got {', '.join(unknown)}. Depths and "
            "other settings of a score belong to the estimators"
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
    if len(samples) > 1:
        raise ValueError(
            f"expected one num_samples, got {', '.join(map(str, sorted(samples)))}: the estimators "
            "of one manager share the samples. Use several managers"
        )
    depths = sorted({config.depth for config in configs})
    arguments = configs[0].to_dict("masks", "machine") | options
    maps = attention_readers(estimators, "attention_all")
    return [
        *register_default_stat_calculators("Whitebox", output_attentions=bool(maps)),
        StatCalculatorContainer(
            name="MaskedHeadsCalculator",
            builder="lm_polygraph_asmi.stat_calculators.masked_heads",
            cfg=OmegaConf.create({"depths": depths, **arguments}),
            stats=list(MASKED_HEADS),
            dependencies=["greedy_tokens"],
        ),
        StatCalculatorContainer(
            name="ResponseDiversityCalculator",
            builder="lm_polygraph_asmi.stat_calculators.response_diversity",
            cfg=OmegaConf.create({name: arguments[name] for name in ("attention", "structure")}),
            stats=list(DIVERSITY),
            dependencies=["sample_tokens"],
        ),
        StatCalculatorContainer(
            name="SamplingGenerationCalculator",
            builder="lm_polygraph_asmi.stat_calculators.sampling",
            cfg=OmegaConf.create(
                {
                    "samples_n": min(samples, default=ASMIConfig.num_samples),
                    "seed": configs[0].seed,
                    "result_cache": options.get("result_cache"),
                }
            ),
            stats=[*SamplingGenerationCalculator.meta_info()[0], "seconds_samples"],
        ),
    ]
