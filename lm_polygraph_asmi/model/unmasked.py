"""The unmasked pass over prompt and response, which records the input of the masked passes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lm_polygraph_asmi.config import check_setting
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layer_call import (
    MASKABLE,
    KeysValues,
    KeyValueTap,
    LayerCall,
    replaced_forward,
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
from lm_polygraph_asmi.model.model_cache import has_foreign_code, model_cache, model_state
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


Reused = Literal["nothing", "keys", "states"]


@dataclass(frozen=True)
class UnmaskedPass:
    """The unmasked forward pass of one example.

    It skips the last token, which predicts nothing that is scored, and the first tokens if their
    keys and values were cached.

    Attributes:
        input_ids: prompt and response, N + 1 tokens.
        prompt_length: number of prompt tokens; T = N + 1 - prompt_length.
        targets: for each target layer, what enters it at the positions that were run.
        calls: how the model called every layer from the first target layer on.
        scope: where heads are to be masked, "all" or "response".
        start: the first position that was run; earlier ones were cached (`PrefixCache`).
        reused: what was cached: "nothing"; "keys" and values of the positions before `start`;
            or also hidden "states" at positions from `start` on, so that only target layers ran.
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
    start: int = 0
    reused: Reused = "nothing"
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

    def run(self, positions: slice) -> slice:
        """Positions of the sequence, counted from `start`."""
        if not self.start:
            return positions
        return slice(positions.start - self.start, positions.stop - self.start)

    def log_probs(self, model: PreTrainedModel) -> Float[Tensor, "T V"]:
        """The model's own next-token log-probabilities at the response positions."""
        return readout(model, self.final_hidden)


States = dict[int, Tensor]
"""Hidden states (1, n, D) by index: those entering some layers, and at index L the final ones
(after the final norm), as in `hidden_states` of transformers."""


@contextmanager
def states_seen(model: PreTrainedModel, layers: Iterable[int]) -> Iterator[Callable[[], States]]:
    """Keep the inputs of layers and the final states of all passes over one sequence, such as those
    of its generation.

    Yields:
        A function that returns them joined along positions; {} if there were several sequences.

    Example:
        >>> with scoring_session(model), states_seen(model, [2]) as joined:
        ...     _ = model.generate(ids[None], max_new_tokens=3, do_sample=False)
        >>> {layer: tuple(states.shape) for layer, states in joined().items()}
        {2: (1, 10, 16), 4: (1, 10, 16)}
    """
    parts: dict[int, list[Tensor]] = {index: [] for index in {*layers, num_layers(model)}}

    def keep_entering(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            if isinstance(output, Tensor):  # else `_skipped_layers` could not return the same type
                parts[index].append(LayerCall.split(layer, args, kwargs)[0])

        return hook

    def keep_final(_: nn.Module, __: tuple, output: Any) -> None:
        parts[num_layers(model)].append(states_of(output))

    def joined() -> States:
        shapes = {tuple(part.shape[:2] for part in states) for states in parts.values()}
        if len(shapes) != 1 or any(rows != 1 for rows, _ in shapes.pop()):
            return {}
        return {index: torch.cat(states, dim=1) for index, states in parts.items() if states}

    with ExitStack() as hooks:
        for index in parts:
            if index == num_layers(model):
                handle = base_model(model).register_forward_hook(keep_final)
            else:
                handle = decoder_layers(model)[index].register_forward_hook(
                    keep_entering(index), with_kwargs=True
                )
            hooks.callback(handle.remove)
        yield joined


@dataclass
class PrefixCache:
    """Keys and values of the last sequence, so that a start shared with the next one runs once.

    Attributes:
        input_ids: tokens of the sequence.
        layers: keys and values of each layer, from the first to the last.
        states: hidden states at positions from `first` on, if they were recorded.
        first: position of the first hidden states.
        state: `model_state` of the model that computed them; the cache is ignored for another
            model, or after its weights have changed.

    Example:
        >>> prefix_cache = PrefixCache()
        >>> with scoring_session(model):
        ...     for last in (7, 8):  # the second pass runs only new positions
        ...         ids[-1] = last
        ...         unmasked = run_unmasked(model, ids, 6, [2], "response", prefix_cache)
        ...         print(unmasked.start)
        0
        5
    """

    input_ids: list[int] = field(default_factory=list)
    layers: list[KeysValues] = field(default_factory=list)
    states: States = field(default_factory=dict)
    first: int = 0
    state: int | None = None

    @staticmethod
    def serves(model: PreTrainedModel) -> bool:
        """Whether every layer keeps only keys and values, and runs with those of earlier positions.

        False if there are foreign hooks, which may act differently at each position.
        """
        structure = structure_of(model)
        return (
            structure.chained
            and structure.takes_cache
            and len(structure.sites) == structure.num_layers
            and all(site.attention is not None for site in structure.sites.values())
            and not has_foreign_code(model)
            and CACHE_DISABLED not in model_cache(model)
        )

    @staticmethod
    def disable(model: PreTrainedModel) -> None:
        """Make `serves` return False from now on, since cached passes were wrong."""
        model_cache(model)[CACHE_DISABLED] = True

    def common(self, model: PreTrainedModel, input_ids: Sequence[int]) -> int:
        """Number of first tokens that are equal to the cached ones."""
        if self.state != model_state(model):
            return 0
        return len(commonprefix([self.input_ids, list(input_ids)]))

    def cache(self, length: int) -> DynamicCache:
        """The first `length` positions as a transformers cache without sliding windows."""
        cache = DynamicCache()
        if length:
            for index, (key, value) in enumerate(self.layers):
                cache.update(key[:, :, :length], value[:, :, :length], index)
        return cache

    def keep(
        self, model: PreTrainedModel, input_ids: Sequence[int], layers: Sequence[KeysValues]
    ) -> None:
        """Replace the cached sequence."""
        self.input_ids, self.layers, self.states = list(input_ids), list(layers), {}
        self.state = model_state(model)

    def take(
        self,
        model: PreTrainedModel,
        input_ids: Sequence[int],
        cache: DynamicCache,
        states: States | None = None,
        first: int = 0,
    ) -> None:
        """Keep the content of a transformers cache; nothing if it lacks part of the sequence.

        A sliding layer keeps only the last positions, and does not record which.

        Args:
            states: of the passes that filled the cache (`states_seen`). Dropped if their number of
                positions differs from the cache's (speculative decoding takes tokens back).
            first: number of positions in the cache before those passes.
        """
        layers: list[Any] = cache.layers  # of a kind that keeps keys and values
        keys_values = [(layer.keys, layer.values) for layer in layers]
        lengths = {0 if key is None else key.shape[-2] for key, _ in keys_values}
        slides = any(getattr(layer, "is_sliding", False) for layer in layers)
        if slides or len(lengths) != 1:
            self.keep(model, [], [])
        else:
            cached = lengths.pop()
            self.keep(model, list(input_ids)[:cached], keys_values)
            states = states or {}
            if all(hidden.shape[1] == cached - first for hidden in states.values()):
                self.states, self.first = states, first

    def states_at(
        self, model: PreTrainedModel, input_ids: Sequence[int], layers: Iterable[int], start: int
    ) -> States:
        """Hidden states entering layers, and final ones, at tokens from `start` on; {} if any are
        missing."""
        total = num_layers(model)
        indices = {*layers, total}
        reads_length = model_cache(model).get(
            (READS_LENGTH, attention_of(model), min(indices)), True
        )
        if (
            reads_length  # True if untested: layers that are not run do not show it
            or not indices <= self.states.keys()
            or start < self.first
            or len(self.layers) < total
            or self.common(model, input_ids) < len(input_ids)
        ):
            return {}
        positions = slice(start - self.first, len(input_ids) - self.first)
        return {index: self.states[index][:, positions] for index in indices}

    def known_states(
        self, model: PreTrainedModel, input_ids: Sequence[int], start: int, indices: Collection[int]
    ) -> dict[int, Tensor] | None:
        """Hidden states (n, D) at tokens from `start` on, by index; None if any is missing."""
        length = len(input_ids)
        known = set(indices) <= self.states.keys() and start >= self.first
        if not known or self.common(model, input_ids) < length:
            return None
        positions = slice(start - self.first, length - self.first)
        return {index: self.states[index][0, positions] for index in indices}


READS_LENGTH = "layers read the length of the cache"
CACHE_DISABLED = "passes with cached keys and values were wrong"


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
def _skipped_layers(model: PreTrainedModel, states: States, before: int) -> Iterator[None]:
    """Run only layers whose hidden states are known, on these states; the other layers return their
    input.

    Args:
        before: cached positions before those of the pass.
    """

    def on_known_states(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        _, call = LayerCall.split(layer, args, kwargs, before)
        return (entering[layer],), call.arguments

    def identity(layer: nn.Module) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return LayerCall.split(layer, args, kwargs, before)[0]

        return forward

    layers = decoder_layers(model)
    entering = {layers[index]: hidden for index, hidden in states.items() if index < len(layers)}
    with ExitStack() as undo:
        for layer in layers:
            if layer in entering:
                handle = layer.register_forward_pre_hook(
                    on_known_states, with_kwargs=True, prepend=True
                )
                undo.callback(handle.remove)
            else:
                undo.enter_context(replaced_forward(layer, identity(layer)))
        yield


@contextmanager
def record_inputs(
    model: PreTrainedModel, layers: Iterable[int], targets: Collection[int], before: int = 0
) -> Iterator[RecordedInputs]:
    """Record the inputs of layers during a pass, and the head outputs of targets among them.

    Args:
        before: cached positions before those of the pass.
    """
    recorded = RecordedInputs()

    def record_layer(index: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            states, recorded.calls[index] = LayerCall.split(module, args, kwargs, before)
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
    """Records keys and values as the layers of a pass make them, behind cached ones.

    Attributes:
        cached: those of `start` earlier positions, by layer.
        first: the first target layer.
        before: positions to keep for masked passes, of the layers above `first`; None: none.
        keep_all: whether to keep all positions of all layers, for a prefix cache.
    """

    cached: Sequence[KeysValues]
    start: int
    first: int
    before: slice | None
    keep_all: bool
    kept_before: dict[int, KeysValues] = field(default_factory=dict)
    kept_all: dict[int, KeysValues] = field(default_factory=dict)
    devices: set[torch.device] = field(default_factory=set)

    def __call__(self, key: Tensor, value: Tensor, index: int) -> KeysValues:
        if self.start:
            key, value = (
                torch.cat([earlier[:, :, : self.start], new], dim=-2)
                for earlier, new in zip(self.cached[index], (key, value), strict=True)
            )
        if self.keep_all:
            self.kept_all[index] = key, value
        self.keep(index, key, value)
        return key, value

    def keep(self, index: int, key: Tensor, value: Tensor) -> None:
        """Keep what masked passes need of a layer."""
        if index >= self.first:
            self.devices.add(key.device)
        if self.before is not None and index > self.first:
            self.kept_before[index] = key[:, :, self.before], value[:, :, self.before]


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
    states: States,
) -> tuple[RecordedInputs, Float[Tensor, "1 n D"]]:
    """Run the base model, whose keys and values go through `tap`; what layers were called with, and
    final states. If `states` are known, only layers whose states they hold run."""
    structure = structure_of(model)
    first = targets[0] if targets else structure.num_layers
    layers = range(first, structure.num_layers) if structure.chained else range(0)

    def reset_length_read(*_: Any) -> None:
        tap.length_read = False  # only reads by layers count

    base, caching = base_model(model), {"use_cache": False}
    if structure.chained and structure.takes_cache:
        caching = {**with_cache(base, tap), "use_cache": True}
    with ExitStack() as hooks:
        recorded = hooks.enter_context(record_inputs(model, layers, targets, tap.length))
        if layers:
            handle = decoder_layers(model)[first].register_forward_pre_hook(reset_length_read)
            hooks.callback(handle.remove)
        if states:
            hooks.enter_context(_skipped_layers(model, states, tap.length))
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
    prefix_cache: PrefixCache | None = None,
) -> UnmaskedPass:
    """Run the model once and keep what masked passes from each of `target_layers` need.

    Call it inside `scoring_session`. The pass uses the model's own forward method, so attention
    masks, windows and rotary positions are the model's own.

    Args:
        scope: positions at which heads will be masked, "all" or "response" (those that predict the
            response).
        prefix_cache: cache of a sequence with the same beginning, for the scope "response" and a
            model that it `serves`; afterwards it holds this sequence.

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
    start, states = 0, {}
    if prefix_cache is not None and scope == "response":
        start = prefix_cache.common(model, input_ids[: prompt_length - 1].tolist())
        if 0 < start == prompt_length - 1:
            states = prefix_cache.states_at(model, input_ids[:-1].tolist(), targets, start)
    record = _KeyValueRecorder(
        cached=prefix_cache.layers if prefix_cache is not None else [],
        start=start,
        first=first,
        before=slice(0, prompt_length - 1) if scope == "response" else None,
        keep_all=prefix_cache is not None,
    )
    # With the model's config it also holds what layers keep besides keys and values.
    tap = KeyValueTap(record, model.config)
    tap.length = start
    ids = input_ids[None, start:-1].to(execution_device(model.get_input_embeddings()))
    recorded, final = _recorded_pass(model, ids, targets, tap, states)
    if states:  # keys and values of skipped layers are cached, too
        final = states[total]
        for index in range(first, total):
            record.keep(index, *record.cached[index])
    else:
        model_cache(model)[READS_LENGTH, attention_of(model), first] = tap.length_read
        if prefix_cache is not None and record.kept_all.keys() != set(range(total)):
            PrefixCache.disable(model)  # layers share keys, or keep them elsewhere
        elif prefix_cache is not None:
            layers = [record.kept_all[index] for index in range(total)]
            prefix_cache.keep(model, input_ids[:-1].tolist(), layers)
    predicting = slice(prompt_length - 1 - start, None)
    final_hidden = final[0, predicting]
    return UnmaskedPass(
        input_ids=input_ids,
        prompt_length=prompt_length,
        targets=recorded.targets,
        calls=recorded.calls,
        scope=scope,
        keys_values=record.kept_before,
        devices=frozenset(record.devices) or frozenset([final.device]),
        final_hidden=final_hidden,
        by_length=tap.length_read,
        start=start,
        reused="states" if states else "keys" if start else "nothing",
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
