"""`polygraph_asmi calibrate`: a threshold with a risk guarantee, from labelled answers."""

import sys
import warnings
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.commands.score import score
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import writing
from lm_polygraph_asmi.options import given_settings
from lm_polygraph_asmi.validation import check_new, check_writable

if TYPE_CHECKING:
    from lm_polygraph_asmi.calibration import Calibration
    from lm_polygraph_asmi.scoring.rows import Row

LOADING = ("model", "gguf_file", "dtype", "device_map", "chat")
SHARED = {*LOADING, *ASMIConfig.names("masks", "score", "machine"), "max_new_tokens"}
"""Options with the same meaning as in `score`."""


def _options() -> list[click.Parameter]:
    """The shared options; a finished run needs no model."""
    options = [copy(option) for option in score.params if option.name in SHARED]
    (model,) = (option for option in options if option.name == "model")
    model.required, model.help = (
        False,
        f"{model.help} Needed with ROWS; with --run, its scores are checked.",
    )
    return options


@click.command(
    params=_options(),
    short_help="Threshold with a risk guarantee, from labels.",
)
@click.argument("rows", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--run",
    type=click.Path(exists=True),
    help="Finished benchmark run, instead of ROWS; its settings are the defaults.",
)
@click.option(
    "--metric",
    help="With --run: quality metric for the labels; default: AlignScore, else its first metric.",
)
@click.option("--risk", type=float, required=True, help="Error rate to guarantee, such as 0.1.")
@click.option(
    "--confidence",
    default=0.95,
    show_default=True,
    help="Minimum probability that the guarantee holds, over samples of labelled answers.",
)
@click.option(
    "--signal",
    default="best",
    show_default=True,
    help="Score to threshold: best (selected on a fifth of the clusters), score, asmi, sem, adapt, "
    "msp, perplexity, entropy, or learned (from two fifths of the labels, where it ranks better).",
)
@click.option(
    "--right-from",
    type=float,
    help="Lowest quality of a correct answer; default: 0.5, of a quality between 0 and 1.",
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
    out: str,
    model: str | None,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    chat: bool,
    **settings: Any,
) -> None:
    """Compute a threshold with a risk guarantee from labelled answers: ROWS or --run is required.

    ROWS is a JSON lines file with `prompt` (text or messages), `answer`, and `correct` (true or
    false) or `quality` (a number). Rows about one passage form a cluster, found by their `context`
    or prompt, or named in `cluster`. Pass OUT, which includes the settings, to
    `decide --calibration`.
    """
    from rich.console import Console

    console, errors = Console(), Console(stderr=True)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    _check_usage(out, rows, run, model, metric)
    try:
        check_writable(out)
        from lm_polygraph_asmi.calibration.fit import check_signal

        check_signal(signal, risk, confidence, run is not None)
        check_new(
            out,
            "name another file, or remove it. If it is of the same labels, each further "
            "calibration lowers the confidence; choosing the best one voids the stated one",
        )
        from lm_polygraph_asmi.calibration.labels import labels_of
        from lm_polygraph_asmi.calibration.run import calibrate_run, scored_group
        from lm_polygraph_asmi.scoring.rows import in_chat, read_rows

        labelled = [] if rows is None else list(read_rows(rows))
        if chat:
            labelled = [row._replace(content=in_chat(row.content)) for row in labelled]
        labels_of(labelled, right_from)  # before torch is imported and the model loaded
        config, explicit = ASMIConfig(), given_settings(settings)
        if run is not None:
            group, method = scored_group(run, metric, **explicit)
            config = group.methods[method]
        config = config.replace(**explicit)
        with writing(out) as partial:
            scorer = None
            if model is not None:
                from lm_polygraph_asmi.scoring.scorer import Scorer

                with errors.status(f"Loading {model}"):
                    scorer = Scorer(
                        model, config, gguf_file=gguf_file, dtype=dtype, device_map=device_map
                    )
            if run is None:
                result = _calibrated(
                    labelled, scorer, errors, risk, confidence, signal=signal,
                    right_from=right_from, name=Path(str(rows)).name,
                )  # fmt: skip
            else:
                with errors.status("Calibrating"):
                    result = calibrate_run(
                        run, scorer, risk, confidence, signal=signal, metric=metric,
                        right_from=right_from, **({} if scorer else explicit),
                    )  # fmt: skip
            if empty := (len(labelled) or len(group)) - result.n:
                errors.print(f"Left out {empty} empty answers: they are never accepted.")
            if scorer is None:
                errors.print(
                    "Without --model, the run's scores were not checked, and decisions do not "
                    "compare weights."
                )
            if "max_new_tokens" in explicit:  # a run and scored rows have their own
                limit = {"max_new_tokens": settings["max_new_tokens"]}
                result = replace(result, settings=result.settings | limit)
            partial.write_text(result.to_json(), encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(result, highlight=False)
    console.print(f"Calibration: {out}", highlight=False, markup=False)


def _check_usage(
    out: str,
    rows: str | None,
    run: str | None,
    model: str | None,
    metric: str | None,
) -> None:
    if Path(out).suffix != ".json":
        raise click.BadParameter(f"expected a .json file, as `decide` needs it, got {out}")
    if (rows is None) == (run is None):
        raise click.UsageError("expected either ROWS of labelled answers or a finished run (--run)")
    if run is None and model is None:
        raise click.UsageError("ROWS need the --model that answered them")
    if run is None and metric is not None:
        raise click.UsageError("--metric needs --run: in ROWS, `correct` or `quality` is the label")


def _calibrated(
    labelled: "list[Row]", scorer: Any, errors: Any, *guarantee: float, **options: Any
) -> "Calibration":
    """`calibrate_rows` with a progress bar, and how many saved scores it has kept."""
    from rich.progress import Progress

    from lm_polygraph_asmi.calibration.rows import calibrate_rows, scored_again

    scored: list[int] = []
    with Progress(console=errors, transient=True) as bar:
        scoring = bar.add_task("Scoring", total=None)

        def progress(count: int, total: int) -> None:
            scored.append(count)
            bar.update(scoring, completed=count, total=total)

        result = calibrate_rows(labelled, scorer, *guarantee, progress=progress, **options)
    if kept := len(labelled) - len(scored):
        errors.print(f"Kept the saved scores of {kept} rows.")
    if note := scored_again(labelled, kept):
        errors.print(f"Warning: {note}", style="yellow", highlight=False, soft_wrap=True)
    return result
