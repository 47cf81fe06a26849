"""`polygraph_asmi decide`: accept answers or abstain, by a calibration."""

from copy import copy
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.commands.score import Summary, Work, score

if TYPE_CHECKING:
    from lm_polygraph_asmi.decisions.calibration import Calibration
    from lm_polygraph_asmi.scoring.rows import Rows


def _without_default(option: click.Parameter) -> click.Parameter:
    """The option of `score`, whose help then names no default: that is the calibration's."""
    option = copy(option)
    if isinstance(option, click.Option):
        option.show_default = False
    return option


COUNTED = {True: "accepted", False: "abstained", None: "without a decision"}


@click.command(
    params=[_without_default(option) for option in score.params if option.name != "calibration"],
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

    ROWS_FILE is as for `score`. Each row gets `accept` (true, false, or null: no decision),
    `reason`, and `error_probability`. By MSP, perplexity or entropy, no masked pass is run.

    Exits with status 1 if any row fails.
    """
    work, loading, explicit = Work.of(options)
    try:
        from lm_polygraph_asmi.decisions.calibration import Calibration

        loaded = Calibration.load(calibration)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error

    def check() -> type:
        loaded.configured(settings=explicit)
        from lm_polygraph_asmi.decisions.decision import Decision

        return Decision

    def opened() -> "Rows":
        from lm_polygraph_asmi.decisions.decider import Decider  # imports torch: after all checks

        return Decider(work.model, loaded, **loading, **explicit)

    work.run(check, opened, Decisions(loaded), "Decisions on answers")


class Decisions(Summary):
    """Counts of decisions, and why there are none."""

    verb = "read"

    def __init__(self, calibration: "Calibration") -> None:
        super().__init__()
        self.calibration = calibration
        self.decided = 0
        self.reason: str | None = None

    def add(self, result: Any) -> str | None:
        """See `Summary`; the reason of the first row without a decision is a warning."""
        from lm_polygraph_asmi.decisions.labels import is_blank

        super().add(result)
        if result is None:
            return None
        self.counts[COUNTED[result.accept]] += 1
        self.counts["empty"] += is_blank(result.answer)
        self.decided += 1
        if result.accept is None and self.reason is None:
            self.reason = result.reason
            return self.reason
        return None

    def warnings(self) -> list[str]:
        """What to do if no answer has a decision."""
        without = self.counts["without a decision"]
        if self.decided == without > self.counts["empty"]:
            advice = "Use the calibration's model and settings, or calibrate again"
            if self.calibration.guarantee.threshold is None:
                advice = "The calibration has no threshold: calibrate on more labelled answers"
            return [f"No answer has a decision, so abstain on all. {advice}."]
        return []

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.listed(*COUNTED.values())}."
