"""Merges the shards of a run into the files of one unsplit run.

`data.num_shards` splits the rows of a setting (model x dataset x prompt) over jobs. Each writes a
manager file, and a manifest with the ids of its rows. Here rows are put back in order, and
LM-Polygraph's code computes the metrics over all of them.
"""

import hashlib
import json
import os
from collections import Counter
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
    """Merge all complete settings below some manager files or folders; merged ones are skipped.

    The files of a single setting go directly into `out`, one per seed; of several, into
    MODEL/DATASET below it (MODEL/DATASET-HASH if settings share these names). Returns the merged
    settings, and the errors of other settings and unreadable files.
    """
    shards, errors = _find_shards(paths)
    groups: dict[str, str] = {}
    runs: dict[tuple[str, int], list[Shard]] = {}
    for shard in shards:
        manifest = shard.manifest
        key = _key(manifest["config"])
        model, data = manifest["model"], manifest["dataset"]
        # Names are those of config groups, which user configs may lack.
        name = model["name"] or Path(model["path"]).name
        groups[key] = f"{name}/{data['name'] or manifest['config_name']}"
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
        found = [*root.rglob("ue_manager_seed*"), *root.rglob("asmi_manifest_seed*.json")]
        if not (files := [root] if root.is_file() else found):
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
            data, ids = manifest["dataset"], manifest["rows"]["ids"]
            shard = data.get("shard", 0), data.get("num_shards", 1)
            shards.append(Shard(manager, manifest, *shard, ids))
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
    """The finished run of every shard, in order; failed and killed ones beside it are ignored."""
    finished, problems = [], []
    total = shards[0].total
    for number in range(total):
        runs = [shard for shard in shards if shard.number == number]
        completed = [shard for shard in runs if shard.manifest["status"] == "completed"]
        finished += completed
        if len(completed) > 1:
            several = " and ".join(map(str, completed))
            problems.append(f"expected one finished run, got {several}: name only one of them")
        elif not completed:
            killed = "the job was killed, or is still running"
            problems += [
                f'{s} has the status "{s.manifest["status"]}": {s.manifest.get("error", killed)}'
                for s in runs
            ] or [f"shard {number} of {total} is missing"]
            own = f"data.num_shards={total}", f"data.shard={number}"
            problems.append(f"run it with: {run_command(shards[0].manifest, PER_SHARD, *own)}")
    if problems:
        raise ValueError("\n  ".join(problems))
    return finished


def _join(group: str, shards: Sequence[Shard], file: Path) -> Merged:
    sources = [
        {"folder": str(shard.manager.parent), "shard": shard.number}
        | {name: shard.manifest[name] for name in ("started", "finished", "packages")}
        for shard in shards
    ]
    rows = sum(len(shard.ids) for shard in shards)
    # A sweep may be merged again when its last setting has finished.
    if file.exists() and read_manifest(file).get("merged_from") == sources:
        return Merged(group, len(shards), rows, file, ["merged before"])
    _check_new(file)
    _check_rows(shards)
    managers = [_load(shard) for shard in shards]
    _check_alike(shards, managers)
    warnings = _without_incomplete(shards, managers)
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
        _check_new(file)
        joined.save(str(unfinished))
        write_manifest(manifest, file)
        os.replace(unfinished, file)
    return Merged(group, len(shards), rows, file, warnings)


def _check_new(file: Path) -> None:
    if file.exists():
        raise ValueError(f"{file} exists already: name another --out, or remove it")


def _check_rows(shards: Sequence[Shard]) -> None:
    """Check that shards are from the same rows: disjoint, with sizes that differ by at most one."""
    sizes = [len(shard.ids) for shard in shards]
    if max(sizes) - min(sizes) > 1:
        raise ValueError(f"shards of {sizes} rows are not from the same data: run all shards again")
    row, count = Counter(row for shard in shards for row in shard.ids).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"row {row!r} is in {' and '.join(str(s) for s in shards if row in s.ids)}: the data "
            "differ, or repeat ids. Run all shards again"
        )


def _load(shard: Shard) -> UEManager:
    try:
        manager = UEManager.load(str(shard.manager))
        lengths = {
            name: len(values)
            for (level, name), values in (manager.estimations | manager.gen_metrics).items()
            if level == "sequence"  # claims are not one per row
        } | {"input_texts": len(manager.stats["input_texts"])}
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{shard.manager} is missing or damaged: {error!r}. Run this shard again"
        ) from error
    for name, length in lengths.items():
        if length != len(shard.ids):
            raise ValueError(
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
            only_first = [value for value in parts[0] if value not in values]
            only_this = [value for value in values if value not in parts[0]]
            if only_first or only_this:
                raise ValueError(
                    f"different {kind}: {only_first} in {shards[0]}, {only_this} in {shard}. Run "
                    "one of them again"
                )


def _without_incomplete(shards: Sequence[Shard], managers: Sequence[UEManager]) -> list[str]:
    """Warnings about statistics of which a shard lacks entries, after removing them.

    LM-Polygraph saves a statistic only for batches in which it was computed; joined, entries would
    be assigned to wrong rows.
    """
    warnings = []
    for name in dict.fromkeys(name for manager in managers for name in manager.stats):
        for shard, manager in zip(shards, managers, strict=True):
            if len(manager.stats.get(name, [])) != len(shard.ids):
                warnings.append(f"statistic {name} left out: not one entry per row of {shard}")
                for each in managers:
                    each.stats.pop(name, None)
                break
    return warnings


def _joined_manifest(shards: Sequence[Shard], stats: Mapping[str, list[Any]]) -> dict[str, Any]:
    manifests = [shard.manifest for shard in shards]
    first, unsplit = manifests[0], {"shard": 0, "num_shards": 1}
    data = first["config"].get("data", {})

    def named(part: str) -> dict[str, list[Any]]:
        names = dict.fromkeys(name for manifest in manifests for name in manifest[part])
        return {name: [m[part][name] for m in manifests if name in m[part]] for name in names}

    rows = {name: [v for m in manifests for v in m["rows"][name]] for name in ("ids", "clusters")}
    return first | {
        "started": min(manifest["started"] for manifest in manifests),
        "finished": max(manifest["finished"] for manifest in manifests),
        "overrides": overrides_of(first, PER_SHARD),
        # Each folder of rows has one shard.
        "dataset": first["dataset"] | unsplit | {"path": None},
        "config": first["config"] | {"dataset": None, "data": data | unsplit},
        "rows": first["rows"] | rows,
        "packages": {n: ", ".join(dict.fromkeys(of)) for n, of in named("packages").items()},
        "device": ", ".join(dict.fromkeys(manifest["device"] for manifest in manifests)),
        "seconds_wall": sum(manifest["seconds_wall"] for manifest in manifests),
        "peak_memory_bytes": {n: max(of) for n, of in named("peak_memory_bytes").items()},
        "asmi": asmi_settings(stats),
        "asmi_reused": sum(manifest["asmi_reused"] for manifest in manifests),
        "seconds": seconds_per_phase(stats),
    }
