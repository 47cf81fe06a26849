"""Results as they were kept: what no test names is at least seen to change.

Remove a file of tests/golden to have it written anew, and read what changed before it is committed.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

KEPT = Path(__file__).with_name("golden")
REL, ABS = 2e-3, 1e-6
"""Far above the rounding of other processors and releases, far below what a reader sees."""


def rounded(number: Any) -> float:
    return float(f"{number:.6g}")


def summary(values: Any) -> list[float]:
    """Of numbers: how many are finite, their sum, their order, and the ends."""
    flat = np.asarray(values, dtype=float).ravel()
    places = np.flatnonzero(np.isfinite(flat))
    finite = flat[places]
    ends = [finite.min(), finite.max()] if len(finite) else []
    weighted = (finite * (places + 1)).sum() / max(1, len(flat))
    return [len(finite), *map(rounded, (finite.sum(), weighted, *ends))]


def of_figure(figure: Figure) -> dict[str, Any]:
    """What a figure shows: lines, bars, areas, points, images and words of every panel.

    Not kept: legends, colours, limits and ticks of axes, and bars of colours.
    """
    found = {}
    for number, ax in enumerate(ax for ax in figure.axes if ax.get_label() != "<colorbar>"):
        texts = [text.get_text() for text in (*ax.texts, *ax.get_yticklabels())]
        named = [text for text in texts if re.search("[a-z]", text)]  # ticks are matplotlib's
        drawn = [area.get_offsets() for area in ax.collections]
        shapes = [path.vertices for area in ax.collections for path in area.get_paths()]
        found[str(number)] = {
            "lines": [summary(data) for line in ax.lines for data in line.get_data()],
            "areas": [summary(shape) for shape in shapes],
            "points": [summary(points) for points in drawn if len(points) > 1],
            "bars": [summary(bar.get_bbox().get_points()) for bar in ax.patches],
            "images": [summary(image.get_array()) for image in ax.images],
            "words": [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), *named],
        }
    return found


def of_table(file: Path) -> list[dict[str, Any]]:
    return json.loads(pd.read_csv(file).to_json(orient="records", double_precision=7))


def leaves(content: Any, path: str = "") -> dict[str, Any]:
    """Path of each number, text and empty part -> its value."""
    if not isinstance(content, dict | list) or not content:
        return {path: content}
    parts = content.items() if isinstance(content, dict) else enumerate(content)
    below = [leaves(part, f"{path}/{key}") for key, part in parts]
    return {name: leaf for found in below for name, leaf in found.items()}


def check_kept(name: str, content: dict[str, Any]) -> None:
    """Fail where parts differ from those of the kept file, numbers by more than rounding."""
    found, file = json.loads(json.dumps(content, default=rounded)), KEPT / f"{name}.jsonl"
    if not file.exists():  # a line a part
        lines = (json.dumps({part: found[part]}, ensure_ascii=False) for part in sorted(found))
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        pytest.fail(f"{file} was written: read and keep it")
    kept: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        kept |= json.loads(line)
    kept, here = leaves(kept), leaves(found)
    assert not kept.keys() ^ here.keys(), f"if they shall change, remove {file} and run again"
    for path, value in kept.items():
        expected = value
        if isinstance(value, int | float) and not isinstance(value, bool):
            expected = pytest.approx(value, rel=REL, abs=ABS)
        assert here[path] == expected, f"{path}: if it shall change, remove {file} and run again"
