"""The shipped configs: where they lie, and a node of a config as plain values."""

from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

PACKAGE = Path(__file__).parents[1]


@lru_cache(maxsize=1)
def configs_path() -> Path:
    """Absolute path of the folder with the `asmi_*.yaml` configs.

    It is inside the package when installed, beside it in a checkout.

    Raises:
        FileNotFoundError: a broken installation without configs.
    """
    for candidate in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if (candidate / "asmi_demo.yaml").is_file():
            return candidate.resolve()
    raise FileNotFoundError(f"no configs found in or beside {PACKAGE}: reinstall lm-polygraph-asmi")


def container(node: DictConfig) -> dict[str, Any]:
    """A node of a run's config as plain values, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
