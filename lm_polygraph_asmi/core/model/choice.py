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
from lm_polygraph_asmi.core.model.passes import (
    UnmaskedPass,
    full_passes,
    packed,
    rows_after_prompt,
    suffix,
)

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
class Candidates:
    """The passes that one layer may use with one attention implementation, fastest first.

    The first is used. It leaves when it fails the self-check, which compares it with full passes
    before its first result is used, and again for longer texts.
    """

    scope: str
    attention: str
    names: list[str]  # of `PASSES`
    # Most positions of a prompt, and of the answers in one pass, for which the first was right.
    compared: tuple[int, int] = 0, 0
    used: bool = False  # whether an answer was scored with the first
    cause: str | None = None  # why faster ones are not among them, until a warning has told it

    @property
    def first(self) -> str:
        return self.names[0]

    def drop_first(self) -> None:
        """The next one has not been compared yet."""
        self.used, self.compared = False, (0, 0)
        del self.names[0]


def candidates(f: MaskedModel, layer: int, scope: str) -> Candidates:
    """The candidates at a layer, chosen at the first call. A changed model gets new ones."""
    key = "candidates", layer, scope, f.attention, f.compiles
    if key not in f.findings:
        names, cause = _may_be_right(f, scope)
        told = f.findings.setdefault("causes of slower passes", set())
        cause_to_tell = None if cause in told else cause
        told.add(cause)
        f.findings[key] = Candidates(scope, f.attention, names, cause=cause_to_tell)
    chosen: Candidates = f.findings[key]
    return chosen


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
    if scope == "response" and f.attention not in MASKABLE:
        start = max(1, names.index(listed or names[1]))
        return names[start:], f"attention {f.attention!r} takes no mask (scope {scope})"
    if scope == "response" and listed is None:
        return names[1:], "its class is not listed, and may keep other things than keys and values"
    return names[names.index(listed or names[0]) :], None


def reads_cache(f: MaskedModel, layers: list[int], scope: str) -> bool:
    """Whether masked passes of some layer read keys and values that the unmasked pass keeps."""
    return scope == "response" and any(candidates(f, at, scope).first == "packed" for at in layers)


def passes_in_use(f: MaskedModel, scope: str) -> list[str]:
    """Names of the passes that scored answers with the attention in use, of any layer."""
    used = {
        each.first
        for each in f.findings.values()
        if isinstance(each, Candidates)
        and each.used
        and (each.scope, each.attention) == (scope, f.attention)
    }
    return [name for name in PASSES[scope] if name in used]


def warn_slower(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: int, cause: str, fast: str
) -> None:
    """Say why a slower pass runs in place of a fast one, and how much more it computes."""
    slow = candidates(f, layer, unmasked.scope).first
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
