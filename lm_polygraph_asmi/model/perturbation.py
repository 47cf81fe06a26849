"""What a mask changes at the target layer; the layers above it always run in the same way.

ASMI sets the outputs of masked heads to zero. Another `Perturbation` changes something else in the
same layer, at the same positions, under the same masks: only the output of the target layer
differs. What it changes is a function, `Edit`.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lm_polygraph_asmi.config import ASMIConfig, check_setting
from lm_polygraph_asmi.model.layer_call import replaced_forward
from lm_polygraph_asmi.model.layers import (
    attention_module,
    decoder_layers,
    down_projection,
    head_site,
    output_projection,
)
from lm_polygraph_asmi.model.structure import states_of
from lm_polygraph_asmi.model.unmasked import UnmaskedPass
from lm_polygraph_asmi.validation import check_one_of

HEADS, MLP, OUTPUT = "heads", "mlp", "output"
SITES = (HEADS, MLP, OUTPUT)
"""Sites: inputs of the output projection and of the MLP's down projection, output of the layer."""


@dataclass(frozen=True)
class Masking:
    """What an edit gets besides the values.

    Attributes:
        masks: (B, H), 1 = kept, one for each batch row of the values.
        positions: (n,) positions of the values in the sequence.
        unmasked: the unmasked pass.
        layer: the target layer.
        seed: base seed.
    """

    masks: Shaped[Tensor, "B H"]
    positions: Int[Tensor, " n"]
    unmasked: UnmaskedPass
    layer: int
    seed: int


@runtime_checkable
class Edit(Protocol):
    """What masks change at a site of the target layer.

    It depends on masks, example, layer and seed alone, so that batch size and other positions
    change nothing. A mask of ones changes nothing, unless the change is rescaled `as_heads`.
    """

    def __call__(self, values: Float[Tensor, "_ n W"], at: Masking, /) -> Float[Tensor, "B n W"]:
        """Changed values, a batch row for each mask.

        Args:
            values: (B, n, W), or (1, n, W) for all masks, at the positions `at.positions`.
            at: masks and all that draws may depend on.
        """


def by_head(values: Float[Tensor, "_ n W"], masks: Shaped[Tensor, "B H"]) -> Tensor:
    """(B, 1, W) masks by channel: each channel has the mask of its head."""
    width = values.shape[-1] // masks.shape[-1]
    return masks.to(values).repeat_interleave(width, dim=-1)[:, None]


def without_heads(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """ASMI's own: the outputs of masked heads are zero, and the others are not rescaled.

    If a gate multiplies head outputs before the projection, the gated outputs are masked.
    """
    return heads * by_head(heads, at.masks)


@dataclass(frozen=True)
class Perturbation:
    """What a mask changes, and where.

    Attributes:
        name: names it in scores, saved runs and caches, so no two perturbations share one. "heads"
            is ASMI's own.
        edit: the change of the values at `site`.
        site: `HEADS`, `MLP` or `OUTPUT`.
        as_heads: whether the change of the layer's output is rescaled, for each token and mask, to
            its norm under head masking.
        reads_heads: whether `edit` reads the head outputs of the unmasked pass.
        scale: multiplies the change of the layer's output: r_0 + scale (r - r_0); None leaves the
            change as it is.
        seed: base seed of random draws.

    Raises:
        ValueError: an unknown site, a scale that is not a positive number, or "heads" with another
            edit.

    Example:
        >>> silent = Perturbation("silent_mlp", lambda values, at: 0 * values, MLP, scale=0.5)
        >>> silent.name, silent.site, silent.scale
        ('silent_mlp', 'mlp', 0.5)
        >>> Perturbation(scale=-1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: perturbation_scale ...
    """

    name: str = ASMIConfig.perturbation
    edit: Edit = without_heads
    site: str = HEADS
    as_heads: bool = False
    reads_heads: bool = False
    scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_setting("perturbation", self.name)
        check_setting("perturbation_scale", self.scale)
        check_one_of("site", self.site, SITES)
        of_heads = self.edit is without_heads and self.site == HEADS and not self.as_heads
        if self.name == ASMIConfig.perturbation and not of_heads:
            raise ValueError(
                f"expected another name than {self.name!r}, which is ASMI's own perturbation: "
                "masked heads output zero"
            )

    @property
    def kind(self) -> tuple[str, ...]:
        """Names the code that runs: the self-check holds for all perturbations of a kind."""
        edit = getattr(self.edit, "__qualname__", type(self.edit).__name__)
        return (self.name, str(self.scale is None), edit)


WITHOUT_HEADS = Perturbation()
"""ASMI's own: masked heads."""


def check_perturbation(
    model: PreTrainedModel, layer: int, change: Perturbation, heads: bool = True
) -> None:
    """Raise unless a perturbation can be applied to a layer.

    Args:
        heads: whether the unmasked pass keeps head outputs.

    Raises:
        TypeError: no single down projection, or fewer channels in it than heads; a perturbation
            that reads head outputs which the unmasked pass does not keep.

    Example:
        >>> check_perturbation(model, 2, Perturbation())
        >>> first = Perturbation("first", lambda heads, at: heads, reads_heads=True)
        >>> check_perturbation(model, 2, first, heads=False)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: perturbation 'first' needs the head outputs of the unmasked pass, ...
    """
    groups = head_site(model, layer).heads
    if change.site == MLP:
        width = getattr(down_projection(model, layer), "in_features", groups)
        if width < groups:
            raise TypeError(
                f"perturbation {change.name!r} needs {groups} groups of MLP channels, got "
                f"{width} channels in layer {layer} of {type(model).__name__}"
            )
    if change.reads_heads and not heads:
        raise TypeError(
            f"perturbation {change.name!r} needs the head outputs of the unmasked pass, which "
            f"are unavailable for {type(model).__name__}: its layers are not a simple chain"
        )


def _scaled(
    unmasked: Tensor, changed: Tensor, head_masked: Tensor | None, scale: float | None
) -> Tensor:
    """Output of a layer: `unmasked` plus its change to `changed`, rescaled to the norm of the
    change to `head_masked`, times the scale."""
    wide = torch.promote_types(unmasked.dtype, torch.float32)
    base = unmasked.to(wide)
    change = changed.to(wide) - base
    if head_masked is not None:
        target_norm = (head_masked.to(wide) - base).norm(dim=-1, keepdim=True)
        norm = change.norm(dim=-1, keepdim=True)
        # A change by rounding is not rescaled: the first position is its own replacement.
        rounding = max(1e-5, torch.finfo(unmasked.dtype).eps) * base.norm(dim=-1, keepdim=True)
        change = change * torch.where(norm > rounding, target_norm / norm, 0)
    return (base + (1 if scale is None else scale) * change).to(unmasked.dtype)


def _with_copied_caches(values: Any) -> Any:
    """Arguments of a layer that is called more than once: each call fills its own cache."""
    if isinstance(values, dict):
        return {name: _with_copied_caches(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(map(_with_copied_caches, values))
    return copy.deepcopy(values) if isinstance(values, Cache) else values


@contextmanager
def perturbed(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    places: Int[Tensor, " n"],
    change: Perturbation = WITHOUT_HEADS,
    before: int = 0,
    heads: Float[Tensor, "1 n W"] | None = None,
) -> Iterator[None]:
    """Let a layer run with the changes of masks at some positions; batch row b has mask b.

    A projection that several layers share is edited only inside the target layer.

    Args:
        places: those positions, in the full sequence.
        before: number of cached positions before those that the layer is called on.
        heads: head outputs that replace those at `places`; the layer is then called only on these
            positions.
    """
    masking = Masking(masks, places, unmasked, layer, change.seed)
    active: dict[str, Edit] = {}  # by site, while the target layer runs

    def edited(values: Tensor, edit: Edit) -> Tensor:
        if heads is not None:
            return edit(values, masking)
        positions = (places - before).to(values.device)
        values = values.clone()
        values[:, positions] = edit(values[:, positions], masking)
        return values

    def at_site(site: str, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        values, *others = args
        if site == HEADS and heads is not None:
            values = heads.expand(len(masks), -1, -1)
        if site in active:
            rows = values.reshape(len(masks), -1, values.shape[-1])
            values = edited(rows, active[site]).reshape(values.shape)
        elif values is args[0]:
            return None
        return (values.contiguous(), *others)  # some projections need contiguous inputs

    module = decoder_layers(model)[layer]
    edits = {} if change.site == OUTPUT else {change.site: change.edit}
    forward = module.forward

    def perturbed_forward(*args: Any, **kwargs: Any) -> Any:
        def run(site_edits: dict[str, Edit], last: bool = False) -> Any:
            active.clear()
            active.update(site_edits)
            try:
                copied = (args, kwargs) if last else _with_copied_caches((args, kwargs))
                return forward(*copied[0], **copied[1])
            finally:
                active.clear()

        if edits and change.scale is None and not change.as_heads:
            return run(edits, last=True)

        def rows(output: Any) -> Tensor:
            states = states_of(output)
            return states.reshape(len(masks), -1, states.shape[-1])

        head_masked = rows(run({HEADS: without_heads})) if change.as_heads else None
        changed = rows(run(edits)) if edits else None
        output = run({}, last=True)
        if changed is None:
            changed = edited(rows(output), change.edit)
        scaled = _scaled(rows(output), changed, head_masked, change.scale)
        scaled = scaled.reshape(states_of(output).shape)
        return (scaled, *output[1:]) if isinstance(output, tuple | list) else scaled

    projections = {}  # looked up before hooks are registered, since that may run a pass
    if MLP in edits:
        projections[MLP] = down_projection(model, layer)
    if HEADS in edits or change.as_heads or heads is not None:
        projections[HEADS] = output_projection(model, layer)
    with ExitStack() as stack:
        for site, projection in projections.items():
            # Last hook: a mask applies to the final input of the projection.
            stack.callback(projection.register_forward_pre_hook(partial(at_site, site)).remove)
        stack.enter_context(replaced_forward(module, perturbed_forward))
        yield


def perturbed_layer(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    positions: slice,
    change: Perturbation = WITHOUT_HEADS,
) -> Float[Tensor, "B n D"]:
    """Output of the target layer at some positions under each mask.

    Its attention is that of the unmasked pass, and the rest of the layer does not mix positions.
    (With parallel residuals the MLP is the same for all masks, but it still runs for each.)

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked, scoring_session
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     perturbed_layer(model, unmasked, 2, masks, unmasked.predicting).shape  # (B, n, D)
        torch.Size([3, 2, 16])
    """
    target, module = unmasked.targets[layer], decoder_layers(model)[layer]
    attention, site = attention_module(model, layer), head_site(model, layer)
    places = torch.arange(target.heads.shape[1])[positions]
    call = unmasked.calls[layer]
    if attention is None:
        # No module returns the projection's output, so the layer runs at all positions.
        hidden = target.hidden.expand(len(masks), -1, -1)
        with perturbed(model, unmasked, layer, masks, places, change):
            return call.replay(module, hidden)[:, positions]
    heads = target.heads[:, positions]
    projection = output_projection(model, layer)

    def attend(*_: Any, **__: Any) -> Any:
        projected = projection(heads)
        return (projected, *[None] * (site.returns - 1)) if site.returns else projected

    with (
        perturbed(model, unmasked, layer, masks, places, change, heads=heads),
        replaced_forward(attention, attend),
    ):
        hidden = target.hidden[:, positions].expand(len(masks), -1, -1)
        return call.replay(module, hidden, positions)
