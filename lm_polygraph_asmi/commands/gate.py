"""`polygraph_asmi gate`: does a guarantee still hold, by newly labelled decisions?"""

import sys
from typing import Any

import click

from lm_polygraph_asmi.files import to_json

STATUS = {"holds": 0, "violated": 3, "inconclusive": 4}
"""Outcome -> exit status; click uses 1 and 2."""


@click.command(short_help="Test a guarantee on newly labelled decisions.")
@click.argument("calibration", type=click.Path(exists=True, dir_okay=False))
@click.argument("labelled", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--right-from",
    type=float,
    help="Lowest quality of a correct answer; default: the calibration's, else 0.5 of 0 to 1.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gate(
    calibration: str, labelled: tuple[str, ...], right_from: float | None, as_json: bool
) -> None:
    """Test the guarantee of CALIBRATION on new decisions with labels.

    LABELLED are files of `decide --out` whose rows also have `correct` (true or false) or
    `quality`; abstained ones need no label. Rows of several files are numbered on, as in one file.

    Exit status: 0 holds, 3 violated, 4 inconclusive; 1 and 2 are errors.
    """
    from lm_polygraph_asmi.decisions.calibration import Calibration
    from lm_polygraph_asmi.decisions.decision import EMPTY
    from lm_polygraph_asmi.decisions.gate import gate as gate_of
    from lm_polygraph_asmi.scoring.rows import read_rows

    rows: list[Any] = []
    for path in labelled:
        before = rows[-1].number if rows else 0
        rows += [row._replace(number=before + row.number) for row in read_rows(path)]
    result = gate_of(Calibration.load(calibration), rows, right_from)
    blank = sum(row.content["reason"] == EMPTY for row in rows)
    without_decision = sum(row.content["accept"] is None for row in rows) - blank
    if as_json:
        content = vars(result) | {"guarantee": vars(result.guarantee)}
        click.echo(to_json(content | {"without_decision": without_decision}))
    else:
        click.echo(result)
        if without_decision:
            click.echo(f"Without a decision, so counted as abstained: {without_decision}.")
        if blank:
            click.echo(f"Left out {blank} empty answers: they are never accepted.")
    sys.exit(STATUS[result.outcome])
