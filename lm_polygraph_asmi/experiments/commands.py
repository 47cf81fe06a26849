"""`polygraph_asmi experiments`: perturbation scales for control conditions, and the causal probe.

Imports only click, as `lm_polygraph_asmi.commands` does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.settings import setting_options


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the model that is loaded again."""
    for option in (
        setting_options("depth", "memory_budget"),
        click.option("--device-map", help="auto for GPUs; default: the CPU."),
        click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ..."),
        click.option("--gguf-file", help="File of the folder with the weights."),
        click.option(
            "--model", required=True, help="The run's model: folder, hub name, or smollm2."
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("run", type=click.Path(exists=True))
@click.option(
    "--held-out",
    required=True,
    type=click.Path(exists=True),
    help="Finished run over other rows; the scales are matched on its answers, without labels.",
)
@_model_options
@click.option("--rows", default=20, show_default=True, help="Answers to take, evenly spaced.")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def scale(
    run: str,
    held_out: str,
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    depth: float,
    rows: int,
    memory_budget: int | None,
    out: str,
) -> None:
    """Match the perturbation scales of control conditions to masked heads, for a finished RUN.

    By norm (same size of the change of the layer's output) and by effect (same divergence of
    predictions). A run of a condition takes the file as asmi.perturbation_scale.
    """
    from rich.console import Console

    from lm_polygraph_asmi.experiments.scale import scales_for

    console = Console()
    try:
        if not Path(out).absolute().parent.is_dir():
            raise ValueError(f"{out} cannot be written: no such folder")
        with console.status("Matching"):
            found = scales_for(
                run, held_out, model, gguf_file, dtype, device_map, depth, rows, memory_budget
            )
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    Path(out).write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")
    for condition, own in found["conditions"].items():
        if "refused" in own:
            console.print(f"{condition}: {own['refused']}", highlight=False, markup=False)
            continue
        # Size and scale by norm are unknown if layers are no plain chain.
        effect, norm, size = (
            "none found" if own[name] is None else f"{own[name]:.4g}"
            for name in ("effect", "norm", "relative_change")
        )
        console.print(
            f"{condition}: scale by effect {effect}, by norm {norm}; unscaled: KL {own['kl']:.3g} "
            f"nats, relative change {size}",
            highlight=False,
        )


@click.command()
@click.argument("run", type=click.Path(exists=True))
@_model_options
@click.option("--tokens", "count", default=200, show_default=True, help="Tokens per group.")
@click.option("--draws", default=10, show_default=True, help="Draws of random heads per token.")
@click.option(
    "--control-depth",
    default=0.3,
    show_default=True,
    help="Depth of random heads in another layer.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of random heads.")
@click.option(
    "--result-cache",
    type=click.Path(file_okay=False),
    help="Folder that stores finished examples; default: next to the file.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="JSON file to write; default: next to the manager file, where `report` finds it.",
)
def probe(
    run: str,
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    depth: float,
    result_cache: str | None,
    out: str | None,
    **settings: Any,
) -> None:
    """Ablate the critical heads of RUN and report how often predictions flip.

    RUN is a run of the config asmi_heads. A killed probe resumes.
    """
    from rich.console import Console
    from rich.progress import Progress

    from lm_polygraph_asmi.experiments.probe_file import probe_path, write_probe
    from lm_polygraph_asmi.results.runs import manager_files

    console = Console()
    try:
        manager, *others = manager_files(run)
        if others:
            raise ValueError(f"{run} has several seeds: name one of its files")
        path = Path(out) if out else probe_path(manager)
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: no such folder")
        from lm_polygraph_asmi.experiments.probe import probe_of

        kept = result_cache or str(path.with_suffix(".cache"))
        how = (manager, model, gguf_file, dtype, device_map, depth)
        asked, answers = probe_of(*how, result_cache=kept, **settings)
        with Progress(console=Console(stderr=True)) as shown:
            task = shown.add_task("Probing", total=len(asked.rows))
            found = asked.run(answers, lambda: shown.advance(task))
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    write_probe({"run": str(manager), "model": model, **found}, manager, path)
    replayed = [
        a == b for a, b in zip(found["tokens"]["argmax"], found["tokens"]["replayed"], strict=True)
    ]
    console.print(
        f"{path}: {len(replayed)} tokens of {len(asked.rows)} answers; without ablation, "
        f"{len(replayed) - sum(replayed)} of them flip.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


COMMANDS: dict[str, click.Command] = {"scale": scale, "probe": probe}
