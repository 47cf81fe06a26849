"""`polygraph_asmi report`: the paper's tables and figures."""

from functools import partial

import click

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.validation import check_writable


@click.command(short_help="The paper's tables and figures, from finished runs.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the report."
)
@click.option("--metric", help="Quality metric. Default: AlignScore, or a run's first metric.")
@click.option(
    "--depth",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=ASMIConfig.depth,
    show_default=True,
    help="Relative depth to report. If a run lacks it, the nearest depth is used.",
)
@click.option("--full", is_flag=True, help="Write all of the paper's tables and figures.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["csv", "md", "tex", "svg", "pdf"]),
    help="Also write tables (csv, md, tex) or figures (svg, pdf) as files. Repeatable.",
)
def report(
    runs: tuple[str, ...], out: str, metric: str | None, depth: float, full: bool,
    formats: tuple[str, ...],
) -> None:  # fmt: skip
    """Write a page on finished RUNS (folders or manager files): PRR, and PRR minus that of MSP.

    Runs over the same answers (with other masks, K, scope or seeds) are shown together. Writes
    OUT/index.html with its figures in OUT/figures, and with --format csv, md or tex, OUT/tables.
    """
    from joblib import cpu_count
    from rich.console import Console
    from rich.progress import track

    from lm_polygraph_asmi.results.run_groups import load_run_groups

    console = Console()
    check_writable(out, folder=True)
    groups = load_run_groups(runs, metric, depth)
    # Imported here, since the import takes seconds and the runs may be unreadable.
    from lm_polygraph_asmi.report import build_report

    progress = partial(track, console=console)
    file, summary = build_report(groups, out, progress, cpu_count(), full, formats)
    for line in summary:
        console.print(line, highlight=False, markup=False)
    console.print(f"{len(groups)} setting{'s' * (len(groups) != 1)}: {file}", highlight=False)
