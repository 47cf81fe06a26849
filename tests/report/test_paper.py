"""The paper's numbers beside those of planted settings."""

import hashlib
from copy import deepcopy
from dataclasses import replace
from functools import reduce

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from lm_polygraph_asmi.analysis import normalised_prr
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.report.item import MissingItem, ReportItem
from lm_polygraph_asmi.report.items.benchmark import benchmark, datasets
from lm_polygraph_asmi.report.items.boundary import coverage
from lm_polygraph_asmi.report.items.paper import papers_numbers
from lm_polygraph_asmi.report.items.signal import confident_fragile, distinct, payoff
from lm_polygraph_asmi.results import paper
from lm_polygraph_asmi.results.run_groups import RunGroup, load_run_groups
from lm_polygraph_asmi.runs.compose import compose_run
from tests.report.runs import METHODS, content, exchanged, loaded, papers_manifest, save

pytestmark = pytest.mark.usefixtures("few_resamples")
SEM, MSP, FEW = "Sem-ASMI (60%, K=64)", "MaximumSequenceProbability", 80


@pytest.fixture(scope="module")
def babi(tmp_path_factory, few_resamples) -> RunGroup:  # noqa: ARG001
    folder = tmp_path_factory.mktemp("babi")
    return loaded(folder, content(1000, depths=(60, 80)), papers_manifest())[0]


@pytest.fixture(scope="module")
def prr(babi) -> list[ReportItem]:
    return made_of([babi], benchmark)


def made_of(groups: list[RunGroup], *makes) -> list[ReportItem]:
    return [item for make in makes for item in make(groups) if isinstance(item, ReportItem)]


def beside(groups: list[RunGroup], *makes) -> pd.DataFrame:
    """The report's table, of PRR unless other items are given."""
    (item,) = papers_numbers(groups, made_of(groups, *(makes or (benchmark,))))
    return item.table


def row_of(table: pd.DataFrame, method: str) -> pd.Series:
    """The row of a method's PRR in the table of all methods."""
    of_method = table["of the paper"].str.startswith("tab:main") & (table["method"] == method)
    return table[of_method & (table["depth"] != "80%")].squeeze()  # which is one


def test_numbers_stand_beside_those_of_the_paper(babi, prr):
    table = papers_numbers([babi], prr)[0].table
    published = {
        (number.method, None if np.isnan(number.depth) else number.depth): number.value
        for number in paper.read_published().itertuples()
        if (number.item, number.where) == ("benchmark", "Qwen3-4B, BabiQA")
    }
    for method, depth, name in ((MSP, None, MSP), ("Sem-ASMI", 0.6, SEM)):
        here, printed = normalised_prr(babi.score(name), babi.quality), published[method, depth]
        row = row_of(table, method)[["here", "paper", "difference"]]
        assert row.tolist() == pytest.approx([here, printed, here - printed])
    assert table["same protocol"].all()
    # Neither of other settings, nor of methods that were not run.
    assert {*table["setting"]} == {"Qwen3-4B, BabiQA"}
    assert not table["method"].isin(["PTrueSampling"]).any()
    assert {*table["depth"].dropna()} == {"60%", "80%"}


def test_the_papers_numbers_are_as_they_were_read():
    """A number that was changed by hand would be believed; their places may change."""
    published = pd.read_csv(paper.PAPER, dtype=str, keep_default_na=False)
    keys = ["label", "model", "dataset", "method", "depth", "quantity"]
    assert len(published.drop_duplicates(keys)) == len(published) == 767
    read = "\n".join(map(",".join, published.loc[:, "label":"unit"].to_numpy())).encode()
    assert hashlib.sha256(read).hexdigest()[:16] == "dd91d5764d646245"


def test_values_are_those_of_the_statistics(babi):
    """In the paper's units; those of a report of several runs: tests/report/test_report.py."""
    here = beside([babi], datasets, confident_fragile, payoff).set_index("quantity")["here"]
    confident, fragile = babi.msp <= np.median(babi.msp), babi.u_sem > np.median(babi.u_sem)
    for quantity, value in (
        ("median tokens of the answer", np.median([*map(len, babi.saved("greedy_tokens"))])),
        ("mean quality", babi.quality.mean()),
        ("confident error", babi.wrong[confident].mean()),
        ("error rate, confident and fragile", 100 * babi.wrong[confident & fragile].mean()),
    ):
        assert getattr(here[quantity], "value", here[quantity]) == pytest.approx(value), quantity


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
        ("config.max_new_tokens", 20, "max_new_tokens"),
        ("config.asmi", None, "asmi.num_samples"),
        ("config.instruct", True, "instruct"),
    ],
)
def test_what_departs_from_the_protocol_is_named(babi, prr, path, value, reason):
    other = changed(babi, path, value)
    assert paper.departures(other) == (reason,) * (reason is not None)
    (item,) = papers_numbers([other], prr)
    if reason in ("model", "data"):
        assert item == MissingItem(item.title, "no run has a model and data of the paper")
    elif reason is not None:
        assert not item.table["same protocol"].any()
        assert (item.table["but"] == reason).all()


def test_a_setting_of_the_papers_protocol_and_size_is_taken_first(babi):
    assert [
        paper.departures(replace(babi, **change))
        for change in ({"metric": "Rouge"}, {"run": replace(babi.run, manifest=None)})
    ] == [("quality",), ("model", "data")]
    other = replace(changed(babi, "config.instruct", True), suffix=" b")
    few = replace(babi, rows=babi.rows[:900], suffix=" c")
    # As many as the paper's coverage has tokens.
    assert {*beside([replace(babi, rows=babi.rows[:216])], coverage)["but"]} == {"rows"}
    for groups, taken, but in (([other, few, babi], babi, None), ([few], few, "rows")):
        row, here = row_of(beside(groups), MSP), normalised_prr(taken.score(MSP), taken.quality)
        assert (row["same protocol"], row["but"], row["here"]) == (
            but is None, but, pytest.approx(here)
        )  # fmt: skip


@pytest.mark.parametrize("settings", [{"scope": "response"}, {"num_masks": 20}])
def test_scores_with_other_settings_are_no_comparison(tmp_path, settings):
    runs = {"own": content(FEW), "other": exchanged(content(FEW), **settings)}
    runs = {name: save(tmp_path / name, run, papers_manifest(FEW)) for name, run in runs.items()}
    table = beside(load_run_groups([runs["other"]]), benchmark, distinct)
    assert not table.query("method == 'Sem-ASMI' and quantity == 'PRR' and depth == '60%'").size
    assert row_of(table, MSP)["but"] == "rows"  # a baseline has no masks
    assert {*table.loc[table["quantity"] == "residual AUROC", "but"]} == {"rows; settings of ASMI"}
    (both,) = load_run_groups(runs.values())  # each score by the masks of its own run
    assert paper.paper_method(both, "Sem-ASMI", 0.6) == SEM


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"gate_token": "last", "closing_token": False, "seeded_by": "prompt"}, True),
        *(({name: 0.5}, False) for name in ("tau", "beta")),
        *((changed, False) for changed in ({"top_k": 8}, {"aggregation": "sum"})),
    ],
    ids=str,
)
def test_what_the_paper_leaves_open_is_used_and_another_gate_is_not(tmp_path, settings, used):
    default, other = content(FEW), exchanged(content(FEW), **settings)
    both = {part: other[part] | default[part] for part in ("estimations", METHODS)}
    (name,) = (name for name in other[METHODS] if "Adapt" in name)
    for saved, expected in (
        (other, name if used else None), (other | both, "Adapt-ASMI (60%, K=64)")
    ):  # fmt: skip
        (group,) = loaded(tmp_path / str(expected), saved, papers_manifest(FEW))
        assert paper.paper_method(group, "Adapt-ASMI", 0.6) == expected


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ("coqa", "qwen3_8b_base"), ("babiqa", "llama2_7b"), ("triviaqa", "mistral_7b"),
        ("squad_closed_book", "qwen3_4b_base"),
    ],
)  # fmt: skip
def test_the_shipped_configs_are_the_papers_protocol(babi, dataset, model):
    config = compose_run(f"asmi_{dataset}", overrides=[f"model=asmi_{model}", "dataset=none"])
    names = ["model", "data", "generation_params", "max_new_tokens", "instruct", "n_shot", "asmi",
             "cache_path"]  # fmt: skip
    job = container(OmegaConf.masked_copy(config, names))
    about = {"model": {"path": job["model"]["path"]}, "dataset": job["data"], "config": job}
    assert paper.departures(replace(babi, run=replace(babi.run, manifest=about))) == ()
