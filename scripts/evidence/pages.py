"""Make the tables and the figure of the results pages from the small files in docs/evidence.

    python scripts/evidence/pages.py          # writes docs/evidence/tables/*.csv and forest.png
    python scripts/evidence/pages.py --check  # changes nothing, reports what would change

The text of the pages is written by hand. The files, docs/evidence/MODEL/SETTING.RUN.parquet, are
made by keep.py from complete runs. `--check --quick` computes nothing: it compares the hash in
tables/made-from.json with that of the files.
"""

from collections.abc import Callable
from pathlib import Path

import click
import pandas as pd
from evidence import TABLES, Evidence, Table, digest, load, made_from, record, write_tables
from forest import draw_forest
from PIL import Image
from tables import TABLES as MAKERS

from lm_polygraph_asmi.report import figures

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = DOCS / "results/records.csv"
SCRIPT = "pages.py"
FIGURES: dict[str, tuple[str, Callable[[Table], figures.Figure]]] = {
    "forest.png": ("glance contains", draw_forest)
}
"""File in docs/evidence -> the table that it is drawn from, and the function that draws it."""


def all_tables(evidence: list[Evidence]) -> dict[str, Table]:
    """Every table by its name."""
    return {name: make(evidence) for name, make in MAKERS.items()}


def of_other_scripts() -> set[str]:
    """Names of tables that are not made here: of fresh_tables.py, and of scripts that have left."""
    fresh = (DOCS / "evidence" / TABLES).glob("fresh-*.csv")
    return {Path(file).name for file in [*pd.read_csv(RECORDS)["file"], *fresh]}


def update_figures(folder: Path, tables: dict[str, Table], check: bool) -> list[str]:
    """Draw the figures whose description is no longer the table that they are drawn from.

    Returns:
        Names of the figures that changed, or with `check` would change.
    """
    stale = []
    for name, (source, draw) in FIGURES.items():
        file, table = folder / name, tables[source]
        if not table.rows:
            continue
        if file.exists() and Image.open(file).info.get("Description") == table.csv():
            continue
        stale.append(name)
        if not check:
            figures.save(draw(table), file, table.csv())
    return stale


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something differs.")
@click.option("--quick", is_flag=True, help="With --check: compute nothing.")
def main(check: bool, quick: bool) -> None:
    evidence = DOCS / "evidence"
    folder = evidence / TABLES
    current = digest(evidence)
    try:
        if check and quick:
            stale = [] if made_from(folder).get(SCRIPT) == current else [TABLES]
        else:
            tables = all_tables(load(evidence))
            old = {file.name for file in folder.glob("*.csv")} - of_other_scripts()
            stale = write_tables(folder, tables, old, check)
            stale += update_figures(evidence, tables, check)
            stale += record(folder, SCRIPT, current, check)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    raise SystemExit(bool(check and stale))


if __name__ == "__main__":
    main()
