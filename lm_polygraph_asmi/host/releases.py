"""The releases of LM-Polygraph, PyTorch and transformers on which the tests passed."""

import csv
import logging
from functools import cache
from importlib.metadata import version
from pathlib import Path

log = logging.getLogger("lm_polygraph")
TESTED = Path(__file__).parents[1] / "data" / "tested.csv"


def tested_releases() -> dict[str, list[str]]:
    """Tested releases of each package, oldest first."""
    releases: dict[str, list[str]] = {}
    for row in csv.DictReader(TESTED.read_text("utf-8").splitlines()):
        releases.setdefault(row["package"], []).append(row["release"])
    return releases


def untested_releases() -> list[str]:
    """Installed releases that were not tested, such as `["transformers 5.9.9"]`."""
    tested = tested_releases()
    installed = {name: version(name).partition("+")[0] for name in tested}  # not 2.13.0+cpu
    return [
        f"{name} {release}" for name, release in installed.items() if release not in tested[name]
    ]


@cache
def warn_of_untested() -> None:
    """Log a warning once per process if a release is untested. The self-check runs in any case."""
    if untested := untested_releases():
        tested = "; ".join(
            f"{name} {', '.join(releases)}" for name, releases in tested_releases().items()
        )
        log.warning(
            "%s: not among the releases on which the tests passed (%s); the self-check still "
            "compares masked passes with full forward passes",
            " and ".join(untested), tested,
        )  # fmt: skip
