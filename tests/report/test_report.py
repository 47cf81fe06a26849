from contextlib import contextmanager
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis import (
    Interval,
    Labelled,
    normalised_prr,
    prr_with_error,
    rank_correlation,
)
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.analysis.distinct import distinct_signal
from lm_polygraph_asmi.analysis.selective import aurc, confident_filter
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.heads.probe_file import write_probe
from lm_polygraph_asmi.report import MissingItem, build_report, figures, load_run_groups
from lm_polygraph_asmi.report.item import BOLD, ITALIC, Marked
from lm_polygraph_asmi.report.items import every_report_item
from lm_polygraph_asmi.report.items.benchmark import (
    benchmark,
    depths,
    stability,
)
from lm_polygraph_asmi.report.items.boundary import boundary, truncation
from lm_polygraph_asmi.report.items.mechanism import screen
from lm_polygraph_asmi.report.items.signal import aurc as aurc_item
from lm_polygraph_asmi.report.tables import about_run
from lm_polygraph_asmi.results.runs import load_run, manager_files
from tests.report.runs import (
    content,
    dissect,
    few_permutations,
    loaded,
    manifest,
    probe,
    put_at,
    save,
    simple_signals,
    some_rows,
)

pytestmark = [
    pytest.mark.usefixtures("few_resamples", "no_pictures"),
    pytest.mark.filterwarnings("error:constrained_layout not applied"),
]

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
    command = ["report", *runs, "--out", str(out), "--full"]
    command += [word for form in ("csv", "md", "tex", "svg") for word in ("--format", form)]
    with seen(hold_data), few_permutations():
        result = CliRunner().invoke(main, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return root, out, result.output


def cells_of(root):
    return load_run_groups(root / name for name in ("open", "k256", "seed 1", "closed"))


def test_a_full_report_has_every_item_in_every_form(everything):
    _, out, shown = everything
    page = (out / "index.html").read_text()
    _, _, missing = page.partition("<h2>Not in these runs</h2>")
    # tests/report/test_paper.py has the paper's numbers.
    assert missing.count("<li>The paper&#39;s numbers beside these: no run has a model") == 1
    assert "2 settings" in shown
    files = {suffix: {path.stem for path in out.rglob(f"*.{suffix}")} for suffix in
             ("csv", "md", "tex", "png", "svg")}  # fmt: skip
    assert files["csv"] == files["md"] == files["tex"] == {
        "benchmark", "minus_msp", "datasets", "head_to_head", "depth_selection",
        "error_separation", "distinct_signal", "ensemble_mean", "matched_flags",
        "confident_fragile", "confident_fragile_by_regime", "payoff", "aurc", "global_selector",
        "boundary", "larger_k", "top_k_coverage", "stability", "mechanism", "candidate_cosines",
        "cost", "head_coupling", "causal_probe",
    }  # fmt: skip
    for name in files["csv"]:
        assert f'<h2 id="{name}">' in page
        assert not table(out, name).empty
        latex = (out / "tables" / f"{name}.tex").read_text()
        assert r"\toprule" in latex
        assert "Source: tiny model, squad: 64 answers, 32 clusters, quality AlignScore" in latex
        assert "model models/tiny (abc); data squad.json" in latex
        assert "torch 2; cpu" in latex
        assert not set(latex.partition(r"\begin{table*}")[2]) - {*map(chr, range(128)), "–"}
    assert files["png"] == files["svg"]
    assert len(files["png"]) == 17
    assert all(f'src="figures/{name}.png"' in page for name in files["png"])


@pytest.mark.pictures
def test_a_plain_report_is_a_page_with_two_figures(tmp_path):
    """The same runs leave the same files; no path of this machine is in them."""
    about = manifest(60)
    about["model"]["path"] = "/secret/models/tiny/snapshot"
    about["dataset"]["source"] = "/secret/data/shared/squad.json"
    saved = content()
    saved["estimations"]["sequence", r"A $\frac$ <b>_|&%#{}"] = list(range(60))
    groups = loaded(tmp_path / "secret", saved, about)
    for name in ("one", "two"):
        build_report(groups, tmp_path / name)
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*")]
    assert sorted(map(str, files)) == [
        "figures/benchmark.png", "figures/minus_msp.png", "index.html",
    ]  # fmt: skip
    for path in files:
        written = (tmp_path / "one" / path).read_bytes()
        assert written == (tmp_path / "two" / path).read_bytes()
        assert b"/secret" not in written
    page = (tmp_path / "one/index.html").read_text()
    assert "A $\\frac$ &lt;b&gt;_|&amp;%#{}" in page
    assert "model tiny/snapshot (abc); data shared/squad.json" in page


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

    _, paired = prr_intervals({"sem": sem, "msp": msp}, group.answers, [("sem", "msp")])
    row = table(out, "minus_msp").set_index("method").loc[SEM]
    parts = [f"tiny model, squad{part}" for part in ("", " low", " high")]
    assert row[parts].tolist() == pytest.approx(list(paired["sem", "msp"]))

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
    row = table(out, "depth_selection").set_index(["variant", "depth"]).loc["Sem-ASMI", "80%"]
    assert row["aggregate PRR"] == pytest.approx(
        normalised_prr(group.score("Sem-ASMI (80%, K=64)"), group.quality)
    )
    # Warm-up left out: the first ten took 50 seconds.
    row = table(out, "cost").iloc[0]
    assert row[["MSP", "Sem-ASMI", "ASMI alone, marginal"]].tolist() == [1.0, 3.0, 2.0]
    assert np.isnan(row["Semantic Entropy"])
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
    stable = table(out, "stability")
    assert (stable["seeds"] == 2).all()
    # Only what depends on the seed: not the baselines, which are the same in all three runs.
    assert all("ASMI" in method for method in stable["method"])


def test_closed_book_rows_take_the_clusters_of_their_twins(everything, tmp_path):
    """Also where the closed-book run has rows in another order, and fewer of them."""
    root, out, _ = everything
    whole = table(out, "boundary")
    assert whole["questions"].tolist() == [64, 64]
    order = np.arange(ANSWERS)[::-1][:40]
    about = manifest(ANSWERS, "asmi_squad_closed_book", closed=True)
    about["rows"] = {"ids": [f"q{i}" for i in order], "clusters": ["other"] * 40}
    save(tmp_path / "closed", some_rows(content(ANSWERS, shift=0.5), order), about)
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


@pytest.mark.parametrize(("clusters", "errors"), [(10, 40), (120, 10), (120, 110)])
def test_small_samples_are_named(tmp_path, clusters, errors):
    saved, about = content(n=120), manifest(120)
    saved["gen_metrics"]["sequence", "AlignScore"] = [0.2] * errors + [0.9] * (120 - errors)
    about["rows"]["clusters"] = [str(i % clusters) for i in range(120)]
    (item,) = screen(loaded(tmp_path, saved, about))
    said = " ".join(item.caption)
    assert "Too small for reliable intervals: All settings. With fewer than 50 clusters" in said


@pytest.mark.parametrize("empty", [0, 4])
def test_empty_answers_are_counted_on_the_screen(tmp_path, empty):
    saved = content(n=60)
    saved["stats"]["greedy_texts"] = [" .\n"] * empty + [" Brask"] * (60 - empty)
    (run,) = (load_run(file) for file in manager_files(save(tmp_path / "run", saved)))
    said = about_run(run)
    assert ("Empty answers" in said) == (empty > 0)
    assert not empty or f"Empty answers, which cannot be right: {empty} of 60." in said


def run_all(groups):
    """All items; none may fail."""
    return [item for make in every_report_item() for item in make(groups)]


def reasons(items) -> str:
    return "\n".join(item.reason for item in items if isinstance(item, MissingItem))


def without_baselines():
    saved = content()
    for name in list(saved["estimations"]):
        if "ASMI" not in name[1]:
            del saved["estimations"][name]
    return saved


def test_without_baselines_msp_and_entropy_are_asmis_own(tmp_path):
    (group,) = loaded(tmp_path, saved := without_baselines())
    own = [-tokens.sum() for tokens in saved["stats"]["asmi_log_likelihood"]]
    np.testing.assert_allclose(group.msp, own)
    assert "no variant and baseline with a defined PRR" in reasons(run_all([group]))


LACKS = dict.fromkeys(("model", "peak_memory_bytes", "config"))


@pytest.mark.parametrize(
    "about", [{}, *(manifest(60) | LACKS | {"rows": rows} for rows in (None, {}, {"ids": []}))]
)
def test_what_no_manifest_records_is_taken_from_the_run(tmp_path, about):
    (group,) = loaded(tmp_path, about=about)
    assert len(set(group.clusters)) == 30  # from the prompts, two questions a passage
    if not about:
        assert group.label == "unknown model, run"
        assert group.ids is None
        assert group.variants == {}  # nobody says which of its scores are ASMI's
    run_all([group])


def test_no_contrast_is_said_and_nothing_is_made_up(tmp_path):
    for value, kind in ((0.9, "right"), (0.1, "wrong")):
        saved = content()
        saved["gen_metrics"]["sequence", "AlignScore"] = [value] * 60
        groups = loaded(tmp_path / kind, saved)
        file, _ = build_report(groups, tmp_path / f"out {kind}", full=True, formats=["csv"])
        assert f"all answers are {kind}" in file.read_text()
        assert table(file.parent, "benchmark")["tiny model, squad"].isna().all()
        assert "nan" not in file.read_text()


def test_constant_scores_are_uninformative(tmp_path):
    saved = content()
    for name in ("ASMI", "Sem-ASMI", "Adapt-ASMI"):
        saved["estimations"]["sequence", f"{name} (60%, K=64)"] = [0.0] * 60
    put_at(saved["stats"], 0.6, mi=[0 * own["mi"] for own in at_depth(saved["stats"], 0.6)])
    groups = loaded(tmp_path, saved)
    scores = benchmark(groups)[0].flat().set_index("method")["tiny model, squad"]
    assert scores[SEM] == pytest.approx(0, abs=1e-12)
    assert screen(groups)[0].table["near zero"].tolist() == [True]
    assert "nan" not in build_report(groups, tmp_path / "out")[0].read_text()


def test_what_the_command_refuses(tmp_path):
    save(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("here")
    run, empty, out, taken = (str(tmp_path / name) for name in ("run", "empty", "x", "file/out"))
    for command, message in (
        ([empty, "--out", out], "neither a manager file nor a folder with one"),
        ([run, "--out", out, "--metric", "BLEU"], "'BLEU', but ['AlignScore']"),
        ([run, "--out", taken], "Error: "),
    ):
        result = CliRunner().invoke(main, ["report", *command])
        assert (result.exit_code, message in result.output) == (1, True), result.output


def test_cells_of_one_name_are_told_apart(tmp_path):
    """By as much of their paths as it takes; each keeps its column."""
    for folder, shift in (("a/run", 0.0), ("b/run", 0.5)):
        save(tmp_path / folder, content(shift=shift))
    groups = load_run_groups([tmp_path / "a/run", tmp_path / "b/run"])
    assert len({group.label for group in groups}) == 2
    assert groups[0].label.endswith("(a/run)")
    first, *_ = benchmark(groups)
    assert set(first.table) == {"method", "family", *(group.label for group in groups)}


def test_another_k_is_compared_on_the_answers_both_have(tmp_path):
    """K = 256 run over fewer rows, and with one answer that came out otherwise."""
    save(tmp_path / "k64")
    larger = content(top_k=256)
    larger["stats"]["greedy_texts"][3] = "something else"
    save(tmp_path / "k256", some_rows(larger, range(40)), manifest(40))
    small, large = load_run_groups([tmp_path / "k64", tmp_path / "k256"])
    (item,) = truncation([small, large])
    assert (item.table["answers"] == 39).all()
    rows = [i for i in range(40) if i != 3]
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


def test_without_tokens_or_scores_what_needs_them_is_missing(tmp_path):
    saved = content()
    saved["stats"] = {k: v for k, v in saved["stats"].items() if not k.startswith("asmi")}
    items = run_all(loaded(tmp_path / "scores", saved))
    names = {item.name for item in items if not isinstance(item, MissingItem)}
    assert {"benchmark", "head_to_head", "distinct_signal", "payoff", "confident_fragile"} <= names
    assert "mi_tokens not saved" in reasons(items)
    assert "asmi not saved" in reasons(items)
    saved = content()
    saved["stats"]["asmi"][5][0.6]["mi"] = np.array([])
    (gap,) = screen(loaded(tmp_path / "empty", saved))
    assert "mi_tokens not saved, or not finite for every row" in gap.reason
    (group,) = loaded(tmp_path / "baselines", content(depths=()))
    assert group.variants == {}
    items = run_all([group])
    assert "u_sem not saved" in reasons(items)
    assert items[0].table["method"].tolist() == [
        "MaximumSequenceProbability", "MeanTokenEntropy", "SemanticEntropy", "RAUQ",
    ]  # fmt: skip


@pytest.mark.parametrize("css", [BOLD, ITALIC])
def test_the_best_is_bold_where_its_interval_excludes_the_next(tmp_path, css):
    """Of PRR, AURC and depth; else it is italic."""
    saved, rng = content(n=120, depths=(60, 80)), np.random.default_rng(2)
    quality = np.array(saved["gen_metrics"]["sequence", "AlignScore"])
    noise = {(BOLD, 60): 0.1, (BOLD, 80): 3, (ITALIC, 60): 3, (ITALIC, 80): 3}
    for depth in (60, 80):
        for symbol in ("ASMI", "Sem-ASMI", "Adapt-ASMI"):
            saved["estimations"]["sequence", f"{symbol} ({depth}%, K=64)"] = (
                noise[css, depth] * rng.normal(size=120) - quality
            )
    saved["estimations"]["sequence", "RAUQ"] = -quality + (css == ITALIC) * rng.normal(size=120)
    groups = loaded(tmp_path, saved)
    for make, columns in (
        (benchmark, [groups[0].label]), (aurc_item, ["MSP", "entropy", "u_sem"]),
        (depths, ["aggregate PRR"]),
    ):  # fmt: skip
        marked = [v for v in make(groups)[0].table[columns].to_numpy().ravel() if type(v) is Marked]
        assert {value.css for value in marked} == {css}, make


def test_no_text_lies_on_another():
    """Titles of few and of many settings, ticks of MI that spans many powers of ten."""
    values, wrong = np.geomspace(1e-6, 1, 60), np.arange(60) % 2 == 0
    both = {"Adapt-ASMI": values, "MSP": np.where(values < 0.1, 0, values)}
    found = dict.fromkeys(both, Interval(0.53, 0.31, 0.75))
    names = ("smollm2, babiqa", "gemma, babiqa")
    for figure in (
        figures.violins(dict.fromkeys(names, (both, wrong, found))),
        figures.violins({"few": ({"MSP": values[:6]}, np.ones(6, bool), found)}),
        figures.joint(dict.fromkeys(names, (values, values, -0.5))),
        figures.payoff(
            {f"{i}, squad closed book, 150 confident of 300": {} for i in range(7)}, values
        ),
    ):
        figure.draw_without_rendering()
        texts = [text for ax in figure.axes for text in (ax.title, *ax.texts)]
        for ax in figure.axes:
            low, high = ax.get_xlim()
            texts += [t for t in ax.get_xticklabels() if low <= t.get_position()[0] <= high]
        boxes = [t.get_window_extent() for t in texts if t.get_text()]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_figures_of_many_settings_fit_a_page():
    """Sixteen panels, twenty rows, or long names, few of them in common; all on one scale."""
    rows = {f"method {i}": Interval(0.1 * i, 0.1 * i - 0.3, 0.1 * i + 0.3) for i in range(20)}
    named = "Adapt-ASMI (60%, K=64, scope=response, mask_sampler=balanced {})"
    own = {f"m, d{i}": {named.format(3 * i + k): rows["method 3"] for k in range(9)}
           for i in range(7)}  # fmt: skip
    for panels in (
        {f"model, set {i}": rows for i in range(16)},
        {"a": rows, "b": own["m, d0"]},
        own,
    ):
        figure = figures.forest(panels, "PRR")
        assert tuple(figure.get_size_inches()) <= figures.PAGE
        explained = figure.get_supxlabel().replace("\n", " ")
        assert "filled: the interval excludes 0; open: it includes it" in explained
        figure.draw_without_rendering()
        axes = [ax for ax in figure.axes if ax.axison]
        assert len({ax.get_xlim() for ax in axes}) == 1
        boxes = [ax.get_window_extent() for ax in axes]
        names = [
            t.get_window_extent() for ax in axes for t in ax.get_yticklabels() if t.get_visible()
        ]
        assert not any(name.overlaps(box) for name in names for box in boxes)
        assert min(name.x0 for name in names) >= 0
