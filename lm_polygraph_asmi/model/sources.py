"""Splits a head's output by source: the part from some tokens, and the part from all others.

With fixed attention weights a head's output is linear in the values: a sum over tokens j of a_j
v_j. The attention of the target layer runs again with the weights of all other tokens set to zero
after the softmax (or their values before it, if one kernel does both). The input of the output
projection is then the part of the kept tokens. This works with grouped queries, sinks, caps,
windows, position biases, latent values and gates after the heads. The parts must add up to the
whole, and no token may contribute to earlier tokens. Otherwise the model is unsupported, for
example if an operation after the softmax is not linear (a norm over heads).
"""

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layer_call import Reached
from lm_polygraph_asmi.model.layers import base_model, decoder_layers, head_site, output_projection
from lm_polygraph_asmi.model.unmasked import UnmaskedPass

Span = tuple[int, int]
"""Positions of tokens, (start, end) with the end excluded."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_16_BITS = 3e-2
"""Relative difference at a position between the sum of parts and all heads' output: rounding."""


@dataclass(frozen=True)
class HeadPart:
    """The part of head outputs that comes from some tokens, at the T predicting positions.

    Attributes:
        heads: that part of the output projection's input, W = H times the width of a head.
        attention: sum of each head's weights on these tokens, in [0, 1]; 1 for all tokens, or less
            if there is an attention sink.

    Example:
        >>> part = HeadPart(heads=torch.zeros(2, 16), attention=torch.full((4, 2), 0.5))
        >>> sum_parts([part, part]).attention.unique()
        tensor([1.])
    """

    heads: Float[Tensor, "T W"]
    attention: Float[Tensor, "H T"]


def check_spans(context: Any, tokens: int) -> list[Span]:
    """The spans of the context, one or several, as tuples of int.

    Raises:
        ValueError: none, an empty one, one outside the sequence, or two that overlap.

    Example:
        >>> check_spans((1, 4), tokens=8)
        [(1, 4)]
        >>> check_spans([(1, 4), (3, 6)], tokens=8)
        Traceback (most recent call last):
        ValueError: spans of the context overlap: [(1, 4), (3, 6)]. A token has one source
    """
    try:
        pairs = np.asarray(context).reshape(-1, 2)  # also of a single span
        spans: list[Span] = [(operator.index(start), operator.index(end)) for start, end in pairs]
    except (TypeError, ValueError):
        spans = []
    if not spans:
        raise ValueError(
            "a source other than 'all' needs to know the context: expected (start, end) in tokens, "
            f"or a list of these, got {context!r:.80}"
        )
    for start, end in spans:
        if not 0 <= start < end <= tokens:
            raise ValueError(
                f"a span of the context must lie within the {tokens} tokens of prompt and response "
                f"and contain at least one, got ({start}, {end})"
            )
    for (_, end), (start, _) in pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"spans of the context overlap: {spans}. A token has one source")
    return spans


class _KeptTokens(TorchFunctionMode):
    """Restricts the attention of the target layer to the values of some tokens.

    Attributes:
        in_layer: whether the layer is running.
        attention: weights on these tokens, after the layer's attention ran.
    """

    def __init__(self, kept: Bool[Tensor, " N"], heads: int) -> None:
        super().__init__()
        self.kept, self.heads = kept, heads
        self.in_layer = False
        self.attention: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "") if self.in_layer else ""
        if name == "scaled_dot_product_attention":
            return self._sdpa(function, args, kwargs)
        output = function(*args, **kwargs)
        if name == "softmax" and self._over_keys(output):
            return self._kept_weights(output)
        return output

    def _over_keys(self, weights: Tensor) -> bool:
        """Whether a softmax has a row of weights for each head and token, with at most one sink as
        the last key."""
        tokens = len(self.kept)
        *batch, heads, queries, keys = (1, *weights.shape)[-4:]
        return (
            (heads, queries) == (self.heads, tokens)
            and keys - tokens in (0, 1)
            and not any(size > 1 for size in batch)
        )

    def _kept_weights(self, weights: Tensor) -> Tensor:
        kept = weights.new_zeros(weights.shape[-1])
        kept[: len(self.kept)] = self.kept
        weights = weights * kept
        self._record(weights.sum(-1))
        return weights

    def _sdpa(self, function: Any, args: tuple, kwargs: dict) -> Tensor:
        query, key, value, *others = (*args, *(kwargs.pop(n) for n in _INPUTS[len(args) :]))
        if query.shape[-3:-1] != (self.heads, len(self.kept)):
            return function(query, key, value, *others, **kwargs)
        if value.shape[-2] != len(self.kept):
            raise _unsplit(f"attention over {value.shape[-2]} keys, not {len(self.kept)}")
        kept = self.kept[:, None].to(value)
        ones = kept.expand_as(value).contiguous()
        self._record(function(query, key, ones, *others, **kwargs)[..., 0])
        return function(query, key, value * kept, *others, **kwargs)

    def _record(self, attention: Tensor) -> None:
        self.attention = attention.reshape(self.heads, -1).float()


_INPUTS = ("query", "key", "value")


def _unsplit(reason: str) -> TypeError:
    return TypeError(
        f"its head outputs cannot be split by source: {reason}. Leave `source` at "
        "'all', or load it with attn_implementation='eager'"
    )


def _heads_from(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    kept: Bool[Tensor, " N"],
    replay: bool,
) -> tuple[Float[Tensor, "N W"], Float[Tensor, "H N"]]:
    """The part of head outputs that comes from the kept tokens, and the attention weights on them.

    Args:
        replay: run only the layer, as called in the unmasked pass, up to the output projection;
            otherwise the model up to there.
    """
    site, module = head_site(model, layer), decoder_layers(model)[layer]

    def stop(_: nn.Module, args: tuple) -> None:
        if mode.in_layer:
            raise Reached(args[0].reshape(-1, site.width))

    def enter(*_: Any) -> None:
        mode.in_layer = True

    def leave(*_: Any) -> None:
        mode.in_layer = False

    mode = _KeptTokens(kept, site.heads)
    with ExitStack() as hooks:
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, always_call=True),
            output_projection(model, layer).register_forward_pre_hook(stop),
        ):
            hooks.callback(handle.remove)
        hooks.enter_context(mode)
        try:
            if replay:
                unmasked.calls[layer].replay(module, unmasked.targets[layer].hidden)
            else:
                device = execution_device(model.get_input_embeddings())
                tokens = unmasked.input_ids[None, :-1].to(device)
                base_model(model)(input_ids=tokens, use_cache=False)
        except Reached as reached:
            if mode.attention is None:
                raise _unsplit("no weights over the keys were seen") from None
            return reached.tensors[0], mode.attention
    raise AssertionError("a decoder layer did not reach its output projection")


def head_parts(
    model: PreTrainedModel, unmasked: UnmaskedPass, layer: int, spans: Sequence[Span]
) -> list[HeadPart]:
    """The parts of a layer's head outputs from each span of tokens and, last, from all others.

    Each part costs the attention of one layer at all positions. Call it inside `scoring_session`.

    Args:
        unmasked: a pass with `layer` among its target layers.
        spans: disjoint, in positions of its tokens.

    Raises:
        ValueError: invalid spans, see `check_spans`.
        TypeError: neither the weights nor the values of the attention are visible.
        RuntimeError: parts do not add up to the head outputs, or tokens contribute to earlier ones:
            an operation after the softmax is not linear, or keys are not at their tokens.

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked, scoring_session
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     context, elsewhere = head_parts(model, unmasked, 2, [(1, 4)])
        >>> context.heads.shape, context.attention.shape  # (T, W), (H, T)
        (torch.Size([2, 16]), torch.Size([4, 2]))
        >>> torch.allclose(context.attention + elsewhere.attention, torch.ones(4, 2))
        True
    """
    spans = check_spans(spans, len(unmasked.input_ids))
    kept = [torch.zeros(unmasked.predicting.stop, dtype=torch.bool) for _ in spans]
    for tokens, (start, end) in zip(kept, spans, strict=True):
        tokens[start:end] = True
    kept.append(~torch.stack(kept).any(0))
    # If replaying the layer alone fails, the model runs up to the layer.
    routes = (True, False) if layer in unmasked.targets else (False,)
    for replay in routes:
        try:
            parts = [_heads_from(model, unmasked, layer, tokens, replay) for tokens in kept]
            if replay:
                all_heads = unmasked.targets[layer].heads[0]
            else:
                all_tokens = torch.ones_like(kept[0])
                all_heads, _ = _heads_from(model, unmasked, layer, all_tokens, replay)
        except TypeError as error:
            raise TypeError(f"{type(model).__name__}, layer {layer}: {error}") from error
        failure = _split_failure([heads for heads, _ in parts], all_heads, kept)
        if failure is None:
            break
    else:
        raise RuntimeError(
            f"{type(model).__name__}, layer {layer}: heads have no part that comes from the "
            f"context: {failure}. Leave `source` at 'all'"
        )
    predicting = unmasked.predicting
    return [HeadPart(heads[predicting], attention[:, predicting]) for heads, attention in parts]


def _split_failure(
    parts: Sequence[Float[Tensor, "N W"]], all_heads: Float[Tensor, "N W"], kept: Sequence[Tensor]
) -> str | None:
    """Why these parts are not a split of the head outputs; None if they are."""
    wide_parts, wide_heads = torch.stack(list(parts)).double(), all_heads.double()
    missing = (wide_parts.sum(0) - wide_heads).norm(dim=-1)
    size = wide_parts.norm(dim=-1).sum(0) + wide_heads.norm(dim=-1)
    largest = (missing / size.clamp_min(torch.finfo(torch.float64).tiny)).max().item()
    if not largest <= TOLERANCE.get(all_heads.dtype, TOLERANCE_16_BITS):
        return (
            "the parts from the context and from elsewhere do not add up to the head outputs "
            f"(relative difference {largest:.2g}). An operation after the softmax is not linear, "
            "such as a norm over heads"
        )
    for part, tokens in zip(wide_parts, kept, strict=True):
        if part[tokens.cumsum(0) == 0].any():
            return "tokens contribute to earlier tokens, so keys are not at their tokens' positions"
    return None


def sum_parts(parts: Sequence[HeadPart]) -> HeadPart:
    """The part of head outputs from several sources together.

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked, scoring_session
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     parts = head_parts(model, unmasked, 2, [(1, 4)])
        >>> torch.allclose(sum_parts(parts).heads, unmasked.targets[2].heads[0, 5:7], atol=1e-5)
        True
    """
    return HeadPart(
        torch.stack([part.heads for part in parts]).sum(0),
        torch.stack([part.attention for part in parts]).sum(0),
    )
