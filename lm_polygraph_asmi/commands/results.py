"""`polygraph_asmi results`: PRR of every method of finished runs."""

import click

from lm_polygraph_asmi.files import to_json


@click.command(short_help="PRR of every method of finished runs.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--together", "as_one", is_flag=True, help="Show runs over the same answers in one table."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def results(runs: tuple[str, ...], as_one: bool, as_json: bool) -> None:
    """Show the PRR of every method of finished RUNS (folders or manager files)."""

    from rich.console import Console

    from lm_polygraph_asmi.report.tables import about_quality, about_run, prr_rows, prr_table
    from lm_polygraph_asmi.results.runs import combine_runs, load_run, manager_files

    console = Console()
    try:
        loaded = [load_run(file, partial=True) for path in runs for file in manager_files(path)]
        loaded = [combine_runs(loaded)] if as_one else loaded
        for run in loaded:
            run.check_scored()
    except (FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        content = [
            {
                "run": str(run.path),
                "missing_rows": run.missing_rows,
                "metrics": {metric: prr_rows(run, metric) for metric in run.quality},
            }
            for run in loaded
        ]
        click.echo(to_json({"runs": content}, indent=1))
        return
    for run in loaded:
        console.print(f"\n{run.path}", style="dim", highlight=False)
        for metric in run.quality:
            console.print(prr_table(run, metric))
            console.print(about_quality(run, metric) + "\n", highlight=False)
        console.print(about_run(run), highlight=False)
