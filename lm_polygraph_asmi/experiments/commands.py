"""`polygraph_asmi experiments`: the causal probe.

Imports only click at the top, as the files of `lm_polygraph_asmi.commands` do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.options import setting_options
from lm_polygraph_asmi.validation import check_writable


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for loading the model of the run."""
    for option in (
        setting_options("depth", "memory_budget"),
        click.option("--device-map", help="auto: use GPUs; default: CPU."),
        click.option(
            "--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ..."
        ),
        click.option("--gguf-file", help="GGUF file in the folder with the weights."),
        click.option(
            "--model", required=True, help="Model of the run: folder, hub ID, or smollm2."
        ),
    ):
        command = option(command)
    return command


@click.command(short_help="Ablate the critical heads of a run.")
@click.argument("run", type=click.Path(exists=True))
@_model_options
@click.option("--tokens", "count", default=200, show_default=True, help="Tokens per group.")
@click.option("--draws", default=10, show_default=True, help="Draws of random heads per token.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random heads.")
@click.option(
    "--result-cache",
    type=click.Path(file_okay=False),
    help="Folder that caches finished examples; default: beside the output file.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="JSON file to write; default: beside the manager file, where `report` finds it.",
)
def probe(run: str, model: str, result_cache: str | None, out: str | None, **settings: Any) -> None:
    """Ablate the critical heads of RUN and report how often predictions flip.

    RUN is a run of the config asmi_heads. A killed probe resumes from its cache.
    """
    from rich.console import Console
    from rich.progress import Progress

    from lm_polygraph_asmi.experiments.probe_file import probe_path, write_probe
    from lm_polygraph_asmi.results.runs import manager_files

    console = Console()
    try:
        manager, *others = manager_files(run)
        if others:
            raise ValueError(f"expected one seed, got several in {run}: name one of its files")
        path = Path(out) if out else probe_path(manager)
        check_writable(path)
        from lm_polygraph_asmi.experiments.probe import probe_of

        cache = result_cache or str(path.with_suffix(".cache"))
        experiment, answers = probe_of(manager, model, result_cache=cache, **settings)
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("Probing", total=len(experiment.rows))
            content = experiment.run(answers, lambda: progress.advance(task))
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    write_probe({"run": str(manager), "model": model, **content}, manager, path)
    tokens = content["tokens"]
    unchanged = [a == b for a, b in zip(tokens["argmax"], tokens["replayed"], strict=True)]
    console.print(
        f"{path}: {len(unchanged)} tokens of {len(experiment.rows)} answers; with no head ablated "
        f"{len(unchanged) - sum(unchanged)} of them flip.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


COMMANDS: dict[str, click.Command] = {"probe": probe}
