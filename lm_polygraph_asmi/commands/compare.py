"""`polygraph_asmi compare`: two models or settings on the same rows."""

import click


@click.command()
@click.argument("first", type=click.Path(exists=True, dir_okay=False))
@click.argument("second", type=click.Path(exists=True, dir_okay=False))
def compare(first: str, second: str) -> None:
    """What differs between two files that `score --out` wrote of the same rows.

    Differences are SECOND minus FIRST, paired by row, with 95 % intervals over clusters: rows over
    one passage, or with the same `cluster`. With `correct` or `quality` in the rows, also how well
    each signal ranks errors.
    """
    from rich.console import Console

    from lm_polygraph_asmi.scoring.comparing import compare_files

    try:
        Console().print(compare_files(first, second), highlight=False)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
