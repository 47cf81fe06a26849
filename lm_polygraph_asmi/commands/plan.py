"""`polygraph_asmi plan`: number of masks, mask rate and cost, before a run."""

import click

from lm_polygraph_asmi.config import ASMIConfig, target_layer


@click.command(short_help="Number of masks, mask rate and cost for a model.")
@click.option("--heads", required=True, type=click.IntRange(min=4), help="H, heads per layer.")
@click.option("--layers", type=click.IntRange(min=2), help="L, number of layers: prints the cost.")
@click.option(
    "--depth",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=ASMIConfig.depth,
    show_default=True,
    help="Relative depth of the masked layer: 0 is the first layer, 1 the last.",
)
def plan(heads: int, layers: int | None, depth: float) -> None:
    """Print the number of masks S, the mask rate p and the cost for a model with H heads.

    S follows from the coverage bound: every head is masked at least once. p follows from the
    fidelity bound: at most a quarter of the heads is masked at once. Each holds with probability
    0.95. S and p are the defaults of the estimators.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.core import mask_plan
    from lm_polygraph_asmi.report.plan import plan_table

    console, points, default = Console(), plan_table(heads), mask_plan.operating_point(heads)
    tolerated = mask_plan.tolerated_heads(heads)
    table = Table(*points, title=f"{heads} heads; at most {tolerated} masked at once")
    for row in points.itertuples(index=False):
        style = "bold" if row[0] == default.mask_rate else None if row.admissible else "dim"
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row), style=style)
    console.print(table)
    click.echo(
        f"Cheapest admissible point: p = {default.mask_rate}, S = {default.num_masks} (default of "
        "the estimators)."
    )
    if layers is not None:
        layer = target_layer(depth, layers)
        passes = mask_plan.flops_ratio(layers, layer, default.num_masks)
        click.echo(
            f"Cost at depth {depth:.0%} (layer {layer} of {layers}): scoring an answer costs "
            f"{passes:.1f} full forward passes ({layer} layers once, {layers - layer} once per "
            "mask). The scope response costs far less."
        )
