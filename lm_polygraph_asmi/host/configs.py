"""The shipped configs: their folder, their nodes, and the node `asmi` with all settings."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig

PACKAGE = Path(__file__).parents[1]
CALCULATOR_OPTIONS = ("details", "result_cache")
"""Arguments for building the masked-heads calculator, besides settings and depths."""


@lru_cache(maxsize=1)
def configs_path() -> Path:
    """Folder of the `asmi_*.yaml` configs: inside an installed package, beside it in a checkout."""
    for candidate in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if (candidate / "asmi_demo.yaml").is_file():
            return candidate.resolve()
    raise FileNotFoundError(f"no configs found in or beside {PACKAGE}: reinstall lm-polygraph-asmi")


def container(node: DictConfig) -> dict[str, Any]:
    """A node of a run's config as plain values, with interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def has_shipped_script(model: Mapping[str, Any]) -> bool:
    """Whether a shipped script loads a run's model. A user's own script may load anything."""
    script = model.get("path_to_load_script")
    return not script or Path(str(script)).is_relative_to(configs_path())


def needed_calculators(
    stats: Iterable[str], entries: Iterable[Any]
) -> tuple[dict[str, Any], list[str]]:
    """The calculators on which statistics depend, directly or not, by name; and what none computes.

    If several entries compute a statistic, the last of them is used.
    """
    provider = {stat: entry for entry in entries for stat in entry.stats}
    needed: dict[str, Any] = {}
    unknown, wanted = list[str](), [*stats]
    while wanted:
        stat = wanted.pop()
        entry = provider.get(stat)
        if entry is None:
            unknown.append(stat)
        elif entry.name not in needed:
            needed[entry.name] = entry
            wanted.extend(entry.dependencies)
    return needed, unknown


def store_settings() -> None:
    """Register `asmi_config` for defaults lists: a node `asmi` with the default settings."""
    ConfigStore.instance().store("asmi_config", {"asmi": ASMIConfig().to_dict()})
