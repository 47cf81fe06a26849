"""Compare the installed releases with the lowest ones that pyproject.toml allows.

Prints a line for each that differs, and then fails: the lowest release was not tried.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import click
from packaging.requirements import Requirement
from packaging.version import Version

PACKAGE = "lm-polygraph-asmi"


def floors(extra: str) -> Iterator[tuple[str, Version]]:
    """Name and lowest release of each direct requirement, also of an extra."""
    for line in requires(PACKAGE) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            lowest = [s.version for s in requirement.specifier if s.operator == ">="]
            if not lowest:
                raise click.ClickException(f"{requirement} has no lowest release: add one")
            yield requirement.name, Version(lowest[0])


def different(extra: str) -> Iterator[str]:
    """Requirements whose installed release is not the lowest one."""
    for name, floor in floors(extra):
        try:
            installed = Version(version(name))
        except PackageNotFoundError:
            yield f"{name}>={floor}: not installed"
        else:
            if Version(installed.public) != floor:
                yield f"{name}>={floor}: {installed} is installed"


@click.command(help=__doc__)
@click.option("--extra", default="dev", show_default=True)
def main(extra: str) -> None:
    if lines := list(different(extra)):
        raise click.ClickException(
            "\n".join(["not the lowest releases: raise these in pyproject.toml", *lines])
        )


if __name__ == "__main__":
    main()
