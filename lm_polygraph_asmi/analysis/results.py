"""A saved LM-Polygraph run as plain tables."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from lm_polygraph_asmi.manifest import asmi_settings, read_manifest

RIGHT = 0.5
"""Quality from which an answer counts as right, as in the paper."""
MSP = "MaximumSequenceProbability"
"""The baseline that costs nothing: what differences are taken from."""


@dataclass(frozen=True)
class Run:
    """Sequence-level results of one manager file.

    Attributes:
        path: the manager file.
        scores: a row per example, a column per estimator; higher = more uncertain.
        quality: a row per example, a column per quality metric; higher = better.
        stats: saved statistics, a list with one entry per example each.
        manifest: what stands beside it (`lm_polygraph_asmi.manifest`), None where nothing does.
    """

    path: Path
    scores: pd.DataFrame
    quality: pd.DataFrame
    stats: dict[str, list[Any]]
    manifest: dict[str, Any] | None = None

    @property
    def clusters(self) -> list[str] | None:
        """Key of each example, equal where examples are not independent; None if not known."""
        clusters = self.manifest["rows"]["clusters"] if self.manifest else []
        return clusters if len(clusters) == len(self.scores) else None

    def finite(self, metric: str) -> np.ndarray:
        """(n,) rows where quality and every score are finite: one mask for all methods."""
        return (np.isfinite(self.quality[metric]) & np.isfinite(self.scores).all(axis=1)).to_numpy()

    def settings(self) -> list[dict[str, Any]]:
        """Settings of ASMI in force, one dictionary per depth."""
        return asmi_settings(self.stats)

    def seconds(self) -> float | None:
        """Median seconds of ASMI per example, all depths together; None if not saved."""
        seconds = self.stats.get("asmi_seconds")
        return float(np.median(seconds)) if seconds else None


def manager_files(path: str | Path) -> list[Path]:
    """The manager file itself, or all inside a run folder, one per seed.

    Raises:
        FileNotFoundError: no such file, or none in the folder.
    """
    path = Path(path)
    found = [path] if path.is_file() else sorted(path.glob("ue_manager_seed*"))
    if not found:
        raise FileNotFoundError(f"{path} is neither a manager file nor a folder that holds one")
    return found


def load_run(path: str | Path) -> Run:
    """Read a manager file that LM-Polygraph saved. Only open files you trust: it is a pickle.

    Raises:
        FileNotFoundError: no such file, or none in the folder.
        ValueError: a folder with several seeds, a file of another kind, or an unfinished run,
            whose estimators and quality metrics do not cover the same examples; a damaged manifest.
    """
    file, *others = manager_files(path)
    if others:
        raise ValueError(f"{path} holds several seeds; name one of the files in it")
    try:
        content = torch.load(file, weights_only=False)
        parts = {part: content[part] for part in ("estimations", "gen_metrics", "stats")}
    except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a run saved by LM-Polygraph: {error!r}") from error
    tables = {
        part: {name: values for (level, name), values in parts[part].items() if level == "sequence"}
        for part in ("estimations", "gen_metrics")
    }
    lengths = {len(values) for table in tables.values() for values in table.values()}
    if "input_texts" in parts["stats"]:
        lengths.add(len(parts["stats"]["input_texts"]))
    if len(lengths) != 1:
        raise ValueError(
            f"{file} is incomplete: its columns have {sorted(lengths)} rows. The run stopped "
            "early; start it again"
        )
    scores = pd.DataFrame({str(name): values for name, values in tables["estimations"].items()})
    quality = pd.DataFrame({str(name): values for name, values in tables["gen_metrics"].items()})
    try:
        manifest = read_manifest(file)
    except FileNotFoundError:
        manifest = None
    return Run(file, scores, quality, dict(parts["stats"]), manifest)


def together(runs: Sequence[Run]) -> Run:
    """Runs that scored the same answers with different methods, as one.

    A method that several runs have counts once, from the first of them.

    Raises:
        ValueError: other questions, other answers, or other quality.
    """
    first, *others = runs
    scores = first.scores
    for run in others:
        for name in ("input_texts", "greedy_texts"):
            if run.stats[name] != first.stats[name]:
                raise ValueError(
                    f"{run.path} has other {name} than {first.path}: only runs over the same rows, "
                    "in the same order, with the same answers can be shown together"
                )
        if not run.quality.equals(first.quality):
            raise ValueError(f"{run.path} judged its answers otherwise than {first.path}")
        scores = scores.join(run.scores[[name for name in run.scores if name not in scores]])
    return replace(first, scores=scores)
