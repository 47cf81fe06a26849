"""`polygraph_asmi merge`: merge the shards of a run."""

import click

from lm_polygraph_asmi.validation import check_writable


@click.command(short_help="Merge the shards of a run.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the merged files."
)
def merge(runs: tuple[str, ...], out: str) -> None:
    """Merge the shards of RUNS (manager files, or folders that are searched for them).

    The merged manager file is the one that a single job over all rows would write, with its
    metrics. A single setting is written to OUT, several to OUT/MODEL/DATASET. Existing files are
    never overwritten. Exits with status 1 if a setting could not be merged.
    """
    from rich.console import Console

    check_writable(out, folder=True)
    from lm_polygraph_asmi.runs.merge import merge_runs

    with Console().status("Merging shards, computing LM-Polygraph's metrics over all rows ..."):
        merged, errors = merge_runs(runs, out)
    for run in merged:
        click.echo(f"{run.group}: {run.rows} rows of {run.shards} shards in {run.file}")
        for warning in run.warnings:
            click.secho(f"{run.group}: {warning}", fg="yellow")
    if errors:
        raise click.ClickException("\n".join(errors))
