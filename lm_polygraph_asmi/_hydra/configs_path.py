"""Where the shipped configs lie: inside the package when installed, beside it in a checkout."""

from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@lru_cache(maxsize=1)
def configs_path() -> Path:
    """Absolute path of the folder with the `asmi_*.yaml` configs.

    Raises:
        FileNotFoundError: a broken installation without configs.
    """
    for candidate in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if (candidate / "asmi_demo.yaml").is_file():
            return candidate.resolve()
    raise FileNotFoundError(f"no configs found in or beside {PACKAGE}: reinstall lm-polygraph-asmi")
