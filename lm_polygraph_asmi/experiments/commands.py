"""`polygraph_asmi experiments`: scales for the control conditions, and the causal probe.

Imports only click at the top, as the files of `lm_polygraph_asmi.commands` do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.files import check_unlocked, to_json, write_whole
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


@click.command(short_help="Scales that match controls to masked heads.")
@click.argument("run", type=click.Path(exists=True))
@click.option(
    "--held-out",
    required=True,
    type=click.Path(exists=True),
    help="Finished run over other rows; its answers (no labels) determine the scales.",
)
@_model_options
@click.option("--rows", default=20, show_default=True, help="Answers to use, evenly spaced.")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def scale(run: str, held_out: str, out: str, **settings: Any) -> None:
    """Find the scales at which control conditions match head masking, for a finished RUN.

    Matches by norm (same change of the layer's output) and by effect (same change of the model's
    predictions). Pass the file to runs of asmi_controls as controls.scales.
    """
    from rich.console import Console

    from lm_polygraph_asmi.experiments.scale import scales_for

    console = Console()
    try:
        check_writable(out)
        check_unlocked(out)
        with console.status("Matching"):
            matched = scales_for(run, held_out, **settings)
            write_whole(out, to_json(matched, indent=1))
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    for condition, scales in matched["conditions"].items():
        if "unsupported" in scales:
            console.print(f"{condition}: {scales['unsupported']}", highlight=False, markup=False)
            continue
        # Without a plain chain of layers the size of a change is unknown, and so is its scale.
        effect, norm, size = (
            "none found" if scales[name] is None else f"{scales[name]:.4g}"
            for name in ("effect", "norm", "relative_change")
        )
        console.print(
            f"{condition}: by effect {effect}, by norm {norm}; unscaled: KL "
            f"{scales['kl']:.3g} nats, relative change {size}",
            highlight=False,
        )


@click.command(short_help="Ablate the critical heads of a run.")
@click.argument("run", type=click.Path(exists=True))
@_model_options
@click.option("--tokens", "count", default=200, show_default=True, help="Tokens per group.")
@click.option("--draws", default=10, show_default=True, help="Draws of random heads per token.")
@click.option("--control-depth", default=0.3, show_default=True, help="Depth of the random heads.")
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


COMMANDS: dict[str, click.Command] = {"scale": scale, "probe": probe}
