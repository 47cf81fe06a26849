"""Merge the shards of a run into the files of one unsplit run.

`data.num_shards` splits the rows of a setting (model x dataset x prompt) over jobs. Each job writes
a manager file and a manifest with the ids of its rows. Merging joins the rows in order, and
computes the metrics over all of them with LM-Polygraph's code.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from lm_polygraph.ue_metrics import ECE, PRAUC, ROCAUC, IsotonicPCC, PredictionRejectionArea
from lm_polygraph.ue_metrics.ue_metric import UEMetric
from lm_polygraph.utils.manager import UEManager

from lm_polygraph_asmi.files import writing
from lm_polygraph_asmi.results.manifest import (
    FORMAT,
    manifest_path,
    read_manifest,
    seconds_per_phase,
    write_manifest,
)
from lm_polygraph_asmi.results.runs import Run, load_run
from lm_polygraph_asmi.validation import check_new

PER_JOB = {"cache_path", "save_path", "seed"}
"""Top-level config nodes that differ between jobs of a setting: folders, and the list of seeds
(each manager file has one seed)."""
PER_SHARD = {"shard", "result_cache", "memory_budget", "compile", "device_map"}
"""Settings that differ between shards: the number of the shard, and settings of its machine.

They are left out wherever they occur, since calculators hold copies of settings.
"""


class Merged(NamedTuple):
    """A merged setting (model, dataset and seed): how many shards and rows it has, and its file."""

    group: str
    shards: int
    rows: int
    file: Path
    warnings: list[str]


def merge_runs(paths: Iterable[str | Path], out: str | Path) -> tuple[list[Merged], list[str]]:
    """Merge every complete setting found in some manager files or folders.

    Files that a merge wrote are skipped. The files of a single setting go directly into `out`, one
    per seed; those of several settings go into MODEL/DATASET below it. Returns the merged settings,
    and errors: of settings that could not be merged, and of files that could not be read.
    """
    jobs, errors = _find_jobs(paths)
    merged = []
    several = jobs["key"].nunique() > 1
    for (_, seed), setting in jobs.groupby(["key", "seed"], sort=False):
        name = setting["name"].iloc[0]
        group, folder = f"{name}, seed {seed}", Path(out, name if several else "")
        try:
            merged.append(_join(group, _finished(setting), folder / f"ue_manager_seed{seed}"))
        except (ValueError, OSError) as error:
            errors.append(f"{group}: {error}")
    return merged, errors


def ue_metrics(config: Mapping[str, Any]) -> list[UEMetric]:
    """The metrics of `polygraph_eval`, copied since its script does not export them."""
    metrics = [
        PredictionRejectionArea(), PredictionRejectionArea(max_rejection=0.5), IsotonicPCC(),
        ECE(normalize=True),
    ]  # fmt: skip
    return [*metrics, ROCAUC(), PRAUC()] if config.get("use_claim_ue") else metrics


def _find_jobs(paths: Iterable[str | Path]) -> tuple[pd.DataFrame, list[str]]:
    """A table of all jobs below some paths, also of killed jobs; and the errors of reading them."""
    managers, errors, jobs = set(), [], []
    for path in (Path(path).resolve() for path in paths):
        names = (
            [path]
            if path.is_file()
            else [
                manifest.with_name(manifest.stem.replace("asmi_manifest", "ue_manager"))
                for manifest in path.rglob(
                    "asmi_manifest_seed*.json"
                )  # a killed job leaves only its manifest
            ]
        )
        managers.update(names)
        if not names:
            errors.append(
                f"{path} has no run: expected a manifest, which the callback RunRecord writes"
            )
    for manager in sorted(managers):
        try:
            manifest = read_manifest(manager)
            if manifest.get("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT} in {manifest_path(manager)}")
        except (FileNotFoundError, ValueError) as error:
            errors.append(f"{error}. The rows of {manager} are unknown: run the job again")
            continue
        model, data = manifest["model"], manifest["dataset"]
        # The model's name is that of a config group, which a user's config may lack.
        name = f"{model['name'] or Path(model['path']).name}/{data['name']}"
        setting = _key(manifest["config"]), manifest["seeds"]["run"], name
        if "merged_from" not in manifest:
            share = data.get("shard", 0), data.get("num_shards", 1)
            jobs.append((manager, manifest, manifest["status"], *setting, *share))
    if not jobs and not errors:
        errors.append("nothing to merge: all of these files were written by a merge")
    columns = ["manager", "manifest", "status", "key", "seed", "name", "shard", "total"]
    return pd.DataFrame(jobs, columns=columns), errors


def _key(config: Mapping[str, Any]) -> str:
    """A key that is equal for all shards of a setting, and differs between settings."""
    shared = json.loads(
        json.dumps(config),
        object_hook=lambda node: {n: v for n, v in node.items() if n not in PER_SHARD},
    )
    return json.dumps({n: v for n, v in shared.items() if n not in PER_JOB}, sort_keys=True)


def _finished(jobs: pd.DataFrame) -> pd.DataFrame:
    """The finished job of every shard, in order. Failed and killed jobs of a shard are ignored."""
    total, problems = jobs["total"].iloc[0], []
    finished = jobs[jobs["status"] == "completed"].sort_values("shard")
    for shard in range(total):
        if (finished["shard"] == shard).sum() != 1:
            states = [
                f"{job.status} in {job.manager.parent} ({job.manifest.get('error', 'no error')})"
                for job in jobs[jobs["shard"] == shard].itertuples()
            ]
            problems.append(
                f"expected one finished job of data.num_shards={total} data.shard={shard}, got "
                f"{' and '.join(states) or 'none'}: run it, or pass only one of them"
            )
    if problems:
        raise ValueError("\n  ".join(problems))
    return finished


def _join(group: str, jobs: pd.DataFrame, file: Path) -> Merged:
    check_new(file, "name another --out, or remove it")
    runs = [load_run(manager) for manager in jobs["manager"]]
    _check_rows(runs)
    _check_alike(runs)
    joined, *others = (UEManager.load(str(run.path)) for run in runs)
    names = dict.fromkeys(name for run in runs for name in run.stats)
    # LM-Polygraph saves a statistic only for batches in which it was computed. If some are missing,
    # joined entries would belong to wrong rows.
    incomplete = [name for name in names if any(run.lacks([name]) for run in runs)]
    for other in others:
        for part in ("estimations", "gen_metrics", "stats"):
            for name, values in getattr(other, part).items():
                getattr(joined, part)[name] += values
    for name in incomplete:
        joined.stats.pop(name, None)
    joined.metrics = {}
    joined.ue_metrics = ue_metrics(runs[0].recorded("config"))
    joined.eval_ue()
    file.parent.mkdir(parents=True, exist_ok=True)
    # The manager file is renamed last: if it exists, so does its manifest.
    with writing(file) as partial:
        joined.save(str(partial))
        write_manifest(_joined_manifest(runs, joined.stats), file)
    warnings = [f"statistic {name} left out, since some rows lack it" for name in incomplete]
    return Merged(group, len(runs), sum(len(run.scores) for run in runs), file, warnings)


def _check_rows(runs: Sequence[Run]) -> None:
    """Check that shards are from the same data: disjoint rows, sizes that differ by at most one.

    Rows without ids in the manifest are compared by their texts.
    """
    sizes = [len(run.scores) for run in runs]
    rows = (run.ids or run.stats.get("input_texts") or range(len(run.scores)) for run in runs)
    row, count = Counter(row for of_run in rows for row in dict.fromkeys(of_run)).most_common(1)[0]
    if max(sizes) - min(sizes) > 1 or count > 1:
        twice = f", with row {row!r:.80} in {count} of them" if count > 1 else ""
        raise ValueError(
            f"shards of {sizes} rows{twice} are not from the same data: run all shards again. "
            "Note that data.num_shards splits only the rows of data.source"
        )


def _check_alike(runs: Sequence[Run]) -> None:
    """Check what can differ between jobs although their configs are equal.

    This is the revision of a hub branch, the content of a folder or file, and the estimators that
    `ignore_exceptions` dropped.
    """
    for kind, parts in {
        "model revisions": [run.recorded("model")["revision"] for run in runs],
        "rows of the source": [run.recorded("dataset").get("revision") for run in runs],
        "ASMI settings": [run.settings() for run in runs],
        "estimators": [list(run.scores) for run in runs],
        "quality metrics": [list(run.quality) for run in runs],
    }.items():
        for run, values in zip(runs, parts, strict=True):
            if values != parts[0]:
                raise ValueError(
                    f"different {kind}: {parts[0]} in {runs[0].path.parent}, {values} in "
                    f"{run.path.parent}. Run one of these jobs again"
                )


def _joined_manifest(runs: Sequence[Run], stats: Mapping[str, list[Any]]) -> dict[str, Any]:
    manifests = [run.manifest or {} for run in runs]
    first, every = manifests[0], pd.DataFrame(manifests)
    packages = pd.DataFrame([*every["packages"]])
    unsplit = {"shard": 0, "num_shards": 1}
    return first | {
        "merged_from": [str(run.path.parent) for run in runs],
        "dataset": first["dataset"] | unsplit,
        "config": first["config"] | {"data": first["config"].get("data", {}) | unsplit},
        "rows": {n: [v for m in manifests for v in m["rows"][n]] for n in ("ids", "clusters")},
        "packages": {name: ", ".join(packages[name].dropna().unique()) for name in packages},
        "device": ", ".join(every["device"].unique()),
        "seconds_wall": every["seconds_wall"].sum(),
        "peak_memory_bytes": pd.DataFrame([*every["peak_memory_bytes"]]).max().to_dict(),
        "asmi_reused": every["asmi_reused"].sum(),
        "seconds": seconds_per_phase(stats),
    }
