"""The masked passes while an answer is written: all subnetworks go on by one position at a time.

The prompt's keys and values are those of the unmasked pass, the same for all; of what has been
written since each subnetwork has its own. What comes after each step are final states, as in the
scope "response" for the finished answer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.check import difference, extent_of
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layer_call import KeysValues
from lm_polygraph_asmi.model.layers import (
    context_window,
    decoder_layers,
    final_norm,
    num_layers,
    trunk,
)
from lm_polygraph_asmi.model.notes import has_foreign_code, known
from lm_polygraph_asmi.model.perturbation import (
    WITHOUT_HEADS,
    Perturbation,
    perturbed,
    perturbed_layer,
)
from lm_polygraph_asmi.model.session import attention_of
from lm_polygraph_asmi.model.structure import states_of
from lm_polygraph_asmi.model.subnetworks import Subnetworks
from lm_polygraph_asmi.model.suffix import Way, cache_of_rows
from lm_polygraph_asmi.model.unmasked import (
    Memory,
    UnmaskedPass,
    check_scope_runs,
    run_unmasked,
)

TRIAL = 3
"""Tokens of the answer that steps are checked on."""
ROOM = 16
"""Positions that room is made for at first, and then twice as many each time."""


Steps = Callable[[Iterable[int]], tuple[Tensor, Tensor]]
"""An answer on its way, first given the whole prompt, then token by token. Returns final states
behind the last token given: (1, D) of the unmasked model, (B, 1, D) under each mask."""


@dataclass(frozen=True)
class Written:
    """Steps, and which of their rows the drawn masks have; as in `Subnetworks`.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> with scoring_session(model):
        ...     written = steps_of(model, ids[:6], 2, masks)
        >>> isinstance(written, Written), written.keeps_all, written.counts
        (True, True, tensor([2., 1.]))
    """

    steps: Steps
    index: Int[Tensor, " S"]
    counts: Float[Tensor, " distinct"]
    keeps_all: bool

    def __call__(self, tokens: Iterable[int]) -> tuple[Float[Tensor, "1 D"], Subnetworks]:
        """What stands behind these tokens, the prompt's at first and then one by one."""
        own, hidden = self.steps(tokens)
        if self.keeps_all:
            hidden = torch.cat([hidden, own[None]])
        return own, Subnetworks(hidden, self.counts, self.index)


class _Grown:
    """Keys and values of a layer: the prompt's, then step by step one of each subnetwork."""

    def __init__(self, prompt: KeysValues, rows: int) -> None:
        self.parts = list(prompt)
        self.length, self.rows = prompt[0].shape[-2], rows

    def __call__(self, key: Tensor, value: Tensor, _: int) -> KeysValues:
        end = self.length + self.rows
        if end > self.parts[0].shape[-2]:
            room = max(ROOM * self.rows, end)
            for number, part in enumerate(self.parts):
                larger = part.new_empty(*part.shape[:2], end + room, part.shape[-1])
                larger[:, :, : self.length] = part[:, :, : self.length]
                self.parts[number] = larger
        for part, new in zip(self.parts, (key, value), strict=True):
            part[:, :, self.length : end] = new
        self.length = end
        keys, values = self.parts
        return keys[:, :, :end], values[:, :, :end]


class OneSequence:
    """The positions of all subnetworks stand behind one prompt, each blind to the others."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer: int,
        masks: Shaped[Tensor, "B H"],
        change: Perturbation,
    ) -> None:
        if not Memory.serves(model):
            raise NotImplementedError("its layers keep more than keys and values")
        self.model, self.layer, self.masks, self.change = model, layer, masks, change
        self.ids: list[int] = []
        self.prompt = 0
        self.memory = Memory()
        self.grown: dict[int, _Grown] = {}

    def __call__(self, tokens: Iterable[int]) -> tuple[Tensor, Tensor]:
        self.ids += tokens
        self.prompt = self.prompt or len(self.ids)
        # What would follow is not looked at.
        ids = torch.tensor([*self.ids, self.ids[-1]])
        unmasked = run_unmasked(
            self.model, ids, len(self.ids), [self.layer], "response", self.memory
        )
        own = unmasked.final_hidden
        if not len(self.masks):
            return own, own.new_empty(0, *own.shape)
        return own, self._masked(unmasked)

    def _masked(self, unmasked: UnmaskedPass) -> Tensor:
        model, copies = self.model, len(self.masks)
        hidden = perturbed_layer(
            model, unmasked, self.layer, self.masks, unmasked.predicting, self.change
        )
        hidden = hidden.reshape(1, copies, -1)
        here = unmasked.run(unmasked.predicting)
        places = torch.full((copies,), here.start)
        apart = torch.eye(copies, dtype=torch.bool)
        packed: dict[int, Tensor] = {}
        for index in range(self.layer + 1, num_layers(model)):
            if index not in self.grown:
                self.grown[index] = _Grown(unmasked.known[index], copies)
            call = unmasked.calls[index]
            kind = id(call.arguments.get("attention_mask"))
            if kind not in packed:
                before, own = call.allowed(here).cpu().tensor_split([self.prompt - 1], dim=1)
                every = own[0][None, :, None] & apart[:, None]  # (mask, step, mask)
                packed[kind] = torch.cat([before.expand(copies, -1), every.flatten(1)], dim=1)
            hidden = call.replay_over(
                decoder_layers(model)[index],
                hidden,
                self.grown[index],
                places,
                packed[kind],
                unmasked.before.stop,
            )
        return final_norm(model)(hidden).reshape(copies, 1, -1)


class RowsOfBatch:
    """Each subnetwork is a row with a cache of its own, whatever the model keeps in it."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer: int,
        masks: Shaped[Tensor, "B H"],
        change: Perturbation,
    ) -> None:
        self.model, self.layer, self.change = model, layer, change
        # One row more, which keeps every head.
        self.masks = torch.cat([torch.ones_like(masks[:1]), masks]) if len(masks) else None
        self.ids: list[int] = []
        self.cache: Any = None

    def __call__(self, tokens: Iterable[int]) -> tuple[Tensor, Tensor]:
        first, tokens = not self.ids, list(tokens)
        self.ids += tokens
        device = execution_device(self.model.get_input_embeddings())
        rows = 1 if self.masks is None else len(self.masks)
        if first and len(tokens) > 1:
            prompt = torch.tensor([tokens[:-1]], device=device)
            output = trunk(self.model)(input_ids=prompt, use_cache=True)
            self.cache = cache_of_rows(output.past_key_values, rows, device)
        ids = torch.tensor(tokens[-1:], device=device).expand(rows, 1)
        given = {"input_ids": ids, "past_key_values": self.cache, "use_cache": True}
        if self.masks is None:
            states = states_of(output := trunk(self.model)(**given))
        else:
            place = len(self.ids) - 1
            # What takes away heads looks at no other pass: there is none.
            none = self.masks.new_empty(0, 1)
            unmasked = UnmaskedPass(
                torch.tensor([*self.ids, 0]),
                len(self.ids),
                {},
                {},
                "response",
                {},
                frozenset(),
                none,
            )
            with perturbed(
                self.model, unmasked, self.layer, self.masks, torch.tensor([place]), self.change,
                before=place,
            ):  # fmt: skip
                states = states_of(output := trunk(self.model)(**given))
        self.cache = output.past_key_values
        if self.cache is None:
            raise NotImplementedError("the model keeps no cache")
        return states[0], states[1:]


def _stepwise(kind: Any) -> Any:
    """A way to run a finished answer step by step, for the check."""

    def run(
        model: PreTrainedModel,
        unmasked: UnmaskedPass,
        layer: int,
        masks: Shaped[Tensor, "B H"],
        change: Perturbation,
    ) -> Float[Tensor, "B T D"]:
        steps: Steps = kind(model, layer, masks, change)
        ids = unmasked.input_ids.tolist()
        given = [ids[: unmasked.prompt_length], *([i] for i in ids[unmasked.prompt_length : -1])]
        return torch.cat([steps(tokens)[1] for tokens in given], dim=1)

    return run


KINDS = (
    (OneSequence, Way("one sequence that grows", "response", _stepwise(OneSequence),
                      lambda *_: 0, packed=True)),
    (RowsOfBatch, Way("rows that grow", "response", _stepwise(RowsOfBatch), lambda *_: 0)),
)  # fmt: skip
"""Cheapest first."""


def repeated(prompt: Int[Tensor, " P"], tokens: int) -> Int[Tensor, " N"]:
    """A prompt and its own start behind it: an answer to check with, before there is one."""
    return torch.cat([prompt] * (1 + -(-tokens // len(prompt))))[: len(prompt) + tokens]


def steps_of(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    layer: int,
    masks: Shaped[Tensor, "S H"],
    change: Perturbation = WITHOUT_HEADS,
) -> "Written":
    """Subnetworks of S masks over an answer to come; equal masks are run once.

    The steps were compared with whole passes, for this prompt or one like it, on an answer made of
    the prompt's own first tokens. Call it in `scoring_session`.

    Raises:
        NotImplementedError: a change that looks at more of the prompt than masked heads do.
        RuntimeError: no way gives what whole passes give, or hooks of others may not.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> with scoring_session(model):
        ...     written = steps_of(model, ids[:6], 2, masks)
        ...     own, subnetworks = written(ids[:6].tolist())  # the prompt
        ...     own, subnetworks = written([9])  # and the first token of the answer
        >>> own.shape, subnetworks.hidden.shape  # (1, D), (distinct, 1, D)
        (torch.Size([1, 16]), torch.Size([2, 1, 16]))
    """
    if change.arm != "heads" or change.edit is not None:
        raise NotImplementedError(f"no steps for the perturbation {change.arm!r}")
    check_scope_runs(model, "response")
    if has_foreign_code(model):
        raise RuntimeError(
            f"{type(model).__name__} cannot be scored while it writes: it has hooks or forward "
            "methods of others, which may do another thing step by step. Remove them, or score the "
            "finished answer"
        )
    distinct, index, counts = masks.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    kept = distinct.all(dim=1)
    masked = distinct[~kept]
    # The row that keeps every head is the unmasked model's, and comes last.
    rows = torch.cat([torch.nonzero(~kept)[:, 0], torch.nonzero(kept)[:, 0]])
    kind = _right_kind(model, prompt.cpu(), layer, masked, change)
    steps = kind(model, layer, masked, change)
    return Written(steps, rows.argsort()[index], counts[rows].float(), bool(kept.any()))


def _right_kind(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    layer: int,
    masks: Shaped[Tensor, "B H"],
    change: Perturbation,
) -> Any:
    """The cheapest kind of steps that was seen to be right."""
    if not len(masks):
        return OneSequence if Memory.serves(model) else RowsOfBatch
    room = (context_window(model) or len(prompt) + TRIAL) - len(prompt)
    trial = repeated(prompt, max(1, min(TRIAL, room)))
    done = known(model).setdefault("steps", {})
    found = done.setdefault((layer, attention_of(model), change.kind), [])
    extent = extent_of(model, trial, len(prompt), True, len(masks))
    for reached, kind in found:
        if reached.covers(extent):
            return kind
    unmasked = run_unmasked(model, trial, len(prompt), [layer], "response")
    reasons = []
    for kind, way in KINDS:
        reason = difference(model, unmasked, layer, masks, len(masks), way, change)
        if reason is None:
            found.append((extent, kind))
            return kind
        reasons.append(f"{way.name}: {reason}")
    raise RuntimeError(
        f"{type(model).__name__} cannot be scored while it writes: step by step its passes from "
        f"layer {layer} on do not give what whole passes give ({'; '.join(reasons)}). Score the "
        "finished answer"
    )
