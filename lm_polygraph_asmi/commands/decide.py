"""`polygraph_asmi decide`: accept answers, or abstain, by a calibration."""

from collections import Counter
from copy import copy
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.commands.score import Summary, Work, score
from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.tables import Row, read_table
from lm_polygraph_asmi.validation import check_new

if TYPE_CHECKING:
    from lm_polygraph_asmi.decisions.calibration import Calibration
    from lm_polygraph_asmi.scoring.rows import Outcome, ScoresRows

SHOWN, COLUMNS = 10, 80
"""Number of decisions of a kind that are printed, and the width of their lines."""

PARAMETERS = [copy(each) for each in score.params if each.name not in ("surest_first", "largest")]
"""Options of `score`. None is required or shows a default: the calibration has the values."""
for option in PARAMETERS:
    if isinstance(option, click.Option):
        option.required = option.show_default = False


@click.command(params=PARAMETERS, short_help="Accept answers or abstain, by a calibration.")
@click.option(
    "--calibration",
    required=True,
    type=click.Path(exists=True),
    help="JSON file from `polygraph_asmi calibrate`. It gives the values of options left out.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    help="With --sheet: only this many accepted answers, drawn at random, to label for `monitor`.",
)
def decide(calibration: str, **options: Any) -> None:
    """Accept answers to the prompts in ROWS_FILE, or abstain.

    ROWS_FILE is as for `score`. Model and settings are the calibration's. Each row gets `accept`
    (true; false; or null for no decision) and `reason`. With --sheet, a table is written that you
    can label for `monitor`. If the signal is MSP, perplexity or entropy, no masked pass is run.

    Exits with status 1 if any row fails.
    """
    from lm_polygraph_asmi.decisions.calibration import Calibration
    from lm_polygraph_asmi.decisions.decision import Decision
    from lm_polygraph_asmi.scoring.provenance import loadable
    from lm_polygraph_asmi.scoring.signals import column_of

    work, loading, explicit = Work.of(options)
    loaded = Calibration.load(calibration)
    if column_of(loaded.signal)[0]:
        _decide_table(loaded, work)
        return
    loaded.configured(explicit)  # raises ValueError if a setting differs from the calibration's
    work = work._replace(model=work.model or loadable(loaded.model))

    def opened() -> "ScoresRows":
        from lm_polygraph_asmi.decisions.decider import Decider  # imports torch: after all checks

        return Decider(work.model, loaded, **loading, **explicit)

    work.run(Decision, opened, Decisions(loaded, work.out), "Decisions on answers")


def _decide_table(calibration: "Calibration", work: Work) -> None:
    """Decide by a column of the rows, and write a new file. No model is loaded."""
    from rich.console import Console

    from lm_polygraph_asmi.decisions.decision import Decision
    from lm_polygraph_asmi.decisions.rows import DECIDED, column_answer
    from lm_polygraph_asmi.scoring.output import Output, check_out
    from lm_polygraph_asmi.scoring.rows import Outcome
    from lm_polygraph_asmi.scoring.signals import column_of

    signal, summary, errors = (
        calibration.signal,
        Decisions(calibration, work.out),
        Console(stderr=True),
    )
    if unused := [n for n in ("model", "answer", "chat", "html") if getattr(work, n)]:
        raise ValueError(f"{calibration.title} is in the rows: leave out --{', --'.join(unused)}")
    if not work.out:
        raise ValueError("the decisions need an output file: name one with --out")
    work.check_files()
    check_new(work.out)
    rows = list(read_table(work.rows_file, [column_of(signal)[0]]))
    check_out(rows, work.rows_file, work.out, (*DECIDED, "digest", "error"))
    with locked(work.out):
        file = Output(Path(work.out))
        for row in rows:
            record, decision, error = {"row": row.number, **row.content}, None, row.error
            try:
                decision = None if error else calibration.decide(column_answer(record, signal))
            except ValueError as failure:
                error = str(failure)
            if decision is None:
                record["error"] = error
            else:
                record |= {"correct": record.get("correct")} | {
                    n: getattr(decision, n) for n in DECIDED
                }
                record["digest"] = Decision.digest(record)
            file.add(record)
            summary.add(
                row, Outcome(row.number - 1, row.content.get("id"), decision, error), errors
            )
        file.finish()
    work.write_sheet()
    click.echo(f"{summary}\nResults: {work.out}")
    if summary.counts["failed"]:
        raise SystemExit(1)


class Decisions(Summary):
    """Counts, the first decisions, and a warning if a cluster of the output file is too large."""

    def __init__(self, calibration: "Calibration", out: str | None) -> None:
        super().__init__()
        self.calibration, self.out = calibration, out
        self.shown: dict[str, list[str]] = {"accept": [], "abstain": [], "no decision": []}

    def add(self, row: Row, outcome: "Outcome", errors: Any) -> None:
        """Count a row as `Summary` does. At the first row without a decision, print the reason."""
        super().add(row, outcome, errors)
        if (decision := outcome.result) is None:
            return
        self.counts[decision.word] += 1
        if decision.accept is None and self.counts[decision.word] == 1:
            self.say(errors, f"Warning: {decision.reason}", "yellow")
        if len(self.shown[decision.word]) < SHOWN:
            start = f"{outcome.id or row.number}  {decision.card.heading}  "
            answer = " ".join(str(decision.answer).split())[: max(20, COLUMNS - len(start))]
            self.shown[decision.word].append(start + answer)

    def __str__(self) -> str:
        first = (
            [f"The first {SHOWN} of each kind (--out FILE has all):"]
            if any(self.counts[word] > SHOWN for word in self.shown)
            else []
        )
        last = (
            guarantee_in(self.calibration, self.out)
            if self.out and self.calibration.guarantee.threshold is not None
            else ""
        )
        return "\n".join([*first, *chain(*self.shown.values()), super().__str__(), last]).rstrip()


def guarantee_in(calibration: "Calibration", out: str) -> str:
    """The guarantee for a file of decisions, or why it is void: a cluster has too many answers."""
    from lm_polygraph_asmi.decisions.labels import clusters_of

    try:
        keys = clusters_of([row for row in read_table(out) if row.content.get("digest")])
    except ValueError as error:
        return f"Warning: clusters are unknown: {error}"
    rule, largest = calibration.guarantee, max(Counter(keys).values(), default=0)
    return (
        f"Guarantee: {rule.promise}; in this file, that holds as far as found."
        if largest <= rule.largest
        else f"Warning: a cluster has {largest} answers, but the guarantee allows {rule.largest}, "
        "so it is void. Decide on fewer answers per cluster, or begin again with --largest "
        f"{largest}, of `score` if a sheet is sorted, else of `calibrate`."
    )
