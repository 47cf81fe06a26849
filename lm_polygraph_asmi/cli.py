"""The console command `polygraph_asmi`, beside LM-Polygraph's own `polygraph_eval`."""

import click

from lm_polygraph_asmi import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """ASMI for LM-Polygraph: what to do with a run after polygraph_eval."""


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
def results(runs: tuple[str, ...]) -> None:
    """Show the PRR of every method of finished RUNS (folders or manager files)."""
    from rich.console import Console

    from lm_polygraph_asmi.analysis.results import load_run, manager_files
    from lm_polygraph_asmi.analysis.tables import notes, prr_table

    console = Console()
    try:
        loaded = [load_run(file) for path in runs for file in manager_files(path)]
    except (FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for run in loaded:
        console.print(f"\n{run.path}", style="dim", highlight=False)
        for metric in run.quality:
            console.print(prr_table(run, metric))
            console.print(notes(run, metric), highlight=False)
