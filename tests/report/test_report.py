import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis import (
    Interval,
    Labelled,
    augrc,
    auroc,
    normalised_prr,
    prr_with_error,
    rank_correlation,
)
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.analysis.distinct import distinct_signal
from lm_polygraph_asmi.analysis.selective import aurc, confident_filter
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.experiments.probe_file import write_probe
from lm_polygraph_asmi.report import MissingItem, build_report, figures, load_run_groups
from lm_polygraph_asmi.report.item import Marked
from lm_polygraph_asmi.report.items import every_report_item
from lm_polygraph_asmi.report.items.benchmark import (
    benchmark,
    datasets,
    depths,
    stability,
)
from lm_polygraph_asmi.report.items.boundary import boundary, truncation
from lm_polygraph_asmi.report.items.mechanism import case_study, screen
from lm_polygraph_asmi.report.items.signal import distinct, flags, payoff
from lm_polygraph_asmi.report.tables import about_run
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.results.runs import load_run, manager_files
from tests.report.runs import (
    BASELINES,
    content,
    dissect,
    exchanged,
    few_permutations,
    loaded,
    manifest,
    probe,
    put,
    put_at,
    save,
    simple_signals,
)

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")

SEM = "Sem-ASMI (60%, K=64)"
ANSWERS = 64
"""Enough that four fifths of them can be calibrated on."""


@pytest.fixture(autouse=True, scope="module")
def simply():
    with simple_signals():
        yield


@contextmanager
def seen(look):
    """Figures are looked at and not written."""

    def savefig(figure, path, **_):
        path.touch()
        look(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


def drawn_without_layout(figure):
    figure.set_layout_engine("none")
    figure.draw_without_rendering()


def hold_data(figure):
    panels = [ax for ax in figure.axes if ax.axison]
    assert panels
    assert all(ax.has_data() for ax in panels)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Runs that between them hold every item, and their report."""
    root = tmp_path_factory.mktemp("runs")
    n = ANSWERS
    details = content(n, depths=(60, 80))
    lengths = [len(tokens) for tokens in details["stats"]["asmi_tokens"]]
    put_at(
        details["stats"], 0.6, candidates=[np.tile(np.arange(8), (t, 1)) for t in lengths],
        candidate_cosines=[np.tile(np.eye(8), (t, 1, 1)) for t in lengths],
    )  # fmt: skip
    dissect(details)
    write_probe(probe(n), save(root / "open", details))
    save(root / "k256", content(n, top_k=256))
    save(root / "seed 1", content(n, mask_seed=1))
    closed = manifest(n, "asmi_squad_closed_book", closed=True)
    save(root / "closed", content(n, shift=0.5), closed)
    out = root / "report"
    runs = [str(root / name) for name in ("open", "k256", "seed 1", "closed")]
    command = ["report", *runs, "--out", str(out), "--jobs", "1"]
    with seen(hold_data), few_permutations():
        result = CliRunner().invoke(main, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return root, out, result.output


def cells_of(root):
    return load_run_groups(root / name for name in ("open", "k256", "seed 1", "closed"))


def test_a_report_has_every_item_in_every_form(everything):
    _, out, shown = everything
    report = (out / "report.md").read_text()
    _, _, gaps = report.partition("## Not in this report\n\n")
    assert [gap.split(":")[0] for gap in gaps.strip().splitlines()] == [
        "- The paper's numbers beside these",  # tests/report/test_reproduction.py has them
    ]
    assert "2 settings" in shown
    tables = {path.stem for path in (out / "tables").glob("*.csv")}
    assert tables == {
        "benchmark", "benchmark_auroc", "benchmark_augrc", "datasets", "head_to_head",
        "depth_selection", "error_separation", "distinct_signal",
        "ensemble_mean", "matched_flags", "confident_fragile", "payoff", "aurc", "global_selector",
        "boundary", "larger_k", "top_k_coverage", "stability", "mechanism", "case_study",
        "cost", "cost_by_method", "depth_by_group", "confident_fragile_by_regime",
        "head_coupling", "causal_probe", "rejection",
    }  # fmt: skip
    for name in tables:
        assert not pd.read_csv(out / "tables" / f"{name}.csv").empty
        latex = (out / "tables" / f"{name}.tex").read_text()
        assert r"\toprule" in latex
        assert "Source: tiny model, squad: 64 answers, 32 clusters, quality AlignScore" in latex
        assert "model models/tiny (abc); data squad.json" in latex
        assert "seeds: run 1, masks 0, samples 0" in latex
        assert "torch 2; cpu" in latex
        provenance = json.loads((out / "tables" / f"{name}.json").read_text())["settings"][0]
        assert provenance["model"] == "models/tiny"
        assert (provenance["n"], provenance["clusters"]) == (64, 32)
        assert provenance["packages"] == {"torch": "2"}
    pictures = list((out / "figures").glob("*.png"))
    assert {p.stem for p in pictures} == {p.stem for p in (out / "figures").glob("*.svg")}
    assert {p.stem for p in pictures} - tables == {"candidate_cosines"}
    assert len(pictures) == 17
    for picture in pictures:
        assert f"(figures/{picture.name})" in report


@pytest.mark.pictures
@pytest.mark.slow
def test_the_same_runs_leave_the_same_files(tmp_path):
    save(tmp_path / "run", content(n=40))
    for name in ("one", "two"):
        build_report(load_run_groups([tmp_path / "run"]), tmp_path / name)
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*")]
    assert {path.suffix for path in files} >= {".svg", ".png", ".tex", ".json"}
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()


def table(out, name) -> pd.DataFrame:
    return pd.read_csv(out / "tables" / f"{name}.csv")


def test_figures_of_the_tables_are_those_of_the_statistics(everything):
    root, out, _ = everything
    group = cells_of(root)[0]
    msp, entropy = group.score("MaximumSequenceProbability"), group.score("MeanTokenEntropy")
    sem = group.score(SEM)

    row = table(out, "benchmark").set_index("method").loc[SEM]
    value, error = prr_with_error(sem, group.answers)
    assert row["tiny model, squad"] == pytest.approx(value)
    assert row["tiny model, squad standard error"] == pytest.approx(error)

    scores = {"sem": sem, "entropy": group.score("SemanticEntropy")}
    _, paired = prr_intervals(scores, group.answers, [("sem", "entropy")])
    row = table(out, "head_to_head").iloc[0]
    parts = ["Sem-ASMI Δ SemEnt", "Sem-ASMI Δ SemEnt low", "Sem-ASMI Δ SemEnt high"]
    assert row[parts].tolist() == pytest.approx(list(paired["sem", "entropy"]))

    controls = np.column_stack([msp, entropy])
    found = distinct_signal(sem, controls, group.answers)
    row = table(out, "distinct_signal").iloc[0]
    assert (row["signal"], row["controls"]) == ("u_sem, mean", "MSP, H")
    assert row["residual AUROC low"] == pytest.approx(found.residual_auroc.low)
    assert row["paper's criterion"] == "yes"  # planted

    row = table(out, "benchmark_auroc").set_index("method").loc[SEM, "tiny model, squad"]
    assert row == pytest.approx(auroc(sem, group.wrong))
    row = table(out, "benchmark_augrc").set_index("method").loc[SEM, "tiny model, squad"]
    assert row == pytest.approx(augrc(sem, group.wrong))

    kept = confident_filter(msp, sem, entropy, group.answers)
    assert table(out, "payoff").iloc[0]["filter by u_sem"] == pytest.approx(kept.by_fragility)
    assert table(out, "aurc").iloc[0]["MSP"] == pytest.approx(aurc(msp, group.wrong))

    # The items the paper names without a table.
    tokens = [np.concatenate(each) for each in (group.masked("mi"), group.saved("asmi_entropy"))]
    row = table(out, "mechanism").iloc[0]
    assert row["Spearman of MI_t and H_t"] == pytest.approx(rank_correlation(*tokens))
    row = table(out, "datasets").iloc[0]
    lengths = np.array([len(answer) for answer in group.saved("greedy_tokens")])
    assert row["tokens of wrong"] == pytest.approx(lengths[group.wrong].mean())
    assert row["empty"] == 0
    row = table(out, "ensemble_mean").iloc[0]
    four = {"PRR of H": entropy, "PRR of H(p̄)": group.entropy_of_mean, "PRR of MI": group.mi,
            "PRR of u_sem": sem}  # fmt: skip
    for name, score in four.items():
        assert row[name] == pytest.approx(normalised_prr(score, group.quality))
    assert f"PRR of {row['highest']}" == max(four, key=lambda name: row[name])
    row = table(out, "depth_by_group").set_index("variant").loc["Sem-ASMI"]
    assert row["80%"] == pytest.approx(
        normalised_prr(group.score("Sem-ASMI (80%, K=64)"), group.quality)
    )
    row = table(out, "cost_by_method").iloc[0]
    assert row[["MSP", "Sem-ASMI", "ASMI alone, marginal"]].tolist() == [1.0, 3.0, 2.0]
    assert np.isnan(row["Semantic Entropy"])

    # Warm-up left out: the first ten took 50 seconds.
    row = table(out, "cost").iloc[0]
    assert row[["greedy", "asmi", "peak GiB, main"]].tolist() == [1.0, 2.0, 1.0]


def test_runs_over_the_same_answers_are_one_cell(everything):
    root, out, _ = everything
    opened, closed = cells_of(root)
    assert len(opened.runs) == 3
    assert len(closed.runs) == 1
    assert {"ASMI (80%, K=64)", "ASMI (60%, K=256)", "ASMI (60%, K=64, seed=1)"} <= set(
        opened.scores
    )
    assert set(opened.variants.values()) == {SEM, "ASMI (60%, K=64)", "Adapt-ASMI (60%, K=64)"}
    larger = table(out, "larger_k").set_index("score")
    difference = normalised_prr(
        opened.score("Sem-ASMI (60%, K=256)"), opened.quality
    ) - normalised_prr(opened.score(SEM), opened.quality)
    assert larger.loc["Sem-ASMI", "large Δ small K"] == pytest.approx(difference)
    small, large = (
        np.concatenate(opened.mi_of(f"Sem-ASMI (60%, K={top_k})")) for top_k in (64, 256)
    )
    assert larger.loc["Sem-ASMI", "token ρ of MI"] == pytest.approx(rank_correlation(small, large))
    assert larger.loc["Sem-ASMI", "token ρ of MI"] < 1
    stable = table(out, "stability")
    assert (stable["other_seeds"] == 2).all()
    # Only what depends on the seed: not the baselines, which are the same in all three runs.
    assert all("ASMI" in method for method in stable["method"])


def test_another_k_is_not_read_in_place_of_the_default_one(tmp_path):
    """Whichever run is named first."""
    save(tmp_path / "k256", content(top_k=256))
    save(tmp_path / "open")
    for names in (("k256", "open"), ("open", "k256")):
        (group,) = load_run_groups(tmp_path / name for name in names)
        assert group.variants["Sem-ASMI"] == SEM
        assert group.settings()["top_k"] == 64
        np.testing.assert_array_equal(group.u_sem, group.score(SEM))
    (alone,) = load_run_groups([tmp_path / "k256"])
    assert alone.variants["Sem-ASMI"] == "Sem-ASMI (60%, K=256)"


def test_closed_book_rows_take_the_clusters_of_their_twins(everything, tmp_path):
    """Also where the closed-book run has rows in another order, and fewer of them."""
    root, out, _ = everything
    whole = table(out, "boundary")
    assert whole["questions"].tolist() == [64, 64]
    saved, order = content(ANSWERS, shift=0.5), np.arange(ANSWERS)[::-1][:40]
    shuffled = {
        part: {name: [values[i] for i in order] for name, values in saved[part].items()}
        for part in ("estimations", "gen_metrics", "stats")
    }
    about = manifest(ANSWERS, "asmi_squad_closed_book", closed=True)
    about["rows"] = {"ids": [f"q{i}" for i in order], "clusters": ["other"] * 40}
    save(tmp_path / "closed", {**saved, **shuffled}, about)
    opened, closed = load_run_groups([root / "open", tmp_path / "closed"])
    (item,) = boundary([opened, closed])
    assert item.table["questions"].tolist() == [40, 40]
    chosen = sorted(order)  # rows of the open run
    clusters = [opened.clusters[i] for i in chosen]
    _, full = cells_of(root)
    assert full.quality[chosen].tolist() == [closed.quality[list(order).index(i)] for i in chosen]
    scores = {"sem": full.u_sem[chosen], "msp": full.msp[chosen]}
    _, paired = prr_intervals(
        scores, Labelled(quality=full.quality[chosen], clusters=clusters), [("sem", "msp")]
    )
    assert item.table["Sem-ASMI Δ MSP"][1] == pytest.approx(paired["sem", "msp"])


def test_runs_of_other_questions_are_not_compared(tmp_path):
    save(tmp_path / "open")
    about = manifest(60, "asmi_squad_closed_book", closed=True)
    about["rows"]["ids"] = [f"other{i}" for i in range(60)]
    save(tmp_path / "closed", content(shift=0.5), about)
    (gap,) = boundary(load_run_groups([tmp_path / "open", tmp_path / "closed"]))
    assert isinstance(gap, MissingItem)
    assert "no question is in both runs" in gap.reason
    (gap,) = truncation(load_run_groups([tmp_path / "open"]))
    assert "two K" in gap.reason


def test_the_first_lines_are_the_notes_of_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_polygraph_asmi.report.writing.every_report_item", lambda: [benchmark])
    saved = content(n=120)
    saved["estimations"]["sequence", "RAUQ"][3] = float("nan")
    file, lines = build_report(loaded(tmp_path, saved), tmp_path / "out")
    assert file.read_text().splitlines()[2] == lines[0]
    assert lines == [
        "**tiny model, squad: 1 of 120 rows without a finite RAUQ left out for all methods**"
    ]


@pytest.mark.parametrize(("clusters", "errors"), [(10, 40), (120, 10), (120, 110)])
def test_small_samples_are_named(tmp_path, clusters, errors):
    saved, about = content(n=120), manifest(120)
    quality = np.where(np.arange(120) < errors, 0.2, 0.9)
    saved["gen_metrics"]["sequence", "AlignScore"] = quality.tolist()
    about["rows"]["clusters"] = [str(i % clusters) for i in range(120)]
    (item,) = screen(loaded(tmp_path, saved, about))
    said = " ".join(item.caption)
    assert "Too small for reliable intervals: All settings. With fewer than 50 clusters" in said


@pytest.mark.parametrize(("empty", "advised"), [(0, False), (4, False), (40, True)])
def test_empty_answers_are_counted_on_the_screen(tmp_path, empty, advised):
    saved = content(n=60)
    saved["stats"]["greedy_texts"] = [" .\n"] * empty + [" Brask"] * (60 - empty)
    (run,) = (load_run(file) for file in manager_files(save(tmp_path / "run", saved)))
    said = about_run(run)
    assert ("Empty answers:" in said) == (empty > 0)
    assert not empty or f"Empty answers: {empty} of 60." in said
    assert ("data.prompt_style=demo" in said) == advised


def run_all(groups):
    """All items; none may fail."""
    return [item for make in every_report_item() for item in make(groups)]


def reasons(items) -> str:
    return "\n".join(item.reason for item in items if isinstance(item, MissingItem))


def test_one_finite_mask_for_all_methods(tmp_path):
    saved = content()
    saved["estimations"]["sequence", "RAUQ"][3] = float("nan")
    saved["gen_metrics"]["sequence", "AlignScore"][8] = float("nan")
    (group,) = loaded(tmp_path, saved)
    assert len(group) == 58
    assert all(len(tokens) == 58 for tokens in (group.mi_tokens, group.clusters, group.quality))
    assert "2 of 60 rows without a finite RAUQ left out for all methods" in group.notes[0]
    assert np.isfinite(group.scores.to_numpy()).all()


@pytest.mark.parametrize("nothing", [float("nan"), None])
def test_a_method_without_any_score_is_left_out_alone(tmp_path, nothing):
    saved = content()
    saved["estimations"]["sequence", "RAUQ"] = [nothing] * 60
    (group,) = loaded(tmp_path, saved)
    assert len(group) == 60
    assert "RAUQ" not in group.scores
    assert "no finite score: RAUQ" in group.notes[0]


def test_without_baselines_msp_and_entropy_are_asmis_own(tmp_path):
    saved = content()
    for name in list(saved["estimations"]):
        if "ASMI" not in name[1]:
            del saved["estimations"][name]
    (group,) = loaded(tmp_path, saved)
    own = [-tokens.sum() for tokens in saved["stats"]["asmi_log_likelihood"]]
    np.testing.assert_allclose(group.msp, own)
    (item,) = distinct([group])
    assert any("ASMI's own unmasked pass" in note for note in item.notes)
    items = run_all([group])
    assert "no variant and baseline with a defined PRR" in reasons(items)


def test_without_tokens_what_needs_them_is_a_gap(tmp_path):
    saved = content()
    saved["stats"] = {k: v for k, v in saved["stats"].items() if not k.startswith("asmi")}
    items = run_all(loaded(tmp_path, saved))
    names = {item.name for item in items if not isinstance(item, MissingItem)}
    assert {"benchmark", "head_to_head", "distinct_signal", "payoff", "confident_fragile"} <= names
    assert "mi_tokens not saved" in reasons(items)
    assert "asmi not saved" in reasons(items)


def test_without_any_asmi_score_the_baselines_are_reported(tmp_path):
    saved = content(depths=())
    (group,) = loaded(tmp_path, saved)
    assert group.variants == {}
    items = run_all([group])
    assert "u_sem not saved" in reasons(items)
    assert items[1].table["method"].tolist() == [
        "MaximumSequenceProbability", "MeanTokenEntropy", "SemanticEntropy", "RAUQ",
    ]  # fmt: skip


def test_a_file_without_a_manifest_is_clustered_by_its_prompts(tmp_path):
    (group,) = loaded(tmp_path, about={})
    assert group.label == "unknown model, run"
    assert len(set(group.clusters)) == 30  # two questions a passage
    assert group.ids is None
    assert group.provenance()["revision"] == "not recorded"
    assert group.variants == {}  # nobody says which of its scores are ASMI's
    run_all([group])


def test_no_contrast_is_said_and_nothing_is_made_up(tmp_path):
    for value, kind in ((0.9, "right"), (0.1, "wrong")):
        saved = content()
        saved["gen_metrics"]["sequence", "AlignScore"] = [value] * 60
        groups = loaded(tmp_path / kind, saved)
    file, _ = build_report(groups, tmp_path / "out")
    text = file.read_text()
    assert f"all answers are {kind}" in text
    benchmark = pd.read_csv(tmp_path / "out/tables/benchmark.csv")
    assert benchmark["tiny model, squad"].isna().all()
    assert " nan" not in text


def test_constant_scores_are_uninformative(tmp_path):
    saved = content()
    for name in ("ASMI", "Sem-ASMI", "Adapt-ASMI"):
        saved["estimations"]["sequence", f"{name} (60%, K=64)"] = [0.0] * 60
    put_at(saved["stats"], 0.6, mi=[0 * own["mi"] for own in at_depth(saved["stats"], 0.6)])
    groups = loaded(tmp_path, saved)
    scores = benchmark(groups)[0].flat().set_index("method")["tiny model, squad"]
    assert scores[SEM] == pytest.approx(0, abs=1e-12)
    assert screen(groups)[0].table["near zero"].tolist() == [True]
    assert " nan" not in build_report(groups, tmp_path / "out")[0].read_text()


def test_one_cluster_has_no_interval(tmp_path):
    about = manifest(60)
    about["rows"]["clusters"] = ["same"] * 60
    groups = loaded(tmp_path, about=about)
    items = {item.name: item for item in run_all(groups) if not isinstance(item, MissingItem)}
    row = items["head_to_head"].flat().iloc[0]
    assert np.isfinite(row["Sem-ASMI Δ MSP"])
    assert np.isnan(row["Sem-ASMI Δ MSP low"])
    assert "distinct_signal" not in items  # folds need clusters


def test_what_the_commands_refuse(tmp_path):
    save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("here")
    run, empty, out, no, taken = (
        str(tmp_path / name) for name in ("run", "empty", "x", "missing/x.png", "file/out")
    )
    for command, code, message in (
        (["report", empty, "--out", out], 1, "neither a manager file nor a folder with one"),
        (["report", run, "--out", out, "--metric", "BLEU"], 1, "'BLEU', but ['AlignScore']"),
        (["report", run, "--out", taken], 1, "Error: "),
        (["report", run, "--out", out, "--depth", "60"], 2, "--depth"),
        (["plan", "--heads", "32", "--out", no], 1, "cannot write"),
    ):
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, message in result.output) == (code, True), result.output


def test_a_run_that_stopped_early_and_rows_left_out_are_in_the_first_lines(tmp_path):
    saved = content()
    saved["stats"]["input_texts"] = [f"q{i}" for i in range(61)]
    file = save(tmp_path / "run", saved)
    with pytest.raises(ValueError, match="the first 60 of 61 rows"):
        load_run_groups([file])
    (group,) = load_run_groups([file], partial=True)
    assert len(group) == 60
    _, lines = build_report([group], tmp_path / "out")
    assert "The run stopped early: has the first 60 of 61 rows" in lines[0]
    assert "the first 60 of 61 rows" in " ".join(group.provenance()["notes"])
    dropped = {"ids": [], "clusters": [], "dropped": {"t:7": "its prompt is empty"}}
    run = replace(group.run, planned=None, manifest={"rows": dropped})
    assert run.missing_rows == ["Left out before the run: 1 row: t:7 (its prompt is empty)."]


def test_a_statistic_with_fewer_entries_is_not_used(tmp_path):
    """LM-Polygraph saves a statistic in those batches alone where it was made."""
    saved = content()
    saved["stats"]["asmi"].pop()
    (group,) = loaded(tmp_path, saved)
    assert group.mi_tokens is None
    assert group.u_sem is not None  # the estimator's


def test_cells_of_one_name_are_told_apart(tmp_path):
    """By as much of their paths as it takes; each keeps its column."""
    for folder, shift in (("a/run", 0.0), ("b/run", 0.5)):
        save(tmp_path / folder, content(shift=shift))
    groups = load_run_groups([tmp_path / "a/run", tmp_path / "b/run"])
    assert len({group.label for group in groups}) == 2
    assert groups[0].label.endswith("(a/run)")
    first, *_ = benchmark(groups)
    assert set(first.table) == {"method", "family", *(group.label for group in groups)}


def test_a_run_named_twice_is_read_once(tmp_path, monkeypatch):
    file = save(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    (group,) = load_run_groups([tmp_path / "run", file, "run"])
    assert len(group.runs) == 1


def test_token_statistics_come_from_the_run_whose_masks_made_the_score(tmp_path):
    first = content()
    for own in at_depth(first["stats"], 0.6):
        del own["mi"]
    save(tmp_path / "first", first)
    save(tmp_path / "seed 1", content(mask_seed=1))
    (group,) = load_run_groups([tmp_path / "first", tmp_path / "seed 1"])
    assert group.variants["Sem-ASMI"] == SEM
    assert group.mi_tokens is None  # those of seed 1 belong to another score
    assert group.agreement_tokens is not None
    assert group.settings()["seed"] == 0


def test_another_k_is_compared_on_the_answers_both_have(tmp_path):
    """K = 256 run over fewer rows, and with one answer that came out otherwise."""
    save(tmp_path / "k64")
    larger = content(top_k=256)
    larger["stats"]["greedy_texts"][3] = "something else"
    order = list(range(40))
    cut = {
        part: {name: [values[i] for i in order] for name, values in larger[part].items()}
        for part in ("estimations", "gen_metrics", "stats")
    }
    save(tmp_path / "k256", {**larger, **cut}, manifest(40))
    small, large = load_run_groups([tmp_path / "k64", tmp_path / "k256"])
    (item,) = truncation([small, large])
    assert (item.table["answers"] == 39).all()
    rows = [i for i in order if i != 3]
    scores = {"64": small.score(SEM)[rows], "256": large.score("Sem-ASMI (60%, K=256)")[rows]}
    clusters = [small.clusters[i] for i in rows]
    _, paired = prr_intervals(
        scores, Labelled(quality=small.quality[rows], clusters=clusters), [("256", "64")]
    )
    row = item.table.set_index("score").loc["Sem-ASMI"]
    assert row["large Δ small K"] == pytest.approx(paired["256", "64"])


def test_only_other_seeds_count_for_stability(tmp_path):
    """The same seed again, but for rounding, is none; nor are baselines without samples."""
    save(tmp_path / "answers")
    again = content()
    for name, values in again["estimations"].items():
        again["estimations"][name] = [v * (1 + 1e-7) for v in values]
    save(tmp_path / "again", again)
    groups = load_run_groups([tmp_path / "answers", tmp_path / "again"])
    assert len(groups) == 1
    assert "scored twice with other masks or samples" in reasons(stability(groups))


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [("asmi_coqa", "context"), ("asmi_triviaqa", "memory"), ("gsm8k", None)],
)
def test_what_answers_are_expected_from(tmp_path, dataset, kind):
    about = manifest(60, dataset)
    about["dataset"]["grounded"] = {"context": True, "memory": False, None: None}[kind]
    groups = loaded(tmp_path, about=about)
    (item,) = datasets(groups)
    assert item.table["answers expected from"].tolist() == [kind]


@pytest.mark.pictures
def test_names_and_texts_with_special_characters(tmp_path, monkeypatch):
    drawn = [benchmark, distinct, payoff, case_study]
    monkeypatch.setattr("lm_polygraph_asmi.report.writing.every_report_item", lambda: drawn)
    saved = content()
    saved["estimations"]["sequence", r"A $\frac$ <b>_|&%#{}"] = list(range(60))
    saved["stats"]["input_texts"] = [
        f"Context:\nBabi {i}\n\nQuestion:\nWhere is $x_{i}$ | 日本?\n\nAnswer:\n" for i in range(60)
    ]
    about = manifest(60)
    about["model"]["name"] = "we_$ird"
    groups = loaded(tmp_path, saved, about)
    with seen(drawn_without_layout):
        build_report(groups, tmp_path / "out")
    cases = pd.read_csv(tmp_path / "out/tables/case_study.csv")
    assert cases["question"].str.startswith("Where is $x_").all()
    latex = (tmp_path / "out/tables/benchmark.tex").read_text()
    assert r"A \$\textbackslash{}frac\$ \textless{}b\textgreater{}\_\textbar{}\&\%\#\{\}" in latex
    kernel = (tmp_path / "out/tables/distinct_signal.tex").read_text()
    assert r"H($\bar{p}$)" in kernel
    figures.save(payoff(groups)[0].figure, tmp_path / "payoff.svg")
    assert "<text" in (tmp_path / "payoff.svg").read_text()


@pytest.mark.parametrize("depth", [0.333, 0.625])
def test_depths_that_percent_rounds(tmp_path, depth):
    saved = content()
    for row in saved["stats"]["asmi"]:
        row[depth] = row.pop(0.6)
        row[depth]["settings"] = row[depth]["settings"] | {"depth": depth}
    baselines = {key: v for key, v in saved["estimations"].items() if key[1] in BASELINES}
    saved = exchanged(saved, depth=depth)
    saved["estimations"] |= baselines
    save(tmp_path / "run", saved)
    (group,) = load_run_groups([tmp_path / "run"], depth=depth)
    assert set(group.variants) == {"ASMI", "Sem-ASMI", "Adapt-ASMI"}
    assert group.mi_tokens is not None
    assert group.notes == ()
    (other,) = load_run_groups([tmp_path / "run"], depth=0.9)
    assert "the run lacks 90.0%" in other.notes[0]


def test_a_gate_of_ones_own_in_front(tmp_path):
    saved = content()
    scores = saved["estimations"].pop(("sequence", "Adapt-ASMI (60%, K=64)"))
    others, saved["estimations"] = saved["estimations"], {}
    put(saved, ASMIConfig(method="adapt", tau=0.5), scores)
    saved["estimations"] |= others
    (group,) = loaded(tmp_path, saved)
    assert set(group.variants) == {"ASMI", "Sem-ASMI", "Adapt-ASMI"}


def test_tokens_that_are_not_finite_are_a_gap(tmp_path):
    for broken in ([], [float("nan")]):
        saved = content()
        saved["stats"]["asmi"][5][0.6]["mi"] = np.array(broken)
        groups = load_run_groups([save(tmp_path / f"run{len(broken)}", saved)])
        (gap,) = screen(groups)
        assert "mi_tokens not saved, or not finite for every row" in gap.reason
    run_all(groups)


def test_manifests_with_parts_missing(tmp_path):
    for name, rows in (("none", None), ("empty", {}), ("ids", {"ids": []})):
        lacks = dict.fromkeys(("model", "peak_memory_bytes", "config")) | {"rows": rows}
        (group,) = loaded(tmp_path / name, about=manifest(60) | lacks)
        assert len(set(group.clusters)) == 30  # from the prompts
    run_all([group])


NO_RUN, DAMAGED = "is not a run saved by LM-Polygraph", r"asmi_manifest_seed1\.json is damaged"
SHORT = content()["estimations"] | {("sequence", "RAUQ"): [0.5] * 59}


@pytest.mark.parametrize(
    ("estimations", "manifest_text", "message"),
    [
        ([1, 2], None, NO_RUN),
        ({"name": [1.0]}, None, NO_RUN),
        ({("sequence", "a"): ["x"] * 60}, None, NO_RUN),
        (SHORT, None, r"its columns have \[59, 60\] rows"),
        ({}, b"[1]", DAMAGED),
        ({}, b"{", DAMAGED),
        ({}, b"\xff\xfe", DAMAGED),
    ],
)
def test_damaged_runs_are_refused(tmp_path, estimations, manifest_text, message):
    saved = content()
    save(tmp_path / "run", saved | {"estimations": estimations or saved["estimations"]})
    if manifest_text:
        (tmp_path / "run/asmi_manifest_seed1.json").write_bytes(manifest_text)
    with pytest.raises(ValueError, match=message):
        load_run_groups([tmp_path / "run"])


def test_bold_is_what_the_interval_excludes(tmp_path):
    """A highest PRR that its interval does not tell from the next is underlined, not bold."""
    saved = content(n=120)
    quality = np.array(saved["gen_metrics"]["sequence", "AlignScore"])
    rng = np.random.default_rng(1)
    near = -quality + 0.3 * rng.normal(size=120)
    saved["estimations"]["sequence", "RAUQ"] = near.tolist()
    saved["estimations"]["sequence", "SemanticEntropy"] = (
        near + 0.02 * rng.normal(size=120)
    ).tolist()
    for name in saved["estimations"]:
        if "ASMI" in name[1]:
            saved["estimations"][name] = rng.normal(size=120).tolist()
    save(tmp_path / "close", saved)
    saved["estimations"]["sequence", "RAUQ"] = (-quality).tolist()
    save(tmp_path / "clear", saved)
    marks = {}
    for name in ("close", "clear"):
        (group,) = load_run_groups([tmp_path / name])
        shown = benchmark([group])[0].shown("markdown").set_index("method")[group.label]
        marks[name] = {m: v for m, v in shown.items() if v[0] in "*<"}
    assert list(marks["clear"]) == ["RAUQ"]
    assert marks["clear"]["RAUQ"].startswith("**1.00")
    assert len(marks["close"]) == 1
    assert next(iter(marks["close"].values())).startswith("<u>")


@pytest.mark.parametrize("mark", ["bold", "underline"])
def test_the_lowest_aurc_is_bold_where_its_interval_excludes_the_next(tmp_path, mark):
    saved, rng = content(n=120), np.random.default_rng(2)
    if mark == "underline":
        for symbol in ("ASMI", "Sem-ASMI", "Adapt-ASMI"):
            saved["estimations"]["sequence", f"{symbol} (60%, K=64)"] = rng.normal(size=120)
    items = {item.name: item for item in payoff(loaded(tmp_path, saved))}
    (row,) = items["aurc"].table.to_dict("records")
    marked = {name: v for name, v in row.items() if isinstance(v, Marked)}
    (best,) = marked
    plain = {name: getattr(row[name], "value", row[name]) for name in ("MSP", "entropy", "u_sem")}
    assert plain[best] == min(plain.values())
    assert marked[best].mark == mark


@pytest.mark.parametrize("mark", ["bold", "underline"])
def test_the_best_depth_is_bold_where_its_interval_excludes_the_next(tmp_path, mark):
    saved, rng = content(n=120, depths=(60, 80)), np.random.default_rng(2)
    for depth in (60, 80):
        for symbol in ("Sem-ASMI", "Adapt-ASMI"):
            name = "sequence", f"{symbol} ({depth}%, K=64)"
            noise = 0.1 if (mark, depth) == ("bold", 60) else 3
            saved["estimations"][name] += noise * rng.normal(size=120)
    selection, by_group = depths(loaded(tmp_path, saved))
    found = selection.table["aggregate PRR"]
    assert [v.mark for v in found if isinstance(v, Marked)] == [mark, mark]
    # As the table by setting has it, of this only setting.
    tied = {"bold": ["60%", "60%"], "underline": ["60%, 80%", "60%, 80%"]}
    assert by_group.table["best or tied"].tolist() == tied[mark]


def test_counts_are_whole_and_small_values_have_their_digits(tmp_path):
    (item,) = flags(loaded(tmp_path))
    for name in ("errors by both", "only by u_sem", "only by entropy"):
        assert item.shown("markdown")[name.replace("_", r"\_")].str.isdigit().all()
    save(tmp_path / "robust", content(scale=0.003))
    (item,) = screen(load_run_groups([tmp_path / "robust"]))
    median = item.table["median MI_t"][0]
    assert 0 < median < 0.001
    assert item.shown("markdown")[r"median MI\_t"][0] == f"{median:.4f}"


def test_what_was_realised_stands_above_the_curve_of_the_payoff(tmp_path):
    saved = content()
    msp = np.array(saved["estimations"]["sequence", "MaximumSequenceProbability"])
    tied = np.where(msp < np.quantile(msp, 0.7), 0.0, msp)
    saved["estimations"]["sequence", "MaximumSequenceProbability"] = tied.tolist()
    item, _ = payoff(loaded(tmp_path, saved))
    (ax,) = item.figure.axes
    assert item.table["confident share"][0] == pytest.approx(0.7)
    assert "42 confident of 60" in ax.get_title()
    assert "half" not in ax.get_xlabel()


def test_violins_show_their_medians_whole():
    values = np.r_[np.zeros(40), np.linspace(0.5, 1.2, 20)]
    wrong = np.arange(60) % 2 == 0
    figure = figures.violins(
        {"a setting": ({"MSP": values}, wrong, {"MSP": Interval(0.5, 0.4, 0.6)})}
    )
    (ax,) = figure.axes
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dots) == 2
    assert not any(dot.get_clip_on() for dot in dots)
    low, high = ax.get_ylim()
    assert any(low <= at <= high for at in ax.get_yticks())


def test_of_answers_of_one_kind_the_panels_keep_their_width():
    values, wrong = {name: np.geomspace(0.1, 1, 6) for name in ("MSP", "ASMI")}, np.ones(6, bool)
    figure = figures.violins(
        {"a setting": (values, wrong, dict.fromkeys(values, Interval(*[np.nan] * 3)))}
    )
    figure.draw_without_rendering()
    assert all(ax.get_position().width > 0.3 for ax in figure.axes)


def test_a_few_answers_are_drawn_one_by_one():
    values, wrong = np.geomspace(0.1, 1, 30), np.arange(30) < 3
    figure = figures.violins(
        {"a setting": ({"MSP": values}, wrong, {"MSP": Interval(0.5, 0.4, 0.6)})}
    )
    (ax,) = figure.axes
    (strokes,) = [line for line in ax.lines if line.get_marker() == "_"]
    assert list(strokes.get_xdata()) == [1, 1, 1]  # the wrong ones
    assert len(ax.collections) == 1  # the violin of the right ones


def test_no_text_lies_on_another(request):
    """Titles of few and of many settings, ticks of MI that spans many powers of ten.

    --slow takes many settings of each.
    """
    values, wrong = np.geomspace(1e-6, 1, 60), np.arange(60) % 2 == 0
    both = {"Adapt-ASMI": values, "MSP": np.where(values < 0.1, 0, values)}
    found = dict.fromkeys(both, Interval(0.53, 0.31, 0.75))
    drawn = [
        figures.violins(dict.fromkeys(("smollm2, babiqa", "gemma, babiqa"), (both, wrong, found))),
        figures.joint(dict.fromkeys(("smollm2, babiqa", "gemma, babiqa"), (values, values, -0.5))),
        figures.payoff(
            {f"{i}, squad closed book, 150 confident of 300": {} for i in range(7)}, values
        ),
    ]
    if request.config.getoption("--slow"):
        drawn += [
            figures.violins({f"{i}, squad": (both, wrong, found) for i in range(4)}),
            figures.joint({f"{i}, squad": (values, values, -0.5) for i in range(7)}),
        ]
    for figure in drawn:
        figure.draw_without_rendering()
        texts = [text for ax in figure.axes for text in (ax.title, *ax.texts)]
        for ax in figure.axes:
            low, high = ax.get_xlim()
            texts += [t for t in ax.get_xticklabels() if low <= t.get_position()[0] <= high]
        boxes = [t.get_window_extent() for t in texts if t.get_text()]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_of_cells_with_methods_of_their_own_names_have_room():
    """Seven panels of long names, few of them in common."""
    named = "Adapt-ASMI (60%, K=64, scope=response, mask_sampler=balanced {})"
    panels = {
        f"m, d{i}": {named.format(3 * i + k): Interval(0.1, 0.0, 0.2) for k in range(9)}
        for i in range(7)
    }
    figure = figures.forest(panels, "PRR")
    figure.draw_without_rendering()
    boxes = [ax.get_window_extent() for ax in figure.axes]
    names = [t.get_window_extent() for ax in figure.axes for t in ax.get_yticklabels()]
    assert not any(name.overlaps(box) for name in names for box in boxes)
    assert min(name.x0 for name in names) >= 0
    assert tuple(figure.get_size_inches()) <= figures.PAGE


def test_of_many_cells_few_depth_curves_are_named():
    band = np.zeros((2, 2))
    groups = {f"setting {i}": (np.array([0.1 * i, 0.1]), band) for i in range(9)}
    figure = figures.depths({"Sem-ASMI": figures.DepthCurves((0.6, 0.8), groups, (band[0], band))})
    (ax,) = figure.axes
    said = [text.get_text() for text in ax.get_legend().texts]
    assert said == ["other settings", "highest mean: setting 8", "lowest mean: setting 0", "mean"]
    colours = [line.get_color() for line in ax.lines]
    assert colours.count(figures.GREY) == 7
    assert len(set(colours)) == 4


def test_cases_are_those_that_masks_change(tmp_path):
    saved = content()
    tops = [np.tile(own, (6, 1)) for own in saved["stats"]["asmi_tokens"]]
    put_at(saved["stats"], 0.6, top_token=tops)
    (group,) = loaded(tmp_path, saved)
    (item,) = case_study([group])
    confident = int((group.wrong & (group.msp <= np.median(group.msp))).sum())
    assert f"no mask changed a token of any of the {confident} confident errors" in item.reason
    chosen = int(np.flatnonzero(group.wrong & (group.msp <= np.median(group.msp)))[-1])
    own = saved["stats"]["asmi_tokens"][chosen]
    tops[chosen][:4, 1] = (own[1] + 1) % 10
    save(tmp_path / "moved", saved)
    (item,) = case_study(load_run_groups([tmp_path / "moved"]))
    (row,) = item.table.to_dict("records")
    assert row["question"] == f"q{chosen}?"
    assert row["token most changed"] == f"word{own[1]}"
    assert row["alternative"] == f"word{(own[1] + 1) % 10}"
    assert (row["masks that keep it"], row["its masks"]) == pytest.approx((2 / 6, 4 / 6))
    assert (row["confident errors"], row["of these changed"]) == (confident, 1)


def test_figures_of_many_cells_fit_a_page():
    """Sixteen panels, or twenty rows; each says what its markers mean."""
    rows = {f"method {i}": Interval(0.1 * i, 0.1 * i - 0.3, 0.1 * i + 0.3) for i in range(20)}
    few = {name: rows[name] for name in [*rows][:4]}
    for panels, own in ((4, rows), (16, few)):
        figure = figures.forest({f"model, set {i}": own for i in range(panels)}, "PRR")
        width, height = figure.get_size_inches()
        assert width <= figures.PAGE[0]
        assert height <= figures.PAGE[1]
        explained = figure.get_supxlabel().replace("\n", " ")
        assert "filled: the interval excludes 0; open: it includes it" in explained
    # Panels that are compared share their scale.
    wide = {"method 0": Interval(3.0, 2.0, 4.0)}
    figure = figures.forest({"a": rows, "b": wide}, "PRR")
    left, right = (ax.get_xlim() for ax in figure.axes)
    assert left == right
    assert left[0] < -0.3
    assert left[1] > 4
    curve = np.linspace(0.5, 0, 19), np.tile([[0.1], [0.6]], (1, 19))
    figure = figures.payoff(
        {f"m, d{i}": {"entropy": curve, "u_sem": curve} for i in range(16)}, np.linspace(0, 0.9, 19)
    )
    assert tuple(figure.get_size_inches()) <= figures.PAGE
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == [
        "by entropy",
        "by u_sem",
        "95 % band, in its colour",
    ]
    figure.draw_without_rendering()
    box = figure.get_tightbbox()  # in inches, as saved
    assert box.width < 7.6
    assert box.height < 10
