"""`polygraph_asmi probe`: are the heads that masks call critical those a prediction hangs on?"""

from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.settings import setting_options


@click.command()
@click.argument("run", type=click.Path(exists=True))
@click.option("--model", required=True, help="The run's: folder, name on a hub, or smollm2.")
@click.option("--gguf-file", help="Weights in this file of the folder.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ...")
@click.option("--device-map", help="auto for GPUs; default: the CPU.")
@setting_options("depth", "memory_budget")
@click.option("--tokens", "count", default=200, show_default=True, help="In each group.")
@click.option("--draws", default=10, show_default=True, help="Of random heads, for each token.")
@click.option("--control-depth", default=0.3, show_default=True, help="Of random heads elsewhere.")
@click.option("--seed", default=0, show_default=True, help="Of random heads.")
@click.option(
    "--journal",
    type=click.Path(file_okay=False),
    help="Folder in which examples are kept as they are done; default: beside the file.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="JSON file; default: beside the manager file, where `report` finds it.",
)
def probe(
    run: str,
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    depth: float,
    journal: str | None,
    out: str | None,
    **settings: Any,
) -> None:
    """Ablate the heads that RUN calls critical, and say how often predictions flip.

    RUN is one of the config asmi_heads. Killed, it goes on where it stopped.
    """
    from rich.console import Console
    from rich.progress import Progress

    from lm_polygraph_asmi.saved.probe import probe_path, write_probe
    from lm_polygraph_asmi.saved.runs import manager_files

    console = Console()
    try:
        manager, *others = manager_files(run)
        if others:
            raise ValueError(f"{run} holds several seeds: name one of the files in it")
        path = Path(out) if out else probe_path(manager)
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no such folder")
        from lm_polygraph_asmi.scoring.probe import probe_of

        kept = journal or str(path.with_suffix(".journal"))
        how = (manager, model, gguf_file, dtype, device_map, depth)
        asked, answers = probe_of(*how, journal=kept, **settings)
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
        f"{path}: {len(replayed)} tokens of {len(asked.rows)} answers; with no head ablated "
        f"{len(replayed) - sum(replayed)} of them flip.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
