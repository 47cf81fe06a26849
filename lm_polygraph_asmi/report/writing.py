"""Write the report: report.md, and a file for every table and figure."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from matplotlib.figure import Figure

from lm_polygraph_asmi.files import to_json, write_whole, writing
from lm_polygraph_asmi.report.apart import compute_apart, processes
from lm_polygraph_asmi.report.figures import save
from lm_polygraph_asmi.report.item import MissingItem, ReportItem, escape
from lm_polygraph_asmi.report.items import every_report_item
from lm_polygraph_asmi.report.latex import latex_table
from lm_polygraph_asmi.results.names import masked_layer
from lm_polygraph_asmi.results.run_groups import RunGroup

SYMBOLS = (
    "MI_t: disagreement of the masked subnetworks on a token, in nats. A_t: semantic similarity "
    "of the tokens they disagree on. u_sem: the score of Sem-ASMI, MI_t (1 − A_t) averaged over "
    "an answer. H, entropy: of the unmasked model, mean over tokens; H(p̄): of the subnetworks' "
    "mean prediction. MSP: −log probability of the answer. All scores: higher = more uncertain. "
    "†: not in the paper."
)
"""Meaning of the report's symbols."""
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def build_report(
    groups: Sequence[RunGroup],
    out: str | Path,
    progress: Progress = lambda steps, _: steps,
    jobs: int = 1,
) -> tuple[Path, list[str]]:
    """Compute and write every item that the settings have data for.

    Args:
        groups: from `load_run_groups`.
        out: folder; files of the same names are replaced.
        progress: wraps a list of steps, given their name, such as `rich.progress.track`.
        jobs: processes that compute settings, then draw figures, side by side, each on one thread;
            no more than settings. The numbers do not depend on it.

    Returns:
        report.md, and its first lines: rows that are missing, and other depths.

    Raises:
        OSError: cannot write to the folder; or a process ended, such as for lack of memory.
        ValueError: another report is being written to it.
    """
    out = Path(out)
    for folder in ("tables", "figures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    report = out / "report.md"
    with writing(report, replace=True) as unfinished:
        with processes(max(1, min(jobs, len(groups)))):
            text, first_lines = _build(groups, out, progress)
        unfinished.write_text(text, encoding="utf-8")
    return report, first_lines


def _build(groups: Sequence[RunGroup], out: Path, progress: Progress) -> tuple[str, list[str]]:
    """Files of all items; returns the text of report.md and its first lines."""
    makes = every_report_item()
    compute_apart(groups, makes, progress)
    first_lines = [f"**{group.label}: {note}**" for group in groups for note in group.notes]
    sections, gaps, drawn = [], [], []
    for make in progress(makes, "Tables"):
        for item in make(groups):
            if isinstance(item, MissingItem):
                gaps.append(f"- {item.title}: {escape(item.reason, 'markdown')}")
            else:
                sections.append(_write(item, groups, out))
                if item.draw is not None:
                    drawn.append((item.draw, out / "figures" / item.name, _description(item)))
    saved = Parallel(return_as="generator")(delayed(_save)(*of_item) for of_item in drawn)
    for _ in zip(progress(drawn, "Figures"), saved, strict=True):
        pass
    provenance = [group.provenance() for group in groups]
    write_whole(out / "provenance.json", _json(provenance))
    runs = (escape(_source(p), "markdown").replace("; ", "\n  - ") for p in provenance)
    listed = "\n".join(f"- {run}" for run in runs)
    parts = ["# Report", *first_lines, SYMBOLS, "## Runs", listed, *sections]
    if gaps:
        parts.append("## Not in this report\n\n" + "\n".join(gaps))
    return "\n\n".join(parts) + "\n", first_lines


def _description(item: ReportItem) -> str:
    """What a figure's file says of itself."""
    return "\n".join([item.title, *item.caption, *_sources(item)])


def _sources(item: ReportItem) -> list[str]:
    return [f"Source: {_source(group.provenance())}" for group in item.groups]


def _save(draw: Callable[[], Figure], stem: Path, description: str) -> None:
    figure = draw()
    save(figure, stem.with_suffix(".png"), description)
    figure.set_layout_engine("none")  # the same layout, which takes long, for both
    save(figure, stem.with_suffix(".svg"), description)


def _json(value: Any) -> str:
    return to_json(value, str, indent=1)


def _write(item: ReportItem, groups: Sequence[RunGroup], out: Path) -> str:
    """Files of one item; returns its section of the report."""
    sources, section = _sources(item), [f"## {item.title}"]
    if item.draw is not None:
        section.append(f"![{item.title}](figures/{item.name}.png)")
    stem = out / "tables" / item.name
    provenance = [group.provenance() for group in item.groups]
    about = {"title": item.title, "notes": item.caption, "settings": provenance}
    stem.with_suffix(".json").write_text(_json(about), encoding="utf-8")
    if item.table is not None:
        shown = item.shown("markdown").to_markdown(index=False, disable_numparse=True)
        rows = f"{len(item.table)} rows: [tables/{item.name}.csv](tables/{item.name}.csv)"
        section.append(shown if item.inline else rows)
        item.flat().to_csv(stem.with_suffix(".csv"), index=False)
        if item.inline:
            comments = "".join(f"% {line}\n" for line in sources)
            stem.with_suffix(".tex").write_text(comments + latex_table(item), encoding="utf-8")
        text = "\n\n".join([shown, *item.caption, *sources]) + "\n"
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
    notes = item.caption
    if len(item.groups) < len(groups):
        notes.append(f"From {len(item.groups)} of the {len(groups)} settings.")
    return "\n\n".join([*section, *notes])


def _source(p: dict[str, Any]) -> str:
    """A setting, its data and runs, in one line."""
    parts = [
        f"{p['setting']}: {p['n']} answers, {p['clusters']} clusters, quality {p['quality']}",
        f"model {p['model']} ({p['revision']})",
        f"data {p['dataset']}",
    ]
    for run in p["runs"]:
        seeds = ", ".join(f"{name} {seed}" for name, seed in run["seeds"].items())
        parts.append(f"run {run['file']}, seeds: {seeds or 'not recorded'}")
        parts += [
            f"ASMI at depth {used['depth']:.1%}: {masked_layer(used)}, "
            f"H = {used['num_heads']}, p = {used['mask_rate']}, S = {used['num_masks']}, "
            f"K = {used['top_k']}, {used['mask_sampler']} masks, scope {used['scope']}"
            for used in run["asmi"]
        ]
    releases = ", ".join(f"{name} {release}" for name, release in p["packages"].items())
    parts += [releases or "releases not recorded", str(p["device"])]
    return "; ".join([*parts, *(f"note: {note}" for note in p["notes"])])
