"""Checks of the arguments of `estimate_uncertainty`, before anything is computed."""

from collections.abc import Sequence
from typing import Any

from lm_polygraph.estimators import Estimator
from lm_polygraph.utils.factory_stat_calculator import StatCalculatorContainer
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.host.configs import container, needed_calculators
from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.host.model import attention_readers, class_without_attention
from lm_polygraph_asmi.host.side_models import CLASSIFIERS
from lm_polygraph_asmi.validation import check_number, check_whole


def check_kinds(model: Any, estimator: Any, input_text: Any) -> None:
    """Raise TypeError unless these are a model of LM-Polygraph, one estimator and one text."""
    if not isinstance(estimator, Estimator):
        raise TypeError(
            f"expected one estimator, such as SemASMI(), got {_described(estimator)}: construct "
            "it, and call this once for each estimator"
        )
    if not hasattr(model, "generation_parameters"):
        raise TypeError(
            f"expected a model of LM-Polygraph, got {_described(model)}: wrap a loaded model as "
            "WhiteboxModel(model, tokenizer), or load it by name as "
            "WhiteboxModel(*load_named(name))"
        )
    if not isinstance(input_text, str):
        raise TypeError(
            f"expected one prompt as a text, got {_described(input_text)}: call this once for "
            "each prompt"
        )


def check_request(
    model: Model, estimator: Estimator, image: Any, available: Sequence[StatCalculatorContainer]
) -> None:
    """Raise TypeError or ValueError if an estimator cannot be computed with a `WhiteboxModel`."""
    if image is not None:
        raise ValueError(
            "expected no input_image, since a WhiteboxModel reads only text: leave it out, or "
            "use LM-Polygraph's VisualWhiteboxModel"
        )
    parameters = model.generation_parameters
    check_whole(
        "generation_parameters.max_new_tokens",
        parameters.max_new_tokens,
        least=1,
        why=": an answer has a token",
    )
    if parameters.num_beams != 1:
        raise ValueError(
            f"expected generation_parameters.num_beams=1, got {parameters.num_beams}: the "
            "greedy answer is scored, and beam search would find another one"
        )
    needed, unknown = needed_calculators(estimator.stats_dependencies, available)
    if unknown:
        raise ValueError(
            f"{estimator} needs {unknown[0]!r}, such as training data, which a single prompt does "
            "not give: compute it in a run of polygraph_eval"
        )
    if any("sample_tokens" in calculator.stats for calculator in needed.values()):
        check_number("generation_parameters.temperature", parameters.temperature)
        if parameters.temperature <= 0:
            raise ValueError(
                "expected generation_parameters.temperature above 0, got "
                f"{parameters.temperature}: {estimator} samples answers"
            )
    if attention_readers([estimator]) and (name := class_without_attention(model.model.config)):
        raise TypeError(f"{estimator} reads attention maps, which {name} does not have")
    for calculator in needed.values():
        settings = container(calculator.cfg)
        settings |= settings.get("nli_model") or {}
        for path in map(settings.get, CLASSIFIERS):
            if path and (why := Repository(path, cache=settings.get("hf_cache")).problem()):
                raise ValueError(f"the model {path!r}, which {estimator} needs, {why}")


def _described(value: Any) -> str:
    """A short description of a value that was passed instead of the expected one."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{value!r:.40}" if isinstance(value, str | None) else f"a {type(value).__name__}"
