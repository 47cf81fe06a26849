"""`polygraph_asmi dose`: how much of each arm does what masked heads do."""

import json
from pathlib import Path

import click

from lm_polygraph_asmi.commands.settings import setting_options


@click.command()
@click.argument("run", type=click.Path(exists=True))
@click.option(
    "--held-out",
    required=True,
    type=click.Path(exists=True),
    help="Finished run over other rows: the doses are found on its answers, without a label.",
)
@click.option("--model", required=True, help="The run's: folder, name on a hub, or smollm2.")
@click.option("--gguf-file", help="Weights in this file of the folder.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ...")
@click.option("--device-map", help="auto for GPUs; default: the CPU.")
@setting_options("depth", "memory_budget")
@click.option("--rows", default=20, show_default=True, help="Answers to take, evenly spaced.")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def dose(
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
    """Find the doses at which the falsifier's arms equal masked heads, for a finished RUN.

    By norm (the change of the layer's output is as large) and by effect (the model's predictions
    move as far). A run of an arm takes the file as asmi.dose.
    """
    from rich.console import Console

    from lm_polygraph_asmi.scoring.dose import doses_for

    console = Console()
    try:
        if not Path(out).absolute().parent.is_dir():
            raise ValueError(f"{out} cannot be written: there is no such folder")
        with console.status("Matching"):
            found = doses_for(
                run, held_out, model, gguf_file, dtype, device_map, depth, rows, memory_budget
            )
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    Path(out).write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")
    for arm, own in found["arms"].items():
        if "refused" in own:
            console.print(f"{arm}: {own['refused']}", highlight=False, markup=False)
            continue
        # Without a plain chain of layers the size of a change is not known, nor a dose by it.
        effect, norm, size = (
            "none found" if own[name] is None else f"{own[name]:.4g}"
            for name in ("effect", "norm", "relative_change")
        )
        console.print(
            f"{arm}: by effect {effect}, by norm {norm}; as it is, KL {own['kl']:.3g} nats, "
            f"relative change {size}",
            highlight=False,
        )
