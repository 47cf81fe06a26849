"""Answers that are labelled from the surest on: the sheet, and the calibration on it so far."""

from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from lm_polygraph_asmi.analysis.clusters import cluster_codes
from lm_polygraph_asmi.decisions.labels import clusters_of
from lm_polygraph_asmi.decisions.risk_control import thinned_rows
from lm_polygraph_asmi.decisions.rows import answers_of, scored_rows
from lm_polygraph_asmi.scoring.sheet import RANK, key_of, write_sheet
from lm_polygraph_asmi.scoring.signals import signal_of
from lm_polygraph_asmi.tables import Row


def write_ordered_sheet(
    scores: str | Path, sheet: str | Path, signal: str, largest: int | None = None
) -> int:
    """Write a sheet of scored answers, the surest first, one a cluster; returns how many.

    Args:
        scores: a file that `score_file` wrote.
        sheet: a new CSV; people label from its top, and may stop at any row.
        signal: by which answers are sorted, and later accepted; not "best" or "learned".
        largest: most answers of a later cluster, as for `calibrate_rows`.
    """
    signal_of(signal)
    rows = [row for row in scored_rows(scores) if row.content.get("digest")]
    kept, values, _ = surest_first(rows, signal, largest)
    write_sheet((rows[at].content for at in kept), sheet, f"{RANK}{signal}")
    return len(values)


def surest_first(
    rows: Sequence[Row], signal: str, largest: int | None
) -> tuple[list[int], np.ndarray, int]:
    """Places of the rows with an answer, one a cluster, the surest first; their signal (N,); and
    the most answers of a cluster, by which they are thinned.

    The draw depends on the keys of the rows alone, so it is the same for the same answers.
    """
    answers = answers_of(rows, signal)
    known = [at for at, answer in enumerate(answers) if answer.answered]
    if not known:
        raise ValueError("expected scored answers to label, got none")
    if signal not in (own := answers[known[0]].signals):
        raise ValueError(f"expected a signal of {', '.join(own)}; got {signal!r}")
    known.sort(key=lambda at: key_of(rows[at].content))
    codes = cluster_codes(clusters_of([rows[at] for at in known]))
    largest = largest or int(np.bincount(codes).max())
    seed = crc32("".join(key_of(rows[at].content) for at in known).encode())
    alone = thinned_rows(codes, largest, seed)
    values = np.array([answers[known[place]].signals[signal] for place in alone])
    order = np.argsort(values, kind="stable")
    return [known[alone[place]] for place in order], values[order], largest
