"""The console command `polygraph_asmi`, beside LM-Polygraph's own `polygraph_eval`."""

from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """ASMI for LM-Polygraph: what to do before and after polygraph_eval."""


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--together", "as_one", is_flag=True, help="Runs over the same answers, in one table."
)
def results(runs: tuple[str, ...], as_one: bool) -> None:
    """Show the PRR of every method of finished RUNS (folders or manager files)."""
    from rich.console import Console

    from lm_polygraph_asmi.report.tables import notes, prr_table
    from lm_polygraph_asmi.saved.runs import load_run, manager_files, together

    console = Console()
    try:
        loaded = [load_run(file) for path in runs for file in manager_files(path)]
        loaded = [together(loaded)] if as_one else loaded
    except (FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for run in loaded:
        console.print(f"\n{run.path}", style="dim", highlight=False)
        for metric in run.quality:
            console.print(prr_table(run, metric))
            console.print(notes(run, metric), highlight=False)


@main.command()
@click.option(
    "--model", required=True, help="Folder, name on a hub, or smollm2 (the demo's model)."
)
@click.option("--gguf-file", help="Weights in this file of the folder.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ...")
@click.option("--device-map", help="auto for GPUs; default: the CPU.")
@click.option(
    "--prompt-file",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A prompt as text, or .jsonl with prompt and, if wanted, answer and samples in each row.",
)
@click.option("--answer", help="Text as it follows the prompt; default: the model's own answer.")
@click.option("--chat", is_flag=True, help="Put text prompts through the chat template.")
@click.option("--variant", type=click.Choice(["asmi", "sem", "adapt"]), default="sem")
@click.option("--depth", default=0.6, show_default=True, help="Relative depth of the masked layer.")
@click.option("--scope", type=click.Choice(["all", "response"]), default="all", show_default=True)
@click.option("--num-masks", type=int, help="S; default: derived from the model's heads.")
@click.option("--mask-rate", type=float, help="p; default: derived from the model's heads.")
@click.option(
    "--mask-sampler",
    type=click.Choice(["bernoulli", "balanced"]),
    default="bernoulli",
    show_default=True,
)
@click.option("--top-k", default=64, show_default=True, help="K, tokens kept per distribution.")
@click.option("--seed", default=0, show_default=True, help="Of the masks, and of drawn answers.")
@click.option(
    "--closing-token/--no-closing-token",
    default=True,
    show_default=True,
    help="Whether the token that ends the answer counts.",
)
@click.option("--num-samples", default=10, show_default=True, help="For adapt: answers to draw.")
@click.option("--tau", default=0.3, show_default=True, help="For adapt: middle of the gate.")
@click.option("--beta", default=10.0, show_default=True, help="For adapt: its steepness.")
@click.option("--stop", multiple=True, help="Ends answers; \\n is a line break.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option(
    "--reference",
    type=click.Path(exists=True),
    help="What the number means: a finished run (its manager file is a pickle: only files you "
    "trust), or what `polygraph_asmi reference` saved.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="JSON lines; rows in it are kept.")
@click.option("--html", type=click.Path(dir_okay=False), help="Page to write.")
def score(
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    prompt_file: str,
    answer: str | None,
    chat: bool,
    stop: tuple[str, ...],
    out: str | None,
    html: str | None,
    **settings: Any,
) -> None:
    """Score answers: how fragile they are, token by token, and what that means.

    The exit status is 1 if a row could not be scored.
    """
    from rich.console import Console
    from rich.progress import track

    from lm_polygraph_asmi.scoring.loading import load
    from lm_polygraph_asmi.scoring.page import render
    from lm_polygraph_asmi.scoring.rows import read_rows, rows_left, score_rows

    console, errors = Console(), Console(stderr=True)
    try:
        for file in filter(None, (out, html)):
            if not Path(file).absolute().parent.is_dir():
                raise ValueError(f"{file} cannot be written: there is no such folder")
        rows = read_rows(prompt_file)
        if not rows:
            raise ValueError(f"{prompt_file} holds no row")
        if answer is not None and len(rows) > 1:
            raise ValueError("--answer is for a single prompt: put answers into the .jsonl file")
        if len(rows) > 1 and not (out or html):
            raise ValueError(
                f"{prompt_file} holds {len(rows)} rows: name a file with --out or --html"
            )
        if answer is not None:
            rows[0].content["answer"] = answer
        if chat:
            for row in rows:
                if isinstance(row.content.get("prompt"), str):
                    message = {"role": "user", "content": row.content["prompt"]}
                    row.content["prompt"] = [message]
        unescaped = [text.replace("\\n", "\n") for text in stop]
        scorer = load(model, gguf_file, dtype, device_map, stop=unescaped, **settings)
        left = rows_left(scorer, rows, Path(out) if out else None)
        if html and len(left) < len(rows):
            raise ValueError(
                f"{out} holds some rows already, which --html cannot show: leave it out"
            )
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    if len(left) < len(rows):
        console.print(f"{len(rows) - len(left)} of {len(rows)} rows are in {out} already.")
    scores, failed = [], 0
    found = score_rows(scorer, rows, Path(out) if out else None)
    shown = track(found, "Scoring", total=len(left), console=errors, disable=len(left) < 2)
    for row, result, problem in shown:
        if result is None:
            failed += 1
            errors.print(f"row {row.number}: {problem}", style="red", markup=False, highlight=False)
            continue
        if html:
            scores.append(result)
        if len(rows) == 1:
            console.print(result, highlight=False)
    if html:
        Path(html).write_text(render(scores, "Fragility of answers"), encoding="utf-8")
        console.print(f"Page: {html}", highlight=False)
    if failed:
        raise SystemExit(1)


@main.command()
@click.argument("run", type=click.Path(exists=True))
@click.option("--variant", type=click.Choice(["asmi", "sem", "adapt"]), default="sem")
@click.option("--depth", default=0.6, show_default=True, help="Relative depth of the masked layer.")
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def reference(run: str, variant: str, depth: float, out: str) -> None:
    """Save what `score --reference` needs of a finished RUN, without its questions and answers."""
    from rich.console import Console

    from lm_polygraph_asmi.scoring import Reference

    if Path(out).suffix != ".json":
        raise click.BadParameter("name a .json file: by that a saved reference is known")
    try:
        found = Reference.from_run(run, variant, depth)
        found.save(out)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(f"{out}: {found.ground}", highlight=False, markup=False)


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the report."
)
@click.option("--metric", help="Quality metric; default AlignScore, else the first of a run.")
@click.option(
    "--depth",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.6,
    show_default=True,
    help="Operating depth; a run that has not got it is read at its nearest.",
)
def report(runs: tuple[str, ...], out: str, metric: str | None, depth: float) -> None:
    """Write the paper's tables and figures from finished RUNS (folders or manager files).

    Runs over the same answers are shown together: other masks, other K, another scope, redraws.
    OUT/report.md holds everything; OUT/tables has it as CSV, LaTeX and Markdown, OUT/figures as PNG
    and SVG.
    """
    from rich.console import Console
    from rich.progress import track

    from lm_polygraph_asmi.report import build_report, load_cells

    console = Console()
    try:
        cells = load_cells(runs, metric, depth)
        file, said = build_report(
            cells, out, lambda items: track(items, "Tables and figures", console=console)
        )
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for line in said:
        console.print(line.replace("**", ""), highlight=False, markup=False)
    console.print(f"{len(cells)} cells: {file}", highlight=False)


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--out", required=True, type=click.Path(file_okay=False), help="Folder for the joined files."
)
def merge(runs: tuple[str, ...], out: str) -> None:
    """Join the shards of split RUNS (manager files, or folders searched for them).

    The joined manager file is what one job over all rows would have left, metrics included. Several
    cells go to OUT/MODEL/DATASET, a single one into OUT; nothing is written over. The exit status
    is 1 if something could not be joined.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from lm_polygraph_asmi.runs.merge import merge_runs

    console = Console()
    with console.status("Joining shards, computing LM-Polygraph's metrics over all rows ..."):
        merged, errors = merge_runs(runs, out)
    if merged:
        table = Table("cell", "shards", "rows", "file")
        for run in merged:
            table.add_row(run.cell, str(run.shards), str(run.rows), escape(str(run.file)))
        console.print(table)
    for run in merged:
        for warning in run.warnings:
            console.print(f"{run.cell}: {warning}", style="yellow", highlight=False, markup=False)
    if errors:
        raise click.ClickException("\n".join(errors))


@main.command()
@click.option("--heads", required=True, type=click.IntRange(min=4), help="H, query heads a layer.")
@click.option("--out", type=click.Path(dir_okay=False), help="Figure to write (.png, .svg, .pdf).")
@click.option(
    "--point", type=(float, int), help="Mask rate and masks of your own, such as 0.10 16."
)
def plan(heads: int, out: str | None, point: tuple[float, int] | None) -> None:
    """Print the masks S and the mask rate p for a model with so many heads, and why.

    S from the coverage bound (every head masked at least once), p from the fidelity bound (no more
    than a quarter of the heads masked at once), each with probability 0.95. The estimators take the
    same point by default.
    """
    from rich.console import Console
    from rich.table import Table

    from lm_polygraph_asmi.maths import masks_for_coverage, never_masked_heads, operating_point
    from lm_polygraph_asmi.report import figures
    from lm_polygraph_asmi.report.plan import plan_figure, plan_table

    console = Console()
    found, chosen = plan_table(heads), operating_point(heads)
    shown = Table(title=f"{heads} heads, of which {heads // 4} may be masked at once")
    for column in found:
        shown.add_column(str(column), justify="right")
    for row in found.itertuples(index=False):
        style = "bold" if row[0] == chosen.mask_rate else None if row[4] else "dim"
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row]
        cells[4] = "yes" if row[4] else "no"
        shown.add_row(*cells, style=style)
    console.print(shown)
    console.print(
        f"Cheapest admissible point: p = {chosen.mask_rate}, S = {chosen.num_masks} (the default "
        "of the estimators).",
        highlight=False,
    )
    if point is not None:
        rate, masks = point
        if not 0 < rate < 1 or masks < 1:
            raise click.BadParameter("wanted a mask rate in (0, 1) and at least one mask")
        missed = never_masked_heads(heads, rate, masks)
        console.print(
            f"At p = {rate:g}, S = {masks}, {missed:.1f} of {heads} heads are never masked on "
            f"average; the coverage bound wants {masks_for_coverage(heads, rate)} masks.",
            highlight=False,
        )
    if out is not None:
        try:
            figures.save(plan_figure(found, heads), out)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{out} cannot be written: {error}") from error
        console.print(f"Figure: {out}", highlight=False)


@main.command()
@click.option("--config-name", required=True, help="As for polygraph_eval.")
@click.option(
    "--config-dir", type=click.Path(exists=True, file_okay=False), help="As for polygraph_eval."
)
@click.option(
    "--run/--no-run",
    default=True,
    help="Score two rows with every method, downloading what the run would download.",
)
@click.argument("overrides", nargs=-1)
def doctor(config_name: str, config_dir: str | None, run: bool, overrides: tuple[str, ...]) -> None:
    """Say whether a run will work and what it will cost, before it is started.

    OVERRIDES are those of polygraph_eval, with one value each: of a sweep, one job is examined. The
    exit status is 1 if something stands in the way.
    """
    from rich.console import Console

    from lm_polygraph_asmi.runs.doctor import diagnose

    try:
        works = diagnose(Console(), config_name, config_dir, overrides, run)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if not works:
        raise SystemExit(1)
