"""Write the report: one page with its figures and, on request, files of tables and figures."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from joblib import Parallel, delayed
from matplotlib.figure import Figure

from lm_polygraph_asmi.files import writing
from lm_polygraph_asmi.report.apart import compute_apart, processes
from lm_polygraph_asmi.report.figures import save
from lm_polygraph_asmi.report.item import MissingItem, ReportItem
from lm_polygraph_asmi.report.items import PAGE, every_report_item
from lm_polygraph_asmi.report.items.paper import papers_numbers
from lm_polygraph_asmi.report.tables import parameters_line
from lm_polygraph_asmi.results.run_groups import RunGroup

SYMBOLS = (
    "MI_t: disagreement of the masked subnetworks on a token, in nats.",
    "A_t: semantic similarity of the tokens that they disagree on.",
    "u_sem: the score of Sem-ASMI, which is MI_t (1 − A_t) averaged over an answer.",
    "H, entropy: mean token entropy of the unmasked model.",
    "H(p̄): entropy of the subnetworks' mean prediction.",
    "MSP: −log probability of the answer. MSP and H are LM-Polygraph's; in a run without them, "
    "they are computed from ASMI's own unmasked pass.",
    "All scores: higher = more uncertain.",
    "†: not in the paper.",
)
"""Explanation of the report's symbols."""
MATH = {"p̄": r"$\bar{p}$", "Δ": r"$\Delta$", "ρ": r"$\rho$", "−": "$-$", "±": r"$\pm$",
        "†": r"\dag{}"}  # fmt: skip
"""Characters that LaTeX can set in text only with packages. pandas escapes all others."""
ESCAPED = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{mark: f"${mark}$" for mark in "<>|"},
    **{mark: rf"\{mark}" for mark in "&%$#_{}"},
}
"""Characters that mean something else in LaTeX."""
NOTE = r"""\par\medskip
\begin{minipage}{\linewidth}\footnotesize
%s
\end{minipage}"""
"""A note below a table in LaTeX."""
RESIZED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" "\n"
"""LaTeX that makes a table narrower if it is wider than the text, but never wider."""
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def build_report(
    groups: Sequence[RunGroup],
    out: str | Path,
    progress: Progress = lambda steps, _: steps,
    jobs: int = 1,
    full: bool = False,
    formats: Collection[str] = (),
) -> tuple[Path, list[str]]:
    """Write a report on settings: a page with its figures and, on request, files of tables.

    Args:
        groups: the settings.
        out: folder to write into.
        progress: gets a list of steps and its name, and yields these steps.
        jobs: number of processes that compute settings and draw figures. It changes no number.
        full: write all of the paper's tables and figures, not only PRR and its difference from MSP.
        formats: formats of further files: csv, md, tex for tables; svg, pdf for figures.

    Returns:
        The path of the page, and the page's first lines.

    Raises:
        OSError: the folder cannot be written, or a process ended.
        ValueError: another process is writing a report there.
    """
    out = Path(out)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    with writing(page, replace=True) as unfinished:
        with processes(max(1, min(jobs, len(groups)))):
            made = _compute(groups, full, progress)
            items = [item for item in made if isinstance(item, ReportItem)]
            _draw(items, out / "figures", {"png"} | ({"svg", "pdf"} & {*formats}), progress)
        for item in items:
            _write_table(item, out / "tables", formats)
        first_lines = [f"{group.label}: {note}" for group in groups for note in group.notes]
        unfinished.write_text(_page(made, groups, first_lines), encoding="utf-8")
    return page, first_lines


def _compute(
    groups: Sequence[RunGroup], full: bool, progress: Progress
) -> list[ReportItem | MissingItem]:
    """All items. The paper's numbers come after the items of every report."""
    makes = every_report_item() if full else PAGE
    compute_apart(groups, makes, progress)
    made = [item for make in progress(makes, "Tables") for item in make(groups)]
    beside = papers_numbers(groups, [item for item in made if isinstance(item, ReportItem)])
    return [*made[:2], *beside, *made[2:]]


def _draw(
    items: Sequence[ReportItem], folder: Path, suffixes: Collection[str], progress: Progress
) -> None:
    drawn = [item for item in items if item.draw]
    saved = Parallel(return_as="generator")(
        delayed(_save)(item.draw, folder / item.name, sorted(suffixes), _description(item))
        for item in drawn
    )
    for _ in zip(progress(drawn, "Figures"), saved, strict=True):
        pass


def _save(draw: Callable[[], Figure], stem: Path, suffixes: Sequence[str], about: str) -> None:
    figure = draw()
    for suffix in suffixes:
        save(figure, stem.with_suffix(f".{suffix}"), about)


def _description(item: ReportItem) -> str:
    """An item's title and notes, and the sources of its data."""
    return "\n".join([item.title, *item.caption, *_sources(item)])


def _sources(item: ReportItem) -> list[str]:
    return [f"Source: {_source(group)}" for group in item.groups]


def markdown_table(item: ReportItem) -> str:
    """A table in Markdown, with its notes and sources below it."""
    shown = item.shown().map(lambda text: text.replace("|", r"\|"))
    table = shown.to_markdown(index=False, disable_numparse=True)
    return "\n\n".join([table, *_description(item).split("\n")]) + "\n"


def latex_table(item: ReportItem) -> str:
    """A table for LaTeX with the packages booktabs and graphicx, with its notes printed below it.

    Its sources become comments.
    """
    numbers = [name for name in item.table if not item.table[name].map(type).eq(str).any()]
    table = item.styled("latex").to_latex(
        column_format="".join("r" if name in numbers else "l" for name in item.table),
        environment="table*",
        position_float="centering",
        hrules=True,
        convert_css=True,
        caption=_escaped(item.title),
        label=f"tab:{item.name}",
    )
    table = table.replace(r"\begin{tabular}", RESIZED + r"\begin{tabular}", 1)
    note = NOTE % _escaped(" ".join(_printed_notes(item)))
    table = table.replace(r"\end{tabular}", r"\end{tabular}}" + f"\n{note}", 1)
    table = re.sub("|".join(MATH), lambda found: MATH[found[0]], table)
    return "".join(f"% {line}\n" for line in [item.title, *_sources(item)]) + table


def _escaped(text: str) -> str:
    return re.sub("|".join(map(re.escape, ESCAPED)), lambda found: ESCAPED[found[0]], text)


def _printed_notes(item: ReportItem) -> list[str]:
    """What a printed table needs: its notes, without those on its figure, and its symbols."""
    notes = [note for note in item.caption if not note.startswith("Figure")]
    words = item.styled("html").to_html() + " ".join(notes)

    def used(line: str) -> bool:
        symbol = line.partition(":")[0].split(",")[0]
        start = r"(?<!\w)" if symbol[0].isalnum() else ""  # † follows a name
        found = re.search(rf"{start}{re.escape(symbol)}(?!\w)", words)
        return symbol == "All scores" or found is not None

    return [*notes, *(line for line in SYMBOLS if line not in notes and used(line))]


TABLES: Mapping[str, Callable[[ReportItem], str]] = {
    "csv": lambda item: item.flat().to_csv(index=False),
    "md": markdown_table,
    "tex": latex_table,
}
"""Suffix of a table's file -> function that writes its text."""


def _write_table(item: ReportItem, folder: Path, formats: Collection[str]) -> None:
    for suffix in TABLES.keys() & {*formats}:
        folder.mkdir(exist_ok=True)
        (folder / f"{item.name}.{suffix}").write_text(TABLES[suffix](item), encoding="utf-8")


def _page(
    made: Sequence[ReportItem | MissingItem], groups: Sequence[RunGroup], first_lines: Sequence[str]
) -> str:
    items = [item for item in made if isinstance(item, ReportItem)]
    source = files("lm_polygraph_asmi.report").joinpath("page.html.jinja").read_text("utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(source)
    return template.render(
        first_lines=first_lines,
        symbols=" ".join(SYMBOLS),
        items=items,
        tables={item.name: item.styled("html").to_html(table_uuid=item.name) for item in items},
        missing=[item for item in made if isinstance(item, MissingItem)],
        runs=[_source(group) for group in groups],
    )


def _short_path(path: str | list[str] | None) -> str | None:
    """The last two parts of an absolute path, since the rest is private; other names unchanged.

    The name and configuration of a dataset are joined.
    """
    if isinstance(path, list):
        path = " ".join(map(str, path))
    return "/".join(Path(path).parts[-2:]) if path and Path(path).is_absolute() else path


def _source(group: RunGroup) -> str:
    """One line on a setting, its data and its runs. Only the last parts of paths are shown."""
    model, data = group.run.recorded("model"), group.run.recorded("dataset")
    unknown = "not recorded"
    parts = [
        f"{group.label}: {len(group)} answers, {group.answers.n_clusters} clusters, quality "
        f"{group.metric}",
        f"model {_short_path(model.get('path')) or unknown} ({model.get('revision', unknown)})",
        f"data {_short_path(data.get('source')) or data.get('name') or unknown}",
    ]
    for run in group.runs:
        seeds = ", ".join(f"{name} {seed}" for name, seed in run.recorded("seeds").items())
        parts.append(f"run {_short_path(str(run.path))}, seeds: {seeds or unknown}")
        parts += map(parameters_line, run.settings())
    releases = group.run.recorded("packages").items()
    parts.append(", ".join(f"{name} {v}" for name, v in releases) or "releases not recorded")
    parts.append((group.run.manifest or {}).get("device", unknown))
    return "; ".join([*parts, *(f"note: {note}" for note in group.notes)])
