"""`polygraph_asmi export`: a finished run as a calibration file."""

from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.files import writing
from lm_polygraph_asmi.options import given_settings, setting_options
from lm_polygraph_asmi.validation import check_new, check_writable


@click.command(short_help="Save a run's scores and labels as a calibration file.")
@click.argument("run", type=click.Path(exists=True))
@setting_options("method", "depth", "aggregation")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def export(run: str, out: str, **settings: Any) -> None:
    """Save scores and labels of RUN for `score --calibration`, without its questions and answers.

    RUN is a finished run, or a .jsonl file written by `score --out`, whose rows label their
    `spans` in the field `spans_correct`, such as [true, false, null]; null = unlabelled.
    """
    from rich.console import Console

    if Path(out).suffix != ".json":
        raise click.BadParameter(f"expected a .json file, as `score` needs it, got {out}")
    try:
        check_new(out)
        check_writable(out)
        from lm_polygraph_asmi.scoring import Calibration

        calibrated = Calibration.read(run, **given_settings(settings))
        with writing(out) as partial:
            partial.write_text(calibrated.to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{out}: {calibrated.ground}", highlight=False, markup=False)
