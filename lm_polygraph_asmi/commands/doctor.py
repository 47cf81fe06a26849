"""`polygraph_asmi doctor`: check a run before starting it."""

import click

from lm_polygraph_asmi.files import to_json


@click.command(short_help="Check a run before starting it.")
@click.option("--config-name", required=True, help="Config of the run, as for polygraph_eval.")
@click.option(
    "--config-dir", type=click.Path(exists=True, file_okay=False), help="Folder of your configs."
)
@click.option(
    "--run/--no-run",
    default=True,
    help="Score two rows with every method, which loads and may download its models (default); or "
    "check the config only.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("overrides", nargs=-1)
def doctor(
    config_name: str, config_dir: str | None, run: bool, as_json: bool, overrides: tuple[str, ...]
) -> None:
    """Check whether a run will work and estimate its cost, before starting it.

    OVERRIDES are those of polygraph_eval, with one value each: one job of a sweep is checked. Exits
    with status 1 if the run would fail.
    """

    from rich.console import Console

    from lm_polygraph_asmi.runs.compose import compose_run

    try:
        compose_run(config_name, config_dir, overrides)  # fails on a wrong name before the imports
        from lm_polygraph_asmi.runs.doctor import diagnose

        console = Console(stderr=True, quiet=True) if as_json else Console()
        diagnosis = diagnose(console, config_name, config_dir, overrides, run)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(to_json(diagnosis.to_dict(), indent=1))
    if not diagnosis.works:
        raise SystemExit(1)
