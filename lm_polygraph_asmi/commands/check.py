"""`polygraph_asmi check`: compare a model's masked passes with full passes."""

import csv
import sys
from typing import Any

import click

from lm_polygraph_asmi.commands.score import LOADING, score
from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.options import given_settings

OPTIONS = (*LOADING, "structure")
"""Options of `score` that determine how the model is loaded and which modules it has."""


@click.command(
    params=[option for option in score.params if option.name in OPTIONS],
    short_help="Compare a model's masked passes with full passes.",
)
@click.argument("model")
def check(model: str, **options: Any) -> None:
    """Compare masked passes of MODEL (folder, hub ID, or smollm2) with full forward passes.

    Passes are compared at 60 % and 90 % of the model's depth, in both scopes, with eager attention,
    SDPA and, on a GPU that supports it, FlashAttention. Prints a table, and a line of CSV to send
    with a report: class, how heads are found, passes of each scope, and what was compared. Exits
    with status 1 if a pass is wrong.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.core.model.comparison import LONGEST, compare_all
    from lm_polygraph_asmi.results.manifest import packages
    from lm_polygraph_asmi.scoring.doctor import PROMPT
    from lm_polygraph_asmi.scoring.scorer import Scorer

    loading = {name: options.pop(name) for name in LOADING}
    try:
        with Console(stderr=True).status(f"Comparing passes of {model}"):
            scorer = Scorer(model, **loading, **given_settings(options))
            text = scorer.tokenizer(PROMPT * LONGEST, return_tensors="pt")["input_ids"][0]
            structure = scorer.config.structure
            comparisons, unavailable = compare_all(scorer.model, text[:LONGEST], structure)
    except (TypeError, RuntimeError, FloatingPointError) as error:  # raised by the model
        raise click.ClickException(str(error)) from error
    table = Table("attention", "layer", "scope", "passes", "difference", title=model)
    for each in comparisons:
        difference = f"{each.difference:.1e}" + " WRONG" * (not each.right)
        table.add_row(each.attention, str(each.layer), each.scope, each.passes, difference)
    for attention, why in unavailable.items():
        table.add_row(attention, "", "", why, "")
    Console().print(table, highlight=False)
    used = [
        " or ".join(dict.fromkeys(e.passes for e in comparisons if e.scope == s)) for s in SCOPES
    ]
    loaded, wrong = scorer.model, not all(each.right for each in comparisons)
    note = [
        f"{loaded.dtype} on {loaded.device.type}".removeprefix("torch."),
        ", ".join(dict.fromkeys(each.attention for each in comparisons)),
        f"layers {', '.join(dict.fromkeys(str(each.layer) for each in comparisons))}",
        "WRONG: " * wrong + f"differs by {max(each.difference for each in comparisons):.1e}",
        *(f"{name} {release}" for name, release in packages().items()),
    ]
    click.echo("The line for a report:")
    row = [type(loaded).__name__, structure or "by name", *used, "; ".join(note)]
    csv.writer(sys.stdout, lineterminator="\n").writerow(row)
    raise SystemExit(int(wrong))
