"""`polygraph_asmi fetch`: download all that a run needs."""

import click


@click.command(short_help="Download all that a run needs.")
@click.argument("overrides", nargs=-1)
@click.option("--config-name", required=True, help="Config of the run, as for polygraph_eval.")
@click.option("--config-dir", type=click.Path(exists=True, file_okay=False), help="Your configs.")
def fetch(overrides: tuple[str, ...], config_name: str, config_dir: str | None) -> None:
    """Download the models, rows and side models of a run, where there is a connection.

    OVERRIDES are those of polygraph_eval, with one value each: one job of a sweep is fetched.
    Prints what it needs and the sizes first. The run itself then needs no connection
    (HF_HUB_OFFLINE=1). Exits with status 1 if something cannot be had.
    """
    from rich.console import Console

    from lm_polygraph_asmi.runs.compose import compose_run

    composed = compose_run(config_name, config_dir, overrides)  # or an error before imports
    from lm_polygraph_asmi.runs.doctor import fetch_needs

    if problems := fetch_needs(Console(), composed):
        raise ValueError("\n".join(problems))
