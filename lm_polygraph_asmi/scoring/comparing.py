"""Two models, or two settings, on the same rows: what differs, with intervals over clusters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.analysis.clusters import RESAMPLES, Interval, cluster_interval
from lm_polygraph_asmi.analysis.comparison import auroc, prr_intervals
from lm_polygraph_asmi.scoring.calibration import context_clusters, is_wrong
from lm_polygraph_asmi.scoring.decision import SIGNALS
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.rows import rows_done


@dataclass(frozen=True)
class Compared:
    """Differences, the second file minus the first, with 95 % intervals over clusters.

    Attributes:
        rows, clusters: that both have.
        left_out: rows that only one has.
        means: of each signal, in its unit; higher = the second is more uncertain.
        error_rate: where both have labels, else None.
        auroc, prr: of each signal, each against its own file's labels; empty without any.
        settings: what differs between them, in words.
    """

    rows: int
    clusters: int
    left_out: int
    means: dict[str, Interval]
    error_rate: Interval | None = None
    auroc: dict[str, Interval] = field(default_factory=dict)
    prr: dict[str, Interval] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            f"{self.rows} rows that both have, {self.clusters} clusters"
            + (f"; {self.left_out} that only one has are left out." if self.left_out else ".")
        )
        yield Text(f"They differ in: {'; '.join(self.settings) or 'nothing that is recorded'}.")
        if self.error_rate is not None:
            yield Text(f"Share of wrong answers, second minus first: {_shown(self.error_rate)}.")
        named = [name for name in ("auroc", "prr") if getattr(self, name)]
        table = Table("second minus first", "mean", *(name.upper() for name in named), box=None,
                      header_style="dim")  # fmt: skip
        for kind, difference in self.means.items():
            others = [_shown(getattr(self, name)[kind]) for name in named]
            table.add_row(SIGNALS[kind], _shown(difference), *others)
        yield table


def _shown(interval: Interval) -> str:
    return f"{interval.value:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def compare_files(first: str | Path, second: str | Path, resamples: int = RESAMPLES) -> Compared:
    """Compare two files of `polygraph_asmi score --out` over the same input, row by row.

    Rows are the same by their number and prompt. Labels are `correct` or `quality` in the rows.
    Where the answers differ, so do the labels: PRR and AUROC then compare both, model and signal.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: no scored rows, none that both have, or the same row with different prompts.
    """
    lines = [_lines(path) for path in (first, second)]
    shared = [number for number in lines[0] if number in lines[1]]
    if not shared:
        raise ValueError(f"{first} and {second} have no row in common: score the same input")
    for number in shared:
        if lines[0][number]["prompt"] != lines[1][number]["prompt"]:
            raise ValueError(
                f"row {number} has another prompt in {second} than in {first}: score the same input"
            )
    scores = [[Score.from_dict(own[number]) for number in shared] for own in lines]
    rows = [lines[0][number] for number in shared]
    given = [row.get("cluster") for row in rows]
    prompts = [row.get("context") or row["prompt"] for row in rows]
    keys = context_clusters(prompts) if any(k is None for k in given) else [str(k) for k in given]
    columns = [
        {kind: np.array([one.signals[kind] for one in own]) for kind in own[0].signals}
        for own in scores
    ]
    kinds = [kind for kind in columns[0] if kind in columns[1]]

    def mean(kind: str) -> Interval:
        gap = columns[1][kind] - columns[0][kind]
        return cluster_interval(lambda taken: float(gap[taken].mean()), keys, resamples)

    found: dict[str, Any] = {
        "rows": len(shared),
        "clusters": len(set(keys)),
        "left_out": len(set(lines[0]) ^ set(lines[1])),
        "means": {kind: mean(kind) for kind in kinds},
        "settings": tuple(_differences(scores[0][0], scores[1][0])),
    }
    one, other = (_labels([own[number] for number in shared]) for own in lines)
    if one is None or other is None:
        return Compared(**found)
    more = other.astype(float) - one
    found["error_rate"] = cluster_interval(lambda t: float(more[t].mean()), keys, resamples)
    found["auroc"] = {
        kind: _auroc_gap(columns, [one, other], kind, keys, resamples) for kind in kinds
    }
    if np.array_equal(one, other):
        found["prr"] = {
            kind: prr_intervals(
                {"second": columns[1][kind], "first": columns[0][kind]},
                1.0 - one,
                keys,
                [("second", "first")],
                resamples,
            )[1]["second", "first"]
            for kind in kinds
        }
    return Compared(**found)


def _auroc_gap(
    columns: Sequence[Mapping[str, np.ndarray]],
    labels: Sequence[np.ndarray],
    kind: str,
    keys: list[str],
    resamples: int,
) -> Interval:
    first, second = (own[kind] for own in columns)

    def gap(taken: np.ndarray) -> float:
        return auroc(second[taken], labels[1][taken]) - auroc(first[taken], labels[0][taken])

    return cluster_interval(gap, keys, resamples)


def _lines(path: str | Path) -> dict[int, dict[str, Any]]:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} is not there: name what `polygraph_asmi score --out` wrote"
        )
    found = rows_done(Path(path))
    if not found:
        raise ValueError(f"{path} holds no scored row")
    return found


def _labels(rows: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """(n,) whether each answer is wrong; None where not all rows say so."""
    try:
        return np.array([is_wrong(row) for row in rows])
    except ValueError:
        return None


def _differences(one: Score, other: Score) -> list[str]:
    """Settings, in words."""
    pairs = [own.settings | {"model": own.model or "unnamed"} for own in (one, other)]
    names = [name for name in pairs[0] if pairs[0][name] != pairs[1].get(name, pairs[0][name])]
    return [f"{name} {pairs[0][name]} and {pairs[1][name]}" for name in names]
