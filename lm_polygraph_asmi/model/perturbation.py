"""What a mask changes at the target layer; the layers above it always run in the same way.

ASMI sets the outputs of masked heads to zero. The other conditions of the perturbation controls
change something else in the same layer, at the same positions, under the same masks: only the
output of the target layer differs. A condition is a function that gets the values at its site, one
batch row per mask, and returns their replacement. A new condition is one more function and one more
line in `CONDITIONS`.
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

    def generators(self) -> Iterator[torch.Generator]:
        """One for each mask, seeded by base seed, layer, tokens and mask, so that equal masks get
        equal draws and no draw depends on the batch."""
        example = [self.seed, self.layer, *self.unmasked.input_ids.tolist()]
        for mask in self.masks.long().tolist():
            yield torch.Generator().manual_seed(_seed(example, mask))

    def groups(self, width: int) -> Int[Tensor, " width"]:
        """Group of each of `width` channels: H groups of nearly equal size, drawn by one
        permutation for all examples."""
        order = permutation(width, _seed([self.seed, self.layer], [width]))
        groups = torch.empty(width, dtype=torch.long)
        groups[order] = torch.arange(width) * self.masks.shape[1] // width
        return groups

    def kept(self, values: Float[Tensor, "_ n W"]) -> Float[Tensor, "B 1 W"]:
        """Masks by channel: each channel has the mask of its group."""
        return self.masks.cpu()[:, self.groups(values.shape[-1])].to(values)[:, None]


Edit = Callable[[Tensor, Masking], Tensor]
"""(values (B, n, W) at a site, masking) -> changed values (B, n, W)."""


@dataclass(frozen=True)
class Perturbation:
    """What a mask changes, independent of the example except for `edit`.

    Attributes:
        condition: name in `CONDITIONS`.
        perturbation_scale: multiplies the change of the layer's output: r_0 + scale (r - r_0); None
            leaves the change as it is.
        seed: base seed of random draws; each also depends on layer, tokens and mask.
        edit: replaces the condition's own edit at its site, if the edit depends on the example.

    Raises:
        ValueError: an unknown condition, or a scale that is not a positive number.

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
        """Names the code that runs: the self-check holds for all perturbations of a kind."""
        edit = self.edit or CONDITIONS[self.condition].edit
        return (
            self.condition,
            str(self.perturbation_scale is None),
            getattr(edit, "__qualname__", type(edit).__name__),
        )


WITHOUT_HEADS = Perturbation()
"""ASMI's own: masked heads."""


def _seed(*numbers: list[int]) -> int:
    """Hash of the lists and their lengths, in [0, 2^63)."""
    content = b"".join(array("q", [len(part), *part]).tobytes() for part in numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def permutation(width: int, seed: int) -> Int[Tensor, " width"]:
    return torch.randperm(width, generator=torch.Generator().manual_seed(seed))


def _by_head(values: Tensor, masks: Tensor) -> Float[Tensor, "B 1 W"]:
    width = values.shape[-1] // masks.shape[-1]
    return masks.to(values).repeat_interleave(width, dim=-1)[:, None]


def without_heads(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """ASMI's own: the outputs of masked heads are zero, and the others are not rescaled.

    If a gate multiplies head outputs before the projection, the gated outputs are masked.
    """
    return heads * _by_head(heads, at.masks)


def without_groups(values: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Masked groups of channels are zero: as many channels as in a head, drawn from all of them."""
    return values * at.kept(values)


def with_noise(values: Float[Tensor, "B n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Uniform non-negative noise on masked groups, one draw per mask for all positions.

    Follows arXiv 2502.03799, which perturbs MLP activations. The mean square of the noise equals
    that of the activations at the position.
    """
    draws = [torch.rand(values.shape[-1], generator=generator) for generator in at.generators()]
    noise = torch.stack(draws).to(values)[:, None] * (1 - at.kept(values))
    size = values.float().square().mean(-1, keepdim=True).sqrt().to(values)
    return values + 3**0.5 * size * noise


def foreign_positions(at: Masking) -> Int[Tensor, "B n"]:
    """For each mask and position an earlier position of the prompt, all equally likely.

    Never a later one, which the model could not have attended to. The first position, with none
    before it, is its own replacement.
    """
    earlier = torch.arange(len(at.unmasked.input_ids) - 1).clamp_max(at.unmasked.prompt_length)
    positions = []
    for generator in at.generators():
        drawn = torch.rand(len(earlier), generator=generator, dtype=torch.float64) * earlier
        positions.append(drawn.long()[at.positions])
    return torch.stack(positions)


def from_elsewhere(heads: Float[Tensor, "_ n W"], at: Masking) -> Float[Tensor, "B n W"]:
    """Masked heads return their unmasked output at an earlier position of the prompt."""
    kept = _by_head(heads, at.masks)
    elsewhere = at.unmasked.targets[at.layer].heads[0].to(heads.device)[foreign_positions(at)]
    return heads * kept + elsewhere * (1 - kept)


def in_random_direction(output: Float[Tensor, "B n D"], at: Masking) -> Float[Tensor, "B n D"]:
    """Adds a random direction for each mask and position, all directions equally likely."""
    shape = len(at.unmasked.input_ids) - 1, output.shape[-1]  # drawn for all positions
    draws = [torch.randn(shape, generator=generator)[at.positions] for generator in at.generators()]
    return output + torch.stack(draws).to(output)


@dataclass(frozen=True)
class Condition:
    """A change that a mask may make.

    Attributes:
        site: where: `HEADS`, `MLP` or `OUTPUT`.
        edit: the change of the values there.
        as_heads: whether the change of the layer's output is rescaled, for each token and mask, to
            its norm under head masking.
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
    """Raise unless a condition can be applied to a layer.

    Args:
        heads: whether the unmasked pass keeps head outputs.

    Raises:
        TypeError: no single down projection, or fewer channels in it than heads; a condition that
            needs head outputs which the unmasked pass does not keep.

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
            f"are unavailable for {type(model).__name__}: its layers are not a simple chain"
        )


def _scaled(
    unmasked: Tensor, changed: Tensor, head_masked: Tensor | None, perturbation_scale: float | None
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
    scale = 1 if perturbation_scale is None else perturbation_scale
    return (base + scale * change).to(unmasked.dtype)


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
    condition = CONDITIONS[change.condition]
    masking = Masking(masks, places, unmasked, layer, change.seed)
    active: dict[str, Edit] = {}  # by site, while the target layer runs

    def edited(values: Tensor, edit: Edit) -> Tensor:
        if heads is not None:
            return edit(values, masking)
        positions = (places - before).to(values.device)
        values = values.clone()
        values[:, positions] = edit(values[:, positions], masking)
        return values

    def at_site(site: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Any]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            values, *others = args
            if site == HEADS and heads is not None:
                values = heads.expand(len(masks), -1, -1)
            if site in active:
                rows = values.reshape(len(masks), -1, values.shape[-1])
                values = edited(rows, active[site]).reshape(values.shape)
            elif values is args[0]:
                return None
            return (values.contiguous(), *others)  # some projections need contiguous inputs

        return hook

    module = decoder_layers(model)[layer]
    edit = change.edit or condition.edit
    edits = {} if condition.site == OUTPUT else {condition.site: edit}
    forward = module.forward

    def scaled_forward(*args: Any, **kwargs: Any) -> Any:
        def run(site_edits: dict[str, Edit], last: bool = False) -> Any:
            active.clear()
            active.update(site_edits)
            try:
                copied = (args, kwargs) if last else _with_copied_caches((args, kwargs))
                return forward(*copied[0], **copied[1])
            finally:
                active.clear()

        def states(output: Any) -> Tensor:
            return output[0] if isinstance(output, tuple | list) else output

        head_masked = states(run({HEADS: without_heads})) if condition.as_heads else None
        changed = states(run(edits)) if edits else None
        output = run({}, last=True)
        hidden = states(output)
        rows = hidden.reshape(len(masks), -1, hidden.shape[-1])
        if changed is None:
            changed = edited(rows, edit)
        if head_masked is not None:
            head_masked = head_masked.reshape(rows.shape)
        changed = changed.reshape(rows.shape)
        scaled = _scaled(rows, changed, head_masked, change.perturbation_scale)
        scaled = scaled.reshape(hidden.shape)
        return (scaled, *output[1:]) if isinstance(output, tuple | list) else scaled

    projections = {}  # looked up before hooks are registered, since that may run a pass
    if MLP in edits:
        projections[MLP] = down_projection(model, layer)
    if HEADS in edits or condition.as_heads or heads is not None:
        projections[HEADS] = output_projection(model, layer)
    with ExitStack() as stack:
        for site, projection in projections.items():
            # Last hook: a mask applies to the final input of the projection.
            stack.callback(projection.register_forward_pre_hook(at_site(site)).remove)
        if edits and change.perturbation_scale is None and not condition.as_heads:
            for handle in (
                module.register_forward_pre_hook(lambda *_: active.update(edits)),
                module.register_forward_hook(lambda *_: active.clear(), always_call=True),
            ):
                stack.callback(handle.remove)
        else:
            stack.enter_context(replaced_forward(module, scaled_forward))
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
    run_positions = unmasked.run(positions)
    places = unmasked.start + torch.arange(target.heads.shape[1])[run_positions]
    call = unmasked.calls[layer]
    if attention is None:
        # No module returns the projection's output, so the layer runs at all positions.
        hidden = target.hidden.expand(len(masks), -1, -1)
        with perturbed(model, unmasked, layer, masks, places, change):
            return call.replay(module, hidden)[:, positions]
    heads = target.heads[:, run_positions]
    projection = output_projection(model, layer)

    def attend(*_: Any, **__: Any) -> Any:
        projected = projection(heads)
        return (projected, *[None] * (site.returns - 1)) if site.returns else projected

    with (
        perturbed(model, unmasked, layer, masks, places, change, heads=heads),
        replaced_forward(attention, attend),
    ):
        hidden = target.hidden[:, run_positions].expand(len(masks), -1, -1)
        return call.replay(module, hidden, run_positions)
