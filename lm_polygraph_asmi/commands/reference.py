"""`polygraph_asmi reference`: what a verdict needs of a finished run."""

from pathlib import Path

import click

from lm_polygraph_asmi.validation import VARIANTS


@click.command()
@click.argument("run", type=click.Path(exists=True))
@click.option("--variant", type=click.Choice(list(VARIANTS)), default="sem")
@click.option("--depth", default=0.6, show_default=True, help="Relative depth of the masked layer.")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def reference(run: str, variant: str, depth: float, out: str) -> None:
    """Save what `score --reference` needs of a finished RUN, without its questions and answers."""
    from rich.console import Console

    from lm_polygraph_asmi.scoring import Reference

    if Path(out).suffix != ".json":
        raise click.BadParameter("name a .json file: by that a saved reference is known")
    try:
        found = Reference.from_run(run, variant, depth)
        found.save(out)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{out}: {found.ground}", highlight=False, markup=False)
