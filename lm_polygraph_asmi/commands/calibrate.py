"""`polygraph_asmi calibrate`: find a threshold with a risk guarantee from labelled answers."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.files import write_whole
from lm_polygraph_asmi.validation import check_new, check_writable

if TYPE_CHECKING:
    from lm_polygraph_asmi.decisions.calibration import Calibration

AGAIN = (
    "If both are made from the same labels, each further calibration lowers the confidence, and "
    "choosing the best one voids it: for another risk, label new answers"
)


def once(_: Any, option: click.Parameter, values: tuple[str, ...]) -> str | None:
    """The value of an option that may be given only once. Click itself would take the last one."""
    if len(values) > 1:
        raise click.UsageError(f"{option.opts[0]} is given {len(values)} times: join the sheets")
    return values[0] if values else None


@click.command(short_help="Find a threshold with a risk guarantee from labels.")
@click.argument("rows", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--risk", type=float, required=True, help="Error rate to guarantee, such as 0.1.")
@click.option(
    "--signal",
    help="Signal to threshold: score, asmi, sem, adapt, msp, perplexity or entropy; best: the one "
    "of the last three that accepts most; learned: a score learned from the labels (loads the "
    "model); column:NAME: any uncertainty in ROWS; column:-NAME: any confidence. Default: the "
    "signal "
    "that sorts the sheet, or else best.",
)
@click.option(
    "--largest",
    type=click.IntRange(min=1),
    help="Most answers of one cluster in later use. Default: the most labelled answers of a "
    "cluster in ROWS; with a sorted sheet, the most scored ones.",
)
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option(
    "--html", type=click.Path(dir_okay=False), help="HTML page to write, with a chart of the tests."
)
@click.option(
    "--run", type=click.Path(exists=True), help="Finished benchmark run, instead of ROWS."
)
@click.option(
    "--labels",
    callback=once,
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="With ROWS: their sheet from `score --sheet`, with labels. Label a sorted sheet from its "
    "top, as far as you like.",
)
@click.option(
    "--unlabelled",
    type=click.Path(exists=True, dir_okay=False),
    help="With ROWS: other scored rows like later ones, without labels. Their scores are then the "
    "thresholds to test, so that the guarantee needs no further condition.",
)
@click.option(
    "--confidence",
    default=0.95,
    show_default=True,
    help="Least probability, over samples of labelled answers, that the guarantee holds.",
)
@click.option(
    "--metric",
    help="With --run: quality metric of the labels. Default: AlignScore, or the first metric.",
)
@click.option(
    "--right-from",
    type=float,
    help="Lowest quality of a correct answer. Default: 0.5, for a quality in [0, 1].",
)
def calibrate(
    rows: str | None,
    run: str | None,
    out: str,
    html: str | None,
    labels: str | None,
    unlabelled: str | None,
    metric: str | None,
    **asked: Any,
) -> None:
    """Find a threshold with a risk guarantee from labelled answers, in ROWS or in --run.

    ROWS is a file from `score --out`, which records model and settings. Labels are read from the
    sheet --labels, or from the fields `correct` (true or false) or `quality` (a number) of ROWS.
    Rows without a label are left out and counted. Rows on the same passage form a cluster. Clusters
    are found from `context` or prompt, or named in `cluster`. Pass OUT to `decide --calibration`.
    """
    from rich.console import Console

    from lm_polygraph_asmi.decisions.picture import page_of

    if Path(out).suffix != ".json":
        raise click.BadParameter(f"expected a .json file, as `decide` needs it, got {out}")
    if html and Path(html).suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"--html: expected a file name that ends in .html, got {html}")
    if (rows is None) == (run is None):
        raise click.UsageError("expected either ROWS of labelled answers or a finished run (--run)")
    if (unlabelled or labels) if rows is None else metric:
        raise click.UsageError("--metric needs --run; --unlabelled and --labels need ROWS")
    try:
        for written in filter(None, (out, html)):
            check_writable(written)
        earlier = _sorted_calibration(out) if labels else None
        if earlier is None:
            check_new(out, f"name another file, or remove it. {AGAIN}")
        with Console(stderr=True).status("Calibrating"):
            if run is not None:
                from lm_polygraph_asmi.decisions.run import calibrate_run

                result = calibrate_run(run, metric=metric, **asked)
            else:
                from lm_polygraph_asmi.decisions.rows import calibrate_rows

                asked |= {"labels": labels, "unlabelled": unlabelled or ()}
                result = calibrate_rows(str(rows), **asked)
        if earlier is not None and _comparable(earlier) != _comparable(result):
            check_new(
                out,
                "it was made from other labels, or with another risk, confidence or --largest, so "
                f"name another file. {AGAIN}",
            )
        if html:
            write_whole(html, page_of(result))
        result.save(out)
    except TypeError as error:  # other errors are handled for all commands
        raise click.ClickException(str(error)) from error
    click.echo(f"{result}\nCalibration: {out}" + (f"\nPage: {html}" if html else ""))


def _sorted_calibration(out: str) -> "Calibration | None":
    """The calibration in `out` if its labels were given in order, so that it may be updated."""
    from lm_polygraph_asmi.decisions.calibration import Calibration

    with suppress(OSError, ValueError):
        earlier = Calibration.load(out)
        return None if earlier.guarantee.labels is None else earlier
    return None


def _comparable(calibration: "Calibration") -> tuple[Any, ...]:
    """What calibrations must share for one to update the other with more labels in order."""
    rule = calibration.guarantee
    return (
        calibration.name,
        calibration.signal,
        rule.risk,
        rule.confidence,
        rule.answers,
        rule.largest,
        rule.labels is None,
    )
