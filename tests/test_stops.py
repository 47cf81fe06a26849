"""Stop strings with quotes or escapes that were meant for a shell, Python or YAML."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi import ASMIConfig, score
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.runs.checks import read_plan
from lm_polygraph_asmi.stat_calculators.masked_heads import load_stat_calculator
from tests import tiny_lm
from tests.composing import composed

QUOTED = ["'\n'", '"\n"', "“\n”", "‘\n’", "«\n»", "„\n“", "`\n`", " '\n' ", "'###'", '"Question:"']
ESCAPED = ["\\n", "\\n\\n", "\\t", "\\r\\n", "\\u000a", "\\x0a", "\\nQ:", " \\n", "\\\n", "'\\n'",
           "\\nuser:", "\\nassistant: "]  # fmt: skip
RIGHT = ["\n", "\n\n", '"', "'", "```", '"""', '\n"""', '"}', "</s>", "\\]", "\\end{", "\\nabla",
         "\\text", "Q: ", " .", "it's", "'s", "\t", '",',
         '", "', '","', '": "', '"}, {"', "\\nu"]  # fmt: skip


@pytest.mark.parametrize("stop", [*QUOTED, *ESCAPED])
def test_wrong_ones(stop):
    with pytest.raises(ValueError, match=r"is (wrapped in quotes|spelled with)") as raised:
        ASMIConfig(stop=["\n", stop])
    assert repr(stop) in str(raised.value)
    if stop in QUOTED:
        assert "is wrapped in quotes, which would be part of" in str(raised.value)
        assert repr(stop.strip(" ")[1:-1]) in str(raised.value)


@pytest.mark.parametrize("stop", RIGHT)
def test_right_ones(stop):
    assert ASMIConfig(stop=[stop]).stop == (stop,)


def test_on_the_command_line(tmp_path):
    """Which reads a line break that is spelled in the shell."""
    (tmp_path / "rows.txt").write_text("Who?")
    line = ["score", str(tmp_path / "rows.txt"), "--model", "no/model", "--stop"]
    for stop, said in ("'\\n'", "wrapped in quotes"), ("\\t", "spelled with a backslash"):
        done = CliRunner().invoke(main, [*line, stop])
        assert done.exit_code
        assert said in done.output
    assert "stop" not in CliRunner().invoke(main, [*line, "\\n"]).output


@pytest.mark.parametrize("stops", [r"['\n']", "[\"'###'\"]"])
def test_in_a_run(stops):
    config = composed("asmi_coqa", f"generation_params.stop_strings={stops}")
    ((fault,),) = read_plan(config).faults.values()
    assert fault.startswith("generation_params.stop_strings ")
    assert "wrapped in quotes" in fault or "spelled with a backslash" in fault


def test_of_a_model_of_the_host():
    model = tiny_lm.whitebox(stop_strings=["'\n'"])
    with pytest.raises(ValueError, match="wrapped in quotes"):
        score(model, "Who?", " Brask")
    with pytest.raises(ValueError, match=r"stop_strings.*wrapped in quotes"):
        load_stat_calculator({}, SimpleNamespace(model=model))
