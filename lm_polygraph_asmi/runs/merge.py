"""Merges the shards of a run into the files of one unsplit run.

A setting is a model on a dataset with one prompt; `data.num_shards` splits its rows over jobs. Each
job writes a manager file with scores and metrics of its rows, and a manifest with their ids. Here
rows are put back in order, and LM-Polygraph's code computes the metrics over all of them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph.ue_metrics import ECE, PRAUC, ROCAUC, IsotonicPCC, PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import UEMetric
from lm_polygraph.utils.manager import UEManager

from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.results.manifest import (
    FORMAT,
    asmi_settings,
    manifest_path,
    overrides_of,
    read_manifest,
    run_command,
    seconds_per_phase,
    write_manifest,
)

PER_JOB = {"dataset", "cache_path", "save_path", "seed"}
"""Top-level nodes of a config that differ between jobs of a setting: folders of rows and results,
and the list of seeds (a manager file has one seed)."""
PER_SHARD = ("data.shard", "data.num_shards", "save_path")
"""Settings whose overrides differ between shards."""
PER_MACHINE = {"result_cache", "memory_budget", "compile", "device_map"}
"""Settings that depend on the machine; calculators have copies, so they may be anywhere."""


class MergeError(ValueError):
    """Runs that cannot be merged; the text says why and what to do."""


class Shard(NamedTuple):
    """One job's share of a setting: shard `number`, from 0, of `total`, with the ids of its rows.

    The manager file does not exist before the job ends.
    """

    manager: Path
    manifest: dict[str, Any]
    number: int
    total: int
    ids: list[str]

    def __str__(self) -> str:
        return f"shard {self.number} of {self.total} in {self.manager.parent}"


class Merged(NamedTuple):
    """A merged setting (model, dataset and seed): numbers of shards and rows, and its files."""

    group: str
    shards: int
    rows: int
    file: Path
    warnings: list[str]


def merge_runs(paths: Iterable[str | Path], out: str | Path) -> tuple[list[Merged], list[str]]:
    """Merge all complete settings below some paths.

    Args:
        paths: manager files, or folders that are searched for them. Merged files are skipped.
        out: folder for the manager files, one per seed: directly in it for a single setting, else
            in MODEL/DATASET below it (MODEL/DATASET-HASH if settings share these names).

    Returns:
        The merged settings, and the errors of other settings and unreadable files, which are not
        raised.
    """
    shards, errors = _find_shards(paths)
    groups: dict[str, str] = {}
    runs: dict[tuple[str, int], list[Shard]] = {}
    for shard in shards:
        manifest = shard.manifest
        key = _key(manifest["config"])
        # Names are those of config groups, which user configs may lack.
        model = manifest["model"]["name"] or Path(manifest["model"]["path"]).name
        groups[key] = f"{model}/{manifest['dataset']['name'] or manifest['config_name']}"
        runs.setdefault((key, manifest["seeds"]["run"]), []).append(shard)
    merged = []
    for (key, seed), parts in runs.items():
        group = groups[key]
        if list(groups.values()).count(group) > 1:
            group += f"-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        file = Path(out, group if len(groups) > 1 else "", f"ue_manager_seed{seed}")
        try:
            merged.append(_join(f"{group}, seed {seed}", _finished_shards(parts), file))
        except (ValueError, OSError) as error:
            errors.append(f"{group}, seed {seed}: {error}")
    return merged, errors


def ue_metrics(config: Mapping[str, Any]) -> list[UEMetric]:
    """The metrics of `polygraph_eval`, whose own list is inside a script."""
    metrics = [PredictionRejectionArea(), PredictionRejectionArea(max_rejection=0.5)]
    metrics += [IsotonicPCC(), ECE(normalize=True)]
    return [*metrics, ROCAUC(), PRAUC()] if config.get("use_claim_ue") else metrics


def _find_shards(paths: Iterable[str | Path]) -> tuple[list[Shard], list[str]]:
    """All shards below some paths, including those of killed jobs, and errors of reading."""
    managers, shards, errors = set(), [], []
    for path in map(Path, paths):
        root = path.resolve()
        # A killed job leaves only a manifest.
        patterns = ("ue_manager_seed*", "asmi_manifest_seed*.json")
        files = [root] if root.is_file() else [f for p in patterns for f in root.rglob(p)]
        if not files:
            errors.append(f"{path} has no run: no ue_manager_seed* and no manifest")
        for file in files:
            name = file.name.removesuffix(".json").replace("asmi_manifest", "ue_manager")
            managers.add(file.with_name(name))
    for manager in sorted(managers):
        try:
            manifest = read_manifest(manager)
            if manifest.get("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT} in {manifest_path(manager)}")
        except (FileNotFoundError, ValueError) as error:
            errors.append(f"{error}. The rows of {manager} are unknown: run it again")
            continue
        if "merged_from" not in manifest:
            data = manifest["dataset"]
            number, total = data.get("shard", 0), data.get("num_shards", 1)
            shards.append(Shard(manager, manifest, number, total, manifest["rows"]["ids"]))
    if not shards and not errors:
        errors.append("nothing to merge: these files are merged already")
    return shards, errors


def _key(config: Mapping[str, Any]) -> str:
    """Key that all shards of a setting share, and no others."""

    def portable(node: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in node.items() if name not in PER_MACHINE}

    shared = json.loads(json.dumps(config), object_hook=portable)
    shared.get("data", {}).pop("shard", None)
    return json.dumps({n: v for n, v in shared.items() if n not in PER_JOB}, sort_keys=True)


def _finished_shards(shards: Sequence[Shard]) -> list[Shard]:
    """The finished run of every shard, in the order of rows.

    Failed or killed runs are ignored if the same shard has also finished.
    """
    finished, problems = [], []
    total, manifest = shards[0].total, shards[0].manifest
    for number in range(total):
        runs = [shard for shard in shards if shard.number == number]
        completed = [shard for shard in runs if shard.manifest["status"] == "completed"]
        finished += completed
        if len(completed) > 1:
            several = " and ".join(map(str, completed))
            problems.append(f"expected one finished run, got {several}: name only one of them")
        elif not completed:
            for shard in runs:
                error = shard.manifest.get("error", "the job was killed, or is still running")
                problems.append(f'{shard} has the status "{shard.manifest["status"]}": {error}')
            if not runs:
                problems.append(f"shard {number} of {total} is missing")
            shard_number = (f"data.num_shards={total}", f"data.shard={number}")
            problems.append(f"run it with: {run_command(manifest, PER_SHARD, *shard_number)}")
    if problems:
        raise MergeError("\n  ".join(problems))
    return finished


def _join(group: str, shards: Sequence[Shard], file: Path) -> Merged:
    sources = [
        {"folder": str(shard.manager.parent), "shard": shard.number}
        | {name: shard.manifest[name] for name in ("started", "finished", "packages")}
        for shard in shards
    ]
    if file.exists():
        # A sweep may be merged again when its last setting has finished.
        if read_manifest(file).get("merged_from") == sources:
            rows = sum(len(shard.ids) for shard in shards)
            return Merged(group, len(shards), rows, file, ["merged before"])
        raise MergeError(f"{file} exists already: name another --out, or remove it")
    _check_rows(shards)
    managers = [_load(shard) for shard in shards]
    _check_alike(shards, managers)
    pairs = list(zip(shards, managers, strict=True))
    warnings = []
    for name in dict.fromkeys(name for manager in managers for name in manager.stats):
        # LM-Polygraph saves a statistic only for batches in which it was computed; with fewer
        # entries than rows, entries would be assigned to wrong rows.
        incomplete = [s for s, manager in pairs if len(manager.stats.get(name, [])) != len(s.ids)]
        if incomplete:
            warnings.append(f"statistic {name} left out: not one entry per row of {incomplete[0]}")
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
        if ", " in releases:  # only a warning: rarely changes a score, and shards may be days apart
            warnings.append(f"shards ran with different releases of {name}: {releases}")
    file.parent.mkdir(parents=True, exist_ok=True)
    # The manager file is written last and atomically, so that it implies all other files.
    unfinished = file.with_name(f".{file.name}.tmp")
    with locked(unfinished):
        if file.exists():
            raise MergeError(f"{file} exists already: name another --out, or remove it")
        joined.save(str(unfinished))
        write_manifest(manifest, file)
        os.replace(unfinished, file)
    return Merged(group, len(shards), len(manifest["rows"]["ids"]), file, warnings)


def _check_rows(shards: Sequence[Shard]) -> None:
    """Check that shards are from the same rows: disjoint, with sizes that differ by at most one."""
    if len(shards) > 1 and shards[0].manifest["config"].get("subsample_eval_dataset", -1) != -1:
        raise MergeError(
            "subsample_eval_dataset sampled within each shard, so rows differ from an unsplit run: "
            "run the shards again with data.size or data.sample instead"
        )
    sizes = [len(shard.ids) for shard in shards]
    if max(sizes) - min(sizes) > 1:
        raise MergeError(f"shards of {sizes} rows are not from the same data: run all shards again")
    holder: dict[str, Shard] = {}
    for shard in shards:
        for row in shard.ids:
            if holder.setdefault(row, shard) is not shard:
                raise MergeError(
                    f"row {row!r} is in {holder[row]} and in {shard}: the data differ, or repeat "
                    "ids. Run all shards again"
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
                f"expected {len(shard.ids)} values of {name} in {shard}, as in its manifest, got "
                f"{length}. Run this shard again"
            )
    return manager


def _check_alike(shards: Sequence[Shard], managers: Sequence[UEManager]) -> None:
    """Check what can differ with one config: revision of a hub branch, and estimators that
    `ignore_exceptions` dropped."""
    for kind, parts in {
        "model revisions": [[shard.manifest["model"]["revision"]] for shard in shards],
        "ASMI settings": [asmi_settings(manager.stats) for manager in managers],
        "estimators": [[name for _, name in manager.estimations] for manager in managers],
        "quality metrics": [[name for _, name in manager.gen_metrics] for manager in managers],
    }.items():
        for shard, values in zip(shards, parts, strict=True):
            if values != parts[0]:
                only_first = [value for value in parts[0] if value not in values]
                only_this = [value for value in values if value not in parts[0]]
                raise MergeError(
                    f"different {kind}: {only_first} in {shards[0]}, {only_this} in {shard}. Run "
                    "one of them again"
                )


def _joined_manifest(shards: Sequence[Shard], stats: Mapping[str, list[Any]]) -> dict[str, Any]:
    manifests = [shard.manifest for shard in shards]
    first, unsplit = manifests[0], {"shard": 0, "num_shards": 1}
    data = first["config"].get("data", {})
    peaks: dict[str, int] = {}
    packages: dict[str, list[str]] = {}
    for manifest in manifests:
        for name, size in manifest["peak_memory_bytes"].items():
            peaks[name] = max(size, peaks.get(name, 0))
        for name, release in manifest["packages"].items():
            packages.setdefault(name, []).append(release)
    rows = {name: [v for m in manifests for v in m["rows"][name]] for name in ("ids", "clusters")}
    return first | {
        "started": min(manifest["started"] for manifest in manifests),
        "finished": max(manifest["finished"] for manifest in manifests),
        "overrides": overrides_of(first, PER_SHARD),
        # Each folder of rows has one shard.
        "dataset": first["dataset"] | unsplit | {"path": None},
        "config": first["config"] | {"dataset": None, "data": data | unsplit},
        "rows": first["rows"] | rows,
        "packages": {name: ", ".join(dict.fromkeys(of)) for name, of in packages.items()},
        "device": ", ".join(dict.fromkeys(manifest["device"] for manifest in manifests)),
        "seconds_wall": sum(manifest["seconds_wall"] for manifest in manifests),
        "peak_memory_bytes": peaks,
        "asmi": asmi_settings(stats),
        "asmi_reused": sum(manifest["asmi_reused"] for manifest in manifests),
        "seconds": seconds_per_phase(stats),
    }
