"""`polygraph_asmi decide`: accept answers or abstain, by a calibration."""

from copy import copy
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.commands.score import Summary, Work, score

if TYPE_CHECKING:
    from lm_polygraph_asmi.decisions.calibration import Calibration
    from lm_polygraph_asmi.scoring.rows import Outcome, Row, Rows

COUNTED = {True: "accepted", False: "abstained", None: "without a decision"}
SHOWN = 20
"""Rows of the table on screen; the file has all."""


def _of_calibration(option: click.Parameter) -> click.Parameter:
    """The option of `score`, not required and without a default: that is the calibration's."""
    option = copy(option)
    if isinstance(option, click.Option):
        option.required = option.show_default = False
    return option


@click.command(
    params=[_of_calibration(option) for option in score.params if option.name != "calibration"],
    short_help="Accept answers or abstain, by a calibration.",
)
@click.option(
    "--calibration",
    required=True,
    type=click.Path(exists=True),
    help="JSON file that `polygraph_asmi calibrate` wrote. Options left out have its values.",
)
def decide(calibration: str, **options: Any) -> None:
    """Accept answers to the prompts in ROWS_FILE, or abstain.

    ROWS_FILE is as for `score`; model and settings are the calibration's. Each row gets `accept`
    (true, false, or null: no decision), `reason`, and `error_probability`, and an empty `correct`
    to label it for `gate`. By MSP, perplexity or entropy, no masked pass is run.

    Exits with status 1 if any row fails.
    """
    work, loading, explicit = Work.of(options)
    try:
        from lm_polygraph_asmi.decisions.calibration import Calibration
        from lm_polygraph_asmi.decisions.rows import loadable

        loaded = Calibration.load(calibration)
        if work.model is None:
            work = work._replace(model=loadable(loaded.model))
            given = {n: v for n, v in loading.items() if v not in (None, "auto")}
            loading = loading | loaded.loading | given
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error

    def check() -> type:
        loaded.configured(explicit)
        from lm_polygraph_asmi.decisions.decision import Decision

        return Decision

    def opened() -> "Rows":
        from lm_polygraph_asmi.decisions.decider import Decider  # imports torch: after all checks

        return Decider(work.model, loaded, **loading, **explicit)

    work.run(check, opened, Decisions(loaded), "Decisions on answers")


class Decisions(Summary):
    """A table of decisions with their counts, and why there are none."""

    verb = "read"

    def __init__(self, calibration: "Calibration") -> None:
        super().__init__()
        self.calibration = calibration
        self.shown: list[tuple[str, ...]] = []

    def report(self, row: "Row", outcome: "Outcome", errors: Any) -> None:
        """See `Summary`."""
        from rich.markup import escape

        super().report(row, outcome, errors)
        if (result := outcome.result) is not None and len(self.shown) < SHOWN:
            chance = result.error_probability
            numbers = [f"{n:.4g}" if n is not None else "-" for n in (result.value, chance)]
            name = str(row.number if outcome.id is None else outcome.id)
            answer = " ".join(str(result.answer).split())
            self.shown.append((name, result.word, *numbers, escape(f"{answer:.60}")))

    def add(self, result: Any) -> str | None:
        """See `Summary`; the reason of the first row without a decision is a warning."""
        from lm_polygraph_asmi.decisions.labels import is_blank

        super().add(result)
        if result is None:
            return None
        self.counts[COUNTED[result.accept]] += 1
        self.counts["empty"] += is_blank(result.answer)
        first = result.accept is None and self.counts[COUNTED[None]] == 1
        return str(result.reason) if first else None

    def warnings(self) -> list[str]:
        """What to do if no answer has a decision."""
        without = self.counts["without a decision"]
        if self.counts[self.verb] == without > self.counts["empty"]:
            advice = "Use the calibration's model and settings, or calibrate again"
            if self.calibration.guarantee.threshold is None:
                advice = "The calibration has no threshold: calibrate on more labelled answers"
            return [f"No answer has a decision, so abstain on all. {advice}."]
        return []

    def __str__(self) -> str:
        from rich.table import Table

        from lm_polygraph_asmi.decisions.calibration import as_text

        table = Table("row", "decision", self.calibration.title, "P(error)", "answer", box=None)
        for line in self.shown:
            table.add_row(*line)
        more = self.counts[self.verb] - len(self.shown)
        lines = [as_text(table)] if self.shown else []
        lines += [f"... and {more} more"] if more else []
        return "\n".join([*lines, super().__str__(), f"{self.listed(*COUNTED.values())}."])
