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
"""Positions of tokens, from the first to the one behind the last."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_16_BITS = 3e-2
"""By how much of their own sizes the parts may miss the whole at a position: rounding."""


@dataclass(frozen=True)
class HeadPart:
    """What the heads of a layer bring from some tokens, at the T predicting positions.

    Attributes:
        heads: their part of what enters the output projection, W = H times the width of a head.
        attention: of each head, the sum of its weights on these tokens, in [0, 1]; with all tokens
            1, or less where a sink takes a share.

    Example:
        >>> part = HeadPart(heads=torch.zeros(2, 16), attention=torch.full((4, 2), 0.5))
        >>> sum_parts([part, part]).attention.unique()
        tensor([1.])
    """

    heads: Float[Tensor, "T W"]
    attention: Float[Tensor, "H T"]


def check_spans(context: Any, tokens: int) -> list[Span]:
    """The context's spans, one or several, as plain numbers.

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
        given = np.asarray(context).reshape(-1, 2)  # a single one, too
        found: list[Span] = [(operator.index(a), operator.index(b)) for a, b in given]
    except (TypeError, ValueError):
        found = []
    if not found:
        raise ValueError(
            "a source other than 'all' needs to know the context: expected (start, end) in tokens, "
            f"or a list of these, got {context!r:.80}"
        )
    for start, end in found:
        if not 0 <= start < end <= tokens:
            raise ValueError(
                f"a span of the context must lie within the {tokens} tokens of prompt and response "
                f"and contain at least one, got ({start}, {end})"
            )
    in_order = sorted(found)
    for (_, end), (start, _) in pairwise(in_order):
        if start < end:
            raise ValueError(f"spans of the context overlap: {found}. A token has one source")
    return found


class _Kept(TorchFunctionMode):
    """Inside the target layer, lets heads take in the values of some tokens alone.

    Attributes:
        inside: whether the layer is being run.
        attention: weights on these tokens, once they have been seen.
    """

    def __init__(self, kept: Bool[Tensor, " N"], heads: int) -> None:
        super().__init__()
        self.kept, self.heads = kept, heads
        self.inside = False
        self.attention: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "") if self.inside else ""
        if name == "scaled_dot_product_attention":
            return self._one_kernel(function, args, kwargs)
        found = function(*args, **kwargs)
        if name == "softmax" and self._over_keys(found):
            return self._weights(found)
        return found

    def _over_keys(self, found: Tensor) -> bool:
        """Whether it is one row of weights for each head and token; behind all, perhaps, a sink."""
        tokens = len(self.kept)
        *batch, heads, queries, keys = (1, *found.shape)[-4:]
        return (
            (heads, queries) == (self.heads, tokens)
            and keys - tokens in (0, 1)
            and not any(one > 1 for one in batch)
        )

    def _weights(self, found: Tensor) -> Tensor:
        kept = found.new_zeros(found.shape[-1])
        kept[: len(self.kept)] = self.kept
        found = found * kept
        self._note(found.sum(-1))
        return found

    def _one_kernel(self, function: Any, args: tuple, kwargs: dict) -> Tensor:
        query, key, value, *others = (*args, *(kwargs.pop(n) for n in _INPUTS[len(args) :]))
        if query.shape[-3:-1] != (self.heads, len(self.kept)):
            return function(query, key, value, *others, **kwargs)
        if value.shape[-2] != len(self.kept):
            raise _unsplit(f"attention over {value.shape[-2]} keys, not {len(self.kept)}")
        kept = self.kept[:, None].to(value)
        ones = kept.expand_as(value).contiguous()
        self._note(function(query, key, ones, *others, **kwargs)[..., 0])
        return function(query, key, value * kept, *others, **kwargs)

    def _note(self, attention: Tensor) -> None:
        self.attention = attention.reshape(self.heads, -1).float()


_INPUTS = ("query", "key", "value")


def _unsplit(found: str) -> TypeError:
    return TypeError(
        f"its heads cannot be split by where their output comes from: {found}. Leave `source` at "
        "'all', or load it with attn_implementation='eager'"
    )


def _part(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    kept: Bool[Tensor, " N"],
    replay: bool,
) -> tuple[Float[Tensor, "N W"], Float[Tensor, "H N"]]:
    """What enters the output projection from these tokens, and the weights on them.

    Args:
        replay: call the layer alone, as it was called in the unmasked pass, up to the projection;
            else the model from its start up to there.
    """
    site, module = head_site(model, layer), decoder_layers(model)[layer]

    def stop(_: nn.Module, args: tuple) -> None:
        if mode.inside:
            raise Reached(args[0].reshape(-1, site.width))

    def enter(*_: Any) -> None:
        mode.inside = True

    def leave(*_: Any) -> None:
        mode.inside = False

    mode = _Kept(kept, site.heads)
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
                start = execution_device(model.get_input_embeddings())
                tokens = unmasked.input_ids[None, :-1].to(start)
                base_model(model)(input_ids=tokens, use_cache=False)
        except Reached as reached:
            if mode.attention is None:
                raise _unsplit("no weights over the keys were seen") from None
            return reached.tensors[0], mode.attention
    raise AssertionError("a decoder layer did not reach its output projection")


def head_parts(
    model: PreTrainedModel, unmasked: UnmaskedPass, layer: int, spans: Sequence[Span]
) -> list[HeadPart]:
    """What the heads of a layer bring from each span of tokens, and, last, from all others.

    Each costs the attention of one layer over all positions. Call it inside `scoring_session`.

    Args:
        unmasked: a pass with `layer` among its target layers.
        spans: disjoint, in positions of its tokens.

    Raises:
        ValueError: spans that are none; see `check_spans`.
        TypeError: attention that shows no weights and takes no values.
        RuntimeError: parts that do not add up to the heads' output, or that come from tokens to
            those before them: something behind the softmax is not linear, or keys are not tokens.

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
    for own, (start, end) in zip(kept, spans, strict=True):
        own[start:end] = True
    kept.append(~torch.stack(kept).any(0))
    # A layer that is not quite itself when called alone is reached through the model.
    routes = (True, False) if layer in unmasked.targets else (False,)
    for replay in routes:
        try:
            found = [_part(model, unmasked, layer, own, replay) for own in kept]
            if replay:
                whole = unmasked.targets[layer].heads[0]
            else:
                every = torch.ones_like(kept[0])
                whole = _part(model, unmasked, layer, every, replay)[0]
        except TypeError as error:
            raise TypeError(f"{type(model).__name__}, layer {layer}: {error}") from error
        wrong = _what_is_wrong([heads for heads, _ in found], whole, kept)
        if wrong is None:
            break
    else:
        raise RuntimeError(
            f"{type(model).__name__}, layer {layer}: heads have no part that comes from the "
            f"context: {wrong}. Leave `source` at 'all'"
        )
    at = unmasked.predicting
    return [HeadPart(heads[at], attention[:, at]) for heads, attention in found]


def _what_is_wrong(
    parts: Sequence[Float[Tensor, "N W"]], whole: Float[Tensor, "N W"], kept: Sequence[Tensor]
) -> str | None:
    """Why these are not the parts of the whole; None if they are."""
    own = torch.stack(list(parts)).double()
    missed = (own.sum(0) - whole.double()).norm(dim=-1)
    size = own.norm(dim=-1).sum(0) + whole.double().norm(dim=-1)
    worst = (missed / size.clamp_min(torch.finfo(torch.float64).tiny)).max().item()
    if not worst <= TOLERANCE.get(whole.dtype, TOLERANCE_16_BITS):
        return (
            "what they bring from there and from elsewhere does not add up to their output (apart "
            f"by {worst:.2g} of it). Something behind the softmax is not linear, as a norm over "
            "heads is"
        )
    for part, tokens in zip(own, kept, strict=True):
        if part[tokens.cumsum(0) == 0].any():
            return "tokens bring something to tokens before them, so keys are not where tokens are"
    return None


def sum_parts(parts: Sequence[HeadPart]) -> HeadPart:
    """What heads bring from several sources.

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
