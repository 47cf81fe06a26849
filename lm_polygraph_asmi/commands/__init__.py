"""The console command `polygraph_asmi`, which complements LM-Polygraph's `polygraph_eval`.

There is one file per command. At the top, these files import only click. A command imports the rest
when it runs, so that help and argument errors appear at once.
"""

import logging
import sys
import warnings
from typing import Any

import click

from lm_polygraph_asmi import __version__
from lm_polygraph_asmi.commands.calibrate import calibrate
from lm_polygraph_asmi.commands.check import check
from lm_polygraph_asmi.commands.configs import configs
from lm_polygraph_asmi.commands.decide import decide
from lm_polygraph_asmi.commands.doctor import doctor
from lm_polygraph_asmi.commands.fetch import fetch
from lm_polygraph_asmi.commands.merge import merge
from lm_polygraph_asmi.commands.monitor import monitor
from lm_polygraph_asmi.commands.plan import plan
from lm_polygraph_asmi.commands.report import report
from lm_polygraph_asmi.commands.results import results
from lm_polygraph_asmi.commands.score import score
from lm_polygraph_asmi.heads.commands import probe


class Main(click.Group):
    """The command. Wrong input or a missing file ends it with a message and exit status 1."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command. Characters that the terminal's encoding lacks are replaced."""
        if not sys.warnoptions:  # hide warnings of other libraries, which users cannot fix
            warnings.simplefilter("ignore")
            # PEFT imports bitsandbytes, which always reports that an optional kernel is not
            # installed.
            logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Group.invoke`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the pipe was closed, as by `| head`: click ends quietly
            raise
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error


@click.group("heads", commands=[probe], short_help="The causal probe.")
def heads() -> None:
    """Test the paper's claims on attention heads with the causal probe."""


gate = click.Command(
    "gate",  # name of `monitor` in release 0.3
    params=monitor.params,
    callback=monitor.callback,
    help=monitor.help,
    hidden=True,
    deprecated="It is called `monitor` now.",
)


@click.group(
    cls=Main,
    context_settings={"help_option_names": ["-h", "--help"]},
    commands=[
        calibrate, check, configs, decide, doctor, fetch, gate, heads, merge, monitor, plan, report,
        results, score,
    ],
)  # fmt: skip
@click.version_option(__version__)
def main() -> None:
    """Score answers with ASMI; prepare, merge and report LM-Polygraph benchmark runs.

    Tab completion: add `eval "$(_POLYGRAPH_ASMI_COMPLETE=bash_source polygraph_asmi)"` to ~/.bashrc
    (zsh_source or fish_source for other shells).
    """
