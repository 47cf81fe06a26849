"""`polygraph_asmi score`: score answers from the shell."""

import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lm_polygraph_asmi.config import ASMIConfig, check_streamed
from lm_polygraph_asmi.files import locked, write_whole
from lm_polygraph_asmi.options import given_settings, setting_options
from lm_polygraph_asmi.validation import TOKENS, check_writable

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.calibration import Calibration
    from lm_polygraph_asmi.scoring.result import Score

TEMPORARY_MARK = "made-by-score"
"""File in a result cache that is deleted after use, because no option named it."""
DECISIONS = {True: "accepted", False: "abstained", None: "without a decision"}
MINUTE = 60.0
CHECKED_ROWS = 100
"""Number of rows whose field names are checked for spelling."""


@click.command()
@click.argument("rows_file", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", required=True, help="Folder, hub ID, or smollm2 (the demo's model).")
@click.option("--gguf-file", help="GGUF file in the folder with the weights.")
@click.option("--dtype", default="auto", show_default=True, help="Data type: auto, float32, ...")
@click.option("--device-map", help="Where to load the model: auto uses GPUs; default: CPU.")
@click.option("--answer", help="Answer text to score; default: the model's greedy answer.")
@click.option("--chat", is_flag=True, help="Apply the chat template to text prompts.")
@setting_options()
@click.option(
    "--calibration",
    multiple=True,
    type=click.Path(exists=True),
    help="Calibration: a file saved by `polygraph_asmi calibrate` or `export`, or a finished "
    "run (its manager file is a pickle: load only files you trust). Repeat to calibrate both "
    "answers and parts of answers.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="File for the scores: .jsonl, or .parquet if ROWS_FILE is Parquet.",
)
@click.option(
    "--result-cache",
    type=click.Path(file_okay=False),
    help="Folder that stores results, so that an interrupted run resumes; several runs may share "
    "it. Default: OUT.cache, deleted when all rows are scored.",
)
@click.option(
    "--tokens",
    type=click.Choice(TOKENS),
    help="Detail per token in --out; default: full, or compact in Parquet.",
)
@click.option("--stream", is_flag=True, help="Print and score the answer during generation.")
@click.option("--html", type=click.Path(dir_okay=False), help="HTML page to write.")
def score(
    rows_file: str,
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    answer: str | None,
    chat: bool,
    calibration: tuple[str, ...],
    out: str | None,
    result_cache: str | None,
    tokens: str | None,
    stream: bool,
    html: str | None,
    **settings: Any,
) -> None:
    """Score answers to the prompts in ROWS_FILE.

    ROWS_FILE is a text file with one prompt; or JSON lines (.jsonl) or Parquet with `prompt`, and
    optionally `answer`, `samples`, `offsets` and `id`, per row.

    Exits with status 1 if any row fails.
    """
    from rich.console import Console
    from rich.progress import track

    from lm_polygraph_asmi.scoring.calibration import settled
    from lm_polygraph_asmi.scoring.page import render
    from lm_polygraph_asmi.scoring.rows import (
        in_chat,
        misspelt,
        read_rows,
        row_count,
        score_file,
        score_rows,
    )

    console, errors = Console(), Console(stderr=True)
    if not sys.warnoptions:  # of other libraries, which users cannot fix
        warnings.simplefilter("ignore")
    try:
        explicit = given_settings(settings)
        if not calibration:  # else its settings are the defaults
            ASMIConfig().replace(**explicit)  # raises if out of range
        check_files(rows_file, out, html)
        if answer == "":
            raise ValueError(
                "expected a text, got an empty --answer. Leave it out to score the model's greedy "
                "answer"
            )
        number = row_count(rows_file)
        if not number:
            raise ValueError(f"{rows_file} has no rows")
        for_one = {"--answer": answer is not None, "--stream": stream}
        if number > 1 and any(for_one.values()):
            option = next(option for option, used in for_one.items() if used)
            raise ValueError(f"{option} needs a single prompt, got {number} rows")
        if number > 1 and not (out or html):
            raise ValueError(f"{rows_file} has {number} rows: name a file with --out or --html")
        first = list(islice(read_rows(rows_file), CHECKED_ROWS))
        for field, close in misspelt({name for row in first for name in row.content}).items():
            errors.print(f"Warning: ignoring the field {field!r}; did you mean {close!r}?",
                         style="yellow", highlight=False)  # fmt: skip
        if all(row.error for row in first):
            raise ValueError(f"{rows_file}, row {first[0].number}: {first[0].error}")
        row_fields: dict[str, Any] = {} if answer is None else {"answer": answer}

        def apply_options(content: dict[str, Any]) -> dict[str, Any]:
            return in_chat(content | row_fields) if chat else content | row_fields

        _, *loaded = settled(calibration, None, explicit)
        calibrations = [*filter(None, loaded)]
        if stream and (answer is not None or out):
            raise ValueError("--stream needs a prompt without --answer or --out")
        if stream:
            check_streamed(explicit)
        from lm_polygraph_asmi.scoring.scorer import Scorer  # imports torch: after all checks

        if out:  # until the command ends, so that a second one stops before it loads a model
            lock = locked(f"{out}.lock", remove=True, output=out)
            click.get_current_context().with_resource(lock)
        if out and not result_cache and Path(f"{out}.cache", TEMPORARY_MARK).is_file():
            errors.print("Resuming: rows in the cache of an earlier run are not scored again.")
        cache = result_cache or (own_cache(out) if out else None)
        with errors.status(f"Loading {model}"):
            scorer = Scorer(
                model, gguf_file=gguf_file, dtype=dtype, device_map=device_map,
                calibration=calibrations, result_cache=cache, **explicit,
            )  # fmt: skip
        if stream:
            row = first[0]._replace(content=apply_options(first[0].content))
            result = _streamed(scorer, row, console)
            if html:
                write_whole(html, render([result], "Fragility of an answer"))
            return
        if out:
            scored = score_file(scorer, rows_file, out, tokens, apply_options)
        else:
            rows = (r._replace(content=apply_options(r.content)) for r in read_rows(rows_file))
            scored = score_rows(scorer, rows)
        summary, pages = Summary(scorer.calibration), []
        progress = track(scored, "Scoring", total=number, console=errors, disable=number < 2)
        if not errors.is_terminal and number > 1:
            progress = _counted(progress, number, errors)
        for row, outcome in progress:
            result = outcome.score
            summary.add(result)
            if result is None:
                row_id = row.content.get("id")
                row_name = f"row {row.number}" if row_id is None else f"row {row.number} ({row_id})"
                errors.print(f"{row_name}: {outcome.error}", style="red", markup=False,
                             highlight=False, soft_wrap=True)  # fmt: skip
                continue
            if summary.differs(result):
                errors.print(f"Warning: {result.accept_reason}", style="yellow", markup=False,
                             highlight=False, soft_wrap=True)  # fmt: skip
            if html:
                pages.append(result)
            if number == 1:
                console.print(result, highlight=False)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if html:
        write_whole(html, render(pages, "Fragility of answers"))
        console.print(f"Page: {html}", highlight=False)
    if number > 1:
        console.print(str(summary), highlight=False, soft_wrap=True)
        if out:
            console.print(f"Scores: {out}", highlight=False, markup=False)
        for drift in summary.drifts():
            errors.print(f"Warning: {drift}.", style="yellow", highlight=False, soft_wrap=True)
    if summary.counts["failed"]:
        raise SystemExit(1)
    if cache and Path(cache, TEMPORARY_MARK).exists():
        shutil.rmtree(cache, ignore_errors=True)


def _counted(rows: Iterable[Any], total: int, console: Any) -> Iterator[Any]:
    """The rows; prints their number once a minute, for files and logs, where no bar is drawn."""
    printed = time.monotonic()
    for number, row in enumerate(rows, start=1):
        yield row
        if time.monotonic() - printed >= MINUTE:
            console.print(f"{number} of {total} rows", highlight=False)
            printed = time.monotonic()


def _streamed(scorer: Any, row: Any, console: Any) -> Any:
    """Print the answer, each token shaded as it appears, then its score."""
    from rich.text import Text

    from lm_polygraph_asmi.scoring.page import visible
    from lm_polygraph_asmi.scoring.terminal import ink

    if row.error is not None:
        raise ValueError(row.error)
    with scorer.stream(row.content["prompt"]) as tokens:
        for token in tokens:
            console.print(Text(visible(token.text), style=ink(token)), end="")
        console.print()
        result = tokens.result
    console.print(result, highlight=False)
    return result


class Measured(NamedTuple):
    """What a test of drift needs of a score."""

    score: float
    msp: float
    prompt_tokens: int | None


class Summary:
    """Counts over all rows; no score stays in memory."""

    def __init__(self, calibration: "Calibration | None") -> None:
        decides = calibration is not None and calibration.decision is not None
        self.calibration = calibration if decides else None
        self.counts: Counter[str] = Counter()
        self.measured: list[Measured] = []
        self.reason: str | None = None
        self.start = time.perf_counter()

    def add(self, score: "Score | None") -> None:
        """Count a row; None: it failed."""
        self.counts["failed" if score is None else "scored"] += 1
        if score is None:
            return
        self.counts["with warnings"] += bool(score.warnings)
        if self.calibration is not None:
            accept = score.accept
            self.counts[DECISIONS[accept]] += 1
            self.measured.append(Measured(score.score, score.msp, score.prompt_tokens))
            if accept is None:
                self.reason = self.reason or score.accept_reason

    def differs(self, score: "Score") -> bool:
        """Whether this is the first score, of several, that the calibration is not for."""
        if self.calibration is None or self.counts["scored"] != 1:
            return False
        return bool(self.calibration.other_settings(score.compared_settings))

    def drifts(self) -> list[Any]:
        """Quantities that differ from the calibration answers."""
        return [] if self.calibration is None else self.calibration.drifts(self.measured)

    def _listed(self, *names: str) -> str:
        return ", ".join(f"{self.counts[name]} {name}" for name in names if self.counts[name])

    def __str__(self) -> str:
        rate = self.counts["scored"] / (time.perf_counter() - self.start)
        lines = [
            f"{self._listed('scored', 'failed', 'with warnings')}, {rate:.3g} rows per second."
        ]
        if decided := self._listed(*DECISIONS.values()):
            lines.append(f"{decided}. {self.reason or ''}".rstrip())
        return "\n".join(lines)


def own_cache(out: str) -> str:
    """Folder of the result cache beside OUT, marked as one to delete.

    Raises:
        ValueError: there is another folder or file of that name.
    """
    folder = Path(f"{out}.cache")
    if folder.exists() and not (folder / TEMPORARY_MARK).is_file():
        raise ValueError(f"{folder} exists: pass it as --result-cache, or remove it")
    folder.mkdir(exist_ok=True)
    (folder / TEMPORARY_MARK).touch()
    return str(folder)


def check_files(rows_file: str, out: str | None, html: str | None) -> None:
    """Raise ValueError unless the outputs can be written without overwriting an input or scores."""
    from lm_polygraph_asmi.scoring.rows import check_out

    for file in map(Path, filter(None, (out, html))):
        check_writable(file)
    if not Path(rows_file).is_file():
        raise ValueError(f"{rows_file}: expected a file, got a pipe or device: save its content")
    if html and Path(html).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"expected --html with the name of an .html file, got {html}")
    if out:
        check_out(rows_file, out)
