"""`polygraph_asmi monitor`: test a guarantee on newly labelled decisions."""

import sys
from typing import Any

import click

from lm_polygraph_asmi.files import to_json

STATUS = {"holds": 0, "violated": 3, "inconclusive": 4}
"""Outcome -> exit status. Click itself uses 1 and 2."""


@click.command(short_help="Test a guarantee on newly labelled decisions.")
@click.argument("calibration", type=click.Path(exists=True, dir_okay=False))
@click.argument("labelled", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--labels",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Sheet of `decide --sheet` with labels. Repeat the option for several files.",
)
@click.option(
    "--right-from",
    type=float,
    help="Lowest quality of a correct answer. Default: the calibration's, or else 0.5 in [0, 1].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def monitor(
    calibration: str,
    labelled: tuple[str, ...],
    labels: tuple[str, ...],
    right_from: float | None,
    as_json: bool,
) -> None:
    """Test the guarantee of CALIBRATION on new decisions with labels.

    LABELLED are files of `decide --out`. Labels are read from the sheets --labels, or from the
    files' own fields `correct` (true or false) or `quality`. Abstained rows need no label. Accepted
    rows without a label are left out. Rows of several files are numbered as in one file.

    Exit status: 0 holds, 3 violated, 4 inconclusive; 1 and 2 are errors.
    """
    from lm_polygraph_asmi.decisions.calibration import Calibration
    from lm_polygraph_asmi.decisions.labels import labels_in, with_labels
    from lm_polygraph_asmi.decisions.monitor import monitor as monitor_of
    from lm_polygraph_asmi.decisions.rows import scored_rows

    rows: list[Any] = []
    for path in labelled:
        before = rows[-1].number if rows else 0
        rows += [row._replace(number=before + row.number) for row in scored_rows(path)]
    if labels:
        rows = with_labels(rows, labels_in(labels, rows).labels)
    result = monitor_of(Calibration.load(calibration), rows, right_from)
    content = vars(result) | {"guarantee": vars(result.guarantee)}
    click.echo(to_json(content) if as_json else result)
    sys.exit(STATUS[result.outcome])
