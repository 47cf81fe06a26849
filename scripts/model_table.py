"""Which models ASMI supports: tests every class of transformers' registry of causal models.

    python scripts/model_table.py --out docs/reference/models.csv     # every class
    python scripts/model_table.py --check docs/reference/models.csv   # compare with the file
    python scripts/model_table.py LlamaForCausalLM                    # one class

Each class is built tiny and random and scored with the public `subnetwork_log_probs` in both
scopes, with eager attention and SDPA, and again with rotary angles that change with the length, if
it has any. The ground truth is a full forward pass over a copy in which the masked heads have
weight zero in the output projection, found by name, independently of the package. A class is
"right" if all numbers agree (in parentheses the slowest way to run the passes, if not the
cheapest), "unsupported" if ASMI raises an error, and "WRONG" if any differs: the script fails.
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
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import layer_at, scoring_session, structure_of, subnetwork_log_probs
from lm_polygraph_asmi.model.check import strategies_seen_right
from lm_polygraph_asmi.model.memory import batch_bytes
from lm_polygraph_asmi.model.model_cache import model_cache
from lm_polygraph_asmi.model.structure import NAME_THEM
from lm_polygraph_asmi.model.suffix import STRATEGIES

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import brute_force
from tests.registry import LAYERS, VOCABULARY, classes, tiny, with_longrope

COLUMNS = ("class", *SCOPES, "note")
TOLERANCE = 1e-3
"""Total variation at the worst position: rounding in recurrences makes 2e-4, errors make 0.01."""
MASKS = torch.tensor(
    [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1]]
)
BATCH = 3
"""Where there are more masks, the memory budget holds so many, and the last batch is smaller."""
Case = tuple[int, int, int]
"""Prompt tokens, response tokens, masks."""
SERIES = [
    # Below, at and beyond every tiny window.
    [(1, 4, 6), (11, 6, 3), (12, 1, 3), (3, 40, 3), (70, 12, 3)],
    # As many positions as heads, as the width of a head, and as that of the model.
    [(70, 12, 2), (20, 13, 2), (10, 7, 2), (5, 4, 2), (3, 2, 2), (2, 1, 2), (1, 2, 2), (1, 1, 2)],
    # One number of tokens, split early first and late first.
    [(3, 9, 2), (9, 3, 1), (9, 3, 2), (9, 3, 6)],
    [(9, 3, 6), (3, 9, 2), (1, 4, 6)],
]
"""Cases for each model; every series starts with an empty cache, with eager and SDPA in turn."""
SWITCHING = [(24, 4, 2), (8, 20, 2), (4, 6, 2), (14, 2, 2), (13, 9, 2)]
"""Cases for angles that switch at 16 tokens: around that length, in the prompt and after it."""
PROJECTIONS = (
    "o_proj", "out_proj", "wo", "Wo", "c_proj", "dense", "output_linear", "linear_out", "o",
    "o_b_proj", "attention_output", "project_o", "out_lin", "output_proj",
)  # fmt: skip
"""Names of the output projection of an attention module."""
NOT_HEADS = re.compile("mlp|expert|cross|encoder_attn|mamba|feed_forward|linear_attn|ffn")


def truth_of(model: PreTrainedModel, layer: int) -> tuple[PreTrainedModel, list[str]]:
    """A copy of a model, and the paths of a layer's output projection in it, found by name."""
    path, copied = structure_of(model).layers, copy.deepcopy(model)
    layers = copied.get_submodule(path)
    layers[layer] = copy.deepcopy(layers[layer])  # unshare modules that layers share
    names = [
        name
        for name, module in layers[layer].named_modules()
        if name.removesuffix(".linear").rpartition(".")[2] in PROJECTIONS
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.ndim == 2
        and not NOT_HEADS.search(name)
    ]
    if len(names) > 1:
        names = [name for name in names if "att" in name] or names
    return copied, [f"{path}.{layer}.{name}" for name in names]


def word_of(model: PreTrainedModel, scope: str, series: list[list[Case]]) -> str:
    """What the table says of a model in a scope."""
    ways, used = [way.name for way in STRATEGIES if way.scope == scope], set()
    try:
        layer, attentions = layer_at(model, 0.4).layer, ["eager"]
        with suppress(ValueError), scoring_session(model, "sdpa"):  # not every model has it
            attentions.append("sdpa")
        copied, paths = truth_of(model, layer)
        if len(paths) != 1:
            return f"not testable: no single output projection by name: {paths}"
        (path,) = paths
        axis = 0 if isinstance(copied.get_submodule(path), Conv1D) else 1
        for cases, attention in zip(series, cycle(attentions)):
            model_cache(model).pop("checks", None)
            for prompt, response, masks in cases:
                drawn = torch.Generator().manual_seed(prompt + response)
                ids = torch.randint(3, VOCABULARY, (prompt + response,), generator=drawn)
                budget = batch_bytes(model, BATCH, len(ids) - 1)
                found = subnetwork_log_probs(
                    model, ids, prompt, layer, MASKS[:masks], scope=scope, attention=attention,
                    memory_budget=budget if masks > BATCH else None,
                ).exp()  # fmt: skip
                with scoring_session(copied, attention):
                    expected = brute_force.subnetwork_log_probs(
                        copied, path, axis, ids, prompt, MASKS[:masks], scope
                    ).exp()
                distance = (found - expected).abs().sum(-1).max().item() / 2
                case = f"at {prompt} + {response} tokens, {masks} masks, {attention}"
                if not distance <= TOLERANCE:
                    return f"WRONG: {distance:.2g} {case}"
                if masks > 1 and not (expected - expected[:1]).abs().max() > 1e-4:
                    return f"WRONG: masks change nothing {case}"
            used |= strategies_seen_right(model, scope)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"unsupported: {str(error).splitlines()[0].replace(NAME_THEM, '')}"
    slowest = max(used, key=ways.index)
    return "right" if slowest == ways[0] else f"right ({slowest})"


def switching(config: type, model: type) -> PreTrainedModel | None:
    """A tiny model with rotary angles that switch with the length; None if the class has none."""
    try:
        built = tiny(config, model, amend=with_longrope)
        ids = torch.arange(3, 23)[None]
        with torch.no_grad():
            long, short = (built(input_ids=ids[:, :length]).logits[0, 9] for length in (20, 10))
        structure_of(built)
    except Exception:  # configurations and models raise different errors
        return None
    return None if torch.allclose(long, short, atol=1e-3) else built


def words_of(config: type, model: type) -> tuple[list[str], str]:
    """Build a class and test it: what the table says of each scope, and the note."""
    try:
        first, second = (tiny(config, model) for _ in SCOPES)  # a pass may change BigBird
    except Exception as error:
        why = textwrap.shorten(str(error), 200)  # the cause is often in its second line
        return ["not tested"] * len(SCOPES), f"not built: {type(error).__name__}: {why}"
    words = [word_of(first, SCOPES[0], SERIES), word_of(second, SCOPES[1], SERIES)]
    right = [index for index, word in enumerate(words) if word.startswith("right")]
    if right and (angles := switching(config, model)) is not None:
        for index in right:
            word = word_of(angles, SCOPES[index], [SWITCHING, SWITCHING[::-1]])
            if not word.startswith("right"):
                words[index] = f"{word}, LongRoPE"
    if not right or len(sites := structure_of(first).sites) == LAYERS:
        return words, ""
    return words, f"heads in layers {', '.join(map(str, sites))} of {LAYERS}"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--out", type=click.File("w"), default="-", help="Write a CSV file.")
@click.option("--check", type=click.File(), help="Compare with a CSV file.")
def main(names: tuple[str, ...], out: TextIO, check: TextIO | None) -> None:
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    known = {name: types for name, *types in classes()}
    if unknown := sorted(set(names) - known.keys()):
        raise click.UsageError(f"not in transformers' registry: {', '.join(unknown)}")
    rows = []
    for name in names or known:
        (all_, response), note = words_of(*known[name])
        if all_ == response and not all_.startswith("right"):  # one reason for both
            response = "the same"
        words = (word.replace(f"{name} ", "", 1) for word in (all_, response))
        rows.append(dict(zip(COLUMNS, (name, *words, note), strict=True)))
        print(*rows[-1].values(), sep=", ", file=sys.stderr, flush=True)
    # Right classes first, untested ones last.
    rows.sort(
        key=lambda row: (row["all"].startswith("not"), row["all"][:5] != "right", row["class"])
    )
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if wrong := [row["class"] for row in rows if "WRONG" in row["all"] + row["response"]]:
        raise click.ClickException(f"wrong numbers: {', '.join(wrong)}")
    if check:
        saved = list(csv.DictReader(check))
        if changed := [row["class"] for row in rows if row not in saved]:
            raise click.ClickException(f"other rows than in {check.name}: {', '.join(changed)}")


if __name__ == "__main__":
    main()
