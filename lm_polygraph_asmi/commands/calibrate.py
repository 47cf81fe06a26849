"""`polygraph_asmi calibrate`: a threshold with a risk guarantee, from labelled answers."""

import sys
import warnings
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.commands.score import LOADING, score
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.options import given_settings
from lm_polygraph_asmi.validation import check_new, check_writable

if TYPE_CHECKING:
    from lm_polygraph_asmi.decisions import Calibration
    from lm_polygraph_asmi.scoring.rows import Row

MAIN = ("risk", "signal", "out", "run", "unlabelled", "help")
SHARED = {"model", "chat", *LOADING, *ASMIConfig.names()}
"""Options with the same meaning as in `score`."""


class MainFirst(click.Command):
    """Its help lists the options that most need first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Command.format_options`."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        for title, main in (("Options", True), ("Advanced", False)):
            records = [p.get_help_record(ctx) for p in options if (p.name in MAIN) == main]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record])


def _options() -> list[click.Parameter]:
    """The shared options; the model is named in scored rows and in a finished run."""
    options = [copy(option) for option in score.params if option.name in SHARED]
    (model,) = (option for option in options if option.name == "model")
    model.required, model.help = False, "Model of ROWS that are not scored yet; see score."
    return options


@click.command(
    cls=MainFirst,
    params=_options(),
    short_help="Threshold with a risk guarantee, from labels.",
)
@click.argument("rows", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--risk", type=float, required=True, help="Error rate to guarantee, such as 0.1.")
@click.option(
    "--signal",
    default="best",
    show_default=True,
    help="Score to threshold: score, asmi, sem, adapt, msp, perplexity or entropy, which all "
    "labels test; best of these, chosen on a fifth of the labels; or learned, on half of them.",
)
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file to write.")
@click.option(
    "--run",
    type=click.Path(exists=True),
    help="Finished benchmark run, instead of ROWS; its settings are the defaults.",
)
@click.option(
    "--unlabelled",
    type=click.Path(exists=True, dir_okay=False),
    help="With ROWS: other scored rows like later ones, without labels. Their scores are the "
    "thresholds to test, which makes the guarantee valid without any condition.",
)
@click.option(
    "--confidence",
    default=0.95,
    show_default=True,
    help="Minimum probability that the guarantee holds, over samples of labelled answers.",
)
@click.option(
    "--metric",
    help="With --run: quality metric for the labels; default: AlignScore, else its first metric.",
)
@click.option(
    "--right-from",
    type=float,
    help="Lowest quality of a correct answer; default: 0.5, of a quality between 0 and 1.",
)
def calibrate(rows: str | None, run: str | None, out: str, **options: Any) -> None:
    """Compute a threshold with a risk guarantee from labelled answers: ROWS or --run is required.

    ROWS is a file of `score --out`, with `correct` (true or false) or `quality` (a number) filled
    in; model and settings are those of the file. Rows about one passage form a cluster, found by
    their `context` or prompt, or named in `cluster`. Pass OUT to `decide --calibration`.
    """
    from rich.console import Console

    console, errors = Console(), Console(stderr=True)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    settings = given_settings({n: v for n, v in options.items() if n in ASMIConfig.names()})
    _check_usage(out, rows, run, options, settings)
    asked = {name: options[name] for name in ("risk", "confidence", "signal", "right_from")}
    try:
        check_writable(out)
        from lm_polygraph_asmi.decisions.fit import check_signal

        check_signal(asked["signal"], asked["risk"], asked["confidence"], run is not None)
        check_new(
            out,
            "name another file, or remove it. If it is of the same labels, each further "
            "calibration lowers the confidence; choosing the best one voids the stated one",
        )
        labelled = [] if rows is None else _labelled(rows, options, errors)
        if run is not None:
            from lm_polygraph_asmi.decisions.run import calibrate_run

            with errors.status("Calibrating"):
                result = calibrate_run(run, metric=options["metric"], **asked, **settings)
        else:
            result = _calibrated(labelled, errors, options, settings, asked)
            result = replace(result, name=Path(str(rows)).name)
        if empty := max(0, len(labelled) - result.n):
            errors.print(f"Left out {empty} empty answers: they are never accepted.")
        result.save(out)
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(result, highlight=False)
    console.print(f"Calibration: {out}", highlight=False, markup=False)


def _check_usage(
    out: str, rows: str | None, run: str | None, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    if Path(out).suffix != ".json":
        raise click.BadParameter(f"expected a .json file, as `decide` needs it, got {out}")
    if (rows is None) == (run is None):
        raise click.UsageError("expected either ROWS of labelled answers or a finished run (--run)")
    if run is None and options["metric"] is not None:
        raise click.UsageError("--metric needs --run: in ROWS, `correct` or `quality` is the label")
    if run is not None and (options["model"] or options["unlabelled"]):
        raise click.UsageError("--model and --unlabelled need ROWS: a run has its own scores")
    if run is None and settings and options["model"] is None:
        raise click.UsageError(f"{', '.join(settings)} are those of ROWS: leave them out, or name "
                               "the --model, too")  # fmt: skip


def _labelled(rows: str, options: dict[str, Any], errors: Any) -> "list[Row]":
    """The labelled rows, checked before torch is imported and a model loaded."""
    from lm_polygraph_asmi.decisions.labels import labelled_only, labels_of

    found = _read(rows, options["chat"])
    labelled = labelled_only(found)
    labels_of(labelled, options["right_from"])
    if without := len(found) - len(labelled):
        errors.print(f"Left out, without a label: {without} rows.")
    return labelled


def _read(rows: str, chat: bool) -> "list[Row]":
    from lm_polygraph_asmi.scoring.rows import in_chat, read_rows

    return [
        row._replace(content=in_chat(row.content)) if chat and "digest" not in row.content else row
        for row in read_rows(rows)
    ]


def _calibrated(
    labelled: "list[Row]", errors: Any, options: dict[str, Any], settings: dict[str, Any],
    asked: dict[str, Any],
) -> "Calibration":  # fmt: skip
    """`calibrate_rows`, by a model only where one is named, or read by the learned score."""
    from rich.progress import track

    from lm_polygraph_asmi.decisions.rows import calibrate_rows, scored, scorer_for
    from lm_polygraph_asmi.scoring.signals import LEARNED

    others = _read(options["unlabelled"], options["chat"]) if options["unlabelled"] else []
    model, scorer = options["model"], None
    if model is not None or asked["signal"] == LEARNED:
        with errors.status("Loading the model"):
            scorer = scorer_for(labelled, model, settings, **{n: options[n] for n in LOADING})
        rows = track(scored(labelled, scorer), "Scoring", len(labelled), console=errors)
        labelled = list(rows)
    result = calibrate_rows(labelled, **asked, unlabelled=others, scorer=scorer)
    loading = {n: options[n] for n in LOADING if n != "device_map"}
    return replace(result, loading={n: v for n, v in loading.items() if v not in (None, "auto")})
