"""The paper's numbers beside those of planted settings."""

from copy import deepcopy
from dataclasses import replace
from functools import cache, reduce

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from lm_polygraph_asmi.analysis import auroc, normalised_prr
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.heads.probe_file import write_probe
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.report.item import MissingItem, ReportItem
from lm_polygraph_asmi.report.items import every_report_item
from lm_polygraph_asmi.report.items.benchmark import benchmark
from lm_polygraph_asmi.report.items.paper import papers_numbers
from lm_polygraph_asmi.report.items.signal import distinct
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    GENERATION,
    MODELS,
    PAPER,
    departures,
    paper_setting,
    read_published,
)
from lm_polygraph_asmi.results.run_groups import RunGroup, load_run_groups
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

pytestmark = pytest.mark.usefixtures("few_resamples")
SEM, MSP = "Sem-ASMI (60%, K=64)", "MaximumSequenceProbability"
PLACELESS = {
    "Spearman with H, lowest of three data sets", "Spearman with H, highest of three data sets",
    "ρ(MI_t, z_t), four layers from the top", "flips of low MI, at most", "peak memory, lowest",
    "peak memory, highest",
}  # fmt: skip
"""Quantities of the paper that no table of the report has."""


def papers_manifest(n: int = 1000, model: str = "Qwen3-4B", dataset: str = "BabiQA") -> dict:
    """What a run of the paper's protocol records."""
    about, recorded = manifest(n, f"asmi_{dataset.lower()}"), BENCHMARKS[dataset]
    about["model"] = {"name": "asmi_any", "path": f"hub/{MODELS[model]}", "revision": "abc"}
    about["dataset"] |= recorded.recorded
    about["config"] = {
        "generation_params": dict(GENERATION), "max_new_tokens": recorded.max_new_tokens,
        "instruct": False, "n_shot": 0, "asmi": {"num_samples": 10},
    }  # fmt: skip
    return about


@pytest.fixture(scope="module")
def babi(tmp_path_factory, few_resamples) -> RunGroup:  # noqa: ARG001
    (group,) = loaded(tmp_path_factory.mktemp("babi"), planted_answers(0, 0.6), papers_manifest())
    return group


@pytest.fixture(scope="module")
def prr(babi) -> list[ReportItem]:
    return made_of([babi], benchmark)


@pytest.fixture(scope="module")
def items(babi, tmp_path_factory) -> list[ReportItem]:
    """Of a setting, and of few answers with several runs: K = 256, another seed, 300 masks."""
    root, n = tmp_path_factory.mktemp("squad"), 60
    opened, closed = (papers_manifest(n, dataset=d) for d in ("SQuAD", "SQuAD without passage"))
    for name, saved, about in (
        ("open", content(n), opened), ("k256", content(n, top_k=256), opened),
        ("seed1", content(n, mask_seed=1), opened), ("closed", content(n, shift=0.5), closed),
    ):  # fmt: skip
        for own in at_depth(saved["stats"], 0.6):
            own["settings"] |= {"num_masks": 40, "mask_rate": 0.15}
        save(root / name, saved, about)
    heads = exchanged(content(n), num_masks=300)
    dissect(heads, masks=300)
    write_probe(probe(n), save(root / "heads", heads, opened))
    groups = [*load_run_groups(folder for folder in root.iterdir()), babi]
    with few_permutations():
        return made_of(groups, *every_report_item())


def made_of(groups: list[RunGroup], *makes) -> list[ReportItem]:
    made = [item for make in makes for item in make(groups)]
    return [item for item in made if isinstance(item, ReportItem)]


def beside(groups: list[RunGroup], *makes) -> pd.DataFrame:
    """The report's table, of PRR unless other items are given."""
    (item,) = papers_numbers(groups, made_of(groups, *(makes or (benchmark,))))
    return item.table


def row_of(table: pd.DataFrame, method: str) -> pd.Series:
    """The row of a method's PRR in the table of all methods."""
    of_method = table["of the paper"].str.startswith("tab:main") & (table["method"] == method)
    (row,) = table[of_method & (table["depth"] != "80%")].iloc
    return row


def test_numbers_stand_beside_those_of_the_paper(babi, prr):
    table = papers_numbers([babi], prr)[0].table
    published = {
        (number.method, None if np.isnan(number.depth) else number.depth): number.value
        for number in read_published().itertuples()
        if (number.item, number.where) == ("benchmark", "Qwen3-4B, BabiQA")
    }
    for method, depth, name in ((MSP, None, MSP), ("Sem-ASMI", 0.6, SEM)):
        row = row_of(table, method)
        assert row["paper"] == published[method, depth]
        assert row["here"] == pytest.approx(normalised_prr(babi.score(name), babi.quality))
        assert row["difference"] == pytest.approx(row["here"] - row["paper"])
    assert table["same protocol"].all()
    # Neither of other settings, nor of methods that were not run.
    assert {*table["setting"]} == {"Qwen3-4B, BabiQA"}
    assert not table["method"].isin(["PTrueSampling"]).any()
    assert {*table["depth"].dropna()} == {"60%", "80%"}


def test_every_number_has_its_place_in_the_report(items):
    """The tables and columns that paper.csv names are the report's."""
    tables = {item.name: item.table for item in items}
    for number in read_published().itertuples():
        if number.quantity in PLACELESS:
            assert not number.table
            continue
        conditions = [part.split("=", 1)[0] for part in number.row.split("; ") if part]
        columns = [number.column] * (number.table != "benchmark") + conditions
        known = {*tables[number.table], "nli", "samples", "k = 16"}  # which these runs lack
        assert {*columns} <= known, number


def test_values_are_those_of_the_statistics(babi, items):
    groups = [babi, *next(item.groups for item in items if item.name == "boundary")]
    table = papers_numbers(groups, items)[0].table
    assert len(table) > 90
    # The paper chooses its depth over sixteen settings, not over these three.
    assert "mean regret" not in set(table["quantity"])
    assert table.loc[table["setting"] == "Qwen3-4B, SQuAD", "but"].str.contains("rows").all()
    lengths = np.array([len(answer) for answer in babi.saved("greedy_tokens")])
    confident, fragile = babi.msp <= np.median(babi.msp), babi.u_sem > np.median(babi.u_sem)
    asmi = auroc(babi.score("ASMI (60%, K=64)"), babi.wrong)
    # Of several runs, as their own tables have it.
    own = {item.name: item.table.iloc[0] for item in items if "setting" in item.table}
    closed = next(item.table for item in items if item.name == "boundary").set_index("setting")
    gap = closed.loc["any, squad without passage", "Sem-ASMI Δ MSP"].value
    for setting, quantity, value in (
        ("BabiQA", "median tokens of the answer", np.median(lengths)),
        ("BabiQA", "tokens an answer", lengths.mean()),
        ("BabiQA", "mean quality", babi.quality.mean()),
        ("BabiQA", "mean MI_t", np.concatenate(babi.mi_tokens).mean()),
        ("BabiQA", "AUROC", asmi),
        ("BabiQA", "confident error", babi.wrong[confident].mean()),
        ("BabiQA", "error rate, confident and fragile",
         100 * babi.wrong[confident & fragile].mean()),
        ("SQuAD without passage", "difference of PRR", gap),
        ("SQuAD", "ρ(MI_t, z_t)", own["head_coupling"]["ρ(MI, z)"].value),
        ("SQuAD", "flips of high MI, k = 2", own["causal_probe"]["k = 2"].value),
    ):  # fmt: skip
        found = table[
            (table["quantity"] == quantity) & table["setting"].str.endswith(f", {setting}")
        ]
        here = found.query("quantity != 'AUROC' or method == 'ASMI'")["here"].iloc[0]
        assert getattr(here, "value", here) == pytest.approx(value), quantity


def changed(group: RunGroup, path: str, value: object) -> RunGroup:
    """The setting with another entry in its manifest; "a.b" is b within a."""
    about = deepcopy(group.run.manifest)
    *parts, last = path.split(".")
    reduce(dict.__getitem__, parts, about)[last] = value
    run = replace(group.run, manifest=about)
    return replace(group, run=run, runs=(run,))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("dataset.prompt_style", "demo", None),  # of SQuAD's columns only
        ("model.path", "hub/Qwen3-4B", "model"),
        ("model.path", None, "model"),
        ("dataset.source", "LM-Polygraph/other", "data"),
        ("dataset.split", "train", "data.split"),
        ("config.generation_params.temperature", 1.0, "generation_params.temperature"),
        ("config.generation_params.do_sample", True, "generation_params.do_sample"),
        ("config.max_new_tokens", 20, "max_new_tokens"),
        ("config.asmi", {"num_samples": 5}, "asmi.num_samples"),
        ("config.asmi", None, "asmi.num_samples"),
        ("config.instruct", True, "instruct"),
    ],
)
def test_what_departs_from_the_protocol_is_named(babi, prr, path, value, reason):
    other = changed(babi, path, value)
    assert departures(other) == [reason] * (reason is not None)
    (item,) = papers_numbers([other], prr)
    if reason in ("model", "data"):
        assert item == MissingItem(item.title, "no run has a model and data of the paper")
    elif reason is not None:
        assert not item.table["same protocol"].any()
        assert (item.table["but"] == reason).all()


def test_other_metrics_and_runs_without_a_manifest_depart(babi):
    assert departures(replace(babi, metric="Rouge_rougeL")) == ["quality"]
    bare = replace(babi, run=replace(babi.run, manifest=None))
    assert departures(bare) == ["model", "data"]


def test_a_setting_of_the_papers_protocol_and_size_is_taken_first(babi):
    other = replace(changed(babi, "config.instruct", True), suffix=" b")
    few = replace(babi, rows=babi.rows[:900], suffix=" c")
    row = row_of(beside([other, few, babi]), MSP)
    assert row["same protocol"]
    assert row["here"] == pytest.approx(normalised_prr(babi.score(MSP), babi.quality))
    row = row_of(beside([few]), MSP)
    assert (row["same protocol"], row["but"]) == (False, "rows")


FEW = 200


@cache
def _planted() -> dict:
    return planted_answers(0, 0.6, FEW)


@pytest.mark.parametrize("settings", [{"scope": "response"}, {"num_masks": 20}])
def test_scores_with_other_settings_are_no_comparison(tmp_path, settings):
    saved = deepcopy(_planted())
    other = exchanged(saved, **settings)
    if "num_masks" in settings:
        for own in at_depth(other["stats"], 0.6):
            own["settings"] |= settings
    for name in (MSP, "MeanTokenEntropy"):
        other["estimations"]["sequence", name] = saved["estimations"]["sequence", name]
    table = beside(loaded(tmp_path, other, papers_manifest(FEW)), benchmark, distinct)
    assert not table.query("method == 'Sem-ASMI' and quantity == 'PRR' and depth == '60%'").size
    assert row_of(table, MSP)["but"] == "rows"  # a baseline has no masks
    tested = table[table["quantity"] == "residual AUROC"]
    assert {*tested["but"]} == {"rows; settings of ASMI"}


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"tau": 0.5}, False), ({"num_samples": 5}, False),
        ({"gate_token": "last"}, True), ({"closing_token": False}, True),
    ],
)  # fmt: skip
def test_what_the_paper_leaves_open_is_used_and_another_gate_is_not(tmp_path, settings, used):
    """Of two gates the default one is, wherever it stands."""
    saved, plain = deepcopy(_planted()), ASMIConfig(method="adapt")
    values = saved["estimations"].pop(("sequence", str(plain)))
    del saved[METHODS][str(plain)]
    put(saved, plain.replace(**settings), np.flip(values))

    def row(name):
        table = beside(loaded(tmp_path / name, saved, papers_manifest(FEW)))
        return table.query("method == 'Adapt-ASMI' and depth == '60%' and quantity == 'PRR'")

    assert len(row("one")) == used
    put(saved, plain, values)
    quality = saved["gen_metrics"]["sequence", "AlignScore"]
    assert row("two")["here"].tolist() == pytest.approx([normalised_prr(values, quality)])


def test_the_shipped_file():
    """Counts as the paper has them; none is there twice."""
    published = read_published()
    counts = {
        "tab:main-ours-coqa-squad": 29 * 8,  # 17 baselines, 3 variants, 4 depths
        "tab:main-ours-babi-trivia": 29 * 8, "tab:app-distinct": 9 * 2,
        "tab:causal-flip": 4 * 5 + 1, "tab:stability": 7 * 5,
    }  # fmt: skip
    assert counts.items() <= published["label"].value_counts().to_dict().items()
    assert {*published["model"]} == {*MODELS, ""}
    assert {*published["dataset"]} == {*BENCHMARKS, ""}
    assert np.isfinite(published["value"]).all()
    keys = ["model", "dataset", "method", "depth", "quantity"]
    assert len(published.drop_duplicates(["label", *keys])) == len(published) == 767
    row = published.set_index(keys).loc[[("Qwen3-8B", "BabiQA", "Sem-ASMI", 0.8, "PRR")]].iloc[0]
    assert row[["value", "n"]].tolist() == [0.70, 1000]
    assert PAPER.parent.name == "data"  # in the package, so in its wheel
    # Column n of tab:topk-highmi counts tokens.
    tokens = published[published["label"] == "tab:topk-highmi"]
    printed = {"CoQA": 567, "SQuAD": 1480, "BabiQA": 216, "TriviaQA": 397}
    assert {*zip(tokens["dataset"], tokens["n"], strict=True)} == {*printed.items()}


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ("coqa", "qwen3_8b_base"), ("babiqa", "llama2_7b"), ("triviaqa", "mistral_7b"),
        ("squad_closed_book", "qwen3_4b_base"),
    ],
)  # fmt: skip
def test_the_shipped_configs_are_the_papers_protocol(babi, dataset, model):
    config = compose_run(f"asmi_{dataset}", overrides=[f"model=asmi_{model}", "dataset=none"])
    names = ("model", "data", "generation_params", "max_new_tokens", "instruct", "n_shot", "asmi",
             "cache_path")  # fmt: skip
    job = container(OmegaConf.masked_copy(config, list(names)))
    about = {"model": {"path": job["model"]["path"]}, "dataset": job["data"], "config": job}
    group = replace(babi, run=replace(babi.run, manifest=about))
    assert departures(group) == []
    assert all(paper_setting(group))
