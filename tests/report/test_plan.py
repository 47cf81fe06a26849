import json

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import binom

from lm_polygraph_asmi import maths
from lm_polygraph_asmi.analysis import prr_draws, sample_size
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import target_layer
from lm_polygraph_asmi.report.plan import plan_table, power_table
from lm_polygraph_asmi.results.run_groups import load_run_groups
from tests.report.runs import content, save


def test_the_papers_figures_for_32_heads():
    """Appendix "Derivation of the Coverage-Fidelity Constraints"."""
    table = plan_table(32).set_index("p")
    assert table.loc[0.10, "S"] == 62
    assert table.loc[0.15, "S"] == 40
    assert table.loc[0.15, "heads, Gaussian"] == pytest.approx(
        4.8 + 1.645 * np.sqrt(4.08), abs=1e-3
    )
    assert table.loc[0.15, "heads, exact"] == 8
    assert table.loc[0.15, "admissible"]
    assert not table.loc[0.16, "admissible"]
    assert table.loc[0.15, "S for pairs"] == pytest.approx(410, abs=2)
    assert maths.never_masked_heads(32, 0.10, 16) == pytest.approx(5.9, abs=0.05)


@pytest.mark.parametrize("heads", [4, 9, 12, 32, 64])
def test_the_last_admissible_row_is_the_default_of_the_estimators(heads):
    table = plan_table(heads)
    corner = table[table["admissible"]].iloc[-1]
    assert (corner["p"], corner["S"]) == maths.operating_point(heads)
    beyond = table[~table["admissible"]].iloc[0]["p"]
    assert binom.sf(heads // 4, heads, beyond) > 0.05 >= binom.sf(heads // 4, heads, corner["p"])


def test_coverage_by_simulation():
    """The union bound holds: some head is never masked in at most 5 % of designs."""
    rng = np.random.default_rng(0)
    masked = rng.random((4000, 62, 32)) < 0.10
    missed = (~masked.any(1)).any(1).mean()
    assert missed < 0.05
    assert (~masked[:, :16].any(1)).sum(1).mean() == pytest.approx(5.9, abs=0.2)


def test_plan_in_the_terminal(tmp_path):
    figure = tmp_path / "plan.png"
    command = ["plan", "--heads", "32", "--out", str(figure), "--point", "0.10", "16"]
    result = CliRunner().invoke(main, command, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "p = 0.15, S = 40" in result.output
    assert "5.9 of 32 heads are never masked" in result.output
    assert figure.stat().st_size > 10_000
    assert CliRunner().invoke(main, ["plan", "--heads", "3"]).exit_code == 2
    assert CliRunner().invoke(main, ["plan", "--heads", "32", "--point", "1.5", "9"]).exit_code == 2


def test_plan_as_json():
    command = ["plan", "--heads", "32", "--json", "--point", "0.10", "16"]
    content = json.loads(CliRunner().invoke(main, command).stdout)
    assert (content["mask_rate"], content["num_masks"]) == maths.operating_point(32)
    assert content["point"]["heads_never_masked"] == pytest.approx(5.9, abs=0.05)
    assert len(content["points"]) == len(plan_table(32))
    assert {"p": 0.15, "S": 40, "admissible": True}.items() <= content["points"][14].items()


@pytest.mark.parametrize(("layers", "ratio"), [(36, 16.2), (32, 16.8)])
def test_the_papers_cost_in_passes(layers, ratio):
    """Section "Methodology": about 16 for Qwen3-4B, 17 for Llama-2-7B, at S = 40."""
    layer = target_layer(0.6, layers)
    by_hand = sum(1 if below < layer else 40 for below in range(layers)) / layers
    assert maths.flops_ratio(layers, layer, 40) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(ratio, abs=0.05)
    command = ["plan", "--heads", "32", "--layers", str(layers)]
    shown = CliRunner().invoke(main, command, env={"COLUMNS": "300"}).output
    assert f"costs {ratio:.1f} full forward passes" in shown
    with pytest.raises(ValueError, match="expected a layer in 0"):
        maths.flops_ratio(layers, layers, 40)


def test_a_pilot_says_how_many_questions(tmp_path):
    save(tmp_path / "run", content(n=120))
    (group,) = load_run_groups([tmp_path / "run"])
    found = power_table(group, 0.03).set_index("comparison")
    sem, msp = group.variants["Sem-ASMI"], "MaximumSequenceProbability"
    scores = {method: group.score(method) for method in (sem, msp)}
    drawn = prr_draws(list(scores.values()), group.answers.resampled(2000))
    row = found.loc["Sem-ASMI Δ MSP"]
    error = np.std(drawn[:, 0] - drawn[:, 1], ddof=1)
    assert row["SE"] == pytest.approx(error)
    size = sample_size(0.03, error, 60, 120)
    assert (row["clusters"], row["questions"]) == (size.clusters, size.questions)
    command = ["plan", "--pilot", str(tmp_path / "run"), "--prr-difference", "0.03"]
    done = CliRunner().invoke(main, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert f"{size.questions:,}" in done.output
    assert "too small" not in done.output
    save(tmp_path / "small", content(n=40))
    small = ["plan", "--pilot", str(tmp_path / "small"), "--prr-difference", "0.03"]
    assert "too small for" in CliRunner().invoke(main, small, env={"COLUMNS": "200"}).output
    assert "8 heads; at most 2 masked" in done.output  # the pilot's
    assert "(layer 4 of 6)" in done.output
    # What the answers cost, at the masks that the plan proposes.
    shown = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    passes = maths.flops_ratio(6, 4, shown["num_masks"])
    assert shown["cost"]["passes"] == pytest.approx(passes)
    by_name = {row["comparison"]: row for row in shown["power"]}
    assert by_name["Sem-ASMI Δ MSP"]["passes"] == round(size.questions * passes)
    assert f"{round(size.questions * passes):,}" in done.output


def test_a_pilot_that_says_nothing(tmp_path):
    def refused(*arguments):
        done = CliRunner().invoke(main, ["plan", *arguments], env={"COLUMNS": "300"})
        assert done.exit_code
        return done.output

    assert "need each other" in refused("--heads", "32", "--prr-difference", "0.03")
    assert "expected --heads" in refused("--layers", "32")
    save(tmp_path / "none", content(depths=()))
    pilot = ["--prr-difference", "0.03", "--pilot"]
    assert "expected a pilot with an ASMI score" in refused(*pilot, str(tmp_path / "none"))
    saved = content()
    saved["gen_metrics"]["sequence", "AlignScore"] = [1.0] * 60
    save(tmp_path / "right", saved)
    assert "PRR is undefined" in refused(*pilot, str(tmp_path / "right"))
