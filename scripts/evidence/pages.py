"""Make the tables and figures of the pages of evidence anew, from the small files beside them.

    python scripts/evidence/pages.py          # writes them into docs/*.md and docs/evidence/*.md
    python scripts/evidence/pages.py --check  # changes nothing, says what would change

A table stands between `<!-- table NAME -->` and `<!-- end -->`; all else on a page is written by
hand. `<!-- verdict -->` is a place for that: a page whose verdict is empty is refused. The files,
docs/evidence/MODEL/CELL.RUN.parquet, are made by measure.sh when a setting is complete; single
shards are never read. `--check --quick` computes nothing: it compares what the pages say they were
made from with the files.
"""

import re
from pathlib import Path

import click
from changed import TABLES as OF_CHANGED
from groups import CHANGED, CORRECTNESS_LABELS, Evidence, digest, load
from PIL import Image
from tables import FIGURES, coupling_table, couplings, draw_coupling
from tables import TABLES as OF_CELLS

from lm_polygraph_asmi.report import figures

DOCS = Path(__file__).parents[2] / "docs"

_PLACE = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VERDICT = re.compile(r"<!-- verdict -->\n(.*?)<!-- end -->", re.DOTALL)
_MADE_FROM = re.compile(r"<!-- made from \w* -->")


def filled(page: str, groups: list[Evidence], made_from: str) -> str:
    """A page with its tables made anew.

    Raises:
        ValueError: a table that there is not.
    """

    def made(place: re.Match[str]) -> str:
        if place[2] in OF_CHANGED:
            found = OF_CHANGED[place[2]](groups)
        elif place[2] in OF_CELLS:
            found = OF_CELLS[place[2]](unchanged(groups))
        else:
            known = ", ".join([*OF_CELLS, *OF_CHANGED])
            raise ValueError(f"there is no table {place[2]!r}: {known}")
        return f"{place[1]}{found}\n{place[3]}"

    return _MADE_FROM.sub(f"<!-- made from {made_from} -->", _PLACE.sub(made, page))


def unchanged(groups: list[Evidence]) -> list[Evidence]:
    """Those whose passages are as they were."""
    return [e for e in groups if e.group not in CHANGED]


def unwritten(page: str) -> bool:
    """Whether a verdict should stand on a page, and none does."""
    return any(not place.strip() for place in _VERDICT.findall(page))


def update_figures(folder: Path, pages: str, groups: list[Evidence], check: bool) -> list[str]:
    """Draw the figures that pages show; what a figure was drawn from stands in its description.

    Returns:
        Names of those that were, or with `check` would be, drawn anew.
    """
    stale = []
    for name, correctness in FIGURES.items():
        file = folder / name
        if name not in pages:
            continue
        found = couplings(groups, correctness)
        described = coupling_table(groups, correctness)
        if file.exists() and Image.open(file).info.get("Description") == described:
            continue
        stale.append(name)
        if found and not check:
            figures.save(draw_coupling(found, CORRECTNESS_LABELS[correctness][1]), file, described)
    return stale


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where something differs.")
@click.option("--quick", is_flag=True, help="With --check: compute nothing.")
def main(check: bool, quick: bool) -> None:
    evidence = DOCS / "evidence"
    made_from = digest(evidence)
    pages = {p: p.read_text(encoding="utf-8") for p in sorted(DOCS.glob("*.md"))}
    pages |= {p: p.read_text(encoding="utf-8") for p in sorted(evidence.glob("*.md"))}
    pages = {page: text for page, text in pages.items() if _PLACE.search(text)}
    try:
        if check and quick:
            known = f"<!-- made from {made_from} -->"
            stale = [page.name for page, text in pages.items() if known not in text]
        else:
            groups = load(evidence)
            stale = update_figures(evidence, "".join(pages.values()), unchanged(groups), check)
            for page, text in pages.items():
                made = filled(text, groups, made_from)
                if made != text:
                    stale.append(page.name)
                    if not check:
                        page.write_text(made, encoding="utf-8")
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{'to be made anew' if check else 'made anew'}: {', '.join(stale) or 'nothing'}")
    empty = [page.name for page, text in pages.items() if unwritten(text)]
    if empty:
        click.echo(f"without a verdict, so not to be published: {', '.join(empty)}")
    raise SystemExit(bool(check and (stale or empty)))


if __name__ == "__main__":
    main()
