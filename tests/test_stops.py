"""Stop strings with quotes or escapes that were meant for a shell, Python or YAML."""

import re

import pytest
from click.testing import CliRunner
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lm_polygraph_asmi import ASMIConfig
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.options import check_shell_stop
from lm_polygraph_asmi.runs.checks import read_plan
from tests.composing import run_of

QUOTED = ["'\n'", '"\n"', "“\n”", "‘\n’", "«\n»", "„\n“", "`\n`", " '\n' ", "'###'", '"Question:"']
ESCAPED = ["\\n", "\\n\\n", "\\t", "\\r\\n", "\\u000a", "\\x0a", "\\nQ:", " \\n", "\\\n", "'\\n'",
           "\\nuser:", "\\nassistant: "]  # fmt: skip
RIGHT = ["\n", "\n\n", '"', "'", "```", '"""', '\n"""', '"}', "</s>", "\\]", "\\end{", "\\nabla",
         "\\text", "Q: ", " .", "it's", "'s", "\t", '",',
         '", "', '","', '": "', '"}, {"', "\\nu"]  # fmt: skip


OF_A_SHELL = ["$\n", "$\n\n", "$", "`n", "^n", "^"]


@pytest.mark.parametrize("stop", [*QUOTED, *ESCAPED, *OF_A_SHELL])
def test_wrong_ones(stop):
    """Only a shell can have changed them: in a list, they are what they are."""
    with pytest.raises(ValueError, match=re.escape(repr(stop))) as raised:
        check_shell_stop("stop", stop)
    if stop in QUOTED:
        assert repr(stop.strip(" ")[1:-1]) in str(raised.value)
    assert ASMIConfig(stop=["\n", stop]).stop == ("\n", stop)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_one_of_a_command_line_is_looked_at(tmp_path, place):
    (prompt := tmp_path / "in.txt").write_text("Who?")
    stops = ["###", "END", "END"]
    stops[place] = "'###'"
    words = [word for stop in stops for word in ("--stop", stop)]
    done = CliRunner().invoke(main, ["score", str(prompt), "--model", "smollm2", *words])
    assert (done.exit_code, "wrapped in quotes" in done.output) == (1, True), done.output


@pytest.mark.parametrize("stop", RIGHT)
def test_right_ones(stop):
    check_shell_stop("stop", stop)
    assert ASMIConfig(stop=[stop]).stop == (stop,)


@pytest.mark.parametrize("stops", [r"['\n']", "[\"'###'\"]"])
def test_in_a_run(stops):
    override = f"generation_params.stop_strings={stops}"
    config = run_of("asmi_coqa", override)
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.overrides.task = [override]
    HydraConfig.instance().set_config(config)
    ((fault,),) = read_plan(config).faults.values()
    assert fault.startswith("generation_params.stop_strings ")
    assert "wrapped in quotes" in fault or "contains the escape" in fault
