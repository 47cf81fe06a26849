"""The unmasked pass over prompt and response, which records the input of the masked passes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import check_setting
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layer_call import (
    MASKABLE,
    KeysValues,
    KeyValueTap,
    LayerCall,
    with_cache,
)
from lm_polygraph_asmi.model.layers import (
    base_model,
    context_window,
    decoder_layers,
    head_site,
    num_layers,
    output_projection,
)
from lm_polygraph_asmi.model.readout import readout
from lm_polygraph_asmi.model.session import attention_of
from lm_polygraph_asmi.model.structure import states_of, structure_of


@dataclass(frozen=True)
class TargetInput:
    """Inputs of a target layer and of its output projection at N positions.

    Attributes:
        hidden: hidden states entering the layer.
        heads: its concatenated head outputs, W = H times the width of a head.
    """

    hidden: Float[Tensor, "1 N D"]
    heads: Float[Tensor, "1 N W"]


@dataclass(frozen=True)
class UnmaskedPass:
    """The unmasked forward pass of one example.

    It skips the last token, which predicts nothing that is scored.

    Attributes:
        input_ids: prompt and response, N + 1 tokens.
        prompt_length: number of prompt tokens; T = N + 1 - prompt_length.
        targets: for each target layer, what enters it.
        calls: how the model called every layer from the first target layer on.
        scope: where heads are to be masked, "all" or "response".
        after: for each target layer, the states after it at the T positions; after the last layer,
            `final_hidden`. Empty if layers do not run one after another.
        keys_values: for scope "response", those of the positions before the predicting ones, for
            every layer above the first target layer that keeps any.
        devices: where the layers from the first target layer on compute.
        final_hidden: states after the final norm at the T positions that predict the response.
        by_length: whether layers read the cache's length, for example to scale attention by
            position.
        prompt_caches: the model's own cache of the positions before the predicting ones, filled on
            first use.

    Example:
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     log_probs = unmasked.log_probs(model)
        >>> isinstance(unmasked, UnmaskedPass), unmasked.predicting
        (True, slice(5, 7, None))
        >>> log_probs.shape  # (T, V)
        torch.Size([2, 50])
    """

    input_ids: Int[Tensor, " tokens"]
    prompt_length: int
    targets: dict[int, TargetInput]
    calls: dict[int, LayerCall]
    scope: str
    keys_values: dict[int, KeysValues]
    devices: frozenset[torch.device]
    final_hidden: Float[Tensor, "T D"]
    by_length: bool = False
    after: dict[int, Float[Tensor, "T D"]] = field(default_factory=dict)
    prompt_caches: list[Any] = field(default_factory=list)

    @property
    def before(self) -> slice:
        """Positions before those that predict the response."""
        return slice(0, self.prompt_length - 1)

    @property
    def predicting(self) -> slice:
        """Positions whose output distribution predicts the response tokens, the last T of N."""
        return slice(self.prompt_length - 1, len(self.input_ids) - 1)

    def log_probs(self, model: PreTrainedModel) -> Float[Tensor, "T V"]:
        """The model's own next-token log-probabilities at the response positions."""
        return readout(model, self.final_hidden)


def validate_sequence(model: PreTrainedModel, input_ids: Tensor, prompt_length: int) -> None:
    """Raise ValueError unless there are a prompt and a response that fit the context window."""
    validate_tokens(model, input_ids, prompt_length)
    if prompt_length >= len(input_ids):
        raise ValueError(
            f"the response is empty: {len(input_ids)} tokens, {prompt_length} of them prompt. "
            "There is no token to score"
        )


def validate_tokens(model: PreTrainedModel, input_ids: Tensor, prompt_length: int) -> None:
    """Raise ValueError unless token ids with a prompt are valid and fit the context window."""
    if input_ids.ndim != 1:
        raise ValueError(
            f"input_ids must be one unpadded sequence of shape (N,), got {tuple(input_ids.shape)}"
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
    window = context_window(model)
    if window is not None and len(input_ids) > window:
        raise ValueError(
            f"prompt and response are {len(input_ids)} tokens long, but {type(model).__name__} "
            f"has a context window of {window}: shorten the prompt or skip the example"
        )


def check_scope_runs(model: PreTrainedModel, scope: str) -> None:
    """Raise ValueError unless the attention implementation in use can serve this scope.

    Example:
        >>> check_scope_runs(model, "response")
        >>> check_scope_runs(model, "answer")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: scope must be ...
    """
    check_setting("scope", scope)
    if scope == "response" and attention_of(model) not in MASKABLE:
        raise ValueError(
            f"scope 'response' packs all masks into one sequence, which {attention_of(model)!r} "
            f"attention cannot: set `attention` to one of {', '.join(map(repr, MASKABLE))}"
        )


@dataclass
class RecordedInputs:
    """Inputs of layers in a pass, by index of the layer.

    Attributes:
        calls: how the model called every recorded layer.
        hidden: hidden states entering a target layer, or the layer above it.
        heads: what enters its output projection.
    """

    calls: dict[int, LayerCall] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> dict[int, TargetInput]:
        return {index: TargetInput(self.hidden[index], self.heads[index]) for index in self.heads}


@contextmanager
def record_inputs(
    model: PreTrainedModel, layers: Iterable[int], targets: Collection[int]
) -> Iterator[RecordedInputs]:
    """Record the inputs of layers during a pass, and the head outputs of targets among them."""
    recorded = RecordedInputs()

    def record_layer(index: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            states, recorded.calls[index] = LayerCall.split(module, args, kwargs)
            if index in targets or index - 1 in targets:
                recorded.hidden[index] = states

        return hook

    def record_heads(index: int) -> Callable[[nn.Module, tuple], None]:
        def hook(_: nn.Module, args: tuple) -> None:
            # Some families keep batch and positions in one axis.
            if index == max(recorded.calls):
                recorded.heads[index] = args[0].reshape(1, -1, args[0].shape[-1])

        return hook

    with ExitStack() as hooks:
        for index in layers:
            # First hook: foreign hooks run again when the layer is replayed.
            handle = decoder_layers(model)[index].register_forward_pre_hook(
                record_layer(index), with_kwargs=True, prepend=True
            )
            hooks.callback(handle.remove)
            if index in targets:
                # Last hook: a mask applies to the final input of the projection.
                projection = output_projection(model, index)
                hooks.callback(projection.register_forward_pre_hook(record_heads(index)).remove)
        yield recorded


@dataclass
class _KeyValueRecorder:
    """Records keys and values as the layers of a pass make them.

    Attributes:
        first: the first target layer.
        before: positions to keep for masked passes, of the layers above `first`; None: none.
    """

    first: int
    before: slice | None
    kept: dict[int, KeysValues] = field(default_factory=dict)
    devices: set[torch.device] = field(default_factory=set)

    def __call__(self, key: Tensor, value: Tensor, index: int) -> KeysValues:
        if index >= self.first:
            self.devices.add(key.device)
        if self.before is not None and index > self.first:
            self.kept[index] = key[:, :, self.before], value[:, :, self.before]
        return key, value


def _checked_layers(model: PreTrainedModel, layers: Iterable[int]) -> list[int]:
    """Distinct layers, sorted; raises for one that the model does not have, or without heads."""
    checked, total = sorted(set(layers)), num_layers(model)
    for layer in checked:
        if not 0 <= layer < total:
            raise ValueError(
                f"layer must be in [0, {total - 1}] for a {total}-layer model, got {layer}"
            )
        head_site(model, layer)
    return checked


def _recorded_pass(
    model: PreTrainedModel,
    ids: Int[Tensor, "1 n"],
    targets: Sequence[int],
    tap: KeyValueTap,
) -> tuple[RecordedInputs, Float[Tensor, "1 n D"]]:
    """Run the base model, whose keys and values go through `tap`; what layers were called with, and
    final states."""
    structure = structure_of(model)
    first = targets[0] if targets else structure.num_layers
    layers = range(first, structure.num_layers) if structure.chained else range(0)

    def reset_length_read(*_: Any) -> None:
        tap.length_read = False  # only reads by layers count

    base, caching = base_model(model), {"use_cache": False}
    if structure.chained and structure.takes_cache:
        caching = {**with_cache(base, tap), "use_cache": True}
    with ExitStack() as hooks:
        recorded = hooks.enter_context(record_inputs(model, layers, targets))
        if layers:
            handle = decoder_layers(model)[first].register_forward_pre_hook(reset_length_read)
            hooks.callback(handle.remove)
        # The base model stops before the output projection, which only T positions need.
        final = states_of(base(input_ids=ids, **caching))
    if structure.chained:
        _check_heads(recorded.heads, targets)
    return recorded, final


def run_unmasked(
    model: PreTrainedModel,
    input_ids: Int[Tensor, " tokens"],
    prompt_length: int,
    target_layers: Iterable[int],
    scope: str = "all",
) -> UnmaskedPass:
    """Run the model once and keep what masked passes from each of `target_layers` need.

    Call it inside `scoring_session`. The pass uses the model's own forward method, so attention
    masks, windows and rotary positions are the model's own.

    Args:
        scope: positions at which heads will be masked, "all" or "response" (those that predict the
            response).

    Raises:
        ValueError: no prompt, an empty response, a sequence beyond the context window, a layer the
            model does not have, an unknown scope, or one the attention in use cannot serve.
        RuntimeError: the model is compiled.

    Example:
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        >>> unmasked.final_hidden.shape, unmasked.targets[2].heads.shape  # (T, D), (1, N - 1, W)
        (torch.Size([2, 16]), torch.Size([1, 7, 16]))
    """
    validate_sequence(model, input_ids, prompt_length)
    check_scope_runs(model, scope)
    targets, total = _checked_layers(model, target_layers), num_layers(model)
    first = targets[0] if targets else total
    before = slice(0, prompt_length - 1) if scope == "response" else None
    record = _KeyValueRecorder(first=first, before=before)
    # With the model's config it also holds what layers keep besides keys and values.
    tap = KeyValueTap(record, model.config)
    ids = input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))
    recorded, final = _recorded_pass(model, ids, targets, tap)
    predicting = slice(prompt_length - 1, None)
    final_hidden = final[0, predicting]
    return UnmaskedPass(
        input_ids=input_ids,
        prompt_length=prompt_length,
        targets=recorded.targets,
        calls=recorded.calls,
        scope=scope,
        keys_values=record.kept,
        devices=frozenset(record.devices) or frozenset([final.device]),
        final_hidden=final_hidden,
        by_length=tap.length_read,
        after={  # a copy: the states at all positions need not be kept
            layer: recorded.hidden[layer + 1][0, predicting].clone()
            if layer + 1 < total
            else final_hidden
            for layer in recorded.heads
        },
    )


def _check_heads(heads: dict[int, Tensor], targets: Sequence[int]) -> None:
    for index in targets:
        if index not in heads:
            raise RuntimeError(
                f"the output projection of layer {index} was never called as a module: pass the "
                "model as transformers loads it, not compiled"
            )
