"""The slow twin of every condition: a full forward pass per mask with plain hooks, loops over
positions.

What is drawn (permutations, noise, directions, other positions) comes from the package, or nothing
could be compared; where it goes, what it is scaled to and what follows is written out here.
"""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from lm_polygraph_asmi.experiments.draws import channel_groups, generators
from lm_polygraph_asmi.experiments.perturbations.foreign import foreign_positions
from lm_polygraph_asmi.model import run_unmasked, scoring_session
from lm_polygraph_asmi.model.perturbation import Masking


def _first(output) -> Tensor:
    return output[0] if isinstance(output, tuple | list) else output


def subnetwork_log_probs(
    model: nn.Module, projection: str, down: str, block: str, layer: int, ids: Tensor,
    prompt: int, masks: Tensor, scope: str, condition: str, perturbation_scale: float | None = None,
        seed: int = 0,
) -> Tensor:  # fmt: skip
    """(S, T, V); paths are those of the output projection, down projection and decoder layer."""
    predicting = range(prompt - 1, len(ids) - 1)
    places = list(predicting if scope == "response" else range(len(ids) - 1))
    heads_at, out_at = model.get_submodule(projection), model.get_submodule(block)
    down_at = model.get_submodule(down) if condition.startswith("mlp") else None
    with scoring_session(model):
        unmasked = run_unmasked(model, ids, prompt, [layer], scope)

    def run(edits=(), output=None) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, the layer's output and the heads that came, of one pass."""
        seen = {}
        with ExitStack() as hooks, torch.no_grad():

            def keep(_, args):
                seen["heads"] = args[0].reshape(-1, args[0].shape[-1]).clone()

            def leave(_, __, found):
                if output is None:
                    seen["out"] = _first(found)[0].clone()
                    return None
                return (
                    (output[None], *found[1:]) if isinstance(found, tuple | list) else output[None]
                )

            hooks.callback(heads_at.register_forward_pre_hook(keep).remove)
            hooks.callback(out_at.register_forward_hook(leave).remove)
            for module, edit in edits:

                def hook(_, args, edit=edit):
                    rows = args[0].reshape(-1, args[0].shape[-1]).clone()
                    for t in places:
                        rows[t] = edit(t, rows[t])
                    return (rows.reshape(args[0].shape), *args[1:])

                hooks.callback(module.register_forward_pre_hook(hook).remove)
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        return logits[list(predicting)].float().log_softmax(-1), seen.get("out"), seen["heads"]

    _, plain, heads = run()
    found = []
    for mask in masks:
        at = Masking(mask[None], torch.tensor(places), unmasked, layer, seed)
        number, width = len(mask), heads.shape[-1] // len(mask)

        def zero(_, row, mask=mask, number=number, width=width):
            row = row.clone()
            for head in range(number):
                if mask[head] == 0:
                    row[head * width : (head + 1) * width] = 0
            return row

        def group(_, row, mask=mask, at=at):
            return row * mask[channel_groups(at, len(row))]

        def noisy(_, row, mask=mask, at=at):
            (generator,) = generators(at)
            drawn = torch.rand(len(row), generator=generator)
            size = (row.square().sum() / len(row)).sqrt() * 3**0.5
            return torch.where(mask[channel_groups(at, len(row))] == 0, row + size * drawn, row)

        other = dict(zip(places, foreign_positions(at)[0].tolist(), strict=True))

        def foreign(t, row, mask=mask, number=number, width=width, other=other):
            row = row.clone()
            for head in range(number):
                if mask[head] == 0:
                    block = slice(head * width, (head + 1) * width)
                    row[block] = heads[other[t]][block]
            return row

        edits = {"heads": (heads_at, zero), "pseudo_heads": (heads_at, group),
                 "foreign": (heads_at, foreign), "mlp": (down_at, group),
                 "mlp_noise": (down_at, noisy)}  # fmt: skip
        if condition == "isotropic":
            (generator,) = generators(at)
            changed = plain + torch.randn(plain.shape, generator=generator)
        else:
            changed = run([edits[condition]])[1]
        bounded = condition in ("foreign", "isotropic")
        taken = run([edits["heads"]])[1] if bounded else plain
        output = plain.clone()
        for t in places:
            change = changed[t] - plain[t]
            if bounded:
                wanted, own = (taken[t] - plain[t]).norm(), change.norm()
                change = change * (wanted / own) if own > 1e-5 * plain[t].norm() else 0 * change
            output[t] = (
                plain[t] + (1 if perturbation_scale is None else perturbation_scale) * change
            )
        found.append(run(output=output)[0])
    return torch.stack(found)
