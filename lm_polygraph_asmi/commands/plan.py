"""`polygraph_asmi plan`: masks and mask rate before a run."""

from typing import Any

import click


@click.command()
@click.option(
    "--heads", type=click.IntRange(min=4), help="H, query heads a layer; a pilot run knows them."
)
@click.option("--layers", type=click.IntRange(min=2), help="L, for the cost in passes.")
@click.option(
    "--depth",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.6,
    show_default=True,
    help="Relative depth of the masked layer.",
)
@click.option(
    "--prr-difference",
    type=click.FloatRange(0, 2, min_open=True),
    help="Difference of PRR to be found: how many questions that takes, from --pilot.",
)
@click.option("--pilot", type=click.Path(exists=True), help="A finished run on such questions.")
@click.option("--out", type=click.Path(dir_okay=False), help="Figure to write (.png, .svg, .pdf).")
@click.option(
    "--point", type=(float, int), help="Mask rate and masks of your own, such as 0.10 16."
)
def plan(
    heads: int | None,
    layers: int | None,
    depth: float,
    prr_difference: float | None,
    pilot: str | None,
    out: str | None,
    point: tuple[float, int] | None,
) -> None:
    """Print the masks S and the mask rate p for a model with so many heads, why, and what it costs.

    S from the coverage bound (every head masked at least once), p from the fidelity bound (no more
    than a quarter of the heads masked at once), each with probability 0.95. The estimators take the
    same point by default. With --pilot and --prr-difference: the questions and clusters that a
    comparison needs to find such a difference with a power of 0.8.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.maths import masks_for_coverage, never_masked_heads, operating_point
    from lm_polygraph_asmi.report.plan import plan_figure, plan_table

    console = Console()
    if (pilot is None) != (prr_difference is None):
        raise click.UsageError("--prr-difference and --pilot go together: one needs the other")
    if pilot is not None and prr_difference is not None:
        heads, layers = _show_power(console, pilot, depth, prr_difference, heads, layers)
    if heads is None:
        raise click.UsageError("--heads is missing: H, the number of query heads of a layer")
    found, chosen = plan_table(heads), operating_point(heads)
    shown = Table(title=f"{heads} heads, of which {heads // 4} may be masked at once")
    for column in found:
        shown.add_column(str(column), justify="right")
    for row in found.itertuples(index=False):
        style = "bold" if row[0] == chosen.mask_rate else None if row[4] else "dim"
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row]
        cells[4] = "yes" if row[4] else "no"
        shown.add_row(*cells, style=style)
    console.print(shown)
    console.print(
        f"Cheapest admissible point: p = {chosen.mask_rate}, S = {chosen.num_masks} (the default "
        "of the estimators).",
        highlight=False,
    )
    if layers is not None:
        from lm_polygraph_asmi.maths import flops_ratio
        from lm_polygraph_asmi.validation import target_layer

        layer = target_layer(depth, layers)
        ratio = flops_ratio(layers, layer, chosen.num_masks)
        console.print(
            f"Cost at depth {depth:.0%} (layer {layer} of {layers}): scoring an answer amounts to "
            f"{ratio:.1f} passes through the whole model, {layer} layers once and "
            f"{layers - layer} once per mask. The scope response costs far less.",
            highlight=False,
        )
    if point is not None:
        rate, masks = point
        if not 0 < rate < 1 or masks < 1:
            raise click.BadParameter("wanted a mask rate in (0, 1) and at least one mask")
        missed = never_masked_heads(heads, rate, masks)
        console.print(
            f"At p = {rate:g}, S = {masks}, {missed:.1f} of {heads} heads are never masked on "
            f"average; the coverage bound wants {masks_for_coverage(heads, rate)} masks.",
            highlight=False,
        )
    if out is not None:
        try:
            from lm_polygraph_asmi.report import figures

            figures.save(plan_figure(found, heads), out)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{out} cannot be written: {error}") from error
        console.print(f"Figure: {out}", highlight=False)


def _show_power(
    console: Any,
    pilot: str,
    depth: float,
    difference: float,
    heads: int | None,
    layers: int | None,
) -> tuple[int | None, int | None]:
    """Print what a difference of PRR takes; returns H and L, from the pilot where not given."""
    from rich.table import Table

    from lm_polygraph_asmi.report.plan import power_table
    from lm_polygraph_asmi.saved.cells import load_cells

    try:
        cell, *others = load_cells([pilot], depth=depth)
        if others:
            raise ValueError(f"{pilot} holds {1 + len(others)} runs over other answers: name one")
        found = power_table(cell, difference)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    shown = Table(
        title=f"To find {difference:g} in PRR with a power of 0.8 at 5 %; pilot: {len(cell)} "
        f"answers, {len(set(cell.clusters))} clusters, {int(cell.wrong.sum())} errors"
    )
    for column in found:
        shown.add_column(str(column), justify="right")
    for row in found.itertuples(index=False):
        shown.add_row(*(f"{v:.3f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int)
                        else str(v) for v in row))  # fmt: skip
    console.print(shown)
    console.print(
        "From the pilot's standard errors over clusters, taken to fall with the square root of "
        "their number; the same model, questions and methods.",
        highlight=False,
    )
    used = cell.settings() or {}
    return heads or used.get("num_heads"), layers or used.get("num_layers")
