"""`polygraph_asmi configs`: what is shipped, with a line each."""

import click

GROUPS = {
    ".": "--config-name ",
    "benchmark": "benchmark=",
    "model": "model=",
    "estimators": "estimators=",
    "add": "+add=",
}
"""Folder of the shipped configs -> what a user writes before the name of a file in it."""


@click.command(short_help="The shipped configs, with a line each.")
def configs() -> None:
    """List the shipped configs: the words for polygraph_eval, and what each file says of itself."""
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.runs.compose import configs_path

    table = Table("polygraph_eval ...", "", box=None)
    table.columns[0].no_wrap = True
    for group, words in GROUPS.items():
        for file in sorted((configs_path() / group).glob("*.yaml")):
            lines = file.read_text(encoding="utf-8").splitlines()
            said = [line.removeprefix("# ") for line in lines if not line.startswith("# @package")]
            table.add_row(words + file.stem, said[0])
        table.add_row()
    Console().print(table)
