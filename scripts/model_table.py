"""Which models ASMI supports: tests every class of transformers' registry of causal models.

    python scripts/model_table.py --out lm_polygraph_asmi/core/model/classes.csv   # every class
    python scripts/model_table.py LlamaForCausalLM                            # one class

Each class is built tiny and random, with layers that share keys and values if it can have any, and
scored in both scopes at 60 % and 90 % of its depth, with eager attention and SDPA, and again with
rotary angles that change with the length, if it has any. The truth is a full pass over a copy in
which the masked heads have weight zero in the output projection, found by name, independently of
the package. The table names the fastest pass that is right in every case without the self-check,
and kept by it; refused classes stay refused. "WRONG": the package gives a wrong number, and the
script fails.
"""

import copy
import csv
import logging
import re
import sys
import textwrap
import warnings
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import TextIO

import click
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.model import masked_model, scoring_session, structure, structure_of
from lm_polygraph_asmi.core.model.choice import PASSES, passes_to_try
from lm_polygraph_asmi.core.model.memory import batch_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import brute_force
from tests.families import LAYERS, VOCABULARY, classes, subnetwork_log_probs, tiny, with_longrope

COLUMNS = ("class", "heads", *SCOPES, "note")
TOLERANCE = 1e-3
"""Total variation at the worst position: rounding in recurrences makes 2e-4, errors make 0.01."""
MASKS = torch.tensor([[int(head) for head in mask] for mask in
                      ("1011", "0110", "0000", "1111", "1001", "0101")])  # fmt: skip
BATCH = 3  # where there are more masks, the memory budget holds so many
Case = tuple[int, int, int]  # prompt tokens, response tokens, masks
SERIES = [
    # Below, at and beyond every tiny window.
    [(1, 4, 6), (11, 6, 3), (12, 1, 3), (3, 40, 3), (70, 12, 3)],
    # As many positions as heads, as the width of a head, and as that of the model.
    [(70, 12, 2), (20, 13, 2), (10, 7, 2), (5, 4, 2), (3, 2, 2), (2, 1, 2), (1, 2, 2), (1, 1, 2)],
    [(3, 9, 2), (9, 3, 1), (9, 3, 2), (9, 3, 6)],  # one number of tokens, split early, late
    [(9, 3, 6), (3, 9, 2), (1, 4, 6)],
]
"""At the lower depth; every series starts with an empty cache, with eager and SDPA in turn."""
UPPER = [[(1, 4, 6), (11, 6, 3), (3, 40, 3)], [(70, 12, 2), (9, 3, 6), (1, 1, 2)]]
"""At the upper depth."""
DEPTHS = (0.6, 0.9)
SWITCHING = [(24, 4, 2), (8, 20, 2), (4, 6, 2), (14, 2, 2), (13, 9, 2)]
"""Cases for angles that switch at 16 tokens: around that length, in the prompt and after it."""
PROJECTIONS = (  # names of the output projection of an attention module
    "o_proj", "out_proj", "wo", "Wo", "c_proj", "dense", "output_linear", "linear_out", "o",
    "o_b_proj", "attention_output", "project_o", "out_lin", "output_proj",
)  # fmt: skip
NOT_HEADS = re.compile("mlp|expert|cross|encoder_attn|mamba|feed_forward|linear_attn|ffn")


def truth_of(model: PreTrainedModel, layer: int) -> tuple[PreTrainedModel, list[str]]:
    """A copy of a model, and the paths of a layer's output projection in it, found by name."""
    path, copied = structure_of(model).layers, copy.deepcopy(model)
    layers = copied.get_submodule(path)
    layers[layer] = copy.deepcopy(layers[layer])  # unshare modules that layers share
    names = [
        name for name, module in layers[layer].named_modules()
        if name.removesuffix(".linear").rpartition(".")[2] in PROJECTIONS
        and getattr(getattr(module, "weight", None), "ndim", 0) == 2
        and not NOT_HEADS.search(name)
    ]  # fmt: skip
    names = [name for name in names if "att" in name or len(names) == 1] or names
    return copied, [f"{path}.{layer}.{name}" for name in names]


def truth(model: PreTrainedModel, layer: int, scope: str, series: list[list[Case]]) -> list:
    """Of each series the attention, and tokens, prompt, masks and distributions of each case."""
    attentions, tested = ["eager"], []
    with suppress(ValueError), scoring_session(model, "sdpa"):
        attentions.append("sdpa")
    copied, (path,) = truth_of(model, layer)
    axis = 0 if isinstance(copied.get_submodule(path), Conv1D) else 1
    for cases, attention in zip(series, cycle(attentions)):
        tested.append((attention, []))
        for prompt, response, number in cases:
            length, masks, drawn = prompt + response, MASKS[:number], torch.Generator()
            ids = torch.randint(3, VOCABULARY, (length,), generator=drawn.manual_seed(length))
            with scoring_session(copied, attention):
                given = copied, path, axis, ids, prompt, masks, scope
                expected = brute_force.subnetwork_log_probs(*given).exp()
            if number > 1 and not (expected - expected[:1]).abs().max() > 1e-4:
                raise ValueError(f"masks change nothing at {length} tokens")
            tested[-1][1].append((ids, prompt, masks, expected))
    return tested


def wrong(
    model: PreTrainedModel, layer: int, scope: str, tested: list, names: list[str], longest: int = 0
) -> str:
    """The first case that is wrong if these passes are known, up to a length; or what falls."""
    for attention, cases in tested:
        with masked_model(model, attention) as f:
            use = passes_to_try(f, layer, scope)
        use.names, use.compared = list(names), (longest, longest)
        for ids, prompt, masks, expected in cases:
            budget = batch_bytes(f, BATCH, len(ids) - 1) if len(masks) > BATCH else None
            how = {"scope": scope, "attention": attention, "memory_budget": budget}
            found = subnetwork_log_probs(model, ids, prompt, layer, masks, **how).exp()
            distance = (found - expected).abs().sum(-1).max().item() / 2
            if not distance <= TOLERANCE:
                case = f"{prompt} of {len(ids)} tokens, {len(masks)} masks, {attention}"
                return f"WRONG: {distance:.2g} at {case}"
        if use.names != names:
            return f"the check drops {names[0]!r}"
    return ""


def word_of(scope: str, model: PreTrainedModel, switches: PreTrainedModel | None) -> str:
    """The fastest pass that is right, or what is wrong. A pass may refuse angles that switch."""
    lower, upper = (structure_of(model).layer_at(depth) for depth in DEPTHS)
    given = [(model, lower, SERIES)] + ([(model, upper, UPPER)] if upper != lower else [])
    also = [] if switches is None else [(switches, lower, [SWITCHING, SWITCHING[::-1]])]
    names, tried = list(PASSES[scope]), len(given)
    try:
        cases = [(m, at, scope, truth(m, at, scope, series)) for m, at, series in given + also]
    except ValueError as error:
        return f"WRONG: no ground truth: {error}"
    for index, name in enumerate(names):
        try:  # right for so many tokens: not checked
            alone = "".join(wrong(*each, [name], 10**9) for each in cases[:tried])
        except Exception:  # models raise different errors
            continue
        with suppress(Exception):
            alone = alone or "".join(wrong(*each, [name], 10**9) for each in cases[tried:])
        chosen = [wrong(*each, names[index:]) for each in cases if not alone]
        if said := [each for each in chosen if each.startswith("WRONG")]:
            return said[0]
        if chosen and not any(chosen[:tried]):
            return name
    return "WRONG: no pass is right"


def switching(config: type, model: type) -> PreTrainedModel | None:
    """A tiny model with rotary angles that switch with the length; None if the class has none."""
    try:
        built, ids = tiny(config, model, amend=with_longrope), torch.arange(3, 23)[None]
        with torch.no_grad():
            long, short = (built(input_ids=ids[:, :length]).logits[0, 9] for length in (20, 10))
        structure_of(built)
    except Exception:  # configurations and models raise different errors
        return None
    return None if torch.allclose(long, short, atol=1e-3) else built


def row_of(name: str, config: type, model: type) -> list[str]:
    """Build a class and test it: its row of the table."""
    try:
        built = [tiny(config, model) for _ in SCOPES]  # a pass may change BigBird
    except Exception as error:
        why = textwrap.shorten(str(error), 200)  # the cause is often in its second line
        return [name, "not tested", "", "", f"not built: {type(error).__name__}: {why}"]
    fastest = [next(iter(PASSES[scope])) for scope in SCOPES]
    if (table := structure.classes()).get(name, {}).get("heads") != "refused":
        table[name] = dict(zip(COLUMNS, (name, "by name", *fastest, ""), strict=True))
    try:
        projections = structure_of(built[0]).projections
    except TypeError as error:
        why = str(error).splitlines()[0].replace(structure.NAME_THEM, "").replace(f"{name} ", "", 1)
        return [name, "refused", why, "the same", ""]
    angles = switching(config, model)
    words = [word_of(scope, each, angles) for scope, each in zip(SCOPES, built, strict=True)]
    listed = f"heads in layers {', '.join(map(str, projections))} of {LAYERS}"
    return [name, "by name", *words, "" if len(projections) == LAYERS else listed]


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--out", type=click.File("w"), default="-", help="Write a CSV file.")
def main(names: tuple[str, ...], out: TextIO) -> None:
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    known = {name: types for name, *types in classes()}
    if unknown := ", ".join(sorted(set(names) - known.keys())):
        raise click.UsageError(f"not in transformers' registry: {unknown}")
    rows = []
    for name in names or known:
        rows.append(row_of(name, *known[name]))
        print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: ("brn".index(row[1][0]), row[0]))  # by name, refused, not tested
    csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])
    if wrong_ones := [row[0] for row in rows if "WRONG" in "".join(row)]:
        raise click.ClickException(f"wrong numbers: {', '.join(wrong_ones)}")


if __name__ == "__main__":
    main()
