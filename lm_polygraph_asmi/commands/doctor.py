"""`polygraph_asmi doctor`: check a run before starting it, or a model."""

from typing import Any

import click

from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.options import given_settings, setting_options

OF_RUN = ("config_dir", "run", "overrides")
OF_MODEL = ("gguf_file", "dtype", "device_map")


def _refuse_other_options(settings: dict[str, Any], of_model: bool) -> None:
    """Raise click.UsageError for options that only a run, or only a model, has."""
    context = click.get_current_context()
    names = OF_RUN if of_model else (*OF_MODEL, *settings)
    explicit = given_settings({name: context.params[name] for name in names})
    if not explicit:
        return
    options = {option.name: option.opts[0] for option in context.command.params}
    mode, other = ("--model", "--config-name")[:: 1 if of_model else -1]
    raise click.UsageError(
        f"{mode} takes no {', '.join(options[name] for name in explicit)}; only {other} does"
        + ". Write settings of a run as overrides, such as asmi.depth=0.5" * (not of_model)
    )


@click.command(short_help="Check a run before starting it, or a model.")
@click.option("--config-name", help="Config of a run, as for polygraph_eval.")
@click.option("--model", help="A model instead: folder, hub ID, or smollm2 (the demo's model).")
@click.option("--gguf-file", help="With --model: GGUF file in the folder with the weights.")
@click.option("--dtype", default="auto", show_default=True, help="With --model: its data type.")
@click.option("--device-map", help="With --model: where to load it; auto uses GPUs, default: CPU.")
@setting_options("depth", "structure", "max_new_tokens", "memory_budget")
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
    config_name: str | None,
    config_dir: str | None,
    run: bool,
    as_json: bool,
    overrides: tuple[str, ...],
    model: str | None,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    **settings: Any,
) -> None:
    """Check whether a run will work, or a model can be scored, and estimate the cost.

    OVERRIDES are those of polygraph_eval, with one value each: one job of a sweep is checked. With
    --model, no data are needed: prints the modules that were found, runs the self-check in both
    scopes with every attention implementation, and times one answer. Exits with status 1 if the
    run or the model would fail.
    """
    from rich.console import Console

    if (config_name is None) == (model is None):
        raise click.UsageError("expected --config-name or --model, one of them")
    _refuse_other_options(settings, model is not None)
    if model is not None:
        from lm_polygraph_asmi.config import ASMIConfig

        try:
            config = ASMIConfig().replace(**given_settings(settings))
            from lm_polygraph_asmi.scoring.doctor import diagnose_model

            with Console(stderr=True).status(f"Checking {model}"):
                result = diagnose_model(
                    model, model, config=config,
                    gguf_file=gguf_file, dtype=dtype, device_map=device_map,
                )  # fmt: skip
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        if as_json:
            click.echo(to_json(result.to_dict(), indent=1))
        else:
            Console().print(result)
        raise SystemExit(not result.works)
    assert config_name is not None
    from lm_polygraph_asmi.runs.compose import compose_run

    try:
        composed = compose_run(config_name, config_dir, overrides)  # or an error before the imports
        from lm_polygraph_asmi.runs.doctor import diagnose

        folder = ["--config-dir", config_dir] if config_dir else []
        arguments = ["--config-name", config_name, *folder, *overrides]
        diagnosis = diagnose(Console(stderr=as_json, quiet=as_json), composed, arguments, run)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(to_json(diagnosis, indent=1))
    if not diagnosis["works"]:
        raise SystemExit(1)
