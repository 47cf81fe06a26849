"""Which masked passes a model runs: the fastest that may be right, until the self-check fails.

The table of classes, the attention implementation and code of others in the model say which passes
may be right. What is chosen is kept by layer, as long as the model stays the same.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lm_polygraph_asmi.core.model.foreign import depends_on_place
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.passes import full_passes, packed, rows_after_prompt, suffix
from lm_polygraph_asmi.core.model.unmasked import UnmaskedPass

log = logging.getLogger("lm_polygraph")
MaskedPass = Callable[[MaskedModel, UnmaskedPass, int, Tensor], Tensor]
FULL = "full passes"
PASSES: dict[str, dict[str, MaskedPass]] = {
    "all": {
        "suffix": suffix, "suffix in rows": partial(suffix, one_row=False), FULL: full_passes,
    },
    "response": {
        "packed": packed, "rows after the prompt": rows_after_prompt, FULL: full_passes,
    },
}  # fmt: skip
"""By scope, the passes by name, fastest first."""
MASKABLE = ("eager", "sdpa")
"""Attention implementations that take an explicit (queries, keys) mask, as packed answers need."""


@dataclass
class PassesToTry:
    """The passes that one layer may use with one attention implementation, fastest first.

    The first is used. It leaves when it fails the self-check, which compares it with full passes
    before its first result is used, and again for longer texts.
    """

    scope: str
    attention: str
    names: list[str]  # of `PASSES`
    # The largest lengths with which the first passed the self-check: of a prompt, and of all copies
    # of a response in one pass. A packed pass has a copy for each mask.
    compared: tuple[int, int] = 0, 0
    used: bool = False  # whether an answer was scored with the first
    cause: str | None = None  # why faster ones are not among them; None after a warning said so

    @property
    def first(self) -> str:
        return self.names[0]

    def drop_first(self) -> None:
        """The next one has not been compared yet."""
        self.used, self.compared = False, (0, 0)
        del self.names[0]


def passes_to_try(f: MaskedModel, layer: int, scope: str) -> PassesToTry:
    """The passes to try at a layer, chosen at the first call. A changed model gets new ones.

    `cause` is set only for the first layer that has this cause: one warning is enough.
    """
    key = "passes_to_try", layer, scope, f.attention, f.compiles
    if key not in f.kept:
        names, cause = _may_be_right(f, scope)
        known = f.kept.setdefault("causes of slower passes", set())
        f.kept[key] = PassesToTry(
            scope, f.attention, names, cause=None if cause in known else cause
        )
        known.add(cause)
    return f.kept[key]


def _may_be_right(f: MaskedModel, scope: str) -> tuple[list[str], str | None]:
    """Names of the passes that may be right, and why these are not all, if a warning is to tell.

    Where code of others acts in a model, this runs a short text, see `depends_on_place`.
    """
    names = list(PASSES[scope])
    listed = f.structure.passes.get(scope)  # the fastest that is right, by `classes.csv`
    if places := depends_on_place(f):
        code = f"code of others in {', '.join(places[:3])}"
        return [FULL], f"{code} does not act on each position alike (scope {scope})"
    if listed == FULL:
        return [FULL], f"no faster pass is right for its class (scope {scope})"
    if listed is not None:
        names = names[names.index(listed) :]
    if names[0] == "packed" and f.attention not in MASKABLE:
        return names[1:], f"attention {f.attention!r} takes no mask (scope {scope})"
    if names[0] == "packed" and listed is None:
        return names[1:], "its class is not listed, and may keep other things than keys and values"
    return names, None


def reads_keys_and_values(f: MaskedModel, layers: list[int], scope: str) -> bool:
    """Whether masked passes of some layer read keys and values that the unmasked pass keeps."""
    return scope == "response" and any(
        passes_to_try(f, at, scope).first == "packed" for at in layers
    )


def passes_in_use(f: MaskedModel, scope: str) -> list[str]:
    """Names of the passes that scored answers with the attention in use, of any layer."""
    used = {
        each.first
        for each in f.kept.values()
        if isinstance(each, PassesToTry)
        and each.used
        and (each.scope, each.attention) == (scope, f.attention)
    }
    return [name for name in PASSES[scope] if name in used]


def warn_slower(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: int, cause: str, fast: str
) -> None:
    """Say why a slower pass runs in place of a fast one, and how much more it computes."""
    slow = passes_to_try(f, layer, unmasked.scope).first
    work = _work(f, unmasked, layer, masks)
    log.warning(
        "%s: %s. Using %r instead of %r, which is %.1f times the work (layers times positions)",
        type(f.model).__name__, cause, slow, fast, work[slow] / work[fast],
    )  # fmt: skip


def _work(f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: int) -> dict[str, int]:
    """Layers times positions that each kind of passes computes for an answer."""
    layers, before = f.structure.num_layers, unmasked.before
    length = len(unmasked.final_hidden)
    above, every = masks * (layers - layer), masks * layers
    return {
        "suffix": above * (before + length),
        "suffix in rows": above * (before + length),
        "packed": above * length,
        "rows after the prompt": above * length + layers * before,
        FULL: every * (before + length),
    }
