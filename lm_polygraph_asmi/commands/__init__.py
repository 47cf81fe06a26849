"""The console command `polygraph_asmi`, beside LM-Polygraph's own `polygraph_eval`.

One file per command. These files import only click at the top; a command imports the rest when it
runs, so that help and argument errors appear at once.
"""

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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Score answers with ASMI; prepare, merge and report LM-Polygraph benchmark runs.

    Tab completion: add `eval "$(_POLYGRAPH_ASMI_COMPLETE=bash_source polygraph_asmi)"` to ~/.bashrc
    (zsh_source or fish_source for other shells).
    """


class Experiments(click.Group):
    """Commands of `lm_polygraph_asmi.experiments`, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._commands().get(cmd_name)

    @staticmethod
    def _commands() -> dict[str, click.Command]:
        from lm_polygraph_asmi.experiments.commands import COMMANDS

        return COMMANDS


@main.group(cls=Experiments, short_help="Controls and the causal probe.")
def experiments() -> None:
    """Test the paper's claims: perturbation controls and the causal probe."""


for command in (calibrate, decide, doctor, gate, merge, plan, report, results, score):
    main.add_command(command)
