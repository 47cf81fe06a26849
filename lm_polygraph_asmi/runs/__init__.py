"""What surrounds a run of polygraph_eval: its rows, its checks, its record, its shards."""

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf


def container(node: DictConfig) -> dict[str, Any]:
    """A node of a run's config as plain values, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
