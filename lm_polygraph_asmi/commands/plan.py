"""`polygraph_asmi plan`: number of masks, mask rate and cost before a run."""

import click

from lm_polygraph_asmi.config import ASMIConfig, target_layer


@click.command(short_help="Masks, mask rate and cost for a model.")
@click.option(
    "--heads", required=True, type=click.IntRange(min=4), help="H, query heads per layer."
)
@click.option(
    "--layers", type=click.IntRange(min=2), help="L, number of layers; needed to print the cost."
)
@click.option(
    "--depth",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=ASMIConfig.depth,
    show_default=True,
    help="Masked layer: 0 is the first, 1 the last.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="Figure to write (.png, .svg, .pdf).")
@click.option("--point", type=(float, int), help="Mask rate and masks to check, such as 0.10 16.")
def plan(
    heads: int, layers: int | None, depth: float, out: str | None, point: tuple[float, int] | None
) -> None:
    """Print the number of masks S and the mask rate p for a model with H heads, and the cost.

    S follows from the coverage bound (every head is masked at least once), p from the fidelity
    bound (at most a quarter of the heads is masked at once), each with probability 0.95. These are
    the defaults of the estimators.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi import maths
    from lm_polygraph_asmi.report.plan import plan_table

    if point is not None and (not 0 < point[0] < 1 or point[1] < 1):
        raise click.BadParameter(f"expected a mask rate in (0, 1) and masks >= 1, got {point}")
    console, points, default = Console(), plan_table(heads), maths.operating_point(heads)
    tolerated = maths.tolerated_heads(heads)
    table = Table(*points, title=f"{heads} heads; at most {tolerated} masked at once")
    for row in points.itertuples(index=False):
        style = "bold" if row[0] == default.mask_rate else None if row.admissible else "dim"
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row), style=style)
    lines = [
        f"Cheapest admissible point: p = {default.mask_rate}, S = {default.num_masks} (default of "
        "the estimators)."
    ]
    if layers is not None:
        layer = target_layer(depth, layers)
        passes = maths.flops_ratio(layers, layer, default.num_masks)
        lines.append(
            f"Cost at depth {depth:.0%} (layer {layer} of {layers}): scoring an answer costs "
            f"{passes:.1f} full forward passes ({layer} layers once, {layers - layer} once per "
            "mask). The scope response costs far less."
        )
    if point is not None:
        missed = maths.never_masked_heads(heads, *point)
        lines.append(
            f"At p = {point[0]:g}, S = {point[1]}: on average {missed:.1f} of {heads} heads are "
            f"never masked; the coverage bound needs {maths.masks_for_coverage(heads, point[0])} "
            "masks."
        )
    if out is not None:
        try:
            from lm_polygraph_asmi.report import figures

            figures.save(figures.operating_point(points, tolerated), out)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot write {out}: {error}") from error
        lines.append(f"Figure: {out}")
    console.print(table)
    for line in lines:
        console.print(line, highlight=False)
