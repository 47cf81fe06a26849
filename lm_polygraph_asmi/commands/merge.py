"""`polygraph_asmi merge`: shards of a run joined."""

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the joined files."
)
def merge(runs: tuple[str, ...], out: str) -> None:
    """Join the shards of split RUNS (manager files, or folders searched for them).

    The joined manager file is what one job over all rows would have left, metrics included. Several
    settings go to OUT/MODEL/DATASET, a single one into OUT; nothing is written over. The exit
    status is 1 if something could not be joined.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lm_polygraph_asmi.runs.merge import merge_runs

    console = Console()
    with console.status("Joining shards, computing LM-Polygraph's metrics over all rows ..."):
        merged, errors = merge_runs(runs, out)
    if merged:
        table = Table("setting", "shards", "rows", "file")
        for run in merged:
            table.add_row(run.group, str(run.shards), str(run.rows), escape(str(run.file)))
        console.print(table)
    for run in merged:
        for warning in run.warnings:
            console.print(f"{run.group}: {warning}", style="yellow", highlight=False, markup=False)
    if errors:
        raise click.ClickException("\n".join(errors))
