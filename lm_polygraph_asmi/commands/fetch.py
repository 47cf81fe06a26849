"""`polygraph_asmi fetch`: download everything that a run needs."""

import click


@click.command(short_help="Download everything that a run needs.")
@click.argument("overrides", nargs=-1)
@click.option("--config-name", required=True, help="Config of the run, as for polygraph_eval.")
@click.option("--config-dir", type=click.Path(exists=True, file_okay=False), help="Your configs.")
def fetch(overrides: tuple[str, ...], config_name: str, config_dir: str | None) -> None:
    """Download models, rows and side models of a run, on a machine with a connection.

    OVERRIDES are those of polygraph_eval, with one value each, so one job of a sweep is prepared.
    Sizes are printed first. After this, the run works without a connection (HF_HUB_OFFLINE=1).
    Exits with status 1 if something could not be downloaded; everything else is downloaded, unless
    the disk has no room for all that is missing.
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from lm_polygraph_asmi.runs.compose import compose_run

    composed = compose_run(config_name, config_dir, overrides)  # raises before slow imports
    from lm_polygraph_asmi.runs.checks import check_disk, read_plan
    from lm_polygraph_asmi.runs.needs import ROWS, download

    console = Console()
    plan = read_plan(composed, rows=False)
    faults = [fault for reasons in plan.faults.values() for fault in reasons]
    table = Table("needed", "by", "to download")
    for need in plan.needs:
        size = need.to_download
        text = "?" if size is None else decimal(size) if size else "here"
        table.add_row(need.name, need.by, text)
    console.print(table)
    # `datasets` may have the rows although no hub answers: the plan read at the end tells.
    needs = [need for need in plan.needs if need.by != ROWS or not need.problem]
    faults += [finding.text for finding in check_disk(plan)] or download(needs)
    faults += read_plan(composed).faults.get("rows", [])
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))
    console.print("Everything is on this machine.")
