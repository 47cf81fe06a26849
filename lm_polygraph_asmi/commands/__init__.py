"""The console command `polygraph_asmi`, beside LM-Polygraph's own `polygraph_eval`.

One file a command. A file imports click alone; what does the work is imported when it is called, so
that help and refused arguments answer at once.
"""

import click

from lm_polygraph_asmi import __version__
from lm_polygraph_asmi.commands.calibrate import calibrate
from lm_polygraph_asmi.commands.calibration import calibration
from lm_polygraph_asmi.commands.doctor import doctor
from lm_polygraph_asmi.commands.merge import merge
from lm_polygraph_asmi.commands.plan import plan
from lm_polygraph_asmi.commands.report import report
from lm_polygraph_asmi.commands.results import results
from lm_polygraph_asmi.commands.score import score
from lm_polygraph_asmi.commands.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """ASMI for LM-Polygraph: what to do before and after polygraph_eval, and `score`.

    Words are completed by the Tab key after `eval "$(_POLYGRAPH_ASMI_COMPLETE=bash_source
    polygraph_asmi)"`, best kept in ~/.bashrc; for others write zsh_source or fish_source.
    """


class Experiments(click.Group):
    """Commands of `lm_polygraph_asmi.experiments`, which is imported when one is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._found())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._found().get(cmd_name)

    @staticmethod
    def _found() -> dict[str, click.Command]:
        from lm_polygraph_asmi.experiments.commands import COMMANDS

        return COMMANDS


@main.group(cls=Experiments)
def experiments() -> None:
    """Test the paper's claims: masks on something else than heads, and the causal probe."""


for command in (calibrate, doctor, merge, plan, calibration, report, results, score, serve):
    main.add_command(command)
