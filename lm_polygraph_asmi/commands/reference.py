"""`polygraph_asmi reference`: what a verdict needs of a finished run."""

from pathlib import Path

import click

from lm_polygraph_asmi.validation import AGGREGATIONS, VARIANTS


@click.command()
@click.argument("source", type=click.Path(exists=True))
@click.option("--variant", type=click.Choice(list(VARIANTS)), default="sem")
@click.option("--depth", default=0.6, show_default=True, help="Relative depth of the masked layer.")
@click.option(
    "--aggregation",
    type=click.Choice(AGGREGATIONS),
    default="mean",
    show_default=True,
    help="How the run's score came of its tokens'.",
)
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def reference(source: str, variant: str, depth: float, aggregation: str, out: str) -> None:
    """Save what `score --reference` needs of SOURCE, without its questions and answers.

    SOURCE is a finished run; or a .jsonl file that `score --out` wrote, whose rows say in `wrong`
    which of their `spans` are wrong: [false, true, null], null where nobody judged.
    """
    from rich.console import Console

    from lm_polygraph_asmi.scoring import Reference

    if Path(out).suffix != ".json":
        raise click.BadParameter(
            "name a .json file: by that a saved reference is known", param_hint="--out"
        )
    try:
        found = Reference.read(source, variant, depth, aggregation=aggregation)
        found.save(out)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{out}: {found.ground}", highlight=False, markup=False)
