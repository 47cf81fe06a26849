"""A saved LM-Polygraph run as plain tables."""

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lm_polygraph_asmi.config import METHODS, ASMIConfig, depth_key
from lm_polygraph_asmi.results.manifest import (
    asmi_settings,
    dropped_text,
    read_manifest,
    run_command,
)

RIGHT = 0.5
"""Quality from which an answer counts as right, as in the paper."""
ROUNDING = 1e-6
"""How far a metric of 0 to 1 may lie outside by rounding."""
SYMBOLS = tuple(METHODS.values())
MSP = "MaximumSequenceProbability"
"""The free baseline for differences."""
TEXTS = ("input_texts", "greedy_texts")
"""Statistics by which two runs have the same answers."""


@dataclass(frozen=True)
class Run:
    """Sequence-level results of one manager file, with a row or entry per example.

    `scores` has a column per estimator (higher = more uncertain), `quality` one per metric (higher
    = better). `described` has the settings of this package's scores, by name. `planned`: the number
    of rows of a run that stopped early; None: it has all its rows.
    """

    path: Path
    scores: pd.DataFrame
    quality: pd.DataFrame
    stats: dict[str, list[Any]]
    manifest: dict[str, Any] | None = None
    methods: dict[str, ASMIConfig] = field(default_factory=dict)
    planned: int | None = None

    @property
    def stopped_early(self) -> str | None:
        """Which rows a run that stopped early has, why, and how to get the others."""
        if self.planned is None:
            return None
        manifest = self.manifest or {}
        text = f"stopped early: has the first {len(self.scores)} of {self.planned} rows"
        text += f" ({manifest['error']})" if manifest.get("error") else ""
        if "overrides" not in manifest:
            return f"{text}. Run it again for the rest"
        cache = (self.recorded("config").get("asmi") or {}).get("result_cache")
        kept = f"; masked passes and samples are read from {cache}" if cache else ""
        return f"{text}. For the rest: {run_command(manifest)}{kept}"

    @property
    def missing_rows(self) -> list[str]:
        """Sentences about planned rows that the run's numbers do not cover."""
        notes = [] if self.stopped_early is None else [f"The run {self.stopped_early}."]
        if dropped := self.recorded("rows").get("dropped"):
            notes.append(f"Left out before the run: {dropped_text(dropped)}.")
        return notes

    def recorded(self, part: str) -> dict[str, Any]:
        """A part of the manifest, such as "model"; empty if not recorded."""
        section = (self.manifest or {}).get(part)
        return section if isinstance(section, dict) else {}

    @property
    def ids(self) -> list[str] | None:
        """Id of each example; None if unknown."""
        ids: list[str] = self.recorded("rows").get("ids", [])
        return ids if len(ids) == len(self.scores) else None

    @property
    def clusters(self) -> list[str] | None:
        """Key of each example, equal for dependent examples; None if unknown."""
        clusters: list[str] = self.recorded("rows").get("clusters", [])
        return clusters if len(clusters) == len(self.scores) else None

    def finite(self, metric: str) -> np.ndarray:
        """(n,) rows with finite quality and scores: the same for all methods."""
        return (np.isfinite(self.quality[metric]) & np.isfinite(self.scores).all(axis=1)).to_numpy()

    def unlabelled(self, metric: str) -> str:
        """Rows that a metric gave no number, in words; empty if there are none."""
        places = np.flatnonzero(~np.isfinite(self.quality[metric]))
        if not len(places):
            return ""
        known = self.ids or range(len(self.quality))
        shown = ", ".join(str(known[i]) for i in places[:5]) + ", ..." * (len(places) > 5)
        return (
            f"{metric} has no value for {len(places)} of {len(self.quality)} rows ({shown}): "
            "it cannot judge these answers by their gold answers"
        )

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Those of the statistics that were not saved for every row."""
        return [name for name in names if len(self.stats.get(name, [])) != len(self.scores)]

    def at(self, depth: float, *fields: str) -> list[dict[str, Any]] | None:
        """Fields of `AnswerStatistics` of every row; None unless all have the depth and these."""
        key = depth_key(depth)
        rows = [row.get(key) for row in self.stats.get("asmi", [])]
        complete = all(row is not None and row.keys() >= set(fields) for row in rows)
        return rows if complete and not self.lacks(["asmi"]) else None

    def check_scored(self) -> None:
        """Raise ValueError unless there are scores and qualities."""
        for name, table in (("scores", self.scores), ("quality metrics", self.quality)):
            if not table.size:
                raise ValueError(
                    f"{self.path} has no {name}: the run failed or was stopped. See its log, and "
                    "start it again"
                )

    def settings(self) -> list[dict[str, Any]]:
        """Settings of ASMI in use, one dictionary per depth."""
        return asmi_settings(self.stats)

    def seconds(self) -> float | None:
        """Median seconds of ASMI per example, all depths together; None if not saved."""
        seconds = self.stats.get("asmi_seconds")
        return float(np.median(seconds)) if seconds else None


def on_scale(quality: Any) -> bool:
    """Whether one or all qualities lie between 0 and 1, up to rounding."""
    return bool(np.all((np.asarray(quality) >= -ROUNDING) & (np.asarray(quality) <= 1 + ROUNDING)))


def below_right(quality: float, right_from: float | None = None, name: str = "quality") -> bool:
    """Whether an answer of this quality is wrong: below `right_from`, by default `RIGHT`.

    Without `right_from`, ValueError for a quality outside 0 to 1: on another scale, such as
    percent, nearly every answer would count as right.
    """
    if right_from is None and not on_scale(quality):
        raise ValueError(
            f"expected {name} between 0 and 1, got {quality:g}: on another scale, say from where "
            "an answer is right (--right-from, right_from)"
        )
    return bool(quality < (RIGHT if right_from is None else right_from))


def says_nothing(texts: Sequence[str] | None) -> np.ndarray | None:
    """(n,) whether an answer has no letter and no digit; None if texts were not saved."""
    return None if texts is None else np.array([not re.search(r"\w", text) for text in texts])


def manager_files(path: str | Path) -> list[Path]:
    """The manager file itself, or all inside a run folder, one per seed."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("ue_manager_seed*"))
    if not files:
        reason = "no such file or folder"
        if path.exists():
            reason = "LM-Polygraph writes ue_manager_seed1 when a run ends"
            for manifest in sorted(path.glob("asmi_manifest_seed*.json")):  # of a killed run
                manager = manifest.with_name(manifest.stem.replace("asmi_manifest", "ue_manager"))
                reason += f". To resume: {run_command(read_manifest(manager))}"
        raise FileNotFoundError(f"{path} is neither a manager file nor a folder with one: {reason}")
    return files


def _content(file: Path) -> dict[str, Any]:
    """The pickle in a zip file that LM-Polygraph saved with `torch.save`.

    Read without torch, which takes seconds to import, unless it has tensors. Reading also checks
    the checksum, which torch ignores.
    """
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("it holds no data.pkl")
        pickled = archive.read(names[0])
    try:
        content: dict[str, Any] = pickle.loads(pickled)
    except pickle.UnpicklingError:  # also at a tensor
        import torch

        return torch.load(file, weights_only=False)
    return content


def load_run(path: str | Path, partial: bool = False) -> Run:
    """Read a manager file that LM-Polygraph saved. Only open files you trust: it is a pickle.

    `partial`: also a run that stopped early, up to its last complete row; else a ValueError, as for
    a folder with several seeds, a file of another kind, or a damaged manifest.
    """
    file, *others = manager_files(path)
    if others:
        raise ValueError(f"{path} has several seeds: name one of its files")
    try:
        content = _content(file)
        tables = [
            {
                str(name): np.asarray(values, dtype=float)  # None becomes NaN
                for (level, name), values in content[part].items()
                if level == "sequence"
            }
            for part in ("estimations", "gen_metrics")
        ]
        stats = dict(content["stats"])
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{file} is not a run saved by LM-Polygraph: {error!r}") from error
    try:
        manifest = read_manifest(file)
    except FileNotFoundError:
        manifest = None
    methods = {
        name: ASMIConfig.from_dict(of)
        for name, of in ((manifest or {}).get("methods") or {}).items()
        if name in tables[0] and of["symbol"] in SYMBOLS
    }
    columns = [stats.get("input_texts"), *(c for table in tables for c in table.values())]
    complete, planned = _rows_of(file, [len(c) for c in columns if c is not None], manifest)
    if planned is not None:
        stats = {name: values[:complete] for name, values in stats.items()}
        if manifest is not None:
            rows = manifest.get("rows") or {}
            cut = {name: rows.get(name, [])[:complete] for name in ("ids", "clusters")}
            manifest |= {"rows": rows | cut}
    scores, quality = (pd.DataFrame({n: v[:complete] for n, v in t.items()}) for t in tables)
    run = Run(file, scores, quality, stats, manifest, methods, planned)
    if run.stopped_early and not partial:
        raise ValueError(f"{file} {run.stopped_early}. `results` and `report` show what it has")
    return run


def _rows_of(
    file: Path, lengths: list[int], manifest: Mapping[str, Any] | None
) -> tuple[int, int | None]:
    """Number of complete rows; and of all rows, if the run stopped before the last.

    LM-Polygraph saves also when a row fails. It fills the row's columns in their order: texts,
    scores, qualities. So from some column on, they may lack this batch.
    """
    if len(set(lengths)) > 2 or lengths != sorted(lengths, reverse=True):
        raise ValueError(
            f"{file} is incomplete: its columns have {sorted(set(lengths))} rows, in an order that "
            "does not tell which rows they are. Start the run again"
        )
    planned = len(((manifest or {}).get("rows") or {}).get("ids", []))
    complete, everything = min(lengths, default=0), max([planned, *lengths])
    return complete, everything if complete < everything else None


def same_quality(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    """Whether the metrics of both agree on all answers, up to rounding."""
    shared = [name for name in first if name in second]
    return bool(shared) and np.allclose(first[shared], second[shared], rtol=1e-4, equal_nan=True)


def distinctly_named(runs: Sequence[Run]) -> list[Run]:
    """The runs, each score renamed that has other settings than a score of an earlier run.

    The new name tells in what: "Adapt-ASMI (60%, K=64, num_samples=5)".
    """
    keys: dict[str, dict[str, Any]] = {}
    named = []
    for run in runs:
        names = {}
        for name, config in run.methods.items():
            key = config.score_key()
            earlier = keys.setdefault(name, key)
            different = [f"{n}={value}" for n, value in key.items() if value != earlier.get(n)]
            if different:
                names[name] = f"{name.removesuffix(')')}, {', '.join(different)})"
        methods = {names.get(name, name): config for name, config in run.methods.items()}
        named.append(replace(run, scores=run.scores.rename(columns=names), methods=methods))
    return named


def combine_runs(runs: Sequence[Run]) -> Run:
    """Merge runs with different methods on the same answers.

    A method of several runs is taken from the first of them. Scores of one name that differ in
    settings are different methods, see `distinctly_named`.
    """
    first, *others = runs = distinctly_named(runs)
    for run in others:
        different = [name for name in TEXTS if run.stats[name] != first.stats[name]]
        if not same_quality(run.quality, first.quality):
            different.append("qualities")
        if different:
            raise ValueError(
                f"{run.path} has other {different[0]} than {first.path}: only runs with the same "
                "rows, order and answers can be merged"
            )
    scores = pd.concat([run.scores for run in runs], axis=1)
    methods = {name: of for run in reversed(runs) for name, of in run.methods.items()}
    return replace(first, scores=scores.loc[:, ~scores.columns.duplicated()], methods=methods)
