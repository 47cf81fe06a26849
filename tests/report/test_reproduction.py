"""The paper's numbers beside those of planted settings: right, wrong and missing told apart."""

import csv
import json
from collections import Counter
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from lm_polygraph_asmi.analysis import Interval, auroc, normalised_prr
from lm_polygraph_asmi.analysis.reproduction import compare_published
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
from lm_polygraph_asmi.report.items.reproduction import (
    SHOWN,
    VERDICTS,
    compare,
    reproduced,
    reproduction,
)
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    COLUMNS,
    GENERATION,
    ITEMS,
    MARGINS,
    MODELS,
    PAPER,
    NotComparable,
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


FEW, OF_FEW = 200, {"n": "200"}


@cache
def _few_answers() -> dict:
    return planted_answers(0, 0.6, FEW)


def few_answers() -> dict:
    """Whose parts a test may change."""
    return {name: copy(part) for name, part in _few_answers().items()}


def write(path: Path, *rows: dict) -> Path:
    """A file of published numbers; columns left out are empty."""
    with path.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def number(method: str, value: float, /, **more: str) -> dict:
    return {
        "item": "benchmark", "label": "tab:x", "model": "Qwen3-4B", "dataset": "BabiQA",
        "method": method, "n": "1000", "quantity": "PRR", "value": f"{value:.2f}",
        "error": "0.02", "unit": "PRR",
    } | more  # fmt: skip


def prr(group: RunGroup, method: str) -> float:
    return normalised_prr(group.score(method), group.quality)


def test_right_wrong_and_missing_numbers_are_told_apart(babi, tmp_path):
    entropy, sem = prr(babi, "MeanTokenEntropy"), prr(babi, SEM)
    seconds = {"item": "cost", "quantity": "greedy answer", "unit": "seconds", "error": ""}
    file = write(
        tmp_path / "paper.csv",
        number("MeanTokenEntropy", entropy),
        number("Sem-ASMI", sem + 0.4, depth="0.6"),
        number("Sem-ASMI", prr(babi, "Sem-ASMI (80%, K=64)") - 0.06, depth="0.8"),
        number("Sem-ASMI", 0.5, depth="0.7"),
        number("PTrueSampling", 0.5),
        number(MSP, 0.5, model="Qwen3-8B"),
        number(MSP, 0.5, dataset="CoQA", n="8000"),
        number("", 3.0, **seconds),
    )
    rows = compare([babi], ALL, file)
    assert [row.verdict for row in rows] == [
        "agrees", "differs", "inconclusive", "not run", "not run", "not run", "not run", SHOWN,
    ]  # fmt: skip
    assert rows[0].measured.value == pytest.approx(entropy)
    assert rows[0].result.difference == pytest.approx(entropy - round(entropy, 2))
    assert rows[1].result.difference == pytest.approx(sem - round(sem + 0.4, 2))
    assert "Sem-ASMI at 70% was not run" in rows[3].why
    assert "PTrueSampling was not run" in rows[4].why
    assert rows[-1].result is None
    assert rows[-1].measured.value > 0  # costs are shown, never judged
    (line,) = reproduced(rows)
    assert "1 agree, 1 differ and 1 are inconclusive, of 3 judged" in line
    assert "Sem-ASMI PRR on Qwen3-4B, BabiQA" in line
    counts, table = reproduction(rows, [babi])
    assert counts.table.set_index("item").loc["benchmark"].to_dict() == {
        "agrees": 1, "differs": 1, "inconclusive": 1, "shown": 0, "not comparable": 0,
        "not run": 4,
    }  # fmt: skip
    assert table.table["verdict"].tolist() == [row.verdict for row in rows]
    assert table.figure is not None


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
def test_what_departs_from_the_protocol_is_named_and_not_compared(babi, part, name, value, reason):
    assert departures(babi) == []
    other = changed(babi, part, name, value)
    if reason is None:
        assert departures(other) == []
        return
    assert any(reason in text for text in departures(other))
    rows = compare([other], ALL)
    assert {row.verdict for row in rows} <= {"not run", "not comparable"}
    assert reproduced(rows) == []
    (missing,) = reproduction(rows, [other])
    assert isinstance(missing, MissingItem)
    assert reason in missing.reason


def test_other_metrics_and_runs_without_a_manifest_are_not_compared(babi):
    assert departures(replace(babi, metric="Rouge_rougeL")) == [
        "quality Rouge_rougeL, not AlignScore"
    ]
    bare = replace(babi, run=replace(babi.run, manifest=None))
    assert departures(bare) == ["no manifest records what was run"]


def test_fewer_rows_are_not_comparable(babi, tmp_path):
    file = write(tmp_path / "paper.csv", number(MSP, 0.5))
    few = replace(babi, rows=babi.rows[:900])
    (row,) = compare([few], ALL, file)
    assert (row.verdict, row.measured) == ("not comparable", None)
    assert "900 rows, not 1000" in row.why
    # The analysis of fewer rows is of these rows, and takes the run that is nearest.
    file = write(tmp_path / "fewer.csv", number(MSP, 0.5, n="900"))
    (row,) = compare([babi, few], ALL, file)
    assert row.group is few
    _, table = reproduction([row], [babi, few])[-2:]
    assert any("Not comparable" in note and "1000 rows" in note for note in table.notes)


@pytest.mark.parametrize(
    "settings", [{"scope": "response"}, {"top_k": 64, "aggregation": "max"}, {"num_masks": 20}]
)
def test_scores_with_other_settings_are_not_comparable(tmp_path, settings):
    saved = few_answers()
    other = saved | exchanged(saved, **settings)
    if "num_masks" in settings:
        name = "asmi_settings_d60"
        other["stats"] = saved["stats"] | {name: [used | settings for used in saved["stats"][name]]}
    other["estimations"]["sequence", MSP] = saved["estimations"]["sequence", MSP]
    groups = loaded(tmp_path, other, papers_manifest(FEW))
    file = write(
        tmp_path / "paper.csv",
        number("Sem-ASMI", 0.5, depth="0.6", **OF_FEW),
        number(MSP, 0.5, **OF_FEW),
    )
    sem, msp = compare(groups, ALL, file)
    assert (sem.verdict, sem.measured) == ("not comparable", None)
    assert "other settings than the paper's" in sem.why
    assert msp.result is not None  # a baseline has no masks


def adapt_and_sem(tmp_path, **settings) -> tuple[list, list]:
    """Comparisons of Adapt-ASMI with these settings and of Sem-ASMI, and the groups."""
    saved = few_answers()
    plain, gated = ASMIConfig(method="adapt"), ASMIConfig(method="adapt", **settings)
    values = saved["estimations"].pop(("sequence", str(plain)))
    del saved[METHODS][str(plain)]
    put(saved, gated, values)
    groups = loaded(tmp_path, saved, papers_manifest(FEW))
    file = write(
        tmp_path / "paper.csv",
        number("Adapt-ASMI", 0.5, depth="0.6", **OF_FEW),
        number("Sem-ASMI", 0.5, depth="0.6", **OF_FEW),
    )
    return compare(groups, ALL, file), groups


@pytest.mark.parametrize("settings", [{"tau": 0.5}, {"beta": 5.0}, {"num_samples": 5}])
def test_another_gate_is_not_comparable(tmp_path, settings):
    gated = ASMIConfig(method="adapt", **settings)
    (adapt, sem), _ = adapt_and_sem(tmp_path, **settings)
    assert (adapt.verdict, adapt.measured) == ("not comparable", None)
    assert str(gated) in adapt.why
    assert sem.result is not None


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "gate_token=second_last"),
        ({"gate_token": "last"}, "gate_token=last"),
        ({"closing_token": False}, "closing_token=False"),
        ({"seeded_by": "prompt"}, "seeded_by=prompt"),
    ],
)
def test_what_the_paper_leaves_open_is_compared_and_named(tmp_path, settings, chosen):
    (adapt, sem), groups = adapt_and_sem(tmp_path, **settings)
    assert adapt.measured is not None
    assert adapt.result is not None
    _, table = reproduction([adapt, sem], groups)[-2:]
    (note,) = (note for note in table.notes if note.startswith("Settings that the paper does not"))
    assert chosen in note
    assert "tau" not in note


def test_of_two_gates_the_default_one_is_compared(tmp_path):
    saved = few_answers()
    plain = ("sequence", str(ASMIConfig(method="adapt")))
    values = saved["estimations"].pop(plain)
    saved["estimations"] = {
        ("sequence", str(ASMIConfig(method="adapt", gate_token="last"))): np.flip(values),
        plain: values, **saved["estimations"],
    }  # fmt: skip
    put(saved, ASMIConfig(method="adapt", gate_token="last"), np.flip(values))
    (group,) = loaded(tmp_path, saved, papers_manifest(FEW))
    file = write(tmp_path / "paper.csv", number("Adapt-ASMI", 0.5, depth="0.6", **OF_FEW))
    (row,) = compare([group], ALL, file)
    assert row.measured.value == pytest.approx(prr(group, plain[1]))


def test_every_number_of_the_paper_has_a_verdict(babi):
    rows = compare([babi], ALL)
    verdicts = Counter(row.verdict for row in rows)
    assert set(verdicts) <= set(VERDICTS)
    known = read_published()
    tokens = sum(n.unit == "tokens" and "answer" in n.quantity for n in known)
    assert len(rows) == len(known) + tokens  # both readings of the closing token
    by_item = {row.number.item for row in rows if row.measured}
    assert by_item >= {
        "datasets", "benchmark", "head_to_head", "error_separation", "distinct_signal",
        "ensemble_mean", "matched_flags", "confident_fragile", "payoff", "aurc", "top_k_coverage",
    }  # fmt: skip
    # Not a number of this setting may come from another, and none of another from this one.
    for row in rows:
        if row.measured is not None:
            assert row.number.model in ("Qwen3-4B", "")
            assert row.number.dataset in ("BabiQA", "")
    # Planted answers are not the paper's: the checks say so first.
    (line,) = reproduced(rows)
    assert line.index("First checks that differ") < line.index("Others that differ")
    assert "median tokens of the prompt on Qwen3-4B, BabiQA" in line


def value_of(rows, quantity: str, method: str = "") -> float:
    (row,) = (
        row for row in rows
        if row.measured and row.number.quantity == quantity and row.number.method == method
        and row.number.label != "tab:h2h"
    )  # fmt: skip
    return row.measured.value


def test_measured_values_are_those_of_the_statistics(babi):
    rows = compare([babi], ALL)
    tokens = np.array([len(answer) for answer in babi.saved("greedy_tokens")])
    expected = {
        "median tokens of the prompt": np.median(babi.saved("asmi_prompt_length")),
        "median tokens of the answer, with closing token": np.median(tokens),
        "median tokens of the answer, without closing token": np.median(tokens - 1),
        "tokens an answer, with closing token": tokens.mean(),
        "tokens an answer, without closing token": tokens.mean() - 1,
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
    (sar,) = (r for r in rows if r.measured and r.number.method == "Sem-ASMI − SAR")
    assert sar.measured.value == pytest.approx(prr(babi, SEM) - prr(babi, "SAR"))


def test_a_difference_printed_twice_is_judged_once(tmp_path):
    groups = loaded(tmp_path, few_answers(), papers_manifest(FEW))
    pair = {"item": "head_to_head", "method": "Sem-ASMI − SemanticEntropy", "depth": "0.6",
            "low": "0.01", "high": "0.13", "error": "", "unit": "PRR difference",
            **OF_FEW}  # fmt: skip
    file = write(
        tmp_path / "paper.csv",
        number("", 0.07, **pair, quantity="top"), number("", 0.07, **pair, quantity="Sem-ASMI"),
    )  # fmt: skip
    first, second = compare(groups, ALL, file)
    assert first.result is not None
    assert (second.verdict, second.why) == (SHOWN, "printed twice, judged once")


def test_without_a_printed_error_it_is_assumed_from_the_runs(babi, tmp_path):
    file = write(
        tmp_path / "paper.csv", number(MSP, 0.5), number(MSP, 0.5, error="", quantity="PRR, bare"),
        number(MSP, 0.5, error="", n="250", quantity="PRR, of fewer"),
    )  # fmt: skip
    few = replace(babi, rows=babi.rows)
    printed, assumed, fewer = compare([few], ALL, file)
    assert (printed.assumed, assumed.assumed, fewer.assumed) == (False, True, True)
    spread = (assumed.measured.high - assumed.measured.low) / (2 * 1.96)
    reach = 1.645 * spread
    assert assumed.result.reach == pytest.approx(reach * 2**0.5 + 0.005, rel=1e-3)
    assert fewer.result.reach == pytest.approx(reach * 5**0.5 + 0.005, rel=1e-3)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (number(MSP, 0.5, item="other"), "line 3: unknown item 'other'"),
        (number(MSP, 0.5, unit="miles"), "line 3: unknown unit 'miles'"),
        (number("SAR", 0.4), "line 3: the same number as in line 2"),
        (number(MSP, 0.5) | {"value": "half"}, "line 3: value is 'half'"),
        (number(MSP, 0.5) | {"value": ""}, "line 3: value is empty"),
        (number(MSP, 0.5, error="nan"), "line 3: error is nan"),
        (number(MSP, 0.5, low="0.4"), "line 3: expected a standard error, or both ends"),
        (number(MSP, 0.5, low="0.6", high="0.7", error=""), "line 3: value 0.5 is outside"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_compared(babi, tmp_path, monkeypatch, row, reason):
    file = write(tmp_path / "paper.csv", number("SAR", 0.5), row)
    with pytest.raises(ValueError, match=reason) as raised:
        read_published(file)
    assert str(file) in str(raised.value)
    monkeypatch.setattr(
        "lm_polygraph_asmi.report.items.compare", lambda *found: compare(*found, file)
    )
    (missing,) = papers_numbers([replace(babi)])
    assert isinstance(missing, MissingItem)
    assert reason in missing.reason


def test_other_columns_are_named(tmp_path):
    (tmp_path / "paper.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"has the columns a, b: expected item, label"):
        read_published(tmp_path / "paper.csv")


def test_the_shipped_file():
    """Counts as the paper has them; every kind of number can be measured and has a margin."""
    published = read_published()
    by_label = Counter(row.label for row in published)
    assert by_label["tab:main-ours-coqa-squad"] == 29 * 8  # 17 baselines, 3 variants, 4 depths
    assert by_label["tab:main-ours-babi-trivia"] == 29 * 8
    assert by_label["tab:app-distinct"] == 9 * 2
    assert by_label["tab:causal-flip"] == 4 * 5 + 1
    assert by_label["tab:stability"] == 7 * 5
    assert {row.item for row in published} == set(ITEMS) == set(ALL)
    assert {row.model for row in published} == {*MODELS, ""}
    assert {row.dataset for row in published} == {*BENCHMARKS, ""}
    for row in published:
        assert (row.unit in MARGINS) == (row.margin is not None)
        assert row.rounding <= 0.5
        if row.error is not None:
            assert row.error > 0
    by_key = {(r.model, r.dataset, r.method, r.depth, r.quantity): r for r in published}
    row = by_key["Qwen3-8B", "BabiQA", "Sem-ASMI", 0.8, "PRR"]
    assert (row.value, row.error, row.n) == (0.70, pytest.approx(0.035), 1000)
    assert PAPER.parent.name == "data"  # in the package, so in its wheel


def test_how_many_numbers_can_agree():
    """With the paper's own errors on both sides; as the page says."""
    can: Counter[str] = Counter()
    for row in read_published():
        if row.item == "benchmark":
            reach = 1.96 * (row.error - 0.005)  # its standard error as printed
            measured = Interval(row.value, row.value - reach, row.value + reach)
            same = compare_published(measured, row.value, row.error, row.rounding)
            can[row.dataset] += same.agrees(row.margin)
    page = (PAPER.parents[2] / "docs/reference/paper.md").read_text(encoding="utf-8")
    assert f"{can.total()} of the 464 values of PRR can agree" in page
    assert f"only {can['BabiQA']} of 116 on BabiQA" in page


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


def test_the_report_begins_with_the_counts_and_the_first_checks(babi, tmp_path, monkeypatch):
    assert every_report_item()[0] is papers_numbers
    monkeypatch.setattr(
        "lm_polygraph_asmi.report.writing.every_report_item", lambda: [papers_numbers]
    )
    report, lines = build_report([babi], tmp_path)
    assert lines[0].startswith("**Of the paper's numbers, ")
    text = report.read_text(encoding="utf-8")
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections[:4] == [
        "## Runs", "## First checks: is this the paper's protocol?",
        "## The paper's numbers: verdicts by item", "## The paper's numbers beside these",
    ]  # fmt: skip
    assert "(figures/reproduction.png)" in text
    with (tmp_path / "tables" / "reproduction.csv").open(encoding="utf-8") as opened:
        saved = list(csv.DictReader(opened))
    assert {"paper", "here", "here low", "here high", "difference", "verdict"} <= set(saved[0])
    assert "without closing token" in (tmp_path / "tables" / "first_checks.csv").read_text()


def papers(saved: dict) -> dict:
    """A run with the paper's masks in its saved settings."""
    for name, settings in saved["stats"].items():
        if name.startswith("asmi_settings"):
            own = {"num_masks": 40, "mask_rate": 0.15}
            saved["stats"][name] = [used | own for used in settings]
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
    return ALL[item](published, [*first, *rest]).value


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
    with pytest.raises(NotComparable, match="num_masks 100"):
        measured([other], "head_coupling", "ρ(MI_t, z_t)")


def test_a_coverage_is_of_the_printed_number_of_tokens():
    """Column n of tab:topk-highmi, which counts tokens; nothing there tells the rows."""
    found = [number for number in read_published() if number.label == "tab:topk-highmi"]
    printed = {"CoQA": 567, "SQuAD": 1480, "BabiQA": 216, "TriviaQA": 397}
    assert {(number.dataset, number.n) for number in found} == set(printed.items())
    assert not any(number.rows for number in found)
