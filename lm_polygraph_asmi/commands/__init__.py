"""The console command `polygraph_asmi`, beside LM-Polygraph's own `polygraph_eval`.

One file per command. These files import only click at the top; a command imports the rest when it
runs, so that help and argument errors appear at once.
"""

import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import click

from lm_polygraph_asmi import __version__
from lm_polygraph_asmi.commands.calibrate import calibrate
from lm_polygraph_asmi.commands.decide import decide
from lm_polygraph_asmi.commands.doctor import doctor
from lm_polygraph_asmi.commands.gate import gate
from lm_polygraph_asmi.commands.merge import merge
from lm_polygraph_asmi.commands.plan import plan
from lm_polygraph_asmi.commands.report import report
from lm_polygraph_asmi.commands.results import results
from lm_polygraph_asmi.commands.score import score


class Console:
    """A standard stream that stops no command.

    Characters that its encoding lacks are replaced; once its reader has gone, as after `| head`,
    nothing more is written.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._unless_closed(self._stream.write, text) or 0

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, run: Any, *arguments: Any) -> Any:
        try:
            return run(*arguments)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also what is buffered, at exit
            os.close(nowhere)
            return None


class Main(click.Group):
    """The command; whatever the console is, the exit status says how the work went."""

    def main(self, *args: Any, **options: Any) -> Any:
        with redirect_stdout(Console(sys.stdout)), redirect_stderr(Console(sys.stderr)):
            return super().main(*args, **options)


@click.group(cls=Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Score answers with ASMI; prepare, merge and report LM-Polygraph benchmark runs.

    Tab completion: add `eval "$(_POLYGRAPH_ASMI_COMPLETE=bash_source polygraph_asmi)"` to ~/.bashrc
    (zsh_source or fish_source for other shells).
    """


class Heads(click.Group):
    """Commands of `lm_polygraph_asmi.heads`, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._commands().get(cmd_name)

    @staticmethod
    def _commands() -> dict[str, click.Command]:
        from lm_polygraph_asmi.heads.commands import COMMANDS

        return COMMANDS


@main.group(cls=Heads, short_help="The causal probe.")
def heads() -> None:
    """Test the paper's claims on heads: the causal probe."""


for command in (calibrate, decide, doctor, gate, merge, plan, report, results, score):
    main.add_command(command)
