"""`polygraph_asmi reference`: what a verdict needs of a finished run."""

from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.settings import said, setting_options


@click.command()
@click.argument("run", type=click.Path(exists=True))
@setting_options("method", "depth", "source", "aggregation")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def reference(run: str, out: str, **settings: Any) -> None:
    """Save what `score --reference` needs of RUN, without its questions and answers.

    RUN is a finished run; or a .jsonl file that `score --out` wrote, whose rows say in `wrong`
    which of their `spans` are wrong: [false, true, null], null where nobody judged.
    """
    from rich.console import Console

    from lm_polygraph_asmi.scoring import Reference

    if Path(out).suffix != ".json":
        raise click.BadParameter(
            "name a .json file: by that a saved reference is known", param_hint="--out"
        )
    try:
        found = Reference.read(run, **said(settings))
        found.save(out)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{out}: {found.ground}", highlight=False, markup=False)
