"""The page of all config files, docs/reference/config-files.rst.

    python scripts/config_page.py

The page only names the files, which are included when the site is built.
"""

from pathlib import Path

import click

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs/reference/config-files.rst"
HEAD = """\
Every config file
=================

Written by ``scripts/config_page.py``. :doc:`config` explains what each is for.
"""
GROUPS = {
    "": ("Runs", "polygraph_eval --config-name NAME"),
    "model": ("Models", "model=NAME"),
    "benchmark": ("Benchmarks", "benchmark=NAME"),
    "estimators": ("Estimators", "estimators=NAME"),
    "stat_calculators": ("Calculators", "stat_calculators: NAME, in the list of defaults"),
    "add": ("Additions", "+add=NAME"),
    "hydra/launcher": ("Launchers", "--multirun hydra/launcher=NAME"),
}
"""Folder below configs/ -> title and how to select its configs."""


def heading(text: str, line: str) -> str:
    return f"\n{text}\n{line * len(text)}\n"


def page() -> str:
    """The page as it should be, in reStructuredText."""
    parts = [HEAD]
    for folder, (title, use) in GROUPS.items():
        parts += [heading(title, "-"), f"\n``{use}``\n"]
        for file in sorted((REPOSITORY / "configs" / folder).glob("*.yaml")):
            shown = f"../../{file.relative_to(REPOSITORY)}"
            parts += [heading(file.stem, "~")]
            parts += [f"\n.. literalinclude:: {shown}\n   :language: yaml\n"]
    return "".join(parts)


@click.command()
def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
