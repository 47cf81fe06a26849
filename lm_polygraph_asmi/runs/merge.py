"""Joins the shards of a run into the files that one unsplit run would have left.

A setting is a model on a dataset under fixed settings; `data.num_shards` splits its rows over jobs.
Each job leaves a manager file with scores and metrics of its own rows, and a manifest that says
which rows these were. Here they are put back in order and the metrics computed over all of them,
by LM-Polygraph's own code.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph.ue_metrics import ECE, PRAUC, ROCAUC, IsotonicPCC, PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import UEMetric
from lm_polygraph.utils.manager import UEManager

from lm_polygraph_asmi.results.manifest import (
    FORMAT,
    asmi_settings,
    manifest_path,
    read_manifest,
    seconds_per_phase,
    write_manifest,
)

OF_A_JOB = {"dataset", "cache_path", "save_path", "seed"}
"""Nodes at the top of a config that differ between jobs of a setting: where its rows and results
lie, and the list of seeds, of which a manager file has one."""
OF_A_MACHINE = {"result_cache", "memory_budget", "device_map"}
"""Settings that fit a job to its machine; calculators are given copies, so they may be anywhere."""


class MergeError(ValueError):
    """Runs that cannot be joined; the text says why, and what to do."""


class Shard(NamedTuple):
    """One job's share of a setting.

    Attributes:
        manager: its manager file; not there yet where the job has not come to its end.
        manifest: what its manifest says.
        number, total: it is shard `number`, from 0, of `total`.
        ids: of its rows, in their order.
    """

    manager: Path
    manifest: dict[str, Any]
    number: int
    total: int
    ids: list[str]

    def __str__(self) -> str:
        return f"shard {self.number} of {self.total} in {self.manager.parent}"


class Merged(NamedTuple):
    """A setting that has been joined.

    Attributes:
        group: model, dataset and seed.
        shards, rows: how many.
        file: the manager file, with the manifest beside it.
        warnings: what its reader must know.
    """

    group: str
    shards: int
    rows: int
    file: Path
    warnings: list[str]


def merge_runs(paths: Iterable[str | Path], out: str | Path) -> tuple[list[Merged], list[str]]:
    """Join all complete settings found under some paths.

    Args:
        paths: manager files, or folders searched for them. What was joined before is passed over.
        out: folder for the manager files, one per seed: they lie in it if there is one setting,
            else in MODEL/DATASET below it, or MODEL/DATASET-HASH where settings would share that.

    Returns:
        The settings that were joined, and why others, or files outside any setting, were not.
        Nothing is raised for these.
    """
    shards, errors = _find_shards(paths)
    groups: dict[str, str] = {}
    runs: dict[tuple[str, int], list[Shard]] = {}
    for shard in shards:
        manifest = shard.manifest
        key = _key(manifest["config"])
        # Names are those of config groups; a config of one's own may not have them.
        model = manifest["model"]["name"] or Path(manifest["model"]["path"]).name
        groups[key] = f"{model}/{manifest['dataset']['name'] or manifest['config_name']}"
        runs.setdefault((key, manifest["seeds"]["run"]), []).append(shard)
    merged = []
    for (key, seed), found in runs.items():
        group = groups[key]
        if list(groups.values()).count(group) > 1:
            group += f"-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        file = Path(out, group if len(groups) > 1 else "", f"ue_manager_seed{seed}")
        try:
            merged.append(_join(f"{group}, seed {seed}", _finished_shards(found), file))
        except (ValueError, OSError) as error:
            errors.append(f"{group}, seed {seed}: {error}")
    return merged, errors


def ue_metrics(config: Mapping[str, Any]) -> list[UEMetric]:
    """The metrics of `polygraph_eval`, whose own list stands in a script. Raises nothing."""
    metrics = [PredictionRejectionArea(), PredictionRejectionArea(max_rejection=0.5)]
    metrics += [IsotonicPCC(), ECE(normalize=True)]
    return [*metrics, ROCAUC(), PRAUC()] if config.get("use_claim_ue") else metrics


def _find_shards(paths: Iterable[str | Path]) -> tuple[list[Shard], list[str]]:
    """All shards under some paths, those of killed jobs too, and what could not be read."""
    managers, shards, errors = set(), [], []
    for path in map(Path, paths):
        root = path.resolve()
        # A job that was killed has left a manifest alone.
        patterns = ("ue_manager_seed*", "asmi_manifest_seed*.json")
        files = [root] if root.is_file() else [f for p in patterns for f in root.rglob(p)]
        if not files:
            errors.append(f"{path} holds no run: no ue_manager_seed* and no manifest")
        for file in files:
            name = file.name.removesuffix(".json").replace("asmi_manifest", "ue_manager")
            managers.add(file.with_name(name))
    for manager in sorted(managers):
        try:
            manifest = read_manifest(manager)
            if manifest.get("format") != FORMAT:
                raise ValueError(f"{manifest_path(manager)} is not of the format {FORMAT}")
        except (FileNotFoundError, ValueError) as error:
            errors.append(f"{error}. Nobody knows which rows {manager} holds: run it again")
            continue
        if "merged_from" not in manifest:
            data = manifest["dataset"]
            number, total = data.get("shard", 0), data.get("num_shards", 1)
            shards.append(Shard(manager, manifest, number, total, manifest["rows"]["ids"]))
    if not shards and not errors:
        errors.append("there is nothing to join: these files are joined already")
    return shards, errors


def _key(config: Mapping[str, Any]) -> str:
    """What all shards of a setting have in common, and no others."""

    def portable(node: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in node.items() if name not in OF_A_MACHINE}

    shared = json.loads(json.dumps(config), object_hook=portable)
    shared.get("data", {}).pop("shard", None)
    return json.dumps({n: v for n, v in shared.items() if n not in OF_A_JOB}, sort_keys=True)


def _finished_shards(found: Sequence[Shard]) -> list[Shard]:
    """The finished run of every shard, in the order of rows.

    A run that failed or was killed does not matter where the same shard has been finished since.
    """
    finished, problems = [], []
    total, manifest = found[0].total, found[0].manifest
    for number in range(total):
        runs = [shard for shard in found if shard.number == number]
        completed = [shard for shard in runs if shard.manifest["status"] == "completed"]
        finished += completed
        if len(completed) > 1:
            several = " and ".join(map(str, completed))
            problems.append(f"wanted once, but finished were {several}: name only one of them")
        elif not completed:
            for shard in runs:
                error = shard.manifest.get("error", "the job was killed, or is not done yet")
                problems.append(f'{shard} has the status "{shard.manifest["status"]}": {error}')
            if not runs:
                problems.append(f"shard {number} of {total} is missing")
            # hydra.mode: a config such as asmi_grid is a multirun by itself.
            command = ["polygraph_eval", "--config-name", manifest["config_name"], "hydra.mode=RUN"]
            command += _common_overrides(manifest)
            command += [f"data.num_shards={total}", f"data.shard={number}"]
            problems.append(f"run it with: {shlex.join(command)}")
    if problems:
        raise MergeError("\n  ".join(problems))
    return finished


def _common_overrides(manifest: Mapping[str, Any]) -> list[str]:
    own = ("data.shard", "data.num_shards", "save_path")
    return [o for o in manifest["overrides"] if o.lstrip("+").partition("=")[0] not in own]


def _join(group: str, shards: Sequence[Shard], file: Path) -> Merged:
    sources = [
        {"folder": str(shard.manager.parent), "shard": shard.number}
        | {name: shard.manifest[name] for name in ("started", "finished", "packages")}
        for shard in shards
    ]
    if file.exists():
        # A sweep may be joined again once its last setting is finished.
        if read_manifest(file).get("merged_from") == sources:
            rows = sum(len(shard.ids) for shard in shards)
            return Merged(group, len(shards), rows, file, ["joined before"])
        raise MergeError(f"{file} is there already: name another --out, or remove it")
    _check_rows(shards)
    managers = [_load(shard) for shard in shards]
    _check_alike(shards, managers)
    pairs = list(zip(shards, managers, strict=True))
    warnings = []
    for name in dict.fromkeys(name for manager in managers for name in manager.stats):
        # LM-Polygraph saves a statistic in those batches alone where it was computed; with fewer
        # entries than rows they would no longer stand beside their rows.
        lacking = [s for s, manager in pairs if len(manager.stats.get(name, [])) != len(s.ids)]
        if lacking:
            warnings.append(f"statistic {name} left out: not one entry per row of {lacking[0]}")
            for manager in managers:
                manager.stats.pop(name, None)
    joined, *others = managers
    for other in others:
        for part in ("estimations", "gen_metrics", "stats"):
            for name, values in getattr(other, part).items():
                getattr(joined, part)[name] += values
    joined.metrics = {}
    joined.ue_metrics = ue_metrics(shards[0].manifest["config"])
    joined.eval_ue()
    manifest = _joined_manifest(shards, joined.stats) | {"merged_from": sources}
    for name, releases in manifest["packages"].items():
        if ", " in releases:  # seldom moves a score, and shards may be days apart: not refused
            warnings.append(f"shards ran with different releases of {name}: {releases}")
    file.parent.mkdir(parents=True, exist_ok=True)
    # The manager file comes last and as a whole, so that where one is there, all is.
    unfinished = file.with_name(f".{file.name}.tmp")
    joined.save(str(unfinished))
    write_manifest(manifest, file)
    os.replace(unfinished, file)
    return Merged(group, len(shards), len(manifest["rows"]["ids"]), file, warnings)


def _check_rows(shards: Sequence[Shard]) -> None:
    """Whether shards were cut from the same rows: disjoint, and of sizes that differ by one."""
    if len(shards) > 1 and shards[0].manifest["config"].get("subsample_eval_dataset", -1) != -1:
        raise MergeError(
            "subsample_eval_dataset drew rows within each shard, others than an unsplit run draws: "
            "run the shards again with data.size or data.limit in its place"
        )
    sizes = [len(shard.ids) for shard in shards]
    if max(sizes) - min(sizes) > 1:
        raise MergeError(f"{sizes} rows were not cut from the same data: run all shards again")
    holder: dict[str, Shard] = {}
    for shard in shards:
        for row in shard.ids:
            if holder.setdefault(row, shard) is not shard:
                raise MergeError(
                    f"row {row!r} is in {holder[row]} and in {shard}: the data was not the same "
                    "for all, or repeats its ids. Run all shards again"
                )


def _load(shard: Shard) -> UEManager:
    try:
        manager = UEManager.load(str(shard.manager))
        lengths = {
            name: len(values)
            for scores in (manager.estimations, manager.gen_metrics)
            for (level, name), values in scores.items()
            if level == "sequence"  # claims are not one per row
        } | {"input_texts": len(manager.stats["input_texts"])}
    except Exception as error:  # a damaged pickle can raise anything
        raise MergeError(
            f"{shard.manager} is missing or damaged: {error!r}. Run this shard again"
        ) from error
    for name, length in lengths.items():
        if length != len(shard.ids):
            raise MergeError(
                f"{shard} has {length} values of {name}, but its manifest names {len(shard.ids)} "
                "rows. Run this shard again"
            )
    return manager


def _check_alike(shards: Sequence[Shard], managers: Sequence[UEManager]) -> None:
    """What the config leaves open: a branch of the hub moves on, and with `ignore_exceptions` an
    estimator that fails on one batch is dropped."""
    for what, found in {
        "model revisions": [[shard.manifest["model"]["revision"]] for shard in shards],
        "ASMI settings": [asmi_settings(manager.stats) for manager in managers],
        "estimators": [[name for _, name in manager.estimations] for manager in managers],
        "quality metrics": [[name for _, name in manager.gen_metrics] for manager in managers],
    }.items():
        for shard, values in zip(shards, found, strict=True):
            if values != found[0]:
                here = [value for value in found[0] if value not in values]
                there = [value for value in values if value not in found[0]]
                raise MergeError(
                    f"different {what}: {here} in {shards[0]}, {there} in {shard}. Run one of "
                    "them again"
                )


def _joined_manifest(shards: Sequence[Shard], stats: Mapping[str, list[Any]]) -> dict[str, Any]:
    manifests = [shard.manifest for shard in shards]
    first, whole = manifests[0], {"shard": 0, "num_shards": 1}
    data = first["config"].get("data", {})
    prefix_cache: dict[str, int] = {}
    packages: dict[str, list[str]] = {}
    for manifest in manifests:
        for name, size in manifest["peak_memory_bytes"].items():
            prefix_cache[name] = max(size, prefix_cache.get(name, 0))
        for name, release in manifest["packages"].items():
            packages.setdefault(name, []).append(release)
    return first | {
        "started": min(manifest["started"] for manifest in manifests),
        "finished": max(manifest["finished"] for manifest in manifests),
        "overrides": _common_overrides(first),
        # The folders of rows hold a shard each.
        "dataset": first["dataset"] | whole | {"path": None},
        "config": first["config"] | {"dataset": None, "data": data | whole},
        "rows": {
            name: [value for manifest in manifests for value in manifest["rows"][name]]
            for name in ("ids", "clusters")
        },
        "packages": {name: ", ".join(dict.fromkeys(of)) for name, of in packages.items()},
        "device": ", ".join(dict.fromkeys(manifest["device"] for manifest in manifests)),
        "seconds_wall": sum(manifest["seconds_wall"] for manifest in manifests),
        "peak_memory_bytes": prefix_cache,
        "asmi": asmi_settings(stats),
        "asmi_reused": sum(manifest["asmi_reused"] for manifest in manifests),
        "seconds": seconds_per_phase(stats),
    }
