"""The report on disk: report.md, and every table and figure as files of its own."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_polygraph_asmi.report.cells import Cell
from lm_polygraph_asmi.report.exhibit import Exhibit, Gap
from lm_polygraph_asmi.report.exhibits import EXHIBITS, findings

Progress = Callable[[Iterable[Any]], Iterable[Any]]


def build_report(
    cells: Sequence[Cell], out: str | Path, progress: Progress = iter
) -> tuple[Path, list[str]]:
    """Compute and write every item that the cells hold.

    Args:
        cells: from `load_cells`.
        out: folder; files of an earlier report of the same names are replaced.
        progress: wraps the list of items, such as `rich.progress.track`.

    Returns:
        report.md, and its first lines: what a reader must not miss.

    Raises:
        OSError: the folder cannot be written.
    """
    out = Path(out)
    for folder in ("tables", "figures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    said = findings(cells)
    sections, gaps = [], []
    for make in progress(EXHIBITS):
        for item in make(cells):
            if isinstance(item, Gap):
                gaps.append(f"- {item.title}: {item.reason}")
            else:
                sections.append(_write(item, out))
    provenance = [cell.provenance() for cell in cells]
    (out / "provenance.json").write_text(_json(provenance), encoding="utf-8")
    parts = ["# Report", *said, _origins(provenance), *sections]
    if gaps:
        parts.append("## Not in this report\n\n" + "\n".join(gaps))
    report = out / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return report, said


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str)


def _write(item: Exhibit, out: Path) -> str:
    """Files of one item; returns its section of the report."""
    provenance = [cell.provenance() for cell in item.cells]
    source = "; ".join(
        f"{p['cell']}: n = {p['n']}, {p['clusters']} clusters, {p['quality']}" for p in provenance
    )
    notes = [*item.notes, f"Source: {source}."]
    section = [f"## {item.title}"]
    if item.figure is not None:
        for suffix, key in (("png", "Description"), ("svg", "Description")):
            item.figure.savefig(
                out / "figures" / f"{item.name}.{suffix}",
                dpi=200,
                bbox_inches="tight",
                metadata={key: source},
            )
        section.append(f"![{item.title}](figures/{item.name}.png)")
    if item.table is not None:
        stem = out / "tables" / item.name
        shown = item.shown("markdown").to_markdown(index=False, disable_numparse=True)
        section.append(shown)
        item.flat().to_csv(stem.with_suffix(".csv"), index=False)
        stem.with_suffix(".json").write_text(
            _json({"title": item.title, "notes": list(item.notes), "cells": provenance}),
            encoding="utf-8",
        )
        comments = "".join(f"% {line}\n" for note in notes for line in note.splitlines())
        table = item.shown("latex").to_latex(
            index=False, escape=False, caption=_caption(item), label=f"tab:{item.name}"
        )
        stem.with_suffix(".tex").write_text(comments + table, encoding="utf-8")
        stem.with_suffix(".md").write_text("\n\n".join([shown, *notes]) + "\n", encoding="utf-8")
    return "\n\n".join([*section, *notes])


def _caption(item: Exhibit) -> str:
    from lm_polygraph_asmi.report.exhibit import escape

    return escape(item.title, "latex")


def _origins(provenance: Sequence[dict[str, Any]]) -> str:
    """Which runs the report is made from."""
    lines = ["## Runs"]
    for p in provenance:
        asmi = p["asmi"]
        used = (
            f"layer {asmi['layer']} of {asmi['num_layers']}, H = {asmi['num_heads']}, "
            f"p = {asmi['mask_rate']}, S = {asmi['num_masks']}, K = {asmi['top_k']}, "
            f"{asmi['mask_sampler']} masks, scope {asmi['scope']}"
            if asmi
            else "no ASMI statistics"
        )
        releases = ", ".join(
            f"{name} {p['packages'][name]}"
            for name in ("lm-polygraph-asmi", "lm-polygraph", "torch", "transformers")
            if name in p["packages"]
        )
        lines.append(
            f"**{p['cell']}**: {p['n']} answers, {p['clusters']} clusters, quality {p['quality']}; "
            f"model `{p['model']}` ({p['revision']}), data `{p['dataset']}`; {used}; seeds "
            f"{p['seeds']}; {releases or 'releases not recorded'}; {p['device']}; "
            f"{', '.join(f'`{run}`' for run in p['runs'])}."
            + "".join(f" Note: {note}." for note in p["notes"])
        )
    return "\n\n".join(lines)
