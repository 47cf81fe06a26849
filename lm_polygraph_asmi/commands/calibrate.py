"""`polygraph_asmi calibrate`: from labelled answers to a threshold with a promise."""

import sys
import warnings
from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.score import score
from lm_polygraph_asmi.commands.settings import said
from lm_polygraph_asmi.config import ASMIConfig

LOADING = ("model", "gguf_file", "dtype", "device_map", "chat")
SHARED = {*LOADING, *ASMIConfig.names("masks", "score", "machine")} - {"source"}
"""Options that mean here what they mean to `score`."""


@click.command(params=[option for option in score.params if option.name in SHARED])
@click.argument("rows", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--run",
    type=click.Path(exists=True),
    help="A finished benchmark run, for ROWS; settings that are not given are the run's.",
)
@click.option(
    "--metric",
    help="For --run: the quality metric that labels; default AlignScore, else its first.",
)
@click.option("--risk", type=float, required=True, help="Promised share of errors, such as 0.1.")
@click.option("--confidence", default=0.95, show_default=True, help="Of the promise.")
@click.option(
    "--signal",
    default="best",
    show_default=True,
    help="best (chosen on a fifth of the clusters), score, asmi, sem, adapt, msp, perplexity "
    "or entropy.",
)
@click.option("--right-from", type=float, help="Lowest quality of a right answer; default 0.5.")
@click.option(
    "--scored",
    type=click.Path(dir_okay=False),
    help="JSON lines of the scores; those in it are kept, after a break or for another --risk.",
)
@click.option("--figure", type=click.Path(dir_okay=False), help="Coverage against promised risk.")
@click.option(
    "--reliability", type=click.Path(dir_okay=False), help="Figure: rates by probability, held out."
)
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
def calibrate(
    rows: str | None,
    run: str | None,
    metric: str | None,
    risk: float,
    confidence: float,
    signal: str,
    right_from: float | None,
    scored: str | None,
    figure: str | None,
    reliability: str | None,
    out: str,
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    chat: bool,
    **settings: Any,
) -> None:
    """Which answers may be shown: a threshold, from ROWS of labelled answers.

    ROWS are JSON lines with `prompt` (text or messages), `answer`, and `correct` (true or false) or
    `quality` (a number); rows over one passage are found by their prompts, or named by `cluster`.
    What is written is for `score --calibration`, with the same model; it says the settings.
    """
    from rich.console import Console
    from rich.progress import Progress

    console, errors = Console(), Console(stderr=True)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    if Path(out).suffix != ".json":
        raise click.BadParameter(
            "name a .json file: by that a saved calibration run is known", param_hint="--out"
        )
    if (rows is None) == (run is None):
        raise click.UsageError("give ROWS of labelled answers, or a finished run with --run")
    if run is None and metric is not None:
        raise click.UsageError("--metric is for --run: in ROWS the label is `correct` or `quality`")
    if run is not None and (scored or right_from is not None):
        raise click.UsageError("--scored and --right-from are for ROWS: a run has its own scores")
    for file in filter(None, (out, scored, figure, reliability)):
        if not Path(file).absolute().parent.is_dir():
            raise click.BadParameter(f"{file} cannot be written: there is no such folder")
    try:
        for name, value in (("risk", risk), ("confidence", confidence)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")
        from lm_polygraph_asmi.scoring.calibrate import (
            RIGHT,
            calibrate_rows,
            calibrate_run,
            labels_of,
        )
        from lm_polygraph_asmi.scoring.calibration import Calibration
        from lm_polygraph_asmi.scoring.loading import load
        from lm_polygraph_asmi.scoring.rows import in_chat, read_rows

        given = [] if rows is None else read_rows(rows)
        if chat:
            in_chat(given)
        limit = RIGHT if right_from is None else right_from
        labels_of(given, limit)  # before the model is loaded
        config = ASMIConfig()
        if run is not None:
            config = Calibration.from_run(run, metric, **said(settings)).config
        config = config.replace(**said(settings))
        with errors.status(f"Loading {model}"):
            scorer = load(model, gguf_file, dtype, device_map, config=config)
        if run is None:
            with Progress(console=errors, transient=True) as bar:
                scoring = bar.add_task("Scoring", total=None)
                found = calibrate_rows(
                    given, scorer, risk, confidence, signal=signal, right_from=limit,
                    name=Path(str(rows)).name, out=scored,
                    progress=lambda done, all_: bar.update(scoring, completed=done, total=all_),
                )  # fmt: skip
        else:
            with errors.status("Calibrating"):
                found = calibrate_run(run, scorer, risk, confidence, signal=signal, metric=metric)
        tested = found.n if found.decision is None else found.decision.found.answers
        if silent := (len(given) or found.n) - tested:
            errors.print(f"{silent} answers of nothing left out: `score` never accepts one.")
        found.save(out)
        if figure or reliability:
            from lm_polygraph_asmi.report import figures

            if figure:
                figures.save(figures.other_thresholds(found.threshold_table), figure)
            if reliability:
                diagram = found.diagram
                if diagram is None:
                    raise ValueError(
                        f"{reliability} is not drawn: of so few answers none can be held out"
                    )
                figures.save(figures.reliability({found.name: diagram}), reliability)
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(found, highlight=False)
    console.print(f"Calibration: {out}", highlight=False, markup=False)
