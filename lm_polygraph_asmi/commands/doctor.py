"""`polygraph_asmi doctor`: check a run or a model before it is used."""

from typing import Any

import click

from lm_polygraph_asmi.commands.score import LOADING, score
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.options import given_settings

OF_MODEL = (*LOADING, "depth", "structure", "max_new_tokens", "memory_budget")
"""Options of `score` that can be used with --model."""


@click.command(
    params=[option for option in score.params if option.name in OF_MODEL],
    short_help="Check a run before starting it, or a model.",
)
@click.argument("overrides", nargs=-1)
@click.option("--config-name", help="Config of the run, as for polygraph_eval.")
@click.option("--model", help="Check a model instead: folder, hub ID, or smollm2 (the demo's).")
@click.option("--config-dir", type=click.Path(exists=True, file_okay=False), help="Your configs.")
@click.option(
    "--run/--no-run",
    default=True,
    help="Score two rows with every method, which loads and may download models (default); or only "
    "check the config.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    overrides: tuple[str, ...], config_name: str | None, model: str | None,
    config_dir: str | None, run: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Check whether a run will work or a model can be scored, and estimate the cost.

    OVERRIDES are those of polygraph_eval, with one value each, so one job of a sweep is checked.
    With --model, no data are needed: it prints the modules that were found, runs the self-check in
    both scopes with every attention implementation, and times one answer. Exits with status 1 if
    the run or the model would fail.
    """
    from rich.console import Console

    given = given_settings(options)
    if (config_name is None) == (model is None):
        raise click.UsageError("expected --config-name or --model, but not both")
    if model is None and given:
        raise click.UsageError(
            f"only --model takes {', '.join(given)}: write settings of a run as overrides, such as "
            "asmi.depth=0.5"
        )
    if model is not None and (config_dir or overrides or not run):
        raise click.UsageError("only --config-name takes --config-dir, --no-run and overrides")
    if model is not None:
        settings = {name: given.pop(name) for name in ASMIConfig.names() if name in given}
        from lm_polygraph_asmi.scoring.doctor import diagnose_model

        with Console(stderr=True).status(f"Checking {model}"):
            result = diagnose_model(model, model, config=ASMIConfig(**settings), **given)
        if as_json:
            click.echo(to_json(result.to_dict(), indent=1))
        else:
            Console().print(result)
        raise SystemExit(not result.works)
    from lm_polygraph_asmi.runs.compose import compose_run

    composed = compose_run(str(config_name), config_dir, overrides)  # raises before slow imports
    from lm_polygraph_asmi.runs.doctor import diagnose

    folder = ["--config-dir", config_dir] if config_dir else []
    arguments = ["--config-name", str(config_name), *folder, *overrides]
    diagnosis = diagnose(Console(stderr=as_json, quiet=as_json), composed, arguments, run)
    if as_json:
        click.echo(to_json(diagnosis, indent=1))
    raise SystemExit(not diagnosis["works"])
