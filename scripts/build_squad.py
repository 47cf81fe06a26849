"""Write SQuAD with the paper's prompt as a dataset folder for LM-Polygraph, which lacks SQuAD.

    python scripts/build_squad.py FOLDER                           # from the hub's rajpurkar/squad
    python scripts/build_squad.py FOLDER --source dev-v1.1.json    # from a SQuAD-format file
    python scripts/build_squad.py FOLDER --closed-book             # without passages

The rows are those of asmi_squad and asmi_squad_closed_book, in the same order. These configs build
them themselves; the folder is for other runs: `dataset: FOLDER` and `load_from_disk: true`.
"""

from pathlib import Path

import click
from hydra import compose, initialize

from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.runs.rows import read_selected_rows, save_rows


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--source", help="SQuAD-format JSON, or a dataset with SQuAD's columns.")
@click.option("--closed-book", is_flag=True, help="Leave the passages out.")
@click.option("--size", type=click.IntRange(1), help="Rows of the fixed subsample (5000).")
def main(folder: Path, source: str | None, closed_book: bool, size: int | None) -> None:
    if folder.exists():
        raise click.ClickException(f"{folder} exists already: name a new folder, or remove it")
    benchmark = "asmi_squad_closed_book" if closed_book else "asmi_squad"
    with initialize(version_base=None, config_path=None):
        data = container(compose("asmi_benchmark", overrides=[f"benchmark={benchmark}"]).data)
    data |= {key: value for key, value in (("source", source), ("size", size)) if value}
    try:
        rows = read_selected_rows(data)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    save_rows(rows, folder)
    click.echo(f"{len(rows)} questions in {folder}, columns id, cluster, input and output")


if __name__ == "__main__":
    main()
