"""The walks of docs/contributing.md: each line is a call that really happens."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import lm_polygraph_asmi
from lm_polygraph_asmi import score
from lm_polygraph_asmi.stat_calculators.masked_heads import load_stat_calculator
from tests.composing import composed
from tests.tiny_lm import whitebox

PACKAGE = Path(lm_polygraph_asmi.__file__).parent
PAGE = PACKAGE.parent / "docs/contributing.md"
CALCULATOR = "MaskedHeadsCalculator"
CHANGES = ["asmi.mask_rate=0.3", "asmi.mask_sampler=balanced", "asmi.result_cache=null"]
MOST = {"An answer": 18, "`mask_rate`": 8}
"""Lines that each walk may have."""


@contextmanager
def calls():
    """Pairs of files of the package, the second with a function that the first has called."""
    pairs: set[tuple[str, str]] = set()

    def inside(frame) -> str | None:
        file = frame.f_code.co_filename
        return file.removeprefix(f"{PACKAGE}/") if file.startswith(f"{PACKAGE}/") else None

    def note(frame, event, _):
        if event == "call" and (callee := inside(frame)) is not None:
            caller = frame.f_back
            while caller is not None and inside(caller) is None:  # through another library
                caller = caller.f_back
            if caller is not None:
                pairs.add((str(inside(caller)), callee))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield pairs
    finally:
        sys.setprofile(before)


def walk(name: str) -> list[tuple[str, str]]:
    """Its lines, as pairs of files."""
    block = (
        PAGE.read_text().partition(f"**{name}**")[2].partition("```text\n")[2].partition("```")[0]
    )
    return re.findall(r"^(\S+)\s+-> (\S+)", block, re.MULTILINE)


def test_the_walk_of_an_answer():
    model = whitebox()
    with calls() as seen:
        score(model, "Who built it?", " Brask")
    lines = walk("An answer")
    assert set(lines) <= seen
    assert 0 < len(lines) <= MOST["An answer"]


def test_the_walk_of_mask_rate():
    model = whitebox()
    ids = model.tokenizer("Who built it?").input_ids
    batch = {"greedy_tokens": [ids[:2]], "input_tokens": [ids]}
    config = composed("asmi_coqa", *CHANGES)  # resolved below
    with calls() as seen:
        (entry,) = (e for e in config.stat_calculators if "name" in e and e.name == CALCULATOR)
        calculator = load_stat_calculator(entry.cfg, SimpleNamespace(model=model))
        stats = calculator(batch, ["Who built it?"], model)
    assert stats["asmi"][0][0.6]["settings"]["mask_rate"] == 0.3
    lines = walk("`mask_rate`")
    assert set(lines) <= seen
    assert 0 < len(lines) <= MOST["`mask_rate`"]
