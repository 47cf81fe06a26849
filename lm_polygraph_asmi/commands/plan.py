"""`polygraph_asmi plan`: number of masks, mask rate and cost before a run."""

from typing import Any

import click

from lm_polygraph_asmi.config import ASMIConfig, target_layer
from lm_polygraph_asmi.files import parse_json, to_json


@click.command(short_help="Masks, mask rate and cost for a model.")
@click.option(
    "--heads", type=click.IntRange(min=4), help="H, query heads per layer; default: from --pilot."
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
@click.option(
    "--prr-difference",
    type=click.FloatRange(0, 2, min_open=True),
    help="With --pilot: difference in PRR to detect; prints how many questions that needs.",
)
@click.option("--pilot", type=click.Path(exists=True), help="Finished run on similar questions.")
@click.option("--out", type=click.Path(dir_okay=False), help="Figure to write (.png, .svg, .pdf).")
@click.option("--point", type=(float, int), help="Mask rate and masks to check, such as 0.10 16.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    heads: int | None,
    layers: int | None,
    depth: float,
    prr_difference: float | None,
    pilot: str | None,
    out: str | None,
    point: tuple[float, int] | None,
    as_json: bool,
) -> None:
    """Print the number of masks S and the mask rate p for a model with H heads, and the cost.

    S follows from the coverage bound (every head is masked at least once), p from the fidelity
    bound (at most a quarter of the heads is masked at once), each with probability 0.95. These are
    the defaults of the estimators. With --pilot and --prr-difference: how many questions and
    clusters a comparison needs to detect this difference with power 0.8.
    """
    from rich.console import Console

    from lm_polygraph_asmi.report.plan import plan_figure, plan_table

    if (pilot is None) != (prr_difference is None):
        raise click.UsageError("--prr-difference and --pilot need each other: give both")
    if point is not None and (not 0 < point[0] < 1 or point[1] < 1):
        raise click.BadParameter(f"expected a mask rate in (0, 1) and masks >= 1, got {point}")
    power = None
    if pilot is not None and prr_difference is not None:
        power, pilot_summary, saved = _power(pilot, depth, prr_difference)
        heads, layers = heads or saved.get("num_heads"), layers or saved.get("num_layers")
    if heads is None:
        raise click.UsageError("expected --heads: H, the number of query heads per layer")
    points = plan_table(heads)
    if out is not None:
        try:
            from lm_polygraph_asmi.report import figures

            figures.save(plan_figure(points, heads), out)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot write {out}: {error}") from error
    content = _content(heads, layers, depth, point, points, power)
    if as_json:
        click.echo(to_json(content, indent=1))
        return
    console = Console()
    if power is not None:
        title = f"To detect {prr_difference:g} in PRR with power 0.8 at level 5 %; {pilot_summary}"
        console.print(_table(power, title))
        console.print(
            "Assumes that the pilot's standard errors over clusters fall with the square root of "
            "their number, for the same model, kind of questions and methods. Passes: full forward "
            "passes to score that many answers once.",
            highlight=False,
        )
    _show(console, content, points, depth)
    if out is not None:
        console.print(f"Figure: {out}", highlight=False)


def _content(
    heads: int,
    layers: int | None,
    depth: float,
    point: tuple[float, int] | None,
    points: Any,
    power: Any,
) -> dict[str, Any]:
    """What is printed, as JSON; adds the passes to a table `power`."""
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
        "power": None,
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
        if power is not None:
            power["passes"] = [round(n * content["cost"]["passes"]) for n in power["questions"]]
    if power is not None:
        content["power"] = parse_json(power.to_json(orient="records"))
    return content


def _show(console: Any, content: dict[str, Any], points: Any, depth: float) -> None:
    heads = content["heads"]
    styles = [
        "bold" if row[0] == content["mask_rate"] else None if row[4] else "dim"
        for row in points.itertuples(index=False)
    ]
    shown = points.assign(admissible=points["admissible"].map({True: "yes", False: "no"}))
    title = f"{heads} heads; at most {content['tolerated']} masked at once"
    console.print(_table(shown, title, "{:.2f}", styles))
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


def _table(frame: Any, title: str, number: str = "{:.3f}", styles: Any = None) -> Any:
    """A data frame for a terminal."""
    from rich.table import Table

    shown = Table(title=title)
    for column in frame:
        shown.add_column(str(column), justify="right")
    for index, row in enumerate(frame.itertuples(index=False)):
        values = [
            number.format(v) if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
            for v in row
        ]
        shown.add_row(*values, style=styles[index] if styles else None)
    return shown


def _power(pilot: str, depth: float, difference: float) -> tuple[Any, str, dict[str, Any]]:
    """Questions needed for a difference of PRR, a description of the pilot, and its settings."""
    from lm_polygraph_asmi.report.plan import power_table
    from lm_polygraph_asmi.results.run_groups import load_run_groups

    try:
        group, *others = load_run_groups([pilot], depth=depth)
        if others:
            raise ValueError(f"{pilot} has {1 + len(others)} runs with other answers: name one")
        table = power_table(group, difference)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    clusters, errors = len(set(group.clusters)), int(group.wrong.sum())
    summary = f"pilot: {len(group)} answers, {clusters} clusters, {errors} errors"
    if group.too_small:
        summary += ", too small for reliable standard errors"
    return table, summary, group.settings() or {}
