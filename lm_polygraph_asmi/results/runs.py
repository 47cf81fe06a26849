"""A saved LM-Polygraph run, read into plain tables."""

import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lm_polygraph_asmi.analysis.clusters import text_clusters
from lm_polygraph_asmi.config import METHODS, ASMIConfig, depth_key
from lm_polygraph_asmi.results.manifest import manifest_path, read_manifest

SYMBOLS = tuple(METHODS.values())
MSP = "MaximumSequenceProbability"
"""The free baseline that other methods are compared with."""


@dataclass(frozen=True)
class Run:
    """Sequence-level results of one manager file, with one row or entry per example.

    `scores` has one column per estimator (higher = more uncertain), `quality` one per metric
    (higher = better). `methods` maps the name of each ASMI score to its settings.
    """

    path: Path
    scores: pd.DataFrame
    quality: pd.DataFrame
    stats: dict[str, list[Any]]
    manifest: dict[str, Any] | None = None
    methods: dict[str, ASMIConfig] = field(default_factory=dict)

    def recorded(self, part: str) -> dict[str, Any]:
        """A part of the manifest, such as "model"; empty if it was not recorded."""
        section = (self.manifest or {}).get(part)
        return section if isinstance(section, dict) else {}

    @property
    def ids(self) -> list[str] | None:
        """Id of each example; None if they were not recorded."""
        return self.recorded("rows").get("ids") or None

    @property
    def clusters(self) -> list[str] | None:
        """Cluster key of each example, which dependent examples share; None if not recorded."""
        return self.recorded("rows").get("clusters") or None

    @cached_property
    def cluster_keys(self) -> list[str]:
        """The recorded `clusters`; otherwise found from the prompts; otherwise one per row."""
        if self.clusters:
            return self.clusters
        texts = self.stats.get("input_texts")
        shared = text_clusters(texts) if texts else range(len(self.scores))
        # Short keys instead of passages, since every resample compares them.
        return [str(code) for code in pd.factorize(pd.Series(shared))[0]]

    def finite(self, metric: str) -> np.ndarray:
        """Mask (n,) of rows where the quality and the scores of all methods are finite."""
        return (np.isfinite(self.quality[metric]) & np.isfinite(self.scores).all(axis=1)).to_numpy()

    def unlabelled(self, metric: str) -> str:
        """A phrase on the rows without a value of a metric; empty if every row has one."""
        places = np.flatnonzero(~np.isfinite(self.quality[metric]))
        known = self.ids or range(len(self.quality))
        shown = ", ".join(str(known[i]) for i in places[:5]) + ", ..." * (len(places) > 5)
        text = f"{metric} has no value for {len(places)} of {len(self.quality)} rows ({shown})"
        return text if len(places) else ""

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Names of the statistics that were not saved for every row."""
        return [name for name in names if len(self.stats.get(name, [])) != len(self.scores)]

    def at(self, depth: float, *fields: str) -> list[dict[str, Any]] | None:
        """Fields of `AnswerStatistics` of each row at a depth; None unless all rows have them."""
        rows = [row.get(depth_key(depth)) for row in self.stats.get("asmi", [])]
        complete = all(row is not None and row.keys() >= set(fields) for row in rows)
        return rows if complete and not self.lacks(["asmi"]) else None

    def settings(self) -> list[dict[str, Any]]:
        """ASMI's settings in use, such as layer, p, S and K: one dictionary per depth."""
        first: dict[float, dict[str, Any]] = next(iter(self.stats.get("asmi") or ()), {})
        return [dict(statistics["settings"]) for _, statistics in sorted(first.items())]


def manager_files(path: str | Path) -> list[Path]:
    """The manager file itself, or all manager files in a run folder, one per seed."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("ue_manager_seed*[0-9]"))
    if not files:
        raise FileNotFoundError(
            f"{path} is neither a manager file nor a folder with one: LM-Polygraph writes "
            "ue_manager_seed1 when a run ends. To resume a run that was killed, start it again"
        )
    return files


def read_manager(file: Path) -> dict[str, Any]:
    """The content of a manager file, which is a pickle. A damaged file can raise any error.

    It is read without torch if possible, since importing torch takes seconds.
    """
    with zipfile.ZipFile(file) as archive:  # checks the checksums, which torch ignores
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        pickled = archive.read(name)
    try:
        content: dict[str, Any] = pickle.loads(pickled)
    except pickle.UnpicklingError:  # for example, because it holds a tensor
        import torch

        return torch.load(file, weights_only=False)
    return content


def load_run(path: str | Path) -> Run:
    """Read a manager file that LM-Polygraph saved. Only load files you trust: they are pickles.

    Raises ValueError: the folder has several seeds, the file is of another kind, the manifest is
    damaged, or the run stopped before its last row.
    """
    file, *others = manager_files(path)
    if others:
        raise ValueError(f"{path} has several seeds: name one of its manager files")
    try:
        content = read_manager(file)
        scores, quality = (
            pd.DataFrame(
                {
                    str(name): pd.Series(np.asarray(values, dtype=float))  # None becomes NaN
                    for (level, name), values in content[part].items()
                    if level == "sequence"
                }
            )
            for part in ("estimations", "gen_metrics")
        )
        columns = [*content["estimations"].items(), *content["gen_metrics"].items()]
        lengths = {len(values) for (level, _), values in columns if level == "sequence"}
        stats = dict(content["stats"])
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{file} is not a run saved by LM-Polygraph: {error!r}") from error
    manifest = read_manifest(file) if manifest_path(file).is_file() else None
    methods = {
        name: ASMIConfig.from_dict(saved)
        for name, saved in ((manifest or {}).get("methods") or {}).items()
        if name in scores and saved["symbol"] in SYMBOLS
    }
    run = Run(file, scores, quality, stats, manifest, methods)
    per_row = run.ids, run.clusters, stats.get("input_texts")
    lengths |= {len(values) for values in per_row if values}
    # If a row fails, LM-Polygraph saves, too. Some columns may then have one more row than others.
    status = (manifest or {}).get("status", "completed")
    # A run of several seeds writes its manifests at its end, so a finished seed is "running", too.
    stopped = status == "failed" or (status == "running" and not content.get("metrics"))
    if stopped or len(lengths) > 1 or scores.empty or quality.empty:
        reason = (manifest or {}).get("error", "see its log")
        raise ValueError(
            f"{file} is incomplete: expected a finished run with scores and qualities of every "
            f"row, got columns of {sorted(lengths)} rows. The run failed or was stopped "
            f"({reason}). Start it again: finished rows are read from its result cache"
        )
    return run
