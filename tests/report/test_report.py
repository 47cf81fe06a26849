"""What a report says of planted runs."""

import sys
from dataclasses import replace
from html import unescape
from itertools import pairwise, product
from types import SimpleNamespace
from unittest.mock import Mock, patch

import joblib
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from lm_polygraph_asmi import analysis
from lm_polygraph_asmi.analysis import Interval, Labelled, coverage, distinct, normalised_prr
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.heads.probe_file import probe_path, write_probe
from lm_polygraph_asmi.report import build_report, figures, load_run_groups
from lm_polygraph_asmi.report.item import BOLD, ITALIC, Marked, ReportItem
from lm_polygraph_asmi.report.items import every_report_item, signal
from lm_polygraph_asmi.report.items.benchmark import benchmark, depths, stability
from lm_polygraph_asmi.report.items.boundary import boundary, pairs_of_rows, truncation
from lm_polygraph_asmi.report.items.mechanism import cost, screen
from lm_polygraph_asmi.report.tables import prr_rows
from lm_polygraph_asmi.results.paper import read_published
from lm_polygraph_asmi.results.runs import MSP
from tests.report.runs import (
    BASELINES,
    content,
    dissect,
    exchanged,
    few_permutations,
    loaded,
    manifest,
    papers_manifest,
    probe,
    put_at,
    save,
    some_rows,
)

pytestmark = [
    pytest.mark.usefixtures("few_resamples", "no_pictures"),
    pytest.mark.filterwarnings("error:constrained_layout not applied"),
]

SEM, TINY, ANSWERS = "Sem-ASMI (60%, K=64)", "tiny model, squad", 64
OPEN, CLOSED = (papers_manifest(ANSWERS, name) for name in ("SQuAD", "SQuAD without passage"))
OTHER = manifest(40) | {
    "dataset": {"name": "asmi_squad", "source": "other.json"}
}  # of other questions


@pytest.fixture(scope="module")
def everything(tmp_path_factory, few_resamples):  # noqa: ARG001
    """The full report of four runs that between them hold every item, over two settings.

    Figures are looked at and not written.
    """
    root = tmp_path_factory.mktemp("runs")
    details = content(ANSWERS, depths=(60, 80))
    lengths = [len(tokens) for tokens in details["stats"]["asmi_tokens"]]
    put_at(
        details["stats"], 0.6, candidates=[np.tile(np.arange(8), (t, 1)) for t in lengths],
        candidate_cosines=[np.tile(np.eye(8), (t, 1, 1)) for t in lengths],
    )  # fmt: skip
    dissect(details)
    contents = {
        "open": (details, OPEN), "k256": (content(ANSWERS, top_k=256), OPEN),
        "seed 1": (content(ANSWERS, mask_seed=1), OPEN | {"seeds": {"masks": 1, "samples": 0}}),
        "closed": (content(ANSWERS, shift=0.5), CLOSED),
    }  # fmt: skip
    runs = {name: str(save(root / name, *run).parent) for name, run in contents.items()}
    write_probe(probe(ANSWERS), probe_path(root / "open" / "ue_manager_seed1"))
    formats = [f"--format={form}" for form in ("csv", "md", "tex", "svg")]
    command = ["report", *runs.values(), "--out", str(root / "report"), "--full", *formats]

    drawn = {}

    def savefig(figure, path, **_):
        path.touch()
        drawn[path.stem] = figure
        assert {ax.has_data() for ax in figure.axes if ax.axison} == {True}

    with pytest.MonkeyPatch.context() as patch, few_permutations():
        patch.setattr(Figure, "savefig", savefig)
        patch.setattr(joblib, "cpu_count", lambda: 1)  # other processes do not know the patches
        result = CliRunner().invoke(main, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return SimpleNamespace(
        groups=load_run_groups(runs.values()), runs=runs, out=root / "report", shown=result.output,
        drawn=drawn,
        table=lambda name: pd.read_csv(root / f"report/tables/{name}.csv"),
    )  # fmt: skip


def test_a_full_report_has_every_item_in_every_form(everything):
    files = {suffix: {path.stem for path in everything.out.rglob(f"*.{suffix}")} for suffix in
             ("csv", "md", "tex", "png", "svg")}  # fmt: skip
    assert files["csv"] == files["md"] == files["tex"] == {
        "benchmark", "minus_msp", "datasets", "head_to_head", "depth_selection",
        "error_separation", "distinct_signal", "ensemble_mean", "matched_flags",
        "confident_fragile", "confident_fragile_by_regime", "payoff", "aurc", "global_selector",
        "boundary", "larger_k", "top_k_coverage", "stability", "mechanism", "candidate_cosines",
        "cost", "head_coupling", "causal_probe", "reproduction",
    }  # fmt: skip
    assert (files["png"], len(files["png"])) == (files["svg"], 17)
    for name in files["csv"]:
        assert not everything.table(name).empty
        latex = (everything.out / "tables" / f"{name}.tex").read_text()
        assert "Source: tiny model, squad: 64 answers, 32 clusters, quality AlignScore" in latex
        printed = latex.partition(r"\begin{table*}")[2]
        assert "asterisk: it excludes 0" in printed or "* [" not in printed, name
        assert not set(printed) - {*map(chr, range(128)), "–"}
    for file, parts in {
        "tables/minus_msp.md": ["10,000 resamples"], "tables/error_separation.md": ["2,000 resam"],
        "index.html": [
            "masks 1, samples 0", "reliable intervals: All settings",
            *(f'<h2 id="{name}">' for name in files["csv"]),
            *(f'src="figures/{name}.png"' for name in files["png"]),
        ],
    }.items():  # fmt: skip
        written = (everything.out / file).read_text()
        assert [part for part in parts if part not in written] == []
    assert ("Not in these runs" in written, "2 settings" in everything.shown) == (False, True)


@pytest.mark.pictures
def test_a_plain_report_is_a_page_with_two_figures(tmp_path):
    """The command leaves the files of the function; no path of this machine is in them."""
    about = manifest(60)
    about["model"]["path"] = "/secret/models/tiny/snapshot"
    about["dataset"]["source"] = ["/secret/data/shared/squad", "continuation"]
    saved = content(depths=(60, 90))
    saved["estimations"]["sequence", r"A $\frac$ <b>_|&%#{}"] = list(range(60))
    run, one, two = (tmp_path / name for name in ("secret/run", "one", "two"))
    build_report(load_run_groups([save(run, saved, about)], depth=0.9), one)
    command = f"report {run} --depth 0.9 --out {two}"
    assert CliRunner().invoke(main, command).exit_code == 0
    files, other = (
        {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.*")}
        for out in (one, two)
    )
    assert sorted(files) == ["figures/benchmark.png", "figures/minus_msp.png", "index.html"]
    assert files == other
    assert not any(b"/secret" in written for written in files.values())
    page = files["index.html"].decode()
    assert "A $\\frac$ &lt;b&gt;_|&amp;%#{}" in page
    assert "model tiny/snapshot (abc); data shared/squad continuation" in page


def test_numbers_of_the_tables_are_those_of_the_statistics(everything):
    group = everything.groups[0]
    answers, wrong, quality = group.answers, group.wrong, group.quality
    msp, entropy, sem = (group.score(name) for name in (MSP, "MeanTokenEntropy", SEM))
    scores = {"sem": sem, "msp": msp, "semantic": group.score("SemanticEntropy")}
    _, paired = analysis.prr_intervals(scores, answers, [("sem", "msp"), ("sem", "semantic")])
    controls = np.column_stack([msp, entropy])
    beyond = distinct.distinct_signal(sem, controls, answers)
    tokens = [np.concatenate(each) for each in (group.masked("mi"), group.saved("asmi_entropy"))]
    lengths = np.array([len(answer) for answer in group.saved("greedy_tokens")])
    four = {"H": entropy, "H(p̄)": group.entropy_of_mean, "MI": group.mi, "u_sem": sem}
    four = {name: normalised_prr(score, quality) for name, score in four.items()}
    prr = {m: normalised_prr(group.score(m), quality) for m in group.scores}
    best = max(group.variants.values(), key=prr.get)
    discounts = list(map(np.multiply, group.masked("mi"), group.masked("agreement")))
    largest = max(range(len(discounts)), key=lambda answer: max(discounts[answer]))
    of_right = np.concatenate([group.mi_tokens[i] for i in np.flatnonzero(~wrong)])

    def parts(name, *values):
        """An interval's columns, or a PRR's."""
        ends = (" low", " high") if len(values) == 3 else (" standard error",)
        return dict(zip([name, *(name + end for end in ends)], values, strict=True))

    expected = {
        ("benchmark", f"method == '{SEM}'"): parts(TINY, *analysis.prr_with_error(sem, answers)),
        ("minus_msp", f"method == '{SEM}'"): parts(TINY, *paired["sem", "msp"]),
        ("head_to_head", ""): {  # only of variants of the operating settings
            "top variant": f"{best} ({prr[best]:.3f})",
            **parts("Sem-ASMI Δ SemEnt", *paired["sem", "semantic"]),
        },
        ("distinct_signal", ""): {
            "signal": "u_sem, mean", "controls": "MSP, H", "paper's criterion": "yes",  # planted
            **parts("residual AUROC", *beyond.residual_auroc), "LR": beyond.likelihood_ratio,
        },
        ("distinct_signal", "signal == 'Sem-ASMI (80%, K=64)'"): {"controls": "MSP, H"},
        ("distinct_signal", "controls != 'MSP, H'"): parts(
            "residual AUROC", *distinct.distinct_signal(
                sem, np.column_stack([group.entropy_of_mean, group.mean_entropy]), answers
            ).residual_auroc
        ),
        ("payoff", ""): {
            "filter by u_sem": analysis.confident_filter(msp, sem, entropy, answers).by_fragility
        },
        ("aurc", ""): {"MSP": analysis.aurc(msp, wrong), "u_sem": analysis.aurc(sem, wrong)},
        ("matched_flags", ""): {
            "flagged by each": wrong.sum(),
            "errors by both": analysis.mcnemar(sem, entropy, wrong, wrong.sum()).both,
        },
        ("global_selector", "coverage == 0.8"): {
            "error, with u_sem": analysis.global_selector(controls, sem, answers)[0.8][1]
        },
        ("error_separation", ""): {"right answers": of_right.mean()},
        ("top_k_coverage", "tokens == 'all tokens'"): {
            "K = 64": np.concatenate(group.masked("coverage"))[:, coverage.TOP_K.index(64)].mean()
        },
        ("mechanism", ""): {"Spearman of MI_t and H_t": analysis.rank_correlation(*tokens)},
        ("candidate_cosines", ""): {
            "answer": largest, "token": np.argmax(discounts[largest]),
        },
        ("datasets", ""): {"tokens of wrong": lengths[wrong].mean(), "empty": 0},
        ("ensemble_mean", ""): {
            "highest": max(four, key=lambda name: four[name]),
            **{f"PRR of {name}": prr for name, prr in four.items()},
        },
        **{
            ("depth_selection", f"variant == 'Sem-ASMI' and depth == '{depth}'"): {
                "aggregate PRR": prr[f"Sem-ASMI ({depth}, K=64)"]  # not of another K
            }
            for depth in ("60%", "80%")
        },
        # Warm-up left out: the first ten took 50 seconds.
        ("cost", ""): {
            "MSP": 1.0, "Sem-ASMI": 3.0, "ASMI alone, marginal": 2.0, "Semantic Entropy": np.nan,
            "greedy": 1.0, "asmi": 2.0, "peak GiB, main": 1.0,
        },
    }  # fmt: skip
    for (name, where), columns in expected.items():
        table = everything.table(name)
        row = (table.query(where) if where else table).iloc[0][list(columns)].tolist()
        assert row == pytest.approx([*columns.values()], abs=1e-12, nan_ok=True), name
    drawn, table = everything.drawn["distinct_signal"], everything.table("distinct_signal")
    assert not table["signal"].isin([*group.variants.values()]).any()  # each signal is tested once
    first = table.query("signal == 'u_sem, mean' and controls == 'MSP, H'")["residual AUROC"]
    points = [line for line in drawn.axes[0].lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in points[::-1]] == pytest.approx(first.tolist())


def test_every_number_of_the_paper_has_its_place(everything):
    """The tables and columns that paper.csv names are the report's."""
    published = read_published()
    placeless = published["table"] == ""  # such as the lowest of several data sets
    assert published.loc[placeless, "quantity"].nunique() == 6
    named = {
        (number.table, column)
        for number in published[~placeless].itertuples()
        for column in [number.column] * (number.table != "benchmark")
        + [part.split("=", 1)[0] for part in number.row.split("; ") if part]
    }
    known = {(name, column) for name, _ in named for column in everything.table(name)}
    # Of phases and numbers of heads that no run here has.
    assert {column for _, column in named - known} <= {"nli", "samples", "k = 16"}


def test_numbers_beside_the_papers_are_those_of_the_other_tables(everything):
    beside = everything.table("reproduction")
    assert beside["but"].str.startswith("rows").all()
    # The paper chooses its depth over sixteen settings, not over these two.
    assert "mean regret" not in set(beside["quantity"])
    for setting, quantity, name, column, but in (
        ("SQuAD without passage", "difference of PRR", "boundary", "Sem-ASMI Δ MSP", ""),
        ("SQuAD", "ρ(MI_t, z_t)", "head_coupling", "ρ(MI, z)", "; masks of heads"),
        ("SQuAD", "flips of high MI, k = 2", "causal_probe", "k = 2", "; masks of heads"),
    ):  # fmt: skip
        place = (beside["quantity"] == quantity) & (beside["setting"] == f"Qwen3-4B, {setting}")
        (row,) = beside[place].iloc
        own = everything.table(name)
        assert row["here"] == own[own["setting"].str.endswith(setting.lower())][column].iloc[0]
        assert row["but"] == f"rows{but}"


def test_closed_book_rows_take_the_clusters_of_their_twins(everything, tmp_path):
    """Also where the closed-book run has rows in another order, and fewer of them."""
    assert everything.table("boundary")["questions"].tolist() == [64, 64]
    order = np.arange(ANSWERS)[::-1][:40]
    rows = {"ids": [f"q{i}" for i in order], "clusters": ["other"] * 40}
    closed = some_rows(content(ANSWERS, shift=0.5), order)
    save(tmp_path / "closed", closed, CLOSED | {"rows": rows})
    few = some_rows(content(ANSWERS, seed=8), range(9))  # shares no question
    save(tmp_path / "few", few, OPEN | {"rows": {"ids": [*range(9)], "clusters": ["a"] * 9}})
    groups = load_run_groups([tmp_path / "few", everything.runs["open"], tmp_path / "closed"])
    (item,) = boundary(groups)
    assert [group.grounded for group in groups] == [True, True, False]
    assert item.table["questions"].tolist() == [40, 40]
    chosen, full = sorted(order), everything.groups[1]  # the same answers, in the open run's order
    scores = {"sem": full.u_sem[chosen], "msp": full.msp[chosen]}
    _, paired = analysis.prr_intervals(scores, full.answers.take(chosen), [("sem", "msp")])
    assert item.table["Sem-ASMI Δ MSP"][1] == pytest.approx(paired["sem", "msp"])


def test_another_k_is_compared_on_the_answers_both_have(tmp_path):
    """K = 256 run over fewer rows in another order, and with one answer that came out otherwise."""
    larger = content(top_k=256)
    larger["stats"]["greedy_texts"][3] = "something else"
    unlike = manifest(40) | {"rows": None, "dataset": {"name": "of another config"}}
    small, large, of_one_name = load_run_groups(
        [
            save(tmp_path / "k64"),
            save(tmp_path / "k256", some_rows(larger, range(39, -1, -1)), unlike),
            save(tmp_path / "others", content(40, top_k=256, shift=0.5), OTHER),
        ]
    )
    (item,), rows = truncation([of_one_name, large, small]), [i for i in range(40) if i != 3]
    assert item.groups == [small, large]  # once, although each has rows of two scores
    turned, of_large = [39 - i for i in rows], "Sem-ASMI (60%, K=256)"
    scores = {"64": small.score(SEM)[rows], "256": large.score(of_large)[turned]}
    _, paired = analysis.prr_intervals(scores, small.answers.take(rows), [("256", "64")])
    row = item.table.set_index("score").loc["Sem-ASMI"]
    assert row["large Δ small K"] == pytest.approx(paired["256", "64"])
    saved = (small.mi_of(SEM), rows), (large.mi_of(of_large), turned)
    tokens = [np.concatenate([mi[i] for i in places]) for mi, places in saved]
    expected = pytest.approx([39, analysis.rank_correlation(*tokens)])
    assert row[["answers", "token ρ of MI"]].tolist() == expected
    assert pairs_of_rows(small, large, True) == [*zip(rows, turned, strict=True)]


def test_a_depth_is_chosen_on_the_larger_of_two_runs(tmp_path, monkeypatch):
    saved, asked = content(depths=(60, 80)), Mock(wraps=analysis.clusters.percentile_interval)
    few, whole = load_run_groups(
        [
            save(tmp_path / "few", some_rows(saved, range(40)), manifest(40)),
            save(tmp_path / "all", saved),
        ]
    )
    for groups in ([few, whole], [whole, few]):
        (item,) = depths(groups)
        prr = normalised_prr(whole.score("Sem-ASMI (80%, K=64)"), whole.quality)
        assert item.table["aggregate PRR"][3] == pytest.approx(prr)
        assert item.caption[-1].endswith("tiny model, squad (few).")
    # A mean over settings has the clusters of the smallest, so the widest interval.
    monkeypatch.setattr(sys.modules[depths.__module__], "percentile_interval", asked)
    (other,) = loaded(tmp_path / "other", content(40, depths=(60, 80), shift=0.5), OTHER)
    (item,) = depths([whole, other])
    assert {call.kwargs["clusters"] for call in asked.call_args_list} == {20}
    # Of one name and with equal ids, but with other questions.
    assert (item.groups, other.dataset) == ([whole, other], whole.dataset)
    (item,) = depths([few, *loaded(tmp_path / "one depth")])
    assert item.groups == [few]  # a larger run of one depth does not stand for it


ASMI, ADAPT = "ASMI (60%, K=64)", "Adapt-ASMI (60%, K=64)"
COMPARING = {
    "K": (truncation, "score"), "seeds": (stability, "method"),
    "passage": (boundary, "setting"), "batches": (cost, "one at a time / batched"),
}  # fmt: skip
"""Items that compare two runs, and the columns that tell what they compared."""
SLOW = {"config": {"asmi": {"memory_budget": 1}}}
CLOSED_BOOK = manifest(60, "asmi_squad_closed_book", closed=True)
OTHER_ROWS = {"ids": [f"other{i}" for i in range(60)], "clusters": ["a", "b"] * 30}


@pytest.mark.parametrize(
    ("made", "settings", "about", "compared"),
    [
        ({}, {}, {}, {}),
        ({"top_k": 256}, {}, {}, {"K": ["Sem-ASMI", "ASMI"]}),
        ({"top_k": 256}, {"stop": ["x"]}, {}, {"K": ["Sem-ASMI", "ASMI"]}),
        ({"top_k": 256}, {"scope": "response"}, {}, {}),
        ({"mask_seed": 1}, {}, {}, {"seeds": [ASMI, SEM, ADAPT]}),
        ({"mask_seed": 1}, {"num_samples": 5}, {}, {"seeds": [ASMI, SEM]}),
        ({"mask_seed": 1}, {"scope": "response"}, {}, {}),
        ({}, {}, {"seeds": {"masks": 0, "samples": 1}}, {"seeds": ["SemanticEntropy", ADAPT]}),
        ({}, {}, SLOW, {"batches": [2.5, 2.5]}),
        ({}, {"scope": "response"}, SLOW, {}),
        ({"depths": (60, 80)}, {}, SLOW, {}),
        ({"shift": 0.5}, {}, CLOSED_BOOK, {"passage": [TINY, f"{TINY} closed book"]}),
        ({}, {}, CLOSED_BOOK | {"model": {"path": "other"}}, {}),
        ({"shift": 0.5}, {}, CLOSED_BOOK | {"rows": OTHER_ROWS}, {}),
        ({"mask_seed": 1}, {}, {"dataset": {"name": "other"}}, {"seeds": [ASMI, SEM, ADAPT]}),
        ({"top_k": 256}, {}, {"dataset": {"name": "other"}}, {"K": ["Sem-ASMI", "ASMI"]}),
    ],
)  # fmt: skip
def test_what_two_runs_are_compared_by(tmp_path, made, settings, about, compared):
    """By what alone differs between them, but for rounding; of other questions, by nothing."""
    other = exchanged(content(**made), **settings)
    other["gen_metrics"]["sequence", "AlignScore"] = [
        quality * (1 + 1e-7) for quality in other["gen_metrics"]["sequence", "AlignScore"]
    ]
    other["stats"]["asmi_seconds"] = [5.0] * 60  # the first has 2
    groups = load_run_groups(
        [save(tmp_path / "one"), save(tmp_path / "other", other, manifest(60) | about)]
    )
    items = {kind: (make(groups)[0], column) for kind, (make, column) in COMPARING.items()}
    found = {
        kind: item.table[column].dropna().tolist()
        for kind, (item, column) in items.items()
        if isinstance(item, ReportItem)
    }
    assert {kind: rows for kind, rows in found.items() if rows} == compared
    assert getattr(items["passage"][0], "reason", "").startswith("no question is in both") == (
        about.get("rows") is OTHER_ROWS
    )


def without(part, keep):
    """Take from a part of a run what `keep` does not want."""
    return lambda run: run.update({part: {n: v for n, v in run[part].items() if keep(n)}})


def all_alike(value):
    return lambda saved: saved["gen_metrics"].update({("sequence", "AlignScore"): [value] * 60})


def constant(saved):
    """The scores and MI_t of ASMI are 0."""
    for name in saved["methods"]:
        saved["estimations"]["sequence", name] = [0.0] * 60
    put_at(saved["stats"], 0.6, mi=[0 * own["mi"] for own in at_depth(saved["stats"], 0.6)])


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (without("estimations", lambda name: "ASMI" in name[1]),
         ["no variant and baseline with a defined PRR", f"no run has {MSP} and another method"]),
        (without("stats", lambda name: not name.startswith("asmi")),
         ["mi_tokens not saved", "asmi not saved"]),
        (lambda saved: saved.update(content(depths=())), ["u_sem not saved", "details=true"]),
        # One answer has no token.
        (lambda saved: saved["stats"]["asmi"][5][0.6].update(mi=np.array([])),
         ["mi_tokens not saved, or not finite for every row", "two K", "two or more",
          "scored twice with other masks or samples", "with and without"]),
        (constant, ["u_sem is the same for all answers", "MI_t or A_t is the same everywhere"]),
        (lambda saved: [change(saved) for change in (all_alike(0.9), without(
            "stats", lambda name: "seconds" not in name))],
         ["all answers are right", "no seconds of more than 10"]),
        (all_alike(0.1), ["all answers are wrong"]),
    ],
)  # fmt: skip
def test_what_a_run_lacks_is_named_and_nothing_is_made_up(tmp_path, change, reasons):
    saved = content()
    change(saved)
    groups = loaded(tmp_path, saved)
    page, _ = build_report(groups, tmp_path / "out", full=True, formats=["csv"])
    made, _, missing = unescape(page.read_text()).partition("<h2>Not in these runs</h2>")
    assert [reason for reason in reasons if reason not in missing] == []
    assert all(f'<h2 id="{name}">' in made for name in ("benchmark", "datasets"))
    assert "nan" not in made + missing
    prr = pd.read_csv(tmp_path / "out/tables/benchmark.csv").set_index("method")[TINY]
    assert prr.isna().all() == ("all answers are" in reasons[0])
    if change is constant:
        assert prr[SEM] == pytest.approx(0, abs=1e-12)
        assert screen(groups)[0].table["near zero"].tolist() == [True]
    elif "u_sem" in reasons[0]:
        assert (groups[0].variants, [*prr.index]) == ({}, [*BASELINES])


@pytest.mark.parametrize("known", [{}, {"rows": None}, {"rows": {"ids": []}}])
def test_what_no_manifest_records_is_taken_from_the_run(tmp_path, known):
    saved, lacks = content(), dict.fromkeys(("model", "peak_memory_bytes", "config"))
    about = manifest(60) | lacks | known if known else {}
    without("estimations", lambda name: "ASMI" in name[1])(saved)
    (group,) = loaded(tmp_path, saved, about)
    assert len(set(group.clusters)) == 30  # from the prompts, two questions a passage
    np.testing.assert_allclose(-group.msp, [*map(sum, saved["stats"]["asmi_log_likelihood"])])
    if not about:  # nobody says which of its scores are ASMI's
        assert (group.label, group.ids, group.variants) == ("unknown model, run", None, {})
        assert all(make([group]) for make in every_report_item())


def test_rows_of_the_terminal_are_prr_the_best_first(everything):
    own = everything.groups[1].run
    scores, number = own.scores.assign(none=0.0), np.arange(ANSWERS)
    values = np.resize([0, 0.5, 0.5, 1, 0.2, 0.9], ANSWERS)  # 0.5 is right
    lacking = np.where(number % 3, values, np.nan)
    run = replace(own, scores=scores, quality=own.quality.assign(F1=values, Rouge=lacking))
    for metric, quality in run.quality.items():
        kept = number[quality.notna()]
        clusters, judged = [run.cluster_keys[i] for i in kept], quality[kept].to_numpy()
        some = {name: score.to_numpy()[kept] for name, score in scores.items()}
        answers, pairs = Labelled(quality=judged, clusters=clusters), [(n, MSP) for n in some]
        differences = analysis.prr_intervals(some, answers, pairs)[1]
        expected = {
            name: (normalised_prr(score, judged), analysis.auroc(score, judged < 0.5),
                   *([np.nan] * 3 if name == MSP else differences[name, MSP]))
            for name, score in some.items()
        }  # fmt: skip
        rows = prr_rows(run, metric)
        assert {row["method"] for row in rows} == {*some}
        assert [row["prr"] for row in rows] == sorted((row["prr"] for row in rows), reverse=True)
        for row in rows:
            found = [row[name] for name in ("prr", "auroc", "minus_msp", "low", "high")]
            assert found == pytest.approx(expected[row["method"]], abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("css", [BOLD, ITALIC])
def test_the_best_is_bold_where_its_interval_excludes_the_next(tmp_path, css):
    """Of PRR, AURC and depth; else it is italic."""
    saved, rng = content(n=120, depths=(60, 80)), np.random.default_rng(2)
    quality = np.array(saved["gen_metrics"]["sequence", "AlignScore"])
    noise = {(BOLD, 60): 0.1, (BOLD, 80): 3, (ITALIC, 60): 3, (ITALIC, 80): 3}
    for depth, symbol in product((60, 80), ("ASMI", "Sem-ASMI", "Adapt-ASMI")):
        saved["estimations"]["sequence", f"{symbol} ({depth}%, K=64)"] = (
            noise[css, depth] * rng.normal(size=120) - quality
        )
    saved["estimations"]["sequence", "RAUQ"] = -quality + (css == ITALIC) * rng.normal(size=120)
    groups = loaded(tmp_path, saved)
    for make, columns in (
        (benchmark, [groups[0].label]), (signal.aurc, ["MSP", "entropy", "u_sem"]),
        (depths, ["aggregate PRR"]),
    ):  # fmt: skip
        marked = [v for v in make(groups)[0].table[columns].to_numpy().ravel() if type(v) is Marked]
        assert {value.css for value in marked} == {css}, make


def test_curves_end_where_few_answers_are_left(tmp_path):
    (item,) = signal.payoff(loaded(tmp_path))
    drawn = [np.isfinite(line.get_ydata()).sum() for line in item.draw().axes[0].lines]
    assert drawn == [((1 - signal.ABSTAIN) * 30 >= 10).sum()] * len(drawn)


def test_quadrants_have_their_own_rates_and_numbers():
    split = SimpleNamespace(error_rate=np.tri(2), count=np.arange(4).reshape(2, 2))
    (ax,) = figures.quadrants({"one": split}).axes
    assert [text.get_text() for text in ax.texts] == [
        "100%\nn = 0", "0%\nn = 1", "100%\nn = 2", "100%\nn = 3"
    ]  # fmt: skip


def test_figures_of_many_settings_fit_a_page():
    """Many panels, rows, or long names, few of them in common; all on one scale."""
    rows = {f"method {i}": Interval(0.1 * i, 0.1 * i - 0.3, 0.1 * i + 0.3) for i in range(20)}
    named = "Adapt-ASMI (60%, K=64, scope=response, mask_sampler=balanced {})"
    own = {f"m, d{i}": {named.format(3 * i + k): rows["method 3"] for k in range(5)}
           for i in range(7)}  # fmt: skip
    scoped = {f"{symbol} (60%, K=64, scope=response)": rows["method 3"] for symbol in ("Sem", "a")}
    two = {"m, one": scoped, "m, other": scoped | {"MSP": rows["method 0"]}}
    for panels, how in (
        ({f"model, set {i}": rows for i in range(16)}, {"chance": 0.55}),
        ({f"m, set {i}": rows for i in range(6)}, {}),
        ({"a": own["m, d0"]}, {}), (own, {"chance": 0.55}), (two, {}),
    ):  # fmt: skip
        figure, chance = figures.forest(panels, "PRR", **how), how.get("chance", 0)
        assert (figure.get_size_inches() <= figures.PAGE).all()
        label = figure.get_supxlabel().replace("\n", " ")
        assert f"filled: the interval excludes {chance}; open: it includes it" in label
        lay_out(figure)
        axes = [ax for ax in figure.axes if ax.axison]
        for line in (line for ax in axes for line in ax.lines if line.get_marker() == "o"):
            filled = abs(line.get_xdata()[0] - chance) > 0.3
            assert line.get_markerfacecolor() == (figures.BLUE if filled else "white")
        assert len({ax.get_xlim() for ax in axes}) == 1
        places = [ax.get_window_extent() for ax in axes]
        columns = [written(ax.yaxis) for ax in axes]
        assert not any(name.overlaps(place) for names in columns for name in names
                       for place in places)  # fmt: skip
        assert not any(under.overlaps(over) for names in columns for under, over in pairwise(names))
        assert min(name.x0 for names in columns for name in names) >= 0
        first = max(name.width for names in columns for name in names)
        assert first * sum(map(bool, columns[:2])) < figure.bbox.width / 2


def lay_out(figure):
    """As in its file, which is not written."""
    with patch.object(Figure, "savefig"):
        figures.save(figure, "figure.png")


def written(axis):
    """Places of the labels that are seen along an axis."""
    axis.get_ticklabels()  # puts them there
    low, high = sorted(axis.get_view_interval())
    return [
        label.get_window_extent()
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high
        for label in [tick.label1]
        if label.get_visible() and label.get_text()
    ]


SETTINGS = [f"Qwen3-8B-Base, SQuAD without passage ({i})" for i in range(6)]
DEPTHS = ([i / 20 for i in range(1, 20)], dict.fromkeys(SETTINGS, np.zeros(19)), np.zeros(19),
          np.zeros((2, 19)))  # fmt: skip


@pytest.mark.parametrize(
    ("draw", "panels", "shared"),
    [
        (figures.joint, [(np.geomspace(low, 0.3, 99), np.linspace(low, 1, 99), 0.5)
                         for low in (1e-5, 1e-3, 0.1)], "xy"),
        (figures.depths, [DEPTHS] * 7, "xy"),
        (figures.depths, [DEPTHS], "xy"),  # whose legend is wider than one panel
        # A curve may end where few answers are left.
        (figures.payoff, [{"u_sem": (np.arange(99), np.where(np.arange(99) < end, 0.5, np.nan),
                                     np.full((2, 99), np.nan))} for end in (30, 90)], "x"),
        (figures.coverage, [(pd.DataFrame([np.linspace(low, 1, len(coverage.TOP_K))],
                                          ["high (top decile)"], coverage.TOP_K),
                             {"high (top decile)": np.ones((2, len(coverage.TOP_K)))})
                            for low in (0.2, 0.9)], "xy"),
        (figures.violins, [("MSP", np.geomspace(low, 200, 40), np.arange(40) < 20)
                           for low in (0.1, 1)], "y"),
    ],
)  # fmt: skip
def test_panels_share_axes_whose_numbers_do_not_touch_and_legends_fit(draw, panels, shared):
    figure = draw({f"model, set {i}": values for i, values in enumerate(panels)})
    lay_out(figure)
    axes = [ax for ax in figure.axes if ax.get_title()]
    assert len(axes) == len(panels)
    for letter in shared:
        assert len({getattr(ax, f"get_{letter}lim")() for ax in axes}) == 1
    for ax in axes:
        numbers = written(ax.xaxis)
        assert all(left.x1 + 2 < right.x0 for left, right in pairwise(numbers))
        assert len(numbers) > 1 or draw is figures.violins
        assert not any("e+" in number.get_text() for number in ax.get_yticklabels())
    for legend in figure.legends:
        assert legend.get_window_extent().width <= figure.bbox.width


def test_every_bar_of_the_costs_has_its_name(tmp_path):
    """Of runs that differ by seed or depth alone, and of one that was repeated."""
    runs = [(content(), 0), (content(mask_seed=1), 1), (content(depths=(80,)), 0), (content(), 0)]
    files = [
        save(tmp_path / f"run{i}", saved, manifest(60) | {"seeds": {"masks": seed}})
        for i, (saved, seed) in enumerate(runs)
    ]
    (item,) = cost(load_run_groups(files))
    (ax,) = item.draw().axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len({*names}) == len(names) == 4
    assert [[part in name for name in names].count(True) for part in ("seed 1", "80%")] == [1, 1]
    assert "S 40" in ax.get_xlabel()


def test_one_variant_is_drawn_in_all_rows_and_few_answers_one_by_one(tmp_path):
    def wrong(saved, rows):
        quality = np.where(np.isin(np.arange(60), rows), 0.1, 0.9).tolist()
        return saved | {"gen_metrics": {("sequence", "AlignScore"): quality}}

    fewer = content()
    without("estimations", lambda name: "Adapt" not in name[1])(fewer)
    groups = load_run_groups(
        [
            save(tmp_path / "all", wrong(content(), range(4)), manifest(60)),
            save(tmp_path / "fewer", wrong(fewer, range(20)), manifest(60, "asmi_other")),
        ]
    )
    figure = screen(groups)[0].draw()
    assert [ax.get_ylabel() for ax in figure.axes] == ["Sem-ASMI, nats", "MSP, nats"] * 2
    assert all(ax.get_ylabel().split(",")[0] in ax.get_title() for ax in figure.axes)
    for number, ax in enumerate(figure.axes):
        few = [len(line.get_xdata()) for line in ax.lines if line.get_marker() == "x"]
        assert (few, len(ax.collections)) == (([4], 1) if number < 2 else ([], 2))
