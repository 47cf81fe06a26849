"""From final states to log-probabilities, through the model's own forward method, and the rows of
the unembedding.

The base model is replaced by a function that returns the states. The model itself does the rest:
scales, soft caps, multipliers. The product with the unembedding keeps 32 bits in 16-bit models.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from lm_polygraph_asmi.core.model.devices import (
    check_distributions,
    execution_device,
    lowest_precision,
)
from lm_polygraph_asmi.core.model.forwards import Forward, replaced_forwards
from lm_polygraph_asmi.core.model.masked import MaskedModel

VOCABULARY_PART = 2**13
"""Rows of the unembedding that are converted to 32 bits at once."""


@dataclass
class _Returned(BaseModelOutputWithPast):
    """Output of a base model: the final states; all other attributes are None."""

    # Older transformers annotate it with a 32-bit type, and our tests, which check types at run
    # time, would refuse 16 bits.
    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def wide_product(
    states: Float[Tensor, "*batch D"], weight: Float[Tensor, "V D"], bias: Tensor | None
) -> Float[Tensor, "*batch V"]:
    """states @ weight.T + bias of 16-bit numbers, summed and returned in float32."""
    rows = states.reshape(-1, states.shape[-1])
    if rows.is_cuda:
        product = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        wide = rows.float()
        product = wide.new_empty(len(rows), len(weight))
        for start in range(0, len(weight), VOCABULARY_PART):
            part = slice(start, start + VOCABULARY_PART)
            torch.mm(wide, weight[part].float().T, out=product[:, part])
    if bias is not None:
        product += bias.float()
    return product.reshape(*states.shape[:-1], -1)


def own_logits(f: MaskedModel, **inputs: Any) -> Tensor:
    """Logits of the model's forward method as it is now, in float32.

    If the unembedding is a plain 16-bit `nn.Linear`, its product is summed and kept in 32 bits.
    Adapters, quantised modules and forward methods of others compute more, and keep their own.
    """
    projection: Any = f.lm_head
    plain = (
        type(projection) is nn.Linear
        and projection.weight.dtype.itemsize == 2
        # A forward method that accelerate has set only moves weights, as is done here.
        and ("forward" not in vars(projection) or hasattr(projection, "_hf_hook"))
    )

    def forward(_: Forward, states: Tensor) -> Tensor:
        with align_module_device(projection):  # references keep fetched weights alive
            weight, bias = projection.weight, projection.bias
        if weight.dtype != states.dtype:  # as where the model's own code casts
            return nn.functional.linear(states, weight, bias)
        return wide_product(states.to(weight.device), weight, bias)

    with replaced_forwards(*([(projection, forward)] if plain else [])):
        return f.model(**inputs, use_cache=False, return_dict=True).logits.float()


def readout(f: MaskedModel, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
    """Natural log-probabilities, in float32, from final states (after the final norm).

    Raises FloatingPointError: NaN, plus infinity, or a row of minus infinity.
    """
    # As states of a batch: (D,) becomes (1, 1, D), (T, D) becomes (1, T, D).
    states = hidden.reshape(-1, *hidden.shape[-2:]) if hidden.ndim > 1 else hidden[None, None]
    tokens = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    output = _Returned(last_hidden_state=states)
    with replaced_forwards((f.base, lambda *_, **__: output)):
        logits = own_logits(f, input_ids=tokens)
    check_distributions(f.model, logits)
    return logits.reshape(*hidden.shape[:-1], -1).log_softmax(-1)


def unembedding(f: MaskedModel) -> Float[Tensor, "V D"]:
    """The output projection W_lm, one row per token, on the device where it computes.

    Of anything but a plain `nn.Linear` (adapters, quantised weights), what it makes of unit
    vectors, kept as long as the model stays the same.
    """
    projection: Any = f.lm_head
    if type(projection) is nn.Linear:
        with align_module_device(projection):  # see `own_logits`
            return projection.weight.detach()
    if "unembedding" not in f.kept:
        width = getattr(projection, "in_features", f.model.config.get_text_config().hidden_size)
        place = execution_device(projection)
        states = torch.eye(width, dtype=lowest_precision(f.model), device=place)
        with torch.no_grad():
            rows = projection(states) - projection(torch.zeros_like(states[:1]))
        f.kept["unembedding"] = rows.T.contiguous()
    return f.kept["unembedding"]
