"""The paper's numbers beside those of planted settings."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from lm_polygraph_asmi.analysis import auroc, normalised_prr
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.experiments.items import MEASURES as OF_HEADS
from lm_polygraph_asmi.experiments.items.heads import coupled, profiles
from lm_polygraph_asmi.experiments.items.probe import probed, rates
from lm_polygraph_asmi.experiments.probe_file import write_probe
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.report import build_report, load_run_groups
from lm_polygraph_asmi.report.item import MissingItem
from lm_polygraph_asmi.report.items import every_report_item, papers_numbers
from lm_polygraph_asmi.report.items.benchmark import stability
from lm_polygraph_asmi.report.items.boundary import boundary, truncation
from lm_polygraph_asmi.report.items.measured import MEASURES
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    GENERATION,
    MODELS,
    PAPER,
    Published,
    departures,
    paper_setting,
    read_published,
)
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable
from lm_polygraph_asmi.results.runs import Run
from lm_polygraph_asmi.runs.compose import compose_run
from tests.report.runs import (
    METHODS,
    content,
    dissect,
    exchanged,
    few_permutations,
    loaded,
    manifest,
    probe,
    put,
    save,
)
from tests.report.sixteen import group as planted_answers

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")
ALL = {**MEASURES, **OF_HEADS}
READ = "lm_polygraph_asmi.report.items.reproduction.read_published"
SEM, MSP = "Sem-ASMI (60%, K=64)", "MaximumSequenceProbability"


def papers_manifest(n: int = 1000, model: str = "Qwen3-4B", dataset: str = "BabiQA") -> dict:
    """What a run of the paper's protocol records."""
    about, benchmark = manifest(n, f"asmi_{dataset.lower()}"), BENCHMARKS[dataset]
    about["model"] = {"name": "asmi_any", "path": f"hub/{MODELS[model]}", "revision": "abc"}
    about["dataset"] |= benchmark.recorded
    about["config"] = {
        "generation_params": dict(GENERATION), "max_new_tokens": benchmark.max_new_tokens,
        "instruct": False, "n_shot": 0, "asmi": {"num_samples": 10},
    }  # fmt: skip
    return about


@pytest.fixture
def fewer():
    with few_permutations():
        yield


@pytest.fixture(scope="module")
def babi(tmp_path_factory) -> RunGroup:
    folder = tmp_path_factory.mktemp("babi") / "run"
    save(folder, planted_answers(0, 0.6), papers_manifest())
    (group,) = load_run_groups([folder])
    return group


FEW = 200


@cache
def _few_answers() -> dict:
    return planted_answers(0, 0.6, FEW)


def few_answers() -> dict:
    """Whose parts a test may change."""
    return deepcopy(_few_answers())


def number(method: str, **more) -> Published:
    """A number of the paper on BabiQA."""
    fields = {
        "item": "benchmark", "label": "tab:x", "model": "Qwen3-4B", "dataset": "BabiQA",
        "method": method, "depth": None, "n": 1000, "quantity": "PRR", "value": 0.5, "unit": "PRR",
    }  # fmt: skip
    return Published(**(fields | more))


def beside(groups: list[RunGroup], *numbers: Published) -> pd.DataFrame:
    """The report's table; of the numbers of the paper, unless others are given."""
    with pytest.MonkeyPatch.context() as patch:
        if numbers:
            patch.setattr(READ, lambda: list(numbers))
        (item,) = papers_numbers(groups)
    return item.table


def prr(group: RunGroup, method: str) -> float:
    return normalised_prr(group.score(method), group.quality)


def test_numbers_stand_beside_those_of_the_paper(babi):
    entropy, sem = prr(babi, "MeanTokenEntropy"), prr(babi, SEM)
    table = beside(
        [babi],
        number("MeanTokenEntropy", value=0.25),
        number("Sem-ASMI", depth=0.6),
        number("Sem-ASMI", depth=0.7),
        number("PTrueSampling"),
        number(MSP, model="Qwen3-8B"),
        number(MSP, dataset="CoQA", n=8000),
        number("", item="cost", quantity="greedy answer", unit="seconds"),
    )
    assert table["same protocol"].tolist() == [True, True, None, None, None, None, True]
    assert table["here"][0].value == pytest.approx(entropy)
    assert table["here"][0].low < entropy < table["here"][0].high
    assert table["difference"][0] == pytest.approx(entropy - 0.25)
    assert table["difference"][1] == pytest.approx(sem - 0.5)
    assert table["here"][6].value > 0
    assert np.isnan(table["here"][6].low)  # seconds have no interval
    assert table["note"].tolist() == [
        "", "", "Sem-ASMI at 70% was not run", "PTrueSampling was not run", "not run", "not run",
        "",
    ]  # fmt: skip


def changed(group: RunGroup, part: str, name: str, value: object) -> RunGroup:
    """The setting with another entry in its manifest; "a.b" is b within a."""
    about = json.loads(json.dumps(group.run.manifest))
    node = about[part]
    *path, last = name.split(".")
    for step in path:
        node = node[step]
    node[last] = value
    run: Run = replace(group.run, manifest=about)
    return replace(group, run=run, runs=(run,))


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("dataset", "prompt_style", "demo", None),  # of SQuAD's columns only
        ("model", "path", "hub/Qwen3-4B", "model hub/Qwen3-4B"),
        ("model", "path", None, "model not recorded"),
        ("dataset", "source", "LM-Polygraph/other", "data LM-Polygraph/other"),
        ("dataset", "split", "train", "data.split 'train', not 'test'"),
        ("config", "generation_params.temperature", 1.0, "temperature 1.0, not 0.5"),
        ("config", "generation_params.stop_strings", ["."], "stop_strings ['.']"),
        ("config", "generation_params.do_sample", True, "do_sample True"),
        ("config", "max_new_tokens", 20, "max_new_tokens 20, not 3"),
        ("config", "asmi", {"num_samples": 5}, "asmi.num_samples 5, not 10"),
        ("config", "asmi", None, "asmi.num_samples not recorded, not 10"),
        ("config", "instruct", True, "instruct True"),
    ],
)
def test_what_departs_from_the_protocol_is_named(babi, part, name, value, reason):
    assert departures(babi) == []
    other = changed(babi, part, name, value)
    if reason is None:
        assert departures(other) == []
        return
    assert any(reason in text for text in departures(other))
    items = papers_numbers([other])
    if part == "model" or name == "source":
        assert items == [MissingItem(items[0].title, "no run has a model and data of the paper")]
        return
    shown = items[0].table[items[0].table["here"].notna()]
    assert len(shown) > 50
    assert not shown["same protocol"].any()
    assert shown["note"].str.contains(reason, regex=False).all()


def test_a_setting_of_the_papers_protocol_is_taken_first(babi):
    other = replace(changed(babi, "config", "instruct", True), rows=babi.rows[:990])
    alone = beside([other], number(MSP))
    both = beside([other, babi], number(MSP))
    assert (alone["same protocol"][0], both["same protocol"][0]) == (False, True)
    assert both["here"][0].value == pytest.approx(prr(babi, MSP))
    assert alone["here"][0].value != pytest.approx(prr(babi, MSP))


def test_other_metrics_and_runs_without_a_manifest_depart(babi):
    assert departures(replace(babi, metric="Rouge_rougeL")) == [
        "quality Rouge_rougeL, not AlignScore"
    ]
    bare = replace(babi, run=replace(babi.run, manifest=None))
    assert departures(bare) == ["no manifest records what was run"]


def test_fewer_rows_are_another_protocol(babi):
    few = replace(babi, rows=babi.rows[:900])
    table = beside([few], number(MSP))
    assert not table["same protocol"][0]
    assert table["note"][0] == "900 rows, not 1000"
    # The analysis of fewer rows is of these rows, and takes the run that is nearest.
    table = beside([babi, few], number(MSP, n=900))
    assert table["same protocol"][0]
    assert table["here"][0].value == pytest.approx(prr(few, MSP))


@pytest.mark.parametrize(
    "settings", [{"scope": "response"}, {"top_k": 64, "aggregation": "max"}, {"num_masks": 20}]
)
def test_scores_with_other_settings_are_not_used(tmp_path, settings):
    saved = few_answers()
    other = saved | exchanged(saved, **settings)
    if "num_masks" in settings:
        for own in at_depth(other["stats"], 0.6):
            own["settings"] = own["settings"] | settings
    other["estimations"]["sequence", MSP] = saved["estimations"]["sequence", MSP]
    groups = loaded(tmp_path, other, papers_manifest(FEW))
    table = beside(groups, number("Sem-ASMI", depth=0.6, n=FEW), number(MSP, n=FEW))
    assert table["here"][0] is None
    assert "other settings than the paper's" in table["note"][0]
    assert table["here"][1] is not None  # a baseline has no masks


def adapt_and_sem(tmp_path, **settings) -> pd.DataFrame:
    """Adapt-ASMI with these settings, and Sem-ASMI, beside the paper's."""
    saved = few_answers()
    plain, gated = ASMIConfig(method="adapt"), ASMIConfig(method="adapt", **settings)
    values = saved["estimations"].pop(("sequence", str(plain)))
    del saved[METHODS][str(plain)]
    put(saved, gated, values)
    groups = loaded(tmp_path, saved, papers_manifest(FEW))
    return beside(groups, *(number(name, depth=0.6, n=FEW) for name in ("Adapt-ASMI", "Sem-ASMI")))


@pytest.mark.parametrize("settings", [{"tau": 0.5}, {"beta": 5.0}, {"num_samples": 5}])
def test_another_gate_is_not_used(tmp_path, settings):
    table = adapt_and_sem(tmp_path, **settings)
    assert table["here"][0] is None
    assert str(ASMIConfig(method="adapt", **settings)) in table["note"][0]
    assert table["here"][1] is not None


@pytest.mark.parametrize(
    "settings", [{}, {"gate_token": "last"}, {"closing_token": False}, {"seeded_by": "prompt"}]
)
def test_what_the_paper_leaves_open_is_used(tmp_path, settings):
    assert adapt_and_sem(tmp_path, **settings)["here"].notna().all()


def test_of_two_gates_the_default_one_is_used(tmp_path):
    saved = few_answers()
    plain = ("sequence", str(ASMIConfig(method="adapt")))
    values = saved["estimations"].pop(plain)
    saved["estimations"] = {
        ("sequence", str(ASMIConfig(method="adapt", gate_token="last"))): np.flip(values),
        plain: values, **saved["estimations"],
    }  # fmt: skip
    put(saved, ASMIConfig(method="adapt", gate_token="last"), np.flip(values))
    (group,) = loaded(tmp_path, saved, papers_manifest(FEW))
    (here,) = beside([group], number("Adapt-ASMI", depth=0.6, n=FEW))["here"]
    assert here.value == pytest.approx(prr(group, plain[1]))


def test_every_number_of_the_paper_has_a_row(babi):
    table = beside([babi])
    known = read_published()
    assert table["quantity"].tolist() == [number.quantity for number in known]
    assert table["paper"].tolist() == [number.value for number in known]
    shown = table[table["here"].notna()]
    assert {*shown["item"]} >= {
        "datasets", "benchmark", "head_to_head", "error_separation", "distinct_signal",
        "ensemble_mean", "matched_flags", "confident_fragile", "payoff", "aurc", "top_k_coverage",
    }  # fmt: skip
    # Not a number of this setting may come from another, and none of another from this one.
    assert {*shown["setting"]} <= {"Qwen3-4B, BabiQA", "Qwen3-4B", "BabiQA", "all settings"}
    assert shown["same protocol"].all()
    assert (table["note"] != "")[table["here"].isna()].all()


def value_of(table: pd.DataFrame, quantity: str, method: str | None = None) -> float:
    rows = table[table["here"].notna() & (table["label"] != "tab:h2h")]
    of_method = rows["method"].isna() if method is None else rows["method"] == method
    (here,) = rows[(rows["quantity"] == quantity) & of_method]["here"]
    return here.value


def test_measured_values_are_those_of_the_statistics(babi):
    rows = beside([babi])
    tokens = np.array([len(answer) for answer in babi.saved("greedy_tokens")])
    expected = {
        "median tokens of the prompt": np.median(babi.saved("asmi_prompt_length")),
        "median tokens of the answer": np.median(tokens),
        "tokens an answer": tokens.mean(),
        "mean quality": babi.quality.mean(),
        "mean MI_t": np.concatenate(babi.mi_tokens).mean(),
        "mean MI_t of wrong answers": np.concatenate(
            [t for t, wrong in zip(babi.mi_tokens, babi.wrong, strict=True) if wrong]
        ).mean(),
    }
    for quantity, value in expected.items():
        assert value_of(rows, quantity) == pytest.approx(value), quantity
    assert value_of(rows, "AUROC", "ASMI") == pytest.approx(
        auroc(babi.score("ASMI (60%, K=64)"), babi.wrong)
    )
    confident = babi.msp <= np.median(babi.msp)
    assert value_of(rows, "confident error") == pytest.approx(babi.wrong[confident].mean())
    fragile = babi.u_sem > np.median(babi.u_sem)
    rate = 100 * babi.wrong[confident & fragile].mean()
    assert value_of(rows, "error rate, confident and fragile", "Sem-ASMI") == pytest.approx(rate)
    (sar,) = rows[rows["method"].eq("Sem-ASMI − SAR") & rows["here"].notna()]["here"]
    assert sar.value == pytest.approx(prr(babi, SEM) - prr(babi, "SAR"))


def test_the_shipped_file():
    """Counts as the paper has them; every kind of number can be measured, none is there twice."""
    published = read_published()
    by_label = Counter(row.label for row in published)
    assert by_label["tab:main-ours-coqa-squad"] == 29 * 8  # 17 baselines, 3 variants, 4 depths
    assert by_label["tab:main-ours-babi-trivia"] == 29 * 8
    assert by_label["tab:app-distinct"] == 9 * 2
    assert by_label["tab:causal-flip"] == 4 * 5 + 1
    assert by_label["tab:stability"] == 7 * 5
    assert {row.item for row in published} == set(ALL)
    assert {row.model for row in published} == {*MODELS, ""}
    assert {row.dataset for row in published} == {*BENCHMARKS, ""}
    assert np.isfinite([row.value for row in published]).all()
    assert all(row.unit for row in published)
    keys = {(r.label, r.model, r.dataset, r.method, r.depth, r.quantity) for r in published}
    assert len(keys) == len(published)
    by_key = {(r.model, r.dataset, r.method, r.depth, r.quantity): r for r in published}
    row = by_key["Qwen3-8B", "BabiQA", "Sem-ASMI", 0.8, "PRR"]
    assert (row.value, row.n) == (0.70, 1000)
    assert PAPER.parent.name == "data"  # in the package, so in its wheel


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ("coqa", "qwen3_4b_base"), ("squad", "qwen3_8b_base"), ("babiqa", "llama2_7b"),
        ("triviaqa", "mistral_7b"), ("squad_closed_book", "qwen3_4b_base"),
    ],
)  # fmt: skip
def test_the_shipped_configs_are_the_papers_protocol(babi, dataset, model):
    config = compose_run(f"asmi_{dataset}", overrides=[f"model=asmi_{model}", "dataset=none"])
    names = ("model", "data", "generation_params", "max_new_tokens", "instruct", "n_shot", "asmi",
             "cache_path")  # fmt: skip
    job = container(OmegaConf.masked_copy(config, list(names)))
    about = {
        "model": {"path": job["model"]["path"]}, "dataset": job["data"], "config": job,
    }  # fmt: skip
    run = replace(babi.run, manifest=about)
    group = replace(babi, run=run)
    assert departures(group) == []
    assert all(paper_setting(group))


def test_the_report_links_the_table(babi, tmp_path, monkeypatch):
    assert every_report_item()[0] is papers_numbers
    monkeypatch.setattr(
        "lm_polygraph_asmi.report.writing.every_report_item", lambda: [papers_numbers]
    )
    report, _ = build_report([babi], tmp_path)
    assert "767 rows: [tables/reproduction.csv]" in report.read_text(encoding="utf-8")
    saved = pd.read_csv(tmp_path / "tables" / "reproduction.csv")
    assert {"paper", "here", "here low", "here high", "difference", "same protocol"} <= {*saved}
    assert saved["same protocol"].value_counts().to_dict() == {True: saved["here"].count()}


def papers(saved: dict) -> dict:
    """A run with the paper's masks in its saved settings."""
    for row in saved["stats"]["asmi"]:
        for own in row.values():
            own["settings"] = own["settings"] | {"num_masks": 40, "mask_rate": 0.15}
    return saved


@pytest.fixture(scope="module")
def squad(tmp_path_factory) -> list[RunGroup]:
    """Few answers, for what needs several runs: K = 256, another seed, no passage, 300 masks."""
    root, n = tmp_path_factory.mktemp("squad"), 60
    opened, closed = (papers_manifest(n, dataset=d) for d in ("SQuAD", "SQuAD without passage"))
    save(root / "open", papers(content(n)), opened)
    heads = exchanged(content(n), num_masks=300)
    dissect(heads, masks=300)
    write_probe(probe(n), save(root / "heads", heads, opened))
    save(root / "k256", papers(content(n, top_k=256)), opened)
    save(root / "seed1", papers(content(n, mask_seed=1)), opened)
    save(root / "closed", papers(content(n, shift=0.5)), closed)
    return load_run_groups(root / name for name in ("open", "heads", "k256", "seed1", "closed"))


def measured(groups: list[RunGroup], item: str, quantity: str, method: str = "", **more) -> float:
    published = replace(
        read_published()[0], item=item, quantity=quantity, method=method, depth=0.6,
        model="Qwen3-4B", dataset="SQuAD", **more,
    )  # fmt: skip
    first = [group for group in groups if paper_setting(group).dataset == published.dataset]
    rest = [group for group in groups if group not in first]
    value = ALL[item](published, [*first, *rest])
    return getattr(value, "value", value)


def test_numbers_of_several_runs(squad):
    opened, closed = squad
    assert {paper_setting(g).dataset for g in squad} == {"SQuAD", "SQuAD without passage"}
    gaps = boundary(squad)[0].table.set_index("setting")["Sem-ASMI Δ MSP"]
    gap = measured(squad, "boundary", "difference of PRR", f"Sem-ASMI − {MSP}")
    assert gap == pytest.approx(gaps[opened.label].value)
    larger = truncation(squad)[0].table.set_index("score")
    for symbol in ("Sem-ASMI", "ASMI"):
        quantity = "difference of PRR, K = 256 − K = 64"
        value = measured(squad, "larger_k", quantity, symbol)
        assert value == pytest.approx(larger.loc[symbol, "large Δ small K"].value)
    below = measured(squad, "larger_k", "difference of PRR, K = 256", f"Sem-ASMI − {MSP}")
    assert below == pytest.approx(larger.loc["Sem-ASMI", "large K Δ MSP"].value)
    over = stability(squad)[0].table.set_index("method")
    rho = measured(squad, "stability", "rank ρ", "Sem-ASMI")
    assert rho == pytest.approx(over.loc[SEM, "rank ρ"])
    with pytest.raises(Unavailable, match="on the same questions"):
        measured([opened], "boundary", "difference of PRR", f"Sem-ASMI − {MSP}")
    with pytest.raises(Unavailable, match="K = 64 and K = 256"):
        measured([closed], "larger_k", "difference of PRR, K = 256", "Sem-ASMI")
    with pytest.raises(Unavailable, match="needs all 16 settings"):
        measured(squad, "depth_selection", "mean regret", "Sem-ASMI")


@pytest.mark.usefixtures("fewer")
def test_numbers_of_heads(squad):
    opened = next(g for g in squad if not g.closed_book)
    found = coupled(opened, 0.6)
    assert measured(squad, "head_coupling", "ρ(MI_t, z_t)") == found.information.value
    assert measured(squad, "head_coupling", "ρ(H_t, z_t)") == found.entropy.value
    tokens = profiles(opened, 0.6)
    heads = measured(squad, "head_coupling", "n_eff of high MI")
    assert heads == pytest.approx(tokens.heads[tokens.high].mean())
    (of_heads,) = probed(opened)
    rates_by_k = rates(of_heads, "high MI, critical heads")[1]
    assert measured(squad, "causal_probe", "flips of high MI, k = 2") == rates_by_k[1].value
    fewer = papers(content(60))
    dissect(fewer, masks=100)
    run = replace(opened.run, stats=fewer["stats"])
    other = replace(opened, run=run, runs=(run,), separate_runs=())
    with pytest.raises(Unavailable, match="num_masks 100"):
        measured([other], "head_coupling", "ρ(MI_t, z_t)")


def test_a_coverage_is_of_the_printed_number_of_tokens():
    """Column n of tab:topk-highmi, which counts tokens."""
    found = [number for number in read_published() if number.label == "tab:topk-highmi"]
    printed = {"CoQA": 567, "SQuAD": 1480, "BabiQA": 216, "TriviaQA": 397}
    assert {(number.dataset, number.n) for number in found} == set(printed.items())
