"""A saved LM-Polygraph run as plain tables."""

import io
import logging
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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

log = logging.getLogger("lm_polygraph")

RIGHT = 0.5
"""Quality from which an answer counts as right, as in the paper."""
ROUNDING = 1e-6
"""How far a metric of 0 to 1 may lie outside by rounding."""
SYMBOLS = tuple(METHODS.values())
MSP = "MaximumSequenceProbability"
"""The free baseline for differences."""


@dataclass(frozen=True)
class Run:
    """Sequence-level results of one manager file.

    Attributes:
        path: the manager file.
        scores: a row per example, a column per estimator; higher = more uncertain.
        quality: a row per example, a column per quality metric; higher = better.
        stats: saved statistics, each a list with one entry per example.
        manifest: see `results.manifest`; None without one.
        described: settings and symbol of this package's estimators, by name of the score; empty
            without a manifest.
        planned: number of rows of a run that stopped early; None: it has all its rows.
    """

    path: Path
    scores: pd.DataFrame
    quality: pd.DataFrame
    stats: dict[str, list[Any]]
    manifest: dict[str, Any] | None = None
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
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

    @property
    def methods(self) -> dict[str, ASMIConfig]:
        """Settings of the scores of ASMI, Sem-ASMI and Adapt-ASMI, by name."""
        scored = {n: of for n, of in self.described.items() if n in self.scores}
        return {n: ASMIConfig.from_dict(of) for n, of in scored.items() if of["symbol"] in SYMBOLS}

    def recorded(self, part: str) -> dict[str, Any]:
        """A part of the manifest, such as "model"; empty if not recorded."""
        section = (self.manifest or {}).get(part)
        return section if isinstance(section, dict) else {}

    @property
    def clusters(self) -> list[str] | None:
        """Key of each example, equal for dependent examples; None if unknown."""
        clusters = self.recorded("rows").get("clusters", [])
        return clusters if len(clusters) == len(self.scores) else None

    def finite(self, metric: str) -> np.ndarray:
        """(n,) rows with finite quality and scores: the same for all methods."""
        return (np.isfinite(self.quality[metric]) & np.isfinite(self.scores).all(axis=1)).to_numpy()

    def unlabelled(self, metric: str) -> str:
        """Rows that a metric gave no number, in words; empty if there are none."""
        places = np.flatnonzero(~np.isfinite(self.quality[metric]))
        if not len(places):
            return ""
        ids = self.recorded("rows").get("ids", [])
        known = ids if len(ids) == len(self.quality) else range(len(self.quality))
        shown = ", ".join(str(known[i]) for i in places[:5])
        more = ", ..." if len(places) > 5 else ""
        return (
            f"{metric} has no value for {len(places)} of {len(self.quality)} rows ({shown}{more}): "
            "it cannot judge these answers by their gold answers"
        )

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Those of the statistics that were not saved for every row."""
        return [name for name in names if len(self.stats.get(name, [])) != len(self.scores)]

    def at(self, depth: float, *fields: str) -> list[dict[str, Any]] | None:
        """Fields of `AnswerStatistics` of every row; None unless all have the depth and these."""
        key, rows = depth_key(depth), self.stats.get("asmi", [])
        complete = len(rows) == len(self.scores) and all(
            key in row and row[key].keys() >= set(fields) for row in rows
        )
        return [row[key] for row in rows] if complete else None

    def check_scored(self) -> None:
        """Raise ValueError unless there are scores and qualities."""
        if not (self.scores.size and self.quality.size):
            missing = "scores" if not self.scores.size else "quality metrics"
            raise ValueError(
                f"{self.path} has no {missing}: the run failed or was stopped. See its log, and "
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


class _HoldsTensors(Exception):
    """A manager file with tensors, which only torch can read."""


class _WithoutTensors(pickle.Unpickler):
    def persistent_load(self, _: Any) -> Any:
        raise _HoldsTensors


def _content(file: Path) -> dict[str, Any]:
    """The content that LM-Polygraph saved with `torch.save`, a pickle in a zip file.

    Read without torch, which takes seconds to import, unless it has tensors. This also checks the
    checksum, which torch ignores.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise ValueError("it holds no data.pkl")
            pickled = archive.read(names[0])
        with suppress(_HoldsTensors):
            return _WithoutTensors(io.BytesIO(pickled)).load()
    else:
        with file.open("rb") as opened:
            if opened.read(1) != pickle.PROTO:
                raise ValueError("it is neither a zip file nor a pickle")
    import torch  # for tensors, and for files of its older releases

    return torch.load(file, weights_only=False)


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
        tables = {
            part: {
                str(name): np.asarray(values, dtype=float)  # None becomes NaN
                for (level, name), values in content[part].items()
                if level == "sequence"
            }
            for part in ("estimations", "gen_metrics")
        }
        stats = dict(content["stats"])
    except (FileNotFoundError, PermissionError):
        raise
    except (
        pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError,
        LookupError, TypeError, ValueError, AttributeError, ImportError,
    ) as error:  # fmt: skip
        raise ValueError(f"{file} is not a run saved by LM-Polygraph: {error!r}") from error
    if old := [name for name in stats if re.fullmatch(r"asmi_\w+_d[\d.]+", name)]:
        raise ValueError(
            f"{file} has the statistic {old[0]}, as saved by lm_polygraph_asmi 0.2: read it with "
            "that version, or run it again"
        )
    try:
        manifest = read_manifest(file)
    except FileNotFoundError:
        manifest = None
    described = (manifest or {}).get("methods") or {}
    complete, planned = _rows_of(file, tables, stats, manifest)
    if planned is not None:
        tables = {p: {n: v[:complete] for n, v in table.items()} for p, table in tables.items()}
        stats = {name: values[:complete] for name, values in stats.items()}
        if manifest is not None:
            rows = manifest.get("rows") or {}
            cut = {name: rows.get(name, [])[:complete] for name in ("ids", "clusters")}
            manifest |= {"rows": rows | cut}
    scores, quality = (pd.DataFrame(tables[part]) for part in ("estimations", "gen_metrics"))
    run = Run(file, scores, quality, stats, manifest, described, planned)
    if run.stopped_early and not partial:
        raise ValueError(f"{file} {run.stopped_early}. `results` and `report` show what it has")
    return run


def _rows_of(
    file: Path,
    tables: Mapping[str, Mapping[str, np.ndarray]],
    stats: Mapping[str, list[Any]],
    manifest: Mapping[str, Any] | None,
) -> tuple[int, int | None]:
    """Number of complete rows; and of all rows, if the run stopped before the last.

    LM-Polygraph saves also when a row fails. It fills the row's columns in their order: texts,
    scores, qualities. So from some column on, they may lack this batch.
    """
    columns = [values for table in tables.values() for values in table.values()]
    lengths = [len(values) for values in (stats.get("input_texts"), *columns) if values is not None]
    if len(set(lengths)) > 2 or lengths != sorted(lengths, reverse=True):
        raise ValueError(
            f"{file} is incomplete: its columns have {sorted(set(lengths))} rows, in an order that "
            "does not tell which rows they are. Start the run again"
        )
    planned = len(((manifest or {}).get("rows") or {}).get("ids", []))
    complete, started = min(lengths, default=0), max(lengths, default=0)
    everything = max(planned, started)
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
        described = {names.get(name, name): of for name, of in run.described.items()}
        named.append(replace(run, scores=run.scores.rename(columns=names), described=described))
    return named


def combine_runs(runs: Sequence[Run]) -> Run:
    """Merge runs with different methods on the same answers.

    A method of several runs is taken from the first of them. Scores of one name that differ in
    settings are different methods, see `distinctly_named`.
    """
    first, *others = runs = distinctly_named(runs)
    scores = first.scores
    for run in others:
        for name in ("input_texts", "greedy_texts"):
            if run.stats[name] != first.stats[name]:
                raise ValueError(
                    f"{run.path} has other {name} than {first.path}: only runs with the same rows, "
                    "order and answers can be merged"
                )
        if not same_quality(run.quality, first.quality):
            raise ValueError(f"{run.path} has other qualities than {first.path}")
        scores = scores.join(run.scores[[name for name in run.scores if name not in scores]])
    described = {name: of for run in reversed(runs) for name, of in run.described.items()}
    return replace(first, scores=scores, described=described)
