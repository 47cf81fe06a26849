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
    """List the shipped configs: the words for polygraph_eval, and what each file says of itself.

    A terminal shows as much of a line as fits into its width; a file or a pipe gets all.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.runs.compose import configs_path

    terminal = Console().is_terminal
    table = Table(box=None, expand=terminal)
    table.add_column("polygraph_eval ...", no_wrap=True)
    table.add_column(no_wrap=True, ratio=1)  # so that only this one is cut
    for group, words in GROUPS.items():
        for file in sorted((configs_path() / group).glob("*.yaml")):
            lines = file.read_text(encoding="utf-8").splitlines()
            said = [line.removeprefix("# ") for line in lines if not line.startswith("# @package")]
            if file.stem != "asmi_base":  # of which the others are made
                table.add_row(words + file.stem, said[0])
        table.add_row()
    Console(width=None if terminal else 200).print(table)
