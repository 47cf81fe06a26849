"""What a run prints: one bar in a terminal, a line now and then in a file. The rest is logged.

Only this module uses internals of LM-Polygraph's manager and of tqdm. `tests/runs/test_screen.py`
fails if a release changes them.
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

TIMED = {
    "GreedyProbsCalculator": "greedy",
    "SavedAnswersCalculator": "greedy",
    "SemanticMatrixCalculator": "nli",
    "CrossEncoderSimilarityMatrixCalculator": "cross_encoder",
}
"""Calculator -> name of its phase. Its time is saved as the statistic `seconds_PHASE`."""
PARTS = 20
"""In a file, a line is written each time one of this many parts of the rows is finished."""


@contextmanager
def screen(script: dict[str, Any]) -> Iterator[None]:
    """Inside the block, the run of a script shows its rows, phase and time left.

    `script` holds the script's globals. Progress bars and warnings of libraries go to the run's log
    file. Everything is undone at the end.
    """
    terminal, shown = (sys.stdout, sys.stderr), Screen()
    with ExitStack() as undo:
        if not shown.in_file:  # other output to a terminal appears above the bar
            undo.enter_context(shown.progress)
        # Every tqdm bar of a library is drawn by the screen, beside the phase.
        made = tqdm.__init__
        on_screen = lambda bar, *args, **how: made(bar, *args, **how | {"file": shown})  # noqa: E731
        undo.enter_context(patch.object(tqdm, "__init__", on_screen))
        _log_notices(shown, terminal, undo)
        if script.get("UEManager") is UEManager:  # keep a script's own manager
            undo.callback(script.update, UEManager=UEManager)
            script["UEManager"] = _watched(shown)
        yield


class Screen(Processor):
    """Shows finished rows, phase and time left on standard error.

    LM-Polygraph calls it as a processor of batches; tqdm writes its bars to it as to a file.
    """

    def __init__(self) -> None:
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        # Jobs that run side by side in a sweep would overwrite each other's bars.
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
            speed_estimate_period=math.inf,  # from all rows but the first, a slow one
        )
        self.say, self.in_file = console.print, self.progress.disable
        self.id = self.progress.add_task("", total=None, rows="")
        self.task = self.progress.tasks[self.id]
        self.name, self.since = "checking the run", time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.batches, self.reused, self.bar = 0, 0, ""

    def phase(self, name: str, detail: str = "") -> None:
        """Note that a phase begins, or show more details of it."""
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
        """Inside the block, count the rows that are scored with one seed."""
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
        """Receive what tqdm draws: one bar after the other, then a line break. Log the last bar."""
        if text == "\n":
            log.info("%s", self.bar)
        self.bar = text.strip()
        self.phase(self.name, self.bar.partition("|")[0])

    def flush(self) -> None:
        """Do nothing, since nothing is buffered."""

    def loading(self, record: logging.LogRecord) -> bool:
        """A log filter that lets every message pass. A message "Loading X..." starts a phase."""
        if match := re.fullmatch(r"((?:Loading|Initializing) .*)\.\.\.", record.getMessage()):
            self.phase(match[1])
            if self.in_file:
                self.say(match[1])
        return True

    @staticmethod
    def shows(record: logging.LogRecord) -> bool:
        """Whether a message is shown on the screen.

        Of other packages than these, only errors are, since users cannot act on their warnings.
        """
        known = ("lm_polygraph", "lm_polygraph_asmi", "hydra", "root", "__main__")
        return record.levelno >= logging.ERROR or record.name.partition(".")[0] in known


def _clock(seconds: float | None) -> str:
    return str(timedelta(seconds=round(seconds or 0)))


def _watched(screen: Screen) -> type[UEManager]:
    """A class of LM-Polygraph's manager that reports to the screen and times some calculators."""

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
            result = super().estimate(batch_stats, estimators)
            screen.phase(", ".join(map(str, self.generation_metrics)))
            return result

    return WatchedManager


def _log_notices(screen: Screen, terminal: tuple[Any, Any], undo: ExitStack) -> None:
    """Send the warnings of libraries to the log file, if there is one, instead of the terminal.

    `terminal`: standard output and error as they were before the bar was drawn.
    """
    root = logging.getLogger()
    _filter(undo, log, screen.loading)
    files = [h for h in root.handlers if isinstance(h, logging.FileHandler)]
    if files:
        # The script may capture warnings itself. Then leave that on at the end.
        undo.callback(logging.captureWarnings, warnings.showwarning.__module__ == "logging")
        logging.captureWarnings(True)
    for handler in _of_terminal(root, terminal):
        undo.callback(handler.setStream, handler.stream)
        handler.setStream(sys.stdout if handler.stream is terminal[0] else sys.stderr)
        if files:
            _filter(undo, handler, screen.shows)
    for logger in map(logging.getLogger, list(logging.Logger.manager.loggerDict) if files else []):
        for handler in _of_terminal(logger, terminal):  # a library's: let the root logger write
            _filter(undo, handler, lambda _: False)
            undo.enter_context(patch.object(logger, "propagate", True))


def _of_terminal(logger: logging.Logger, terminal: tuple[Any, Any]) -> list[Any]:
    """Handlers of a logger that write to the terminal."""
    return [h for h in logger.handlers if getattr(h, "stream", None) in terminal]


def _filter(undo: ExitStack, filtered: logging.Filterer, passes: Any) -> None:
    filtered.addFilter(passes)
    undo.callback(filtered.removeFilter, passes)
