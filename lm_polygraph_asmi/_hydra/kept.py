"""The lists of a user's config before `+add=asmi`, which Hydra would replace instead of extend."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

GROUP = "add"


def kept_entries(node: str, root: DictConfig) -> list[Any]:
    """Unresolved entries of a list in the user's config; empty if the config lacks the list.

    The config is composed again, without the group `add`.

    Args:
        node: name of the list.
        root: the run's config.

    Raises:
        ValueError: this is not the config of a run, so its name is unknown.
        SystemExit: the config has ASMI already. OmegaConf would wrap any other error.
    """
    hydra = root.get("hydra")
    if hydra is None:
        if not HydraConfig.initialized():
            raise ValueError(
                f"cannot find out which {node} to keep: compose the config with its node hydra "
                "(return_hydra_config=True), as polygraph_eval does"
            )
        hydra = HydraConfig.get()
    folders = [
        str(source.path)
        for source in hydra.runtime.config_sources
        if source.schema == "file" and source.provider != "lm-polygraph-asmi"
    ]
    keys = {text: text.partition("=")[0].lstrip("+~") for text in hydra.overrides.task}
    overrides = [t for t, key in keys.items() if key != GROUP and not key.startswith("asmi.")]
    if GROUP not in keys.values():
        overrides.append(f"~{GROUP}")  # the group is in the config's own defaults list
    kept = _composed(tuple(folders), str(hydra.job.config_name), tuple(overrides))
    ours = "lm_polygraph_asmi." in str(kept.get("estimators"))
    if ours or "asmi" in kept:
        has, do = ("ASMI already", "leave out add=asmi") if ours else (
            "a node asmi, which add=asmi would replace",
            "remove it, and set its values on the command line, as in asmi.depth=0.9",
        )  # fmt: skip
        raise SystemExit(f"the config {hydra.job.config_name} has {has}: {do}")
    return kept.get(node) or []


@lru_cache(maxsize=8)  # several lists, each resolved several times in a run
def _composed(folders: tuple[str, ...], name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    with_file = [folder for folder in folders if Path(folder, file).is_file()]
    first = (with_file or list(folders) or [str(Path(__file__).parent)])[0]
    others = [f"'file://{folder}'" for folder in folders if folder != first]
    hydra = GlobalHydra.instance()
    outer = hydra.hydra  # the run's own; Hydra composes only one config at a time
    hydra.clear()
    try:
        with initialize_config_dir(first, version_base=None):
            config = compose(name, [*overrides, f"hydra.searchpath=[{','.join(others)}]"])
    finally:
        GlobalHydra.instance().hydra = outer
    nodes = ("asmi", "estimators", "stat_calculators", "save_stats")
    return {node: OmegaConf.to_container(config[node]) for node in nodes if config.get(node)}
