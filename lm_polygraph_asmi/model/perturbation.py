"""What a mask changes at the target layer; all passes above it are the same whatever it is.

The method takes away the masked heads. The other conditions of the perturbation controls change
something else in the same layer, at the same positions, under the same masks: what the target layer
returns is the only thing that differs. A condition is a function that gets the values at its site,
one batch row per mask, and returns what is to stand there instead; another condition is one more
function and one more line in `CONDITIONS`.
"""

import copy
import hashlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lm_polygraph_asmi.config import check_setting
from lm_polygraph_asmi.model.layer_call import replaced_forward
from lm_polygraph_asmi.model.layers import (
    attention_module,
    decoder_layers,
    down_projection,
    head_site,
    output_projection,
)
from lm_polygraph_asmi.model.unmasked import UnmaskedPass

HEADS, MLP, OUTPUT = "heads", "mlp", "output"
"""Sites: the input of the output projection, that of the MLP's down projection, what the layer
returns."""


@dataclass(frozen=True)
class Masking:
    """What an edit gets besides the values.

    Attributes:
        masks: (B, H), 1 = kept, one for each batch row of the values.
        positions: (n,) places of the values in the sequence.
        unmasked: the unmasked pass.
        layer: the target layer.
        seed: base seed.
    """

    masks: Shaped[Tensor, "B H"]
    positions: Int[Tensor, " n"]
    unmasked: UnmaskedPass
    layer: int
    seed: int

    def generators(self) -> Iterator[torch.Generator]:
        """One for each mask. What it draws follows from base seed, layer, tokens and mask alone,
        so that equal masks are equal and no draw depends on the batch it is made in."""
        example = [self.seed, self.layer, *self.unmasked.input_ids.tolist()]
        for mask in self.masks.long().tolist():
            yield torch.Generator().manual_seed(_seed(example, mask))

    def groups(self, width: int) -> Int[Tensor, " width"]:
        """Group of each of `width` channels, H groups as equal as can be, drawn across them by one
        permutation for all examples."""
        order = permutation(width, _seed([self.seed, self.layer], [width]))
        groups = torch.empty(width, dtype=torch.long)
        groups[order] = torch.arange(width) * self.masks.shape[1] // width
        return groups

    def kept(self, values: Float[Tensor, "_ n W"]) -> Float[Tensor, "B 1 W"]:
        """Masks by channel, in these groups."""
        return self.masks.cpu()[:, self.groups(values.shape[-1])].to(values)[:, None]


Edit = Callable[[Tensor, Masking], Tensor]
"""(values (B, n, W) at a site, what is masked) -> values (B, n, W)."""


@dataclass(frozen=True)
class Perturbation:
    """What a mask changes, as far as it does not depend on the example.

    Attributes:
        condition: name in `CONDITIONS`.
        perturbation_scale: multiplies the change of the layer's output: r_0 + scale (r - r_0); None
            changes it as the condition does, without a detour.
        seed: base seed of what a condition draws; with layer, tokens and mask it gives each draw.
        edit: what is done at the condition's site in place of what the condition does, where that
            depends on the example.

    Raises:
        ValueError: an unknown condition, or a scale that is no positive number.

    Example:
        >>> Perturbation("mlp", perturbation_scale=1.5).kind
        ('mlp', 'False', 'without_groups')
        >>> Perturbation(perturbation_scale=-1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: perturbation_scale ...
    """

    condition: str = "heads"
    perturbation_scale: float | None = None
    seed: int = 0
    edit: Edit | None = None

    def __post_init__(self) -> None:
        check_setting("perturbation", self.condition)
        check_setting("perturbation_scale", self.perturbation_scale)

    @property
    def kind(self) -> tuple[str, ...]:
        """By what code it is done: what was seen to be right for one of a kind is for all."""
        done = self.edit or CONDITIONS[self.condition].edit
        return (
            self.condition,
            str(self.perturbation_scale is None),
            getattr(done, "__qualname__", type(done).__name__),
        )


WITHOUT_HEADS = Perturbation()
"""The method's own."""


def _seed(*numbers: list[int]) -> int:
    """Non-negative, below 2^63; lists of other lengths give others."""
    content = b"".join(array("q", [len(part), *part]).tobytes() for part in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def permutation(width: int, seed: int) -> Int[Tensor, " width"]:
    return torch.randperm(width, generator=torch.Generator().manual_seed(seed))


def _by_head(values: Tensor, masks: Tensor) -> Float[Tensor, "B 1 W"]:
    width = values.shape[-1] // masks.shape[-1]
    return masks.to(values).repeat_interleave(width, dim=-1)[:, None]


def without_heads(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """The method's own: a masked head's outputs are zero, without rescaling the rest.

    Where a gate multiplies head outputs before the projection, what is masked is the gated output,
    a head's whole contribution to the projection.
    """
    return heads * _by_head(heads, at.masks)


def without_part(part: Float[Tensor, "T W"]) -> Edit:
    """A masked head loses a part of what it says at the T predicting positions, see `sources`.

    Example:
        >>> from lm_polygraph_asmi.model import run_subnetworks, run_unmasked, scoring_session
        >>> from lm_polygraph_asmi.model import head_parts
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2], "response")
        ...     context, _ = head_parts(model, unmasked, 2, [(1, 4)])
        ...     change = Perturbation(edit=without_part(context.heads))
        ...     run_subnetworks(model, unmasked, 2, masks, change=change).hidden.shape
        torch.Size([2, 2, 16])
    """

    def edit(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
        gone = 1 - _by_head(heads, at.masks)
        return heads - gone * part.to(heads)[at.positions - at.unmasked.predicting.start]

    return edit


def without_groups(values: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """As many channels as heads have, but drawn from everywhere: masked groups are zero."""
    return values * at.kept(values)


def with_noise(values: Float[Tensor, "B n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Uniform noise from 0 upwards on masked groups, one draw per mask for all positions.

    In the manner of arXiv 2502.03799, which perturbs MLP activations so. The noise's mean square is
    that of the activations at the position.
    """
    draws = [torch.rand(values.shape[-1], generator=own) for own in at.generators()]
    noise = torch.stack(draws).to(values)[:, None] * (1 - at.kept(values))
    size = values.float().square().mean(-1, keepdim=True).sqrt().to(values)
    return values + 3**0.5 * size * noise


def foreign_positions(at: Masking) -> Int[Tensor, "B n"]:
    """For each mask and position an earlier one of the prompt, all of them equally likely.

    Never a later one: no position gets what the model could not have seen there. The first
    position has none before it and stands for itself.
    """
    earlier = torch.arange(len(at.unmasked.input_ids) - 1).clamp_max(at.unmasked.prompt_length)
    found = []
    for own in at.generators():
        drawn = torch.rand(len(earlier), generator=own, dtype=torch.float64) * earlier
        found.append(drawn.long()[at.positions])
    return torch.stack(found)


def from_elsewhere(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Masked heads say what they say, unmasked, at an earlier position of the prompt."""
    kept = _by_head(heads, at.masks)
    elsewhere = at.unmasked.targets[at.layer].heads[0].to(heads.device)[foreign_positions(at)]
    return heads * kept + elsewhere * (1 - kept)


def in_random_direction(output: Float[Tensor, "B n D"], at: Masking) -> Float[Tensor, "B n D"]:
    """A direction of its own for each mask and position, all of them equally likely."""
    shape = len(at.unmasked.input_ids) - 1, output.shape[-1]  # whichever positions are asked for
    draws = [torch.randn(shape, generator=own)[at.positions] for own in at.generators()]
    return output + torch.stack(draws).to(output)


@dataclass(frozen=True)
class Condition:
    """One thing that a mask may change.

    Attributes:
        site: where: `HEADS`, `MLP` or `OUTPUT`.
        edit: what.
        as_heads: whether the change of the layer's output gets, token by token and mask by mask,
            the norm it has when the masked heads are taken away.
    """

    site: str
    edit: Edit
    as_heads: bool = False


CONDITIONS: dict[str, Condition] = {
    "heads": Condition(HEADS, without_heads),
    "pseudo_heads": Condition(HEADS, without_groups),
    "foreign": Condition(HEADS, from_elsewhere, as_heads=True),
    "isotropic": Condition(OUTPUT, in_random_direction, as_heads=True),
    "mlp": Condition(MLP, without_groups),
    "mlp_noise": Condition(MLP, with_noise),
}
"""By the names in `config.PERTURBATIONS`."""


def check_condition(
    model: PreTrainedModel, layer: int, change: Perturbation, heads: bool = True
) -> None:
    """Raise unless a layer has what a condition changes.

    Args:
        heads: whether the unmasked pass keeps head outputs.

    Raises:
        TypeError: no single down projection, or fewer channels in it than heads; head outputs that
            cannot be had from elsewhere.

    Example:
        >>> check_condition(model, 2, Perturbation("foreign"))
        >>> check_condition(model, 2, Perturbation("foreign"), heads=False)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: perturbation 'foreign' needs the head outputs of the unmasked pass, ...
    """
    condition, groups = CONDITIONS[change.condition], head_site(model, layer).heads
    if condition.site == MLP:
        width = getattr(down_projection(model, layer), "in_features", groups)
        if width < groups:
            raise TypeError(
                f"perturbation {change.condition!r} needs {groups} groups of MLP channels, got "
                f"{width} channels in layer {layer} of {type(model).__name__}"
            )
    if condition.edit is from_elsewhere and not heads:
        raise TypeError(
            f"perturbation {change.condition!r} needs the head outputs of the unmasked pass, which "
            f"are unavailable for {type(model).__name__}: its layers are not a plain chain"
        )


def _mixed(
    plain: Tensor, condition: Tensor, heads: Tensor | None, perturbation_scale: float | None
) -> Tensor:
    """What a layer returns: `plain` and the change to `condition`, as large as that to `heads`,
    times the scale."""
    wide = torch.promote_types(plain.dtype, torch.float32)
    base = plain.to(wide)
    change = condition.to(wide) - base
    if heads is not None:
        wanted = (heads.to(wide) - base).norm(dim=-1, keepdim=True)
        own = change.norm(dim=-1, keepdim=True)
        # What stands for itself, as the first position does, changes by rounding alone: that is
        # not to be made as large as a change.
        rounding = max(1e-5, torch.finfo(plain.dtype).eps) * base.norm(dim=-1, keepdim=True)
        change = change * torch.where(own > rounding, wanted / own, 0)
    return (base + (1 if perturbation_scale is None else perturbation_scale) * change).to(
        plain.dtype
    )


def _with_copied_caches(values: Any) -> Any:
    """Arguments of a layer that is called more than once: each call adds to a cache of its own."""
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
    """Let a layer run with what masks change at some positions; batch row b has mask b.

    A projection that several layers share is edited only inside the target layer.

    Args:
        places: the positions, in the whole sequence.
        before: positions that a cache holds, in front of the sequence as it is called.
        heads: head outputs at `places`, to be used in place of those that come; the layer is then
            called on these positions alone.
    """
    condition = CONDITIONS[change.condition]
    masking = Masking(masks, places, unmasked, layer, change.seed)
    acting: dict[str, Edit] = {}  # by site, while the target layer runs

    def edited(values: Tensor, edit: Edit) -> Tensor:
        if heads is not None:
            return edit(values, masking)
        here = (places - before).to(values.device)
        values = values.clone()
        values[:, here] = edit(values[:, here], masking)
        return values

    def at_site(site: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Any]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            given, *others = args
            if site == HEADS and heads is not None:
                given = heads.expand(len(masks), -1, -1)
            if site in acting:
                rows = given.reshape(len(masks), -1, given.shape[-1])
                given = edited(rows, acting[site]).reshape(given.shape)
            elif given is args[0]:
                return None
            return (given.contiguous(), *others)  # in one piece, as some projections want it

        return hook

    module = decoder_layers(model)[layer]
    edit = change.edit or condition.edit
    own = {} if condition.site == OUTPUT else {condition.site: edit}
    forward = module.forward

    def several(*args: Any, **kwargs: Any) -> Any:
        def output(edits: dict[str, Edit], again: bool = True) -> Any:
            acting.clear()
            acting.update(edits)
            try:
                copied = _with_copied_caches((args, kwargs)) if again else (args, kwargs)
                return forward(*copied[0], **copied[1])
            finally:
                acting.clear()

        def states(found: Any) -> Tensor:
            return found[0] if isinstance(found, tuple | list) else found

        as_heads = states(output({HEADS: without_heads})) if condition.as_heads else None
        changed = states(output(own)) if own else None
        returned = output({}, again=False)
        plain = states(returned)
        rows = plain.reshape(len(masks), -1, plain.shape[-1])
        if changed is None:
            changed = edited(rows, edit)
        if as_heads is not None:
            as_heads = as_heads.reshape(rows.shape)
        changed = changed.reshape(rows.shape)
        mixed = _mixed(rows, changed, as_heads, change.perturbation_scale).reshape(plain.shape)
        return (mixed, *returned[1:]) if isinstance(returned, tuple | list) else mixed

    projections = {}  # found before anything is hooked: that may take a pass
    if MLP in own:
        projections[MLP] = down_projection(model, layer)
    if HEADS in own or condition.as_heads or heads is not None:
        projections[HEADS] = output_projection(model, layer)
    with ExitStack() as stack:
        for site, projection in projections.items():
            # Last in line: a mask applies to what the projection gets in the end.
            stack.callback(projection.register_forward_pre_hook(at_site(site)).remove)
        if own and change.perturbation_scale is None and not condition.as_heads:
            for handle in (
                module.register_forward_pre_hook(lambda *_: acting.update(own)),
                module.register_forward_hook(lambda *_: acting.clear(), always_call=True),
            ):
                stack.callback(handle.remove)
        else:
            stack.enter_context(replaced_forward(module, several))
        yield


def perturbed_layer(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    positions: slice,
    change: Perturbation = WITHOUT_HEADS,
) -> Float[Tensor, "B n D"]:
    """What the target layer returns at some positions under each mask.

    Its attention is that of the unmasked pass, and nothing in the layer that follows mixes
    positions. (Under parallel residuals the layer's MLP is the same for all masks too; it is run
    for each.)

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked, scoring_session
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     perturbed_layer(model, unmasked, 2, masks, unmasked.predicting).shape  # (B, n, D)
        torch.Size([3, 2, 16])
    """
    target, module = unmasked.targets[layer], decoder_layers(model)[layer]
    attention, site = attention_module(model, layer), head_site(model, layer)
    here = unmasked.run(positions)
    places = unmasked.start + torch.arange(target.heads.shape[1])[here]
    call = unmasked.calls[layer]
    if attention is None:
        # No module returns what the projection does: the attention is run, for all positions.
        hidden = target.hidden.expand(len(masks), -1, -1)
        with perturbed(model, unmasked, layer, masks, places, change):
            return call.replay(module, hidden)[:, positions]
    heads = target.heads[:, here]
    projection = output_projection(model, layer)

    def attend(*_: Any, **__: Any) -> Any:
        projected = projection(heads)
        return (projected, *[None] * (site.returns - 1)) if site.returns else projected

    with (
        perturbed(model, unmasked, layer, masks, places, change, heads=heads),
        replaced_forward(attention, attend),
    ):
        hidden = target.hidden[:, here].expand(len(masks), -1, -1)
        return call.replay(module, hidden, here)
