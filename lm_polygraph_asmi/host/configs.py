"""The shipped configs: their folder, their nodes, and the node `asmi` with every setting."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.config import ASMIConfig

PACKAGE = Path(__file__).parents[1]
CALCULATOR_OPTIONS = ("details", "result_cache")
"""Arguments of the masked-heads calculator's builder besides settings and depths."""


@lru_cache(maxsize=1)
def configs_path() -> Path:
    """Folder of the `asmi_*.yaml` configs: in the package if installed, beside it in a checkout."""
    for candidate in (PACKAGE / "configs", PACKAGE.parent / "configs"):
        if (candidate / "asmi_demo.yaml").is_file():
            return candidate.resolve()
    raise FileNotFoundError(f"no configs found in or beside {PACKAGE}: reinstall lm-polygraph-asmi")


def container(node: DictConfig) -> dict[str, Any]:
    """A node of a run's config as plain values, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def has_shipped_script(model: Mapping[str, Any]) -> bool:
    """Whether a run's model is loaded by a shipped script; a user's may load anything."""
    script = model.get("path_to_load_script")
    return not script or Path(str(script)).is_relative_to(configs_path())


def needed_calculators(
    stats: Iterable[str], entries: Iterable[Any]
) -> tuple[dict[str, Any], list[str]]:
    """Entries of calculators that statistics need, directly or not, by name; and what none returns.

    Of several entries that return a statistic, the last one counts.
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
    """Register `asmi_config` for defaults lists: the node `asmi` with the default settings."""
    ConfigStore.instance().store("asmi_config", {"asmi": ASMIConfig().to_dict()})
