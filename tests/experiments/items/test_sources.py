"""Scores by source, on a run whose truth is known."""

import numpy as np
import pytest

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.source_kl import SourceKL
from lm_polygraph_asmi.estimators.without_context import WithoutContext
from lm_polygraph_asmi.experiments.items.sources import sources
from lm_polygraph_asmi.report.item import MissingItem
from lm_polygraph_asmi.results.run_groups import load_run_groups
from lm_polygraph_asmi.scoring.calibration import Calibration
from tests.report.runs import BASELINES, METHODS, content, put, save

N = 60
SCORED = "Sem-ASMI (60%, K=64, scope=response{})"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Errors show in what comes from the context, and in nothing else."""
    saved, rng = content(N), np.random.default_rng(3)
    wrong = np.array(saved["gen_metrics"]["sequence", "AlignScore"]) < 0.5
    saved["estimations"] = {k: v for k, v in saved["estimations"].items() if k[1] in BASELINES}
    saved[METHODS], whole = {}, ASMIConfig(scope="response")
    stats = saved["stats"]
    lengths = [len(tokens) for tokens in stats["asmi_tokens"]]
    used = stats["asmi_settings_d60"][0] | {"scope": "response"}
    for source, base in (("all", 0.4), ("context", 0.1), ("elsewhere", 0.2)):
        signal = 0.05 * wrong if source == "context" else np.zeros(N)
        mi = [base + own + 0.02 * rng.random(t) for own, t in zip(signal, lengths, strict=True)]
        put(saved, whole.replace(source=source), [values.mean() for values in mi])
        ending = "" if source == "all" else f"_{source}"
        stats[f"asmi_mi_d60{ending}"] = mi
        stats[f"asmi_agreement_d60{ending}"] = [np.zeros(t) for t in lengths]
        stats[f"asmi_settings_d60{ending}"] = [used | {"source": source}] * N
        stats[f"asmi_source_attention_d60{ending}"] = [np.full(t, base) for t in lengths]
    for kind in (SourceKL, WithoutContext):
        estimator = kind(scope="response", source="context")
        saved["estimations"]["sequence", str(estimator)] = rng.random(N).tolist()
        saved[METHODS] |= {str(estimator): estimator.described}
    return save(tmp_path_factory.mktemp("run") / "run", saved)


@pytest.fixture(scope="module")
def table(run, request):
    request.getfixturevalue("few_resamples")
    (item,) = sources(load_run_groups([run]))
    return item.table.set_index(["score", "source"])


def test_the_source_that_knows_is_found(table):
    known, other = table.loc[("Sem-ASMI", "context")], table.loc[("Sem-ASMI", "elsewhere")]
    assert known["PRR"].low > 0.7 > other["PRR"].value
    assert known["Δ all"].low > 0
    assert known["AUROC"] > 0.95
    assert known["z"] > 3
    assert known["p"] < 0.01
    assert other["p"] > 0.01
    assert table.loc[("Sem-ASMI", "all"), "Δ all"] is None


def test_shares_and_attention_are_those_of_the_tokens(table):
    shares = table["share of MI"]
    assert 0.25 < shares["Sem-ASMI", "context"] < 0.4
    assert 0.45 < shares["Sem-ASMI", "elsewhere"] < 0.55
    assert table.loc[("Sem-ASMI", "context"), "attention"] == pytest.approx(0.1)
    assert np.isnan(shares["Sem-ASMI", "all"])


def test_shares_are_of_one_run_s_own_masks(run, table, tmp_path):
    """The benchmark's run, in the scope "all", saved another MI under the same name."""
    plain = content(N, scale=5)
    groups = load_run_groups([save(tmp_path / "plain", plain), run])
    assert len(groups) == 1
    (item,) = sources(groups)
    shares = item.table.set_index(["score", "source"])["share of MI"]
    for source in ("context", "elsewhere"):
        assert shares["Sem-ASMI", source] == table.loc[("Sem-ASMI", source), "share of MI"]
    assert "10,000 resamples" in item.caption[-1]


def test_cheaper_scores_stand_beside_them(table):
    assert list(table.index) == [
        ("Sem-ASMI", "all"), ("Sem-ASMI", "context"), ("Sem-ASMI", "elsewhere"),
        ("Source-KL", "context"), ("Without-context", "context"),
    ]  # fmt: skip


def test_holm_over_cells_only(table):
    """A single setting: nothing to adjust for."""
    np.testing.assert_allclose(table["p, Holm"], table["p"])


def test_runs_without_sources_are_a_gap(tmp_path):
    (gap,) = sources(load_run_groups([save(tmp_path / "run")]))
    assert isinstance(gap, MissingItem)
    assert "asmi_sources" in gap.reason


def test_the_score_of_all_is_the_operating_one(run):
    (group,) = load_run_groups([run])
    assert group.variants == {"Sem-ASMI": SCORED.format("")}
    assert group.settings()["source"] == "all"
    context = group.mi_of(SCORED.format(", source=context"))
    assert 0.09 < np.concatenate(context).mean() < 0.2
    assert np.concatenate(group.mi_tokens).min() > 0.39


def test_a_reference_is_of_one_source(run):
    of_all, of_context = (Calibration.from_run(run, source=s) for s in ("all", "context"))
    assert of_context.method == SCORED.format(", source=context")
    assert of_context.settings["source"] == "context"
    assert 0.09 < of_context.masking_response < 0.2 < of_all.masking_response
    used = of_context.settings
    assert of_context.other_settings(used) == []
    (other,) = of_all.other_settings(used)
    assert other == "source all there, context here"
    with pytest.raises(
        ValueError, match="expected a score with the settings method='asmi', source='con"
    ):
        Calibration.from_run(run, method="asmi", source="context")
