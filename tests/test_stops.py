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


@pytest.mark.parametrize(
    ("stop", "said"), [("'\\n'", "wrapped in quotes"), ("\\t", "spelled with a backslash")]
)
def test_on_the_command_line(stop, said, tmp_path):
    (tmp_path / "rows.txt").write_text("Who?")
    line = ["score", str(tmp_path / "rows.txt"), "--model", "no/model", "--stop", stop]
    done = CliRunner().invoke(main, line)
    assert done.exit_code
    assert said in done.output


def test_a_line_break_spelled_in_the_shell_is_read():
    done = CliRunner().invoke(main, ["score", "--model", "no/model", "--stop", "\\n", "x.txt"])
    assert "stop" not in done.output


def test_in_python():
    with pytest.raises(ValueError, match="spelled with a backslash"):
        score("no/model", "Who?", " Brask", stop="\\n")
    with pytest.raises(ValueError, match="wrapped in quotes"):
        score(tiny_lm.whitebox(stop_strings=["'\n'"]), "Who?", " Brask")


@pytest.mark.parametrize("stops", [r"['\n']", "[\"'###'\"]"])
def test_in_a_run(stops):
    config = composed("asmi_coqa", f"generation_params.stop_strings={stops}")
    ((fault,),) = read_plan(config).faults.values()
    assert fault.startswith("generation_params.stop_strings ")
    assert "wrapped in quotes" in fault or "spelled with a backslash" in fault


def test_with_a_manager_built_by_hand():
    model = tiny_lm.whitebox(stop_strings=["\\n"])
    with pytest.raises(ValueError, match=r"stop_strings.*spelled with a backslash"):
        load_stat_calculator({}, SimpleNamespace(model=model))
