"""`polygraph_asmi plan`: masks and mask rate before a run."""

import click


@click.command()
@click.option("--heads", required=True, type=click.IntRange(min=4), help="H, query heads a layer.")
@click.option("--out", type=click.Path(dir_okay=False), help="Figure to write (.png, .svg, .pdf).")
@click.option(
    "--point", type=(float, int), help="Mask rate and masks of your own, such as 0.10 16."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for other programs.")
def plan(heads: int, out: str | None, point: tuple[float, int] | None, as_json: bool) -> None:
    """Print the masks S and the mask rate p for a model with so many heads, and why.

    S from the coverage bound (every head masked at least once), p from the fidelity bound (no more
    than a quarter of the heads masked at once), each with probability 0.95. The estimators take the
    same point by default.
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.maths import masks_for_coverage, never_masked_heads, operating_point
    from lm_polygraph_asmi.report.plan import plan_figure, plan_table

    console = Console()
    found, chosen = plan_table(heads), operating_point(heads)
    own = None
    if point is not None:
        rate, masks = point
        if not 0 < rate < 1 or masks < 1:
            raise click.BadParameter("wanted a mask rate in (0, 1) and at least one mask")
        own = {
            "mask_rate": rate,
            "num_masks": masks,
            "heads_never_masked": float(never_masked_heads(heads, rate, masks)),
            "masks_for_coverage": masks_for_coverage(heads, rate),
        }
    if out is not None:
        try:
            from lm_polygraph_asmi.report import figures

            figures.save(plan_figure(found, heads), out)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{out} cannot be written: {error}") from error
    if as_json:
        content = {
            "heads": heads,
            "tolerated": heads // 4,
            "mask_rate": chosen.mask_rate,
            "num_masks": chosen.num_masks,
            "points": json.loads(found.to_json(orient="records")),
            "point": own,
        }
        click.echo(json.dumps(content, indent=1, allow_nan=False))
        return
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
    if own is not None:
        console.print(
            f"At p = {own['mask_rate']:g}, S = {own['num_masks']}, {own['heads_never_masked']:.1f} "
            f"of {heads} heads are never masked on average; the coverage bound wants "
            f"{own['masks_for_coverage']} masks.",
            highlight=False,
        )
    if out is not None:
        console.print(f"Figure: {out}", highlight=False)
