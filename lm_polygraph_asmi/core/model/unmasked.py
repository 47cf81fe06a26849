"""The unmasked pass: the model runs once, and what masked passes need is kept.

These are the states that enter each target layer. Some layers hand more than states to layers
above: keys and values (Gemma 4), which keys to attend to (HY 4), states of a router (Zaya). That is
kept, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.forwards import Forward, replaced_forwards
from lm_polygraph_asmi.core.model.layers import (
    SHARED,
    KeysAndValues,
    OneLayerCache,
    arguments,
    row_axis,
    states_name,
    states_of,
    without_first,
)
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.structure import context_window


@dataclass(frozen=True)
class UnmaskedPass:
    """The unmasked pass of one example; the last token, which predicts nothing, does not run.

    Here and in `start` and `passes`, N is the number of tokens that run, T of them predict the
    response, and B is the number of masks that run together.
    """

    input_ids: Int[Tensor, " tokens"]  # prompt and response, N + 1
    prompt_length: int  # N + 1 - T
    scope: str
    final_hidden: Float[Tensor, "T D"]  # after the final norm, where the response is predicted
    # States that enter each target layer: (1, N, D), in some models with another axis. Masked
    # passes begin with them.
    entering: dict[int, Tensor]
    # States that leave each target layer, of the last layer after the norm. For `Engine.read`; no
    # masked pass reads them.
    leaving: dict[int, Float[Tensor, "T _"]]
    # Keys and values that layers below a target share with layers above, by layer.
    shared: dict[int, dict[str, KeysAndValues]] = field(default_factory=dict)
    # What the layer right below each target returns beside its states, by its index.
    beside: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    # The next three are for scope "response". Of each layer from the lowest target on:
    attention_masks: dict[int, Tensor | None] = field(default_factory=dict)
    # Of the same layers, keys and values of all positions, if they are kept.
    caches: dict[int, OneLayerCache] = field(default_factory=dict)
    # The model's own cache of the prompt, which the first pass that needs it adds.
    prompt_caches: list[Any] = field(default_factory=list)

    @property
    def before(self) -> int:
        """Number of positions before those that predict the response."""
        return self.prompt_length - 1

    @property
    def predicting(self) -> slice:
        """Positions whose output distribution predicts the response tokens, the last T of N."""
        return slice(self.before, len(self.input_ids) - 1)

    def tokens(self, model: PreTrainedModel) -> Int[Tensor, "1 N"]:
        """See `running`."""
        return running(model, self.input_ids)


def validate_tokens(model: PreTrainedModel, input_ids: Tensor, prompt_length: int) -> None:
    """Raise ValueError unless token ids with a prompt are valid and fit the context window."""
    if input_ids.ndim != 1:
        raise ValueError(
            "input_ids must be one unpadded sequence of shape (tokens,), got "
            f"{tuple(input_ids.shape)}"
        )
    if prompt_length < 1:
        raise ValueError(
            f"the prompt must have at least one token (such as BOS), got {prompt_length}: it "
            "predicts the first response token"
        )
    vocabulary = model.config.get_text_config().vocab_size
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise ValueError(
            f"token ids must lie in [0, {vocabulary - 1}], the model's vocabulary, got "
            f"{int(input_ids.min())} to {int(input_ids.max())}: use the model's tokenizer"
        )
    window = context_window(model.config)
    if window is not None and len(input_ids) > window:
        raise ValueError(
            f"prompt and response are {len(input_ids)} tokens long, but {type(model).__name__} "
            f"has a context window of {window}: shorten the prompt or skip the example"
        )


def run_unmasked(
    f: MaskedModel,
    input_ids: Tensor,  # (tokens,), as is checked here
    prompt_length: int,
    target_layers: Iterable[int],
    scope: str = "all",
    keep_keys_and_values: bool = True,
) -> UnmaskedPass:
    """Run the model once, in a session; keep what masked passes from `target_layers` need.

    `keep_keys_and_values`: in scope "response", also keys and values.

    Raises ValueError: no prompt, an empty response, a sequence beyond the context window, or a
    layer without heads.
    """
    validate_tokens(f.model, input_ids, prompt_length)
    if prompt_length >= len(input_ids):
        raise ValueError(f"the response is empty: all {len(input_ids)} tokens are prompt")
    targets = sorted(set(target_layers))
    for layer in targets:
        f.projection(layer)  # raises for a layer without heads
    with_caches = scope == "response" and keep_keys_and_values and bool(targets)
    layers, before = f.layers, prompt_length - 1
    entering: dict[int, Tensor] = {}
    leaving: dict[int, Tensor] = {}
    shared: dict[int, dict[str, KeysAndValues]] = {}
    beside: dict[int, tuple[Any, ...]] = {}
    attention_masks: dict[int, Tensor | None] = {}
    caches: dict[int, OneLayerCache] = {}

    def watch(index: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        given = arguments(layers[index], args, kwargs)
        # The layer adds what it shares to the dictionary that it is given.
        already_shared = dict(given.get(SHARED) or {})
        if with_caches and index >= targets[0]:
            caches[index] = OneLayerCache()
            given |= caches[index].argument(layers[index])
            attention_masks[index] = given.get("attention_mask")
        output = real(**given) if index in caches else real(*args, **kwargs)
        if given.get(SHARED):
            shared[index] = _added(already_shared, given[SHARED])
        if index + 1 in targets and isinstance(output, tuple | list):
            beside[index] = tuple(output[1:])
        if index in targets:
            entering[index] = states = given[states_name(layers[index])]
            axis = row_axis(states)
            # Of the only row, with positions first: (T, D), and all streams in D. A copy, since
            # states at the other positions need not be kept.
            predicting = without_first(before, states_of(output), axis).select(axis, 0)
            # Without the row, `axis` is that of positions.
            leaving[index] = predicting.movedim(axis, 0).flatten(1).clone()
        return output

    # Targets, for the states; with caches, all layers from the lowest target on; and layers below a
    # target that hand on more than states.
    watched = {*targets, *(range(targets[0], len(layers)) if with_caches else ())}
    watched |= {index for index in f.handing_on if index < max(targets, default=0)}
    watches = ((layers[index], partial(watch, index)) for index in watched)
    with replaced_forwards(*f.compiled(layers), *watches):  # later ones call earlier ones
        final = states_of(f.base(input_ids=running(f.model, input_ids), use_cache=False))
    final_hidden = final[0, before:]
    if len(layers) - 1 in leaving:
        leaving[len(layers) - 1] = final_hidden
    return UnmaskedPass(
        input_ids, prompt_length, scope, final_hidden, entering, leaving, shared, beside,
        attention_masks, caches,
    )  # fmt: skip


def running(model: PreTrainedModel, input_ids: Int[Tensor, " tokens"]) -> Int[Tensor, "1 N"]:
    """All tokens but the last, which predicts nothing, where the model takes them."""
    return input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))


def _added(before: dict[str, KeysAndValues], shared: Any) -> dict[str, KeysAndValues]:
    """Keys and values that a layer added. They are told by their tensors, since a layer may put
    those that it was given into other tuples."""
    tensors = {id(each) for pair in before.values() for each in pair}
    return {kind: pair for kind, pair in shared.items() if id(pair[0]) not in tensors}
