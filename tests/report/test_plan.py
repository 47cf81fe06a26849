import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.core import mask_plan
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.plan import plan_table


def test_the_papers_figures_for_32_heads():
    """Appendix "Derivation of the Coverage-Fidelity Constraints"."""
    table = plan_table(32).set_index("p")
    assert table.loc[0.15, "heads, Gaussian"] == pytest.approx(4.8 + 1.645 * 4.08**0.5, abs=1e-3)
    assert table.loc[0.15, "heads, exact"] == 8
    assert table.index[-1] == 0.30  # twice the largest admissible
    for heads in (4, 64):  # the last admissible row is the default of the estimators
        corner = plan_table(heads).query("admissible").iloc[-1]
        assert (corner["p"], corner["S"]) == mask_plan.operating_point(heads)


def test_plan_in_the_terminal_and_as_a_figure(tmp_path):
    result = CliRunner().invoke(main, ["plan", "--heads", "32"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "p = 0.15, S = 40" in result.output
    figures.save(figures.operating_point(plan_table(32), 8), tmp_path / "plan.png")
    assert CliRunner().invoke(main, ["plan", "--heads", "3"]).exit_code == 2
    for layers, ratio in ((36, 16.2), (32, 16.8)):  # the paper's, of Qwen3-4B and of Llama-2-7B
        done = CliRunner().invoke(main, f"plan --heads 32 --layers {layers}")
        assert f"costs {ratio} full forward passes" in done.output
