"""`polygraph_asmi configs`: list the shipped configs."""

import click

GROUPS = {
    ".": "--config-name ",
    "benchmark": "benchmark=",
    "model": "model=",
    "estimators": "estimators=",
    "add": "+add=",
}
"""Folder of shipped configs -> what to write before the name of a file in it."""


@click.command(short_help="List the shipped configs.")
def configs() -> None:
    """List the shipped configs: what to write after polygraph_eval, and what each config does.

    In a terminal, lines are cut to its width. In a file or a pipe, they are complete.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.runs.compose import configs_path

    terminal = Console().is_terminal
    table = Table(box=None, expand=terminal)
    table.add_column("polygraph_eval ...", no_wrap=True)
    table.add_column(no_wrap=True, ratio=1)  # only this column is cut
    for group, words in GROUPS.items():
        for file in sorted((configs_path() / group).glob("*.yaml")):
            lines = file.read_text(encoding="utf-8").splitlines()
            comments = [
                line.removeprefix("# ") for line in lines if not line.startswith("# @package")
            ]
            if file.stem != "asmi_base":  # the base of the other configs
                table.add_row(words + file.stem, comments[0])
        table.add_row()
    Console(width=None if terminal else 200).print(table)
