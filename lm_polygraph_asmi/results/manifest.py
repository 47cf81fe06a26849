"""The manifest of a run: facts that LM-Polygraph's manager file does not record.

It is written beside `ue_manager_seed1` as `asmi_manifest_seed1.json`, at the start of a run and
again at its end, so that a killed run has one, too.
"""

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from lm_polygraph_asmi.files import read_json, to_json, write_whole
from lm_polygraph_asmi.results.names import SECONDS
from lm_polygraph_asmi.tables import LINES, TABLES

FORMAT = 1
SECRETS = {"hf_token", "token", "use_auth_token", "api_key"}
"""Names of settings that are removed from a manifest."""
PACKAGES = (
    "lm-polygraph-asmi", "lm-polygraph", "torch", "transformers", "tokenizers", "accelerate",
    "datasets", "sentence-transformers", "hydra-core", "numpy", "scipy", "scikit-learn",
)  # fmt: skip
PHASES = {**{name: name.removeprefix("seconds_") for name in SECONDS}, "asmi_seconds": "asmi",
          "asmi_diversity_seconds": "diversity"}  # fmt: skip
"""Saved statistic -> name of its phase in the manifest."""


def manifest_path(manager: str | Path) -> Path:
    """Path of the manifest of a manager file: `ue_manager_seed1` -> `asmi_manifest_seed1.json`."""
    manager = Path(manager)
    return manager.with_name(f"{manager.name.replace('ue_manager', 'asmi_manifest')}.json")


def read_manifest(manager: str | Path) -> dict[str, Any]:
    """The manifest of a manager file; FileNotFoundError if missing, ValueError if damaged."""
    path = manifest_path(manager)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: only runs with the callback RunRecord write a manifest"
        )
    try:
        manifest = read_json(path)
        if not isinstance(manifest, dict):
            raise ValueError("expected a JSON object")
        return manifest | {"dataset": data_of(manifest)}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def data_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest records of a run's data, with its `source` and a `name` for people.

    The name is the one recorded (a benchmark), or else the stem of the file or the name on the hub.
    A manifest of an earlier release has the source of a config's own `dataset` in the config alone.
    """
    data, config = manifest.get("dataset") or {}, manifest.get("config") or {}
    source = data.get("source", config.get("dataset", ""))  # None: the demo's questions
    parts = source if isinstance(source, list) else ["asmi_demo" if source is None else source]
    paths, files = [Path(str(part)) for part in parts], (".json", *LINES, *TABLES)
    name = " ".join(
        path.stem if path.suffix.lower() in files else path.name.partition("@")[0] for path in paths
    )
    return data | {"name": data.get("name") or name or None, "source": source or None}


def write_manifest(manifest: Mapping[str, Any], manager: str | Path) -> None:
    """Write or replace the manifest of a manager file atomically."""
    write_whole(manifest_path(manager), to_json(manifest, indent=1))


def packages() -> dict[str, str]:
    """Installed releases of packages that results may depend on."""
    releases = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            releases[name] = version(name)
    return releases


def model_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Path and revision of the model in a config's node `model`.

    The revision of a hub model is its commit in the local cache. The revision of a folder is a
    digest of the content of small files, and of the names and sizes of large ones.
    """
    path = str(node.get("path"))
    if Path(path).is_dir():
        digest = hashlib.sha256()
        for file in sorted(f for f in Path(path).iterdir() if f.is_file()):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            if size < 2**20:
                digest.update(file.read_bytes())
        return {"path": node.get("path"), "revision": f"sha256:{digest.hexdigest()[:16]}"}
    chosen = (node.get("load_model_args") or {}).get
    cached = None
    with suppress(HFValidationError):  # the path is a folder that does not exist
        cached = try_to_load_from_cache(
            path, "config.json", chosen("cache_dir"), chosen("revision") or "main"
        )
    revision = Path(cached).parent.name if isinstance(cached, str) else "unknown"
    return {"path": node.get("path"), "revision": revision}


def without_secrets(node: Any) -> Any:
    """A config without tokens and keys, since manifests are shared."""
    if isinstance(node, dict):
        return {name: without_secrets(value) for name, value in node.items() if name not in SECRETS}
    return [without_secrets(value) for value in node] if isinstance(node, list) else node


def seconds_by_phase(stats: Mapping[str, list[Any]]) -> dict[str, list[float]]:
    """Seconds of every example, for each phase that was saved."""
    return {phase: stats[name] for name, phase in PHASES.items() if stats.get(name)}


def seconds_per_phase(stats: Mapping[str, list[Any]]) -> dict[str, dict[str, float]]:
    """Median and total of the seconds over examples, for each phase that was saved."""
    return {
        phase: {"median": float(np.median(seconds)), "total": float(np.sum(seconds))}
        for phase, seconds in seconds_by_phase(stats).items()
    }
