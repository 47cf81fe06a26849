"""`polygraph_asmi calibration`: what a verdict needs of a finished run."""

from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.settings import said, setting_options


@click.command()
@click.argument("run", type=click.Path(exists=True))
@setting_options("method", "depth", "source", "aggregation")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def calibration(run: str, out: str, **settings: Any) -> None:
    """Save what `score --calibration` needs of RUN, without its questions and answers.

    RUN is a finished run; or a .jsonl file that `score --out` wrote, whose rows say in `wrong`
    which of their `spans` are wrong: [false, true, null], null where nobody judged.
    """
    from rich.console import Console

    from lm_polygraph_asmi.scoring import Calibration

    if Path(out).suffix != ".json":
        raise click.BadParameter(
            "name a .json file: by that a saved calibration run is known", param_hint="--out"
        )
    try:
        found = Calibration.read(run, **said(settings))
        found.save(out)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{out}: {found.ground}", highlight=False, markup=False)
