"""The transformers model inside a LM-Polygraph model, and the exact token ids of its prompts."""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lm_polygraph_asmi.config import check_stop, module_paths
from lm_polygraph_asmi.core.model import plain_model, structure_of
from lm_polygraph_asmi.core.model.structure import classes, refusal
from lm_polygraph_asmi.host.generation import shipped_settings

if TYPE_CHECKING:
    from lm_polygraph.estimators import Estimator
    from lm_polygraph.utils.model import Model


def is_host_model(model: Any) -> "TypeGuard[Model]":
    """Whether this is a LM-Polygraph model. Does not import LM-Polygraph, which takes seconds.

    Such a model can exist only if LM-Polygraph is already imported.
    """
    module = sys.modules.get("lm_polygraph.utils.model")
    return module is not None and isinstance(model, module.Model)


def causal_model(model: "Model") -> PreTrainedModel:
    """The transformers model inside LM-Polygraph's `WhiteboxModel`; TypeError for other models.

    It is not checked that heads can be masked, since baselines also run on other models.
    """
    kind = getattr(model, "model_type", type(model).__name__)
    if kind != "CausalLM":
        raise TypeError(
            f"expected a WhiteboxModel of type CausalLM, got a model of type {kind}: black-box, "
            "vLLM and encoder-decoder models give no access to attention heads, which ASMI masks"
        )
    return plain_model(model.model)


def maskable_model(model: "Model", structure: str | None = None) -> PreTrainedModel:
    """The result of `causal_model`; TypeError with the reason if its heads cannot be masked.

    `structure` names the model's modules, as in `ASMIConfig`.
    """
    transformer = causal_model(model)
    structure_of(transformer, structure)
    return transformer


def unmaskable_class(config: PretrainedConfig, structure: str | None = None) -> str | None:
    """Why heads cannot be masked in the class that transformers loads for a configuration.

    None: they can be masked, or the class is unknown. `structure`: see `maskable_model`.
    """
    name = _class_name(config)
    return name and refusal(name, classes().get(name), module_paths(structure))


def class_without_attention(config: PretrainedConfig) -> str | None:
    """Name of the class that transformers loads for a configuration, if it has no attention."""
    name = _class_name(config)
    row = classes().get(name or "")
    return name if row and row["all"].startswith("has no attention heads: ") else None


def attention_readers(
    estimators: "Iterable[Estimator]", statistic: str = "attention"
) -> "list[Estimator]":
    """Estimators that depend on attention maps, directly or not; or on another statistic.

    `statistic`: "attention" matches all of them; "attention_all" matches those that need the maps
    LM-Polygraph keeps while it generates the greedy answer.
    """
    return [e for e in estimators if any(statistic in name for name in e.stats_dependencies)]


def _class_name(config: PretrainedConfig) -> str | None:
    """Name of the class that transformers loads; None if its code is not in transformers."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return name if isinstance(name, str) and not hasattr(config, "auto_map") else None


def check_greedy(model: "Model") -> None:
    """Raise ValueError if a run's "greedy" answers would not be the model's greedy answers.

    LM-Polygraph takes settings that the run does not set from the model's own generation config.
    """
    if model.generation_parameters.do_sample:
        raise ValueError(
            "generation_parameters.do_sample is true, so LM-Polygraph would sample the greedy "
            "answers. Set generation_params.do_sample: false; methods that need samples still get "
            "them"
        )
    stops = model.generation_parameters.stop_strings or ()
    check_stop("stop_strings", (stops,) if isinstance(stops, str) else stops)
    shipped = shipped_settings(model.model.generation_config)
    if unset := sorted(shipped.keys() - vars(model.generation_parameters)):
        raise ValueError(
            f"the model's own generation config sets {', '.join(unset)}. LM-Polygraph does not "
            "override this, and it would change answers and their probabilities. Before you use "
            "the model, run model.generation_config = plain_generation(model.generation_config), "
            "with plain_generation from lm_polygraph_asmi.host.generation"
        )


def prompt_ids(
    model: "Model", text: str, batch: Mapping[str, Any] | None = None, row: int = 0
) -> Int[Tensor, " P"]:
    """Token ids of one prompt, without padding.

    `batch`: statistics of the batch whose row `row` is the prompt. Its `input_tokens` are padded
    but have no mask, and the padding token may also be a special token of the prompt. So the prompt
    is tokenized again on its own, with the chat template, and the result is compared.
    """
    ids = model.tokenize([text])["input_ids"][0]
    if batch is not None and "input_tokens" in batch:
        padded = torch.as_tensor(batch["input_tokens"][row])
        if not (padded[-len(ids) :].equal(ids) or padded[: len(ids)].equal(ids)):
            raise ValueError(
                f"prompt {row} of the batch has other token ids alone than in its batch, so ASMI "
                "would not score the prompt that was answered. Use batch_size: 1"
            )
    return ids
