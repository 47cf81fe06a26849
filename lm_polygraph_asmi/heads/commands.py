"""`polygraph_asmi heads`: the causal probe.

At the top, only click is imported, as in the files of `lm_polygraph_asmi.commands`.
"""

from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.options import setting_options
from lm_polygraph_asmi.validation import check_writable


@click.command(short_help="Ablate the critical heads of a run.")
@click.argument("run", type=click.Path(exists=True))
@click.option("--model", required=True, help="Model of the run: folder, hub ID, or smollm2.")
@click.option("--gguf-file", help="GGUF file in the model's folder that holds the weights.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ...")
@click.option("--device-map", help='Devices: "auto" uses GPUs. Default: CPU.')
@setting_options("depth")
@click.option(
    "--tokens",
    "count",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Tokens in each group: of highest and of lowest MI.",
)
@click.option(
    "--draws",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Number of random draws of heads for each token.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for drawing random heads.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="JSON file to write. Default: beside the manager file, where `report` finds it.",
)
def probe(run: str, model: str, out: str | None, **settings: Any) -> None:
    """Ablate the critical heads of RUN, a run of the config asmi_heads, and save predictions."""
    from lm_polygraph_asmi.heads.probe_file import probe_path, write_probe
    from lm_polygraph_asmi.results.runs import manager_files

    try:
        manager = manager_files(run)[0]  # `probe_run` raises an error if there are several
        path = Path(out) if out else probe_path(manager)
        check_writable(path)
        from lm_polygraph_asmi.heads.probe import probe_run

        content = probe_run(run, model, **settings)
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    write_probe({"run": str(manager), "model": model, **content}, path)
    tokens = content["tokens"]
    flips = sum(a != b for a, b in zip(tokens["argmax"], tokens["replayed"], strict=True))
    click.echo(f"{path}: {len(tokens['row'])} tokens; with no head ablated, {flips} of them flip.")
