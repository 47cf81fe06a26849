"""`polygraph_asmi results`: PRR of every method of finished runs."""

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--together", "as_one", is_flag=True, help="Runs over the same answers, in one table."
)
def results(runs: tuple[str, ...], as_one: bool) -> None:
    """Show the PRR of every method of finished RUNS (folders or manager files)."""
    from rich.console import Console

    from lm_polygraph_asmi.report.tables import notes, prr_table
    from lm_polygraph_asmi.saved.runs import load_run, manager_files, together

    console = Console()
    try:
        loaded = [load_run(file) for path in runs for file in manager_files(path)]
        loaded = [together(loaded)] if as_one else loaded
    except (FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for run in loaded:
        console.print(f"\n{run.path}", style="dim", highlight=False)
        for metric in run.quality:
            console.print(prr_table(run, metric))
            console.print(notes(run, metric), highlight=False)
