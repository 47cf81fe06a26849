"""`polygraph_asmi doctor`: a run examined before it is started."""

import click


@click.command()
@click.option("--config-name", required=True, help="As for polygraph_eval.")
@click.option(
    "--config-dir", type=click.Path(exists=True, file_okay=False), help="As for polygraph_eval."
)
@click.option(
    "--run/--no-run",
    default=True,
    help="Score two rows with every method, downloading what the run would download.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for other programs.")
@click.argument("overrides", nargs=-1)
def doctor(
    config_name: str, config_dir: str | None, run: bool, as_json: bool, overrides: tuple[str, ...]
) -> None:
    """Say whether a run will work and what it will cost, before it is started.

    OVERRIDES are those of polygraph_eval, with one value each: of a sweep, one job is examined. The
    exit status is 1 if something stands in the way.
    """
    import json

    from rich.console import Console

    from lm_polygraph_asmi.runs.compose import compose_run

    try:
        compose_run(config_name, config_dir, overrides)  # a wrong name is told before the imports
        from lm_polygraph_asmi.runs.doctor import diagnose

        console = Console(stderr=True, quiet=True) if as_json else Console()
        found = diagnose(console, config_name, config_dir, overrides, run)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1, allow_nan=False))
    if not found.works:
        raise SystemExit(1)
