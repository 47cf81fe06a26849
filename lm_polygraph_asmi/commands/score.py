"""`polygraph_asmi score`: score answers from the shell."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.files import interrupted_by_sigterm, write_whole
from lm_polygraph_asmi.options import given_settings, setting_options
from lm_polygraph_asmi.tables import Row, read_table
from lm_polygraph_asmi.validation import check_new, check_writable

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.rows import Outcome, ScoresRows

LOADING = ("gguf_file", "dtype", "device_map")
"""Options on how to load the model."""
SORTED = ("asmi", "sem", "msp", "perplexity", "entropy")
"""Signals that every score has, by which a sheet can be sorted."""
MINUTE = 60.0


@click.command()
@click.argument("rows_file", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", required=True, help="Folder, hub ID, or smollm2 (the demo's model).")
@click.option("--gguf-file", help="GGUF file in the model's folder that holds the weights.")
@click.option("--dtype", default="auto", show_default=True, help="Data type: auto, float32, ...")
@click.option("--device-map", help='Devices for the model: "auto" uses GPUs. Default: CPU.')
@click.option("--answer", help="Text of the answer. Default: the model's greedy answer.")
@click.option("--chat", is_flag=True, help="Apply the chat template to text prompts.")
@setting_options()
@click.option(
    "--out",
    type=click.Path(dir_okay=False),
    help="File for the results: .jsonl or .parquet. A run that was stopped resumes.",
)
@click.option(
    "--sheet",
    type=click.Path(dir_okay=False),
    help="With --out: new .csv file, in which people label answers in the column `correct`.",
)
@click.option(
    "--surest-first",
    metavar="SIGNAL",
    help="Sort the sheet by this signal, such as msp: label from its top, and stop when you like.",
)
@click.option(
    "--largest",
    type=click.IntRange(min=1),
    help="With --surest-first: most answers of one cluster in later use. Default: the most of a "
    "cluster in ROWS_FILE.",
)
@click.option("--html", type=click.Path(dir_okay=False), help="HTML page to write.")
def score(**options: Any) -> None:
    """Score answers to the prompts in ROWS_FILE.

    ROWS_FILE is a text file (.txt) with one prompt; or JSON lines (.jsonl), CSV or Parquet where
    each row has `prompt` or `messages`, and optionally `answer`, `samples` and `id`.

    Exits with status 1 if any row fails.
    """
    work, loading, explicit = Work.of(options)
    ASMIConfig().replace(**explicit)  # raises ValueError if a setting is out of range
    from lm_polygraph_asmi.scoring.result import Score

    def opened() -> "ScoresRows":
        from lm_polygraph_asmi.scoring.scorer import Scorer  # imports torch: after all checks

        return Scorer(work.model, **loading, **explicit)

    work.run(Score, opened, Summary(), "Fragility of answers")


class Work(NamedTuple):
    """What `score` or `decide` does with a file of rows. The fields are options of the command."""

    rows_file: str
    model: str
    answer: str | None
    chat: bool
    out: str | None
    sheet: str | None
    html: str | None
    surest_first: str | None = None  # only of `score`
    largest: int | None = None  # only of `score`
    sample: int | None = None  # only of `decide`

    @classmethod
    def of(cls, options: dict[str, Any]) -> tuple["Work", dict[str, Any], dict[str, Any]]:
        """Split a command's options: the work, how to load the model, and the settings given."""
        fields = [name for name in cls._fields if name in options]
        work, loading = ({n: options.pop(n) for n in names} for names in (fields, LOADING))
        return cls(**work), loading, given_settings(options)

    def run(
        self, kind: type, opened: "Callable[[], ScoresRows]", summary: "Summary", title: str
    ) -> None:
        """Check the files, load the scorer or decider, run it on the rows, and print results."""
        from rich.console import Console

        from lm_polygraph_asmi.scoring.page import render

        errors, rows, results = Console(stderr=True), self._checked(kind), list[Any]()
        try:
            with errors.status(f"Loading {self.model}"):
                scorer = opened()
            with interrupted_by_sigterm():
                self._score(scorer, rows, summary, errors, results)
        except KeyboardInterrupt as stop:
            if self.out:
                unfinished = f"{self.out}.partial" if self.out.endswith(".parquet") else self.out
                errors.print(
                    f"Stopped. {summary.counts['scored']} rows were finished in this run and are "
                    f"in {unfinished}: run the same command again to resume.",
                    highlight=False, soft_wrap=True,
                )  # fmt: skip
            raise SystemExit(128 + int(*stop.args or (signal.SIGINT,))) from None
        except (TypeError, ImportError, RuntimeError) as error:  # raised by the model
            raise click.ClickException(str(error)) from error
        if self.html and results:
            write_whole(self.html, render([result.card for result in results], title))
            click.echo(f"Page: {self.html}")
        if len(rows) == 1 and results:
            Console().print(results[0], highlight=False)
        if len(rows) > 1:
            click.echo(summary)
            if self.out:
                click.echo(f"Results: {self.out}")
        if summary.counts["failed"]:
            raise SystemExit(1)

    def _score(
        self,
        scorer: "ScoresRows",
        rows: list[Row],
        summary: "Summary",
        errors: Any,
        results: list[Any],
    ) -> None:
        """Score the rows, into the output file if there is one. Keep results that will be shown."""
        from rich.progress import Progress

        from lm_polygraph_asmi.scoring.output import score_file

        with Progress(console=errors, disable=len(rows) < 2) as bar:
            task = bar.add_task("Scoring", total=len(rows))

            def seen(row: Row, outcome: "Outcome") -> None:
                summary.add(row, outcome, errors)
                bar.advance(task)
                if outcome.result is not None and (self.html or len(rows) == 1):
                    results.append(outcome.result)

            if self.out:
                score_file(scorer, rows, self.out, seen=seen)
                self.write_sheet()
            else:
                for row, outcome in zip(rows, scorer.score_many(rows), strict=True):
                    seen(row, outcome)

    def write_sheet(self) -> None:
        """Write the sheet of the results, if --sheet is given."""
        from lm_polygraph_asmi.scoring.sheet import write_sheet

        if not (self.sheet and self.out):
            return
        thinning = ""
        if self.surest_first:
            from lm_polygraph_asmi.decisions.rows import write_ordered_sheet

            _, thinning = write_ordered_sheet(self.out, self.sheet, self.surest_first, self.largest)
        else:
            records = [row.content for row in read_table(self.out)]
            write_sheet(_sampled(records, self.sample) if self.sample else records, self.sheet)
        click.echo(f"Sheet: {self.sheet}, rows: {sum(1 for _ in read_table(self.sheet))}")
        click.echo(thinning, nl=bool(thinning))

    def _changed(self, content: dict[str, Any]) -> dict[str, Any]:
        """A row with the text of --answer as its answer; with --chat, its prompt becomes a chat."""
        from lm_polygraph_asmi.scoring.rows import in_chat

        content = content if self.answer is None else content | {"answer": self.answer}
        return in_chat(content) if self.chat else content

    def check_files(self) -> None:
        """Raise ValueError if a file cannot be written, or if options do not fit together."""
        for written in filter(None, (self.out, self.sheet, self.html)):
            check_writable(written)
        _refuse(
            (
                self.surest_first and self.surest_first not in SORTED,
                f"--surest-first: expected {', '.join(SORTED)}, got {self.surest_first!r}",
            ),
            (
                self.surest_first and not self.sheet,
                "--surest-first sorts a sheet: name one with --sheet",
            ),
            (
                self.html and Path(self.html).suffix.lower() not in (".html", ".htm"),
                f"--html: expected a file name that ends in .html, got {self.html}",
            ),
            (
                self.sheet and Path(self.sheet).suffix.lower() != ".csv",
                f"--sheet: expected a file name that ends in .csv, got {self.sheet}",
            ),
            (
                self.largest and not self.surest_first,
                "--largest thins a sheet in order: name a signal with --surest-first",
            ),
            (
                self.sample and not self.sheet,
                "--sample draws rows of a sheet: name one with --sheet",
            ),
            (
                self.sheet and not self.out,
                "--sheet labels the results of a file: name one with --out",
            ),
        )
        if self.sheet:
            check_new(self.sheet, "it may have labels: name another file, or remove it")

    def _checked(self, kind: type) -> list[Row]:
        """The rows; ValueError if files or options do not fit, or if `out` has other results."""
        from lm_polygraph_asmi.scoring.output import check_out, fields_of
        from lm_polygraph_asmi.scoring.rows import checked, read_rows

        self.check_files()
        source = self.rows_file
        if not Path(source).is_file():
            raise ValueError(f"{source}: expected a file, got a pipe or device: save its content")
        read = (row._replace(content=self._changed(row.content)) for row in read_rows(source))
        rows = _alike(list(map(checked, read)))
        if self.out:
            check_out(rows, source, self.out, fields_of(kind))
        several = len(rows) > 1
        _refuse(
            (not rows, f"{source} has no rows"),
            (
                several and self.answer is not None,
                f"--answer needs a single prompt, got {len(rows)} rows",
            ),
            (
                several and not (self.out or self.html),
                f"{source} has {len(rows)} rows: name a file with --out or --html",
            ),
        )
        if all(row.error for row in rows):
            raise ValueError(f"{source}, row {rows[0].number}: {rows[0].error}")
        return rows


def _alike(rows: list[Row]) -> list[Row]:
    """The rows, with an error for those without an answer if others have one.

    The answer was lost, such as that of a tool call: one of the model's own under the row's `id`
    would be taken for it.
    """
    from lm_polygraph_asmi.scoring.rows import request_of

    known = [row.error is None and request_of(row.content).answer is not None for row in rows]
    if len(rows) > 1 and not any(known) and not all(row.error for row in rows):
        click.echo("No row has an answer: the model answers all of them itself.", err=True)
    return [
        row._replace(
            error=row.error or "expected an answer, as in other rows: add it, or leave this row out"
        )
        if any(known) and not given
        else row
        for row, given in zip(rows, known, strict=True)
    ]


def _refuse(*cases: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first case that holds."""
    for holds, message in cases:
        if holds:
            raise ValueError(message)


def _sampled(records: Iterable[Mapping[str, Any]], size: int) -> list[Mapping[str, Any]]:
    """A random sample of the accepted rows. It depends on hashes, so it is the same each time."""
    from lm_polygraph_asmi.scoring.sheet import key_of

    # Keys are hashes, so the order is random.
    return sorted((r for r in records if r.get("digest") and r.get("accept")), key=key_of)[:size]


class Summary:
    """Counts over all rows. No score is kept in memory."""

    def __init__(self) -> None:
        self.counts = Counter({"scored": 0, "failed": 0, "with warnings": 0})
        self.start = self.printed = time.perf_counter()

    def add(self, row: Row, outcome: "Outcome", errors: Any) -> None:
        """Count a row; print its error, or the first warning. Print a count of rows once a minute.

        The count is printed into logs only: in a terminal there is a bar.
        """
        self.counts["scored" if outcome.error is None else "failed"] += 1
        name = f"row {row.number}" + ("" if outcome.id is None else f" ({outcome.id})")
        if outcome.error is not None:
            self.say(errors, f"{name}: {outcome.error}", "red")
        elif outcome.result.warnings:
            self.counts["with warnings"] += 1
            if self.counts["with warnings"] == 1:
                self.say(errors, f"First warning, {name}: {outcome.result.warnings[0]}", "yellow")
        if not errors.is_terminal and time.perf_counter() - self.printed >= MINUTE:
            self.say(errors, f"{self.counts['scored'] + self.counts['failed']} rows", None)
            self.printed = time.perf_counter()

    @staticmethod
    def say(errors: Any, text: str, style: str | None) -> None:
        """Print a line above the progress bar, without markup."""
        errors.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        rate = self.counts["scored"] / (time.perf_counter() - self.start)
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items() if number)
        return f"{counts or 'no row left to score'}, {rate:.3g} rows per second."
