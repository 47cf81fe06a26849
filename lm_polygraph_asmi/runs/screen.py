"""What a run shows: one bar in a terminal, a line now and then in a file. All else is in its log.

Only this module uses the inside of LM-Polygraph's manager and of tqdm. `tests/runs/test_screen.py`
fails when a release moves what is used.
"""

import logging
import math
import multiprocessing
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

from lm_polygraph.utils.manager import UEManager
from lm_polygraph.utils.processor import Processor
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from tqdm.std import tqdm

log = logging.getLogger("lm_polygraph")

SHOWN = ("lm_polygraph", "lm_polygraph_asmi", "hydra", "root", "__main__")
"""Packages whose warnings are shown; of others, whose notices users cannot act on, only errors."""
TIMED = {
    "GreedyProbsCalculator": "greedy",
    "SavedAnswersCalculator": "greedy",
    "SemanticMatrixCalculator": "nli",
    "CrossEncoderSimilarityMatrixCalculator": "cross_encoder",
}
"""Calculator -> its phase, whose seconds are a statistic, `seconds_PHASE`."""
PARTS = 20
"""A file has a line each time another of these parts of the rows is done."""


@contextmanager
def screen(script: dict[str, Any]) -> Iterator[None]:
    """Inside the block, the run of the script with these globals shows rows, phase and time left.

    Bars and notices of libraries go to the log file of the run. All is undone at the end.
    """
    terminal, shown = (sys.stdout, sys.stderr), Screen()
    with ExitStack() as undo:
        if not shown.in_file:  # what is printed in a terminal appears above the bar
            undo.enter_context(shown.progress)
        # Every bar of tqdm that a library makes is drawn there, beside the phase.
        made = tqdm.__init__
        on_screen = lambda bar, *args, **how: made(bar, *args, **how | {"file": shown})  # noqa: E731
        undo.enter_context(patch.object(tqdm, "__init__", on_screen))
        _log_notices(shown, terminal, undo)
        if script.get("UEManager") is UEManager:  # a script's own is left alone
            undo.callback(script.update, UEManager=UEManager)
            script["UEManager"] = _watched(shown)
        yield


class Screen(Processor):
    """The rows that are done, the phase and the time that is left, on standard error.

    To LM-Polygraph it is a processor of batches; to tqdm, the file on which bars are drawn.
    """

    def __init__(self) -> None:
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        # Jobs of a sweep that run side by side would draw over each other.
        alone = multiprocessing.current_process().name == "MainProcess"
        whole_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=whole_line),
            BarColumn(20),
            TextColumn("{task.fields[rows]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
            disable=not (alone and console.is_interactive and sys.stderr.isatty()),
            speed_estimate_period=math.inf,  # from all rows but the first, which checks itself
        )
        self.say, self.in_file = console.print, self.progress.disable
        self.id = self.progress.add_task("", total=None, rows="")
        self.task = self.progress.tasks[self.id]
        self.name, self.since = "checking the run", time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.batches, self.reused, self.bar = 0, 0, ""

    def phase(self, name: str, detail: str = "") -> None:
        """A phase begins, or more is known of it."""
        now = time.perf_counter()
        self.seconds[self.name] += now - self.since
        self.name, self.since = name, now
        self.progress.update(self.id, description=f"{name} {detail}", rows=self._done())

    def _done(self) -> str:
        if self.task.total is None:
            return ""
        reused = f", {self.reused} from the result cache" if self.reused else ""
        return f"{self.task.completed:.0f} of {self.task.total:.0f} rows{reused}"

    @contextmanager
    def rows(self, total: int) -> Iterator[None]:
        """While all rows are scored with one seed."""
        self.progress.reset(self.id, total=total)
        self.batches = self.reused = 0
        self.phase("data")
        self.seconds.clear()
        try:
            yield
        finally:
            where = "" if self.task.finished else f"stopped in the phase {self.name!r}: "
            self.say(f"{where}{self._done()} in {_clock(self.task.elapsed)}")
            self.progress.reset(self.id, total=None)

    def on_batch(self, batch_stats: Mapping[str, Any], *_: Any) -> None:
        """See `Processor`."""
        rows = len(batch_stats["input_texts"])
        self.reused += sum(map(bool, batch_stats.get("asmi_reused_depths", [])))
        self.batches += 1
        self.progress.advance(self.id, rows)
        self.phase("PRR of the methods" if self.task.finished else "next row")
        left, part = self.task.time_remaining, (self.task.total or 1) / PARTS
        another_part = self.task.completed // part > (self.task.completed - rows) // part
        if self.batches == 1:
            spent = [f"{name} {s:.2f}" for name, s in self.seconds.items() if s >= 0.005]
            first = "the first row" if rows == 1 else f"the first {rows} rows"
            self.say(f"{first}, in seconds: {', '.join(spent)}")
        elif left and (self.batches == 3 or (self.in_file and another_part)):
            end = datetime.now() + timedelta(seconds=left)
            self.say(f"{self._done()}; {_clock(left)} left, until {end:%a %H:%M}")

    def on_eval(self, *_: Any) -> None:
        """See `Processor`."""

    def write(self, text: str) -> None:
        """Take what tqdm draws: bar after bar, then a line break. The last bar goes to the log."""
        if text == "\n":
            log.info("%s", self.bar)
        self.bar = text.strip()
        self.phase(self.name, self.bar.partition("|")[0])

    def flush(self) -> None:
        """Nothing is held back."""

    def loading(self, record: logging.LogRecord) -> bool:
        """A filter that passes all of LM-Polygraph's messages; "Loading X..." begins a phase."""
        if found := re.fullmatch(r"((?:Loading|Initializing) .*)\.\.\.", record.getMessage()):
            self.phase(found[1])
            if self.in_file:
                self.say(found[1])
        return True

    @staticmethod
    def shows(record: logging.LogRecord) -> bool:
        """Whether a message belongs on the screen."""
        return record.levelno >= logging.ERROR or record.name.partition(".")[0] in SHOWN


def _clock(seconds: float | None) -> str:
    return str(timedelta(seconds=round(seconds or 0)))


def _watched(screen: Screen) -> type[UEManager]:
    """LM-Polygraph's manager, which tells the screen what it does, and times some calculators."""

    class WatchedManager(UEManager):
        def __call__(self) -> dict[tuple[str, ...], float]:
            self.processors.insert(0, screen)
            with screen.rows(len(self.data.x)):
                return super().__call__()

        def calculate(self, batch_stats: dict, calculators: list, inp_texts: list) -> dict:
            rows = len(inp_texts)
            for calculator in calculators:
                name, start = type(calculator).__name__, time.perf_counter()
                words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).removesuffix(" Calculator")
                screen.phase(TIMED.get(name, words.lower()).replace("_", " "))
                batch_stats = super().calculate(batch_stats, [calculator], inp_texts)
                if name in TIMED:
                    seconds = (time.perf_counter() - start) / rows
                    batch_stats[f"seconds_{TIMED[name]}"] = [seconds] * rows
            return batch_stats

        def estimate(self, batch_stats: dict, estimators: list) -> tuple[dict, list]:
            screen.phase("estimators")
            found = super().estimate(batch_stats, estimators)
            screen.phase(", ".join(map(str, self.generation_metrics)))
            return found

    return WatchedManager


def _log_notices(screen: Screen, terminal: tuple[Any, Any], undo: ExitStack) -> None:
    """Notices of libraries go to the log file, if there is one, and not to the terminal.

    `terminal`: standard output and error as they were before the bar.
    """
    root = logging.getLogger()
    _filter(undo, log, screen.loading)
    files = [h for h in root.handlers if isinstance(h, logging.FileHandler)]
    if files:
        # A script's own may capture them, too.
        undo.callback(logging.captureWarnings, warnings.showwarning.__module__ == "logging")
        logging.captureWarnings(True)
    for handler in _of_terminal(root, terminal):
        undo.callback(handler.setStream, handler.stream)
        handler.setStream(sys.stdout if handler.stream is terminal[0] else sys.stderr)
        if files:
            _filter(undo, handler, screen.shows)
    for logger in map(logging.getLogger, list(logging.Logger.manager.loggerDict) if files else []):
        for handler in _of_terminal(logger, terminal):  # a library's own: the root's write instead
            _filter(undo, handler, lambda _: False)
            undo.enter_context(patch.object(logger, "propagate", True))


def _of_terminal(logger: logging.Logger, terminal: tuple[Any, Any]) -> list[Any]:
    """Handlers of a logger that write to the terminal."""
    return [h for h in logger.handlers if getattr(h, "stream", None) in terminal]


def _filter(undo: ExitStack, filtered: logging.Filterer, passes: Any) -> None:
    filtered.addFilter(passes)
    undo.callback(filtered.removeFilter, passes)
