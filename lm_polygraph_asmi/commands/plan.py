"""`polygraph_asmi plan`: number of masks, mask rate and cost before a run."""

from typing import Any

import click

from lm_polygraph_asmi.config import ASMIConfig, target_layer
from lm_polygraph_asmi.files import parse_json, to_json


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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    heads: int,
    layers: int | None,
    depth: float,
    out: str | None,
    point: tuple[float, int] | None,
    as_json: bool,
) -> None:
    """Print the number of masks S and the mask rate p for a model with H heads, and the cost.

    S follows from the coverage bound (every head is masked at least once), p from the fidelity
    bound (at most a quarter of the heads is masked at once), each with probability 0.95. These are
    the defaults of the estimators.
    """
    from rich.console import Console

    from lm_polygraph_asmi.report.plan import plan_table

    if point is not None and (not 0 < point[0] < 1 or point[1] < 1):
        raise click.BadParameter(f"expected a mask rate in (0, 1) and masks >= 1, got {point}")
    points = plan_table(heads)
    content = _content(heads, layers, depth, point, points)
    if out is not None:
        try:
            from lm_polygraph_asmi.report import figures

            figures.save(figures.operating_point(points, content["tolerated"]), out)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot write {out}: {error}") from error
    if as_json:
        click.echo(to_json(content, indent=1))
        return
    console = Console()
    _show(console, content, points, depth)
    if out is not None:
        console.print(f"Figure: {out}", highlight=False)


def _content(
    heads: int,
    layers: int | None,
    depth: float,
    point: tuple[float, int] | None,
    points: Any,
) -> dict[str, Any]:
    """What is printed, as JSON."""
    from lm_polygraph_asmi import maths

    default_point = maths.operating_point(heads)
    content: dict[str, Any] = {
        "heads": heads,
        "tolerated": heads // 4,
        "mask_rate": default_point.mask_rate,
        "num_masks": default_point.num_masks,
        "points": parse_json(points.to_json(orient="records")),
        "point": None,
        "cost": None,
    }
    if point is not None:
        rate, masks = point
        content["point"] = {
            "mask_rate": rate,
            "num_masks": masks,
            "heads_never_masked": float(maths.never_masked_heads(heads, rate, masks)),
            "masks_for_coverage": maths.masks_for_coverage(heads, rate),
        }
    if layers is not None:
        layer = target_layer(depth, layers)
        content["cost"] = {
            "layer": layer,
            "layers": layers,
            "passes": maths.flops_ratio(layers, layer, default_point.num_masks),
        }
    return content


def _show(console: Any, content: dict[str, Any], points: Any, depth: float) -> None:
    heads = content["heads"]
    styles = [
        "bold" if row[0] == content["mask_rate"] else None if row[4] else "dim"
        for row in points.itertuples(index=False)
    ]
    shown = points.assign(admissible=points["admissible"].map({True: "yes", False: "no"}))
    title = f"{heads} heads; at most {content['tolerated']} masked at once"
    console.print(_table(shown, title, styles))
    lines = [
        f"Cheapest admissible point: p = {content['mask_rate']}, S = {content['num_masks']} "
        "(default of the estimators)."
    ]
    if (cost := content["cost"]) is not None:
        layer, layers = cost["layer"], cost["layers"]
        lines.append(
            f"Cost at depth {depth:.0%} (layer {layer} of {layers}): scoring an answer costs "
            f"{cost['passes']:.1f} full forward passes ({layer} layers once, {layers - layer} once "
            "per mask). The scope response costs far less."
        )
    if (point := content["point"]) is not None:
        lines.append(
            f"At p = {point['mask_rate']:g}, S = {point['num_masks']}: on average "
            f"{point['heads_never_masked']:.1f} of {heads} heads are never masked; the coverage "
            f"bound needs {point['masks_for_coverage']} masks."
        )
    for line in lines:
        console.print(line, highlight=False)


def _table(frame: Any, title: str, styles: list[str | None]) -> Any:
    """A data frame for a terminal."""
    from rich.table import Table

    shown = Table(title=title)
    for column in frame:
        shown.add_column(str(column), justify="right")
    for row, style in zip(frame.itertuples(index=False), styles, strict=True):
        values = [f"{v:.2f}" if isinstance(v, float) else str(v) for v in row]
        shown.add_row(*values, style=style)
    return shown
