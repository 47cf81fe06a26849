"""`polygraph_asmi score`: score answers from the shell."""

import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import locked, write_whole
from lm_polygraph_asmi.options import given_settings, setting_options
from lm_polygraph_asmi.validation import TOKENS, check_writable

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.many import Rows

TEMPORARY_MARK = "made-by-score"
"""File in a result cache that is deleted after use, because no option named it."""
LOADING = ("gguf_file", "dtype", "device_map")
"""Options that load the model."""
MINUTE = 60.0
CHECKED_ROWS = 100
"""Number of rows whose field names are checked for spelling."""


def _refuse(_: Any, __: Any, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            "score takes no calibration: `polygraph_asmi decide` says what one tells of an answer"
        )


@click.command()
@click.argument("rows_file", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", required=True, help="Folder, hub ID, or smollm2 (the demo's model).")
@click.option("--gguf-file", help="GGUF file in the folder with the weights.")
@click.option("--dtype", default="auto", show_default=True, help="Data type: auto, float32, ...")
@click.option("--device-map", help="Where to load the model: auto uses GPUs; default: CPU.")
@click.option("--answer", help="Answer text; default: the model's greedy answer.")
@click.option("--chat", is_flag=True, help="Apply the chat template to text prompts.")
@setting_options()
@click.option(
    "--calibration", hidden=True, expose_value=False, callback=_refuse, help="See `decide`."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="File for the results: .jsonl, or .parquet if ROWS_FILE is Parquet.",
)
@click.option(
    "--result-cache",
    type=click.Path(file_okay=False),
    help="Folder that stores results, so that an interrupted run resumes; several runs may share "
    "it. Default: OUT.cache, deleted when all rows have a result.",
)
@click.option(
    "--tokens",
    type=click.Choice(TOKENS),
    help="Detail per token in --out; default: full, or compact in Parquet.",
)
@click.option("--html", type=click.Path(dir_okay=False), help="HTML page to write.")
def score(**options: Any) -> None:
    """Score answers to the prompts in ROWS_FILE.

    ROWS_FILE is a text file with one prompt; or JSON lines (.jsonl) or Parquet with `prompt`, and
    optionally `answer`, `samples` and `id`, per row.

    Exits with status 1 if any row fails.
    """
    from lm_polygraph_asmi.scoring.many import OUTPUT

    work, loading, explicit = Work.of(options)

    def check() -> None:
        ASMIConfig().replace(**explicit)  # raises if out of range

    def opened(cache: str | None) -> "Rows":
        from lm_polygraph_asmi.scoring.scorer import Scorer  # imports torch: after all checks

        return Scorer(work.model, result_cache=cache, **loading, **explicit)

    work.run(OUTPUT, check, opened, Summary(), "Fragility of answers")


class Work(NamedTuple):
    """What `score` and `decide` do with the rows of a file; fields are options of both."""

    rows_file: str
    model: str
    answer: str | None
    chat: bool
    out: str | None
    result_cache: str | None
    tokens: str | None
    html: str | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> tuple["Work", dict[str, Any], dict[str, Any]]:
        """Options of a command: the work, how to load the model, and the settings given."""
        work, loading = ({n: options.pop(n) for n in names} for names in (cls._fields, LOADING))
        return cls(**work), loading, given_settings(options)

    def run(
        self,
        output: Mapping[str, type],
        check: Callable[[], None],
        opened: "Callable[[str | None], Rows]",
        summary: "Summary",
        title: str,
    ) -> None:
        """Check everything, open what takes rows, run and print.

        Args:
            output: columns that are added to a table.
            check: raises for settings that are out of range.
            opened: loads the model, with a folder for results.
            summary: counts rows.
            title: of the page.
        """
        from rich.console import Console
        from rich.progress import track

        from lm_polygraph_asmi.scoring.page import render
        from lm_polygraph_asmi.scoring.rows import read_rows, score_file, score_rows

        console, errors = Console(), Console(stderr=True)
        if not sys.warnoptions:  # of other libraries, which users cannot fix
            warnings.simplefilter("ignore")
        try:
            check()
            number = self._checked(output, errors)
            if self.out:  # until the command ends, so that a second one stops before it loads
                lock = locked(f"{self.out}.lock", remove=True, output=self.out)
                click.get_current_context().with_resource(lock)
            if self.out and not self.result_cache and _temporary(f"{self.out}.cache"):
                errors.print("Resuming: rows in the cache of an earlier run are not run again.")
            cache = self.result_cache or (own_cache(self.out) if self.out else None)
            with errors.status(f"Loading {self.model}"):
                scorer = opened(cache)
            rows = (r._replace(content=self._with(r.content)) for r in read_rows(self.rows_file))
            outcomes = (
                score_file(scorer, self.rows_file, self.out, self.tokens, self._with)
                if self.out
                else score_rows(scorer, rows)
            )
            results = []
            progress = track(outcomes, "Scoring", total=number, console=errors, disable=number < 2)
            if not errors.is_terminal and number > 1:
                progress = _counted(progress, number, errors)
            for result in _reported(progress, summary, errors):
                if self.html or number == 1:
                    results.append(result)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
            raise click.ClickException(str(error)) from error
        if self.html:
            write_whole(self.html, render([result.card for result in results], title))
            console.print(f"Page: {self.html}", highlight=False)
        if number == 1 and results:
            console.print(results[0], highlight=False)
        if number > 1:
            console.print(str(summary), highlight=False, soft_wrap=True)
            if self.out:
                console.print(f"Results: {self.out}", highlight=False, markup=False)
        for warning in summary.warnings():
            errors.print(f"Warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
        if summary.counts["failed"]:
            raise SystemExit(1)
        if cache and _temporary(cache):
            shutil.rmtree(cache, ignore_errors=True)

    def _with(self, content: dict[str, Any]) -> dict[str, Any]:
        """A row with what the options say of it."""
        from lm_polygraph_asmi.scoring.rows import in_chat

        content = content if self.answer is None else content | {"answer": self.answer}
        return in_chat(content) if self.chat else content

    def _checked(self, output: Mapping[str, type], errors: Any) -> int:
        """Number of rows; raises ValueError for files and options that do not fit."""
        from lm_polygraph_asmi.scoring.rows import misspelt, read_rows, row_count

        check_files(self.rows_file, self.out, self.html, output)
        if self.answer == "":
            raise ValueError(
                "expected a text, got an empty --answer. Leave it out to take the model's greedy "
                "answer"
            )
        number = row_count(self.rows_file)
        if not number:
            raise ValueError(f"{self.rows_file} has no rows")
        if number > 1 and self.answer is not None:
            raise ValueError(f"--answer needs a single prompt, got {number} rows")
        if number > 1 and not (self.out or self.html):
            raise ValueError(
                f"{self.rows_file} has {number} rows: name a file with --out or --html"
            )
        first = list(islice(read_rows(self.rows_file), CHECKED_ROWS))
        for field, close in misspelt({name for row in first for name in row.content}).items():
            errors.print(f"Warning: ignoring the field {field!r}; did you mean {close!r}?",
                         style="yellow", highlight=False)  # fmt: skip
        if all(row.error for row in first):
            raise ValueError(f"{self.rows_file}, row {first[0].number}: {first[0].error}")
        return number


def _temporary(cache: str) -> bool:
    """Whether a result cache is to be deleted."""
    return Path(cache, TEMPORARY_MARK).is_file()


def _reported(
    outcomes: Iterable[tuple[Any, Any]], summary: "Summary", errors: Any
) -> Iterator[Any]:
    """Results of the rows that have one; prints warnings, and the errors of the others."""
    for row, outcome in outcomes:
        if warning := summary.add(outcome.result):
            errors.print(f"Warning: {warning}", style="yellow", markup=False,
                         highlight=False, soft_wrap=True)  # fmt: skip
        if outcome.result is not None:
            yield outcome.result
            continue
        row_id = row.content.get("id")
        name = f"row {row.number}" + ("" if row_id is None else f" ({row_id})")
        errors.print(f"{name}: {outcome.error}", style="red", markup=False,
                     highlight=False, soft_wrap=True)  # fmt: skip


def _counted(rows: Iterable[Any], total: int, console: Any) -> Iterator[Any]:
    """The rows; prints their number once a minute, for files and logs, where no bar is drawn."""
    printed = time.monotonic()
    for number, row in enumerate(rows, start=1):
        yield row
        if time.monotonic() - printed >= MINUTE:
            console.print(f"{number} of {total} rows", highlight=False)
            printed = time.monotonic()


class Summary:
    """Counts over all rows; no score stays in memory."""

    verb = "scored"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.start = time.perf_counter()

    def add(self, result: Any) -> str | None:
        """Count a row, None if it failed; a warning to print at once, or None."""
        self.counts["failed" if result is None else self.verb] += 1
        self.counts["with warnings"] += bool(result is not None and result.warnings)
        return None

    def warnings(self) -> list[str]:
        """About all rows, in sentences; a score knows none."""
        return []

    def listed(self, *names: str) -> str:
        """Counts by name, but for zeros."""
        return ", ".join(f"{self.counts[name]} {name}" for name in names if self.counts[name])

    def __str__(self) -> str:
        rate = self.counts[self.verb] / (time.perf_counter() - self.start)
        counts = self.listed(self.verb, "failed", "with warnings")
        return f"{counts}, {rate:.3g} rows per second."


def own_cache(out: str) -> str:
    """Folder of the result cache beside OUT, marked as one to delete.

    Raises:
        ValueError: there is another folder or file of that name.
    """
    folder = Path(f"{out}.cache")
    if folder.exists() and not _temporary(str(folder)):
        raise ValueError(f"{folder} exists: pass it as --result-cache, or remove it")
    folder.mkdir(exist_ok=True)
    (folder / TEMPORARY_MARK).touch()
    return str(folder)


def check_files(
    rows_file: str, out: str | None, html: str | None, output: Mapping[str, type]
) -> None:
    """Raise ValueError unless the outputs can be written without overwriting an input or scores."""
    from lm_polygraph_asmi.scoring.rows import check_out

    for file in map(Path, filter(None, (out, html))):
        check_writable(file)
    if not Path(rows_file).is_file():
        raise ValueError(f"{rows_file}: expected a file, got a pipe or device: save its content")
    if html and Path(html).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"expected --html with the name of an .html file, got {html}")
    if out:
        check_out(rows_file, out, output)
