"""The transformers model and the exact prompt ids behind LM-Polygraph's models and batches."""

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
    """Whether this is a LM-Polygraph model, without importing LM-Polygraph.

    The import takes seconds; such a model can only exist if LM-Polygraph is already imported.
    """
    module = sys.modules.get("lm_polygraph.utils.model")
    return module is not None and isinstance(model, module.Model)


def causal_model(model: "Model") -> PreTrainedModel:
    """The transformers model inside LM-Polygraph's `WhiteboxModel`, or a TypeError.

    Nothing is asked of it: baselines also run on a model whose heads cannot be masked.
    """
    kind = getattr(model, "model_type", type(model).__name__)
    if kind != "CausalLM":
        raise TypeError(
            f"expected a WhiteboxModel of type CausalLM, got a model of type {kind}: black-box, "
            "vLLM and encoder-decoder models give no access to attention heads, which ASMI masks"
        )
    return plain_model(model.model)


def maskable_model(model: "Model", structure: str | None = None) -> PreTrainedModel:
    """`causal_model`, or a TypeError that says why its heads cannot be masked.

    `structure` names its modules, as in `ASMIConfig`.
    """
    transformer = causal_model(model)
    structure_of(transformer, structure)
    return transformer


def unmaskable_class(config: PretrainedConfig, structure: str | None = None) -> str | None:
    """Why heads of the class that transformers loads for a configuration cannot be masked.

    None: they can, or nothing is known. `structure` as for `maskable_model`.
    """
    name = _class_name(config)
    return name and refusal(name, classes().get(name), module_paths(structure))


def class_without_attention(config: PretrainedConfig) -> str | None:
    """The class that transformers loads for a configuration, if it has no attention at all."""
    name = _class_name(config)
    row = classes().get(name or "")
    return name if row and row["all"].startswith("has no attention heads: ") else None


def attention_readers(
    estimators: "Iterable[Estimator]", statistic: str = "attention"
) -> "list[Estimator]":
    """Estimators that read attention maps, or something computed from them.

    `statistic`: by default any of these; "attention_all" are the maps that LM-Polygraph keeps when
    it generates the greedy answer.
    """
    return [e for e in estimators if any(statistic in name for name in e.stats_dependencies)]


def _class_name(config: PretrainedConfig) -> str | None:
    """None if the code is not in transformers."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return name if isinstance(name, str) and not hasattr(config, "auto_map") else None


def check_greedy(model: "Model") -> None:
    """Raise ValueError if the "greedy" answers of a run are not the model's.

    What a run does not set, LM-Polygraph takes from the model's own generation config.
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
            f"the generation config of the model sets {', '.join(unset)}, which would change "
            "answers and their probabilities, and LM-Polygraph does not set it: before, use "
            "model.generation_config = plain_generation(model.generation_config), from "
            "lm_polygraph_asmi.host.generation"
        )


def prompt_ids(
    model: "Model", text: str, batch: Mapping[str, Any] | None = None, row: int = 0
) -> Int[Tensor, " P"]:
    """Token ids of one prompt, unpadded.

    `batch`: statistics of the batch in which the prompt is the `row`-th. Its `input_tokens` are
    padded rows without a mask, and the id of the padding may be that of another special token. So
    the prompt is tokenized again on its own, with the chat template, and compared.
    """
    ids = model.tokenize([text])["input_ids"][0]
    if batch is not None and "input_tokens" in batch:
        padded = torch.as_tensor(batch["input_tokens"][row])
        if not (padded[-len(ids) :].equal(ids) or padded[: len(ids)].equal(ids)):
            raise ValueError(
                f"prompt {row} of the batch has other token ids alone than in its batch, so ASMI "
                "would score another prompt than the answered one. Use batch_size: 1"
            )
    return ids
