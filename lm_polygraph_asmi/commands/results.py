"""`polygraph_asmi results`: PRR of every method of finished runs."""

import click


@click.command(short_help="PRR of every method of finished runs.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a row per run, metric and method.")
def results(runs: tuple[str, ...], as_csv: bool) -> None:
    """Show the PRR of every method of finished RUNS (folders or manager files)."""
    import pandas as pd
    from rich.console import Console

    from lm_polygraph_asmi.report.tables import about_quality, about_run, prr_rows, prr_table
    from lm_polygraph_asmi.results.runs import load_run, manager_files

    console = Console()
    loaded = [load_run(file) for path in runs for file in manager_files(path)]
    if as_csv:
        rows = [
            {"run": run.path, "metric": metric, **row}
            for run in loaded
            for metric in run.quality
            for row in prr_rows(run, metric)
        ]
        click.echo(pd.DataFrame(rows).to_csv(index=False), nl=False)
        return
    for run in loaded:
        console.print(f"\n{run.path}", style="dim", highlight=False)
        for metric in run.quality:
            console.print(prr_table(run, metric))
            console.print(about_quality(run, metric) + "\n", highlight=False)
        console.print(about_run(run), highlight=False)
