"""A finished run as a yardstick: fitted, saved, and silent where it does not rank."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.analysis.calibration import Step, calibrate
from lm_polygraph_asmi.analysis.clusters import Interval, wilson_interval
from lm_polygraph_asmi.scoring import Reference
from tests.report import runs

METHODS = {
    "asmi": "ASMI (60%, K=64)",
    "sem": "Sem-ASMI (60%, K=64)",
    "adapt": "Adapt-ASMI (60%, K=64)",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return runs.save(tmp_path_factory.mktemp("runs") / "squad")


@pytest.fixture(scope="module")
def reference(run):
    return Reference.from_run(run)


def columns(variant="sem"):
    saved = runs.content()
    scores = np.array(saved["estimations"]["sequence", METHODS[variant]])
    wrong = np.array(saved["gen_metrics"]["sequence", "AlignScore"]) < 0.5
    return scores, wrong, saved["stats"]


@pytest.mark.parametrize("variant", METHODS)
def test_what_a_run_gives(run, variant):
    found = Reference.from_run(run, method=variant)
    scores, wrong, stats = columns(variant)
    assert found.method == METHODS[variant]
    assert found.scores == sorted(scores)
    assert found.median == np.median(scores)
    msp = [-answer.sum() for answer in stats["asmi_log_likelihood"]]
    assert found.msp_median == pytest.approx(np.median(msp))
    assert (found.n, found.clusters, found.errors) == (60, 30, wrong.sum())
    assert (found.model, found.quality) == ("models/tiny", "AlignScore")
    own = {"method": variant, "closing_token": True, "aggregation": "mean", "stop": None}
    own |= {"max_new_tokens": 64}
    gate = {"tau": 0.3, "beta": 10.0, "num_samples": 10} if variant == "adapt" else {}
    assert found.settings == stats["asmi_settings_d60"][0] | own | gate
    assert found.ranks
    assert 0 < found.prr.low < found.prr.value < found.prr.high


def test_probability_is_read_from_the_steps(reference):
    scores, wrong, _ = columns()
    assert reference.calibration == calibrate(scores, wrong)
    for asked in (-1.0, *scores, 9.0):
        ((errors, n),) = {
            (step.errors, step.n)
            for step, later in zip(
                reference.calibration, [*reference.calibration[1:], None], strict=True
            )
            if (later is None or asked < later.start)
            and (asked >= step.start or step == reference.calibration[0])
        }
        assert reference.error_probability(asked) == pytest.approx(
            (errors + wrong.mean()) / (n + 1)
        )


def test_percentile_counts_lower_scores(reference):
    scores, _, _ = columns()
    for asked in (-1.0, *scores[:5], scores.max() + 1):
        assert reference.percentile(asked) == pytest.approx(100 * np.mean(scores < asked))


def with_scores(change):
    """A run whose Sem-ASMI is something else."""
    saved = runs.content()
    key = ("sequence", METHODS["sem"])
    saved["estimations"][key] = change(np.array(saved["estimations"][key])).tolist()
    return saved


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (np.negative, "the score ranks errors the wrong way: this interval lies below zero"),
        (
            lambda scores: np.sin(1e6 * scores),
            "not known to rank errors, since this interval does not lie above zero",
        ),
    ],
    ids=["reversed", "noise"],
)
def test_a_run_that_does_not_rank_gives_no_rank(tmp_path, change, why):
    found = Reference.from_run(runs.save(tmp_path / "run", with_scores(change)))
    assert found.prr.low <= 0
    assert not found.ranks
    assert found.percentile(0.1) is found.error_probability(0.1) is None
    (said,) = found.verdict(0.1, found.settings)
    assert said.startswith("No verdict: ")
    assert why in said
    assert f"{found.prr.value:.2f} [{found.prr.low:.2f}, {found.prr.high:.2f}]" in said


@pytest.mark.parametrize("low", [0.0, -0.01, float("nan")])
def test_the_interval_decides(reference, low):
    assert not replace(reference, prr=Interval(0.5, low, 0.9)).ranks


def test_verdict(reference):
    score = reference.scores[20]
    (said,) = reference.verdict(score, reference.settings | {"model": "elsewhere/tiny"})
    prr = reference.prr
    assert f"PRR of Sem-ASMI (60%, K=64) {prr.value:.2f} [{prr.low:.2f}, {prr.high:.2f}]" in said
    assert "Higher than 33 % of the reference run" in said
    step = next(step for step in reversed(reference.calibration) if step.start <= score)
    assert f"Of the {step.n} answers on its step of the calibration {step.errors} were" in said
    rate = wilson_interval(step.errors, step.n)
    chance = f"{reference.error_probability(score):.2f} [{rate.low:.2f}, {rate.high:.2f}]"
    assert f"probability of error {chance}, against" in said
    assert f"{reference.errors / 60:.2f} overall" in said
    assert reference.brier is None  # four fifths of 60 answers are too few for two steps
    assert "Brier" not in said
    (worth,) = replace(reference, brier=(0.1, 0.2)).verdict(score, reference.settings)
    assert "had a Brier score of 0.100, that overall share alone 0.200 (lower = better)" in worth
    for errors, shown in ((0, "below 0.01"), (30, "above 0.99")):
        steps = [Step(0.0, 9000, 300 * errors), Step(9.0, 30, errors)]
        certain = replace(reference, calibration=steps)
        assert f"probability of error {shown} [" in certain.verdict(0.1, certain.settings)[0]
    said = reference.verdict(1e9, reference.settings)
    assert said[1] == "No answer of the reference run had a score like this."
    (said,) = reference.verdict(score, reference.settings | {"model": "models/another"})
    assert "No verdict: the reference run used other settings (model tiny there, another" in said


@pytest.mark.parametrize(
    "other",
    [
        {"method": "asmi"}, {"depth": 0.9, "layer": 5}, {"num_masks": 9}, {"mask_rate": 0.2},
        {"top_k": 8}, {"mask_sampler": "balanced"}, {"scope": "response"}, {"closing_token": False},
        {"stop": ["\n"]}, {"tau": 0.5}, {"beta": 5.0}, {"num_samples": 5},
    ],
    ids=str,
)  # fmt: skip
def test_another_score_gets_no_verdict(reference, other):
    gate = {"stop": [], "tau": 0.3, "beta": 10.0, "num_samples": 10, "method": "adapt"}
    reference = replace(reference, settings=reference.settings | gate)
    (said,) = reference.verdict(0.1, reference.settings | other)
    assert said.startswith("No verdict: the reference run used other settings (")
    for name, value in other.items():
        assert f"{name} {reference.settings[name]} there, {value} here" in said
    # Another draw of masks is the same score, and token ids need no stop string.
    unknown = {name: value for name, value in reference.settings.items() if name != "stop"}
    assert "No verdict" not in reference.verdict(0.1, unknown)[0]
    same = reference.settings | {"seed": 7, "attention": "eager"}
    assert "No verdict" not in reference.verdict(0.1, same)[0]


def test_what_a_run_says_of_its_gate(tmp_path):
    own = {"tau": 0.25, "beta": 1e-5, "num_samples": 5, "stop": ["\n"]}
    saved = runs.exchanged(runs.content(), **own)
    found = Reference.from_run(runs.save(tmp_path / "run", saved), method="adapt")
    assert own.items() <= found.settings.items()
    assert found.config.replace(**own) == found.config


def test_saved_and_loaded(reference, tmp_path):
    file = tmp_path / "reference.json"
    undefined = replace(
        reference, name="NaNo, squad", prr=Interval(0.5, float("nan"), float("nan")), brier=None
    )
    for one in (reference, undefined):
        one.save(file)
        found = Reference.load(file)
        json.loads(file.read_text(), parse_constant=pytest.fail)  # NaN is not JSON
        assert math.isnan(found.prr.low) == math.isnan(one.prr.low)
        assert isinstance(found.prr, Interval)
        assert isinstance(found.calibration[0], Step)
        assert replace(found, prr=one.prr) == one
    reference.save(file)
    assert Reference.read(file) == reference


def test_read_takes_runs_too(run, reference):
    assert Reference.read(run) == Reference.read(run.parent) == reference
    assert Reference.read(run, method="asmi").method == METHODS["asmi"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", "null", "{}", '{"format": 3}', '{"format": 3, "prr": [1, 2, 3]}',
             '{"format": 4}'],
)  # fmt: skip
def test_other_files(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other.json is not a (saved )?reference"):
        Reference.read(file)


def test_another_format(reference, tmp_path):
    file = tmp_path / "reference.json"
    reference.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    with pytest.raises(ValueError, match="is not a reference of the format 3"):
        Reference.load(file)


def test_nothing_there(tmp_path):
    for name in ("reference.json", "run"):
        with pytest.raises(FileNotFoundError):
            Reference.read(tmp_path / name)
    (tmp_path / "ue_manager_seed1").write_text("no run")
    with pytest.raises(ValueError, match="is not a run saved by LM-Polygraph"):
        Reference.read(tmp_path)


def test_runs_that_teach_nothing(tmp_path):
    for kind, quality in (("wrong", 0.1), ("right", 0.9)):
        saved = runs.content()
        saved["gen_metrics"]["sequence", "AlignScore"] = [quality] * 60
        with pytest.raises(ValueError, match=f"all 60 answers of .* are {kind}"):
            Reference.from_run(runs.save(tmp_path / kind, saved))
    run = runs.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no score with the settings depth=0\.9"):
        Reference.from_run(run, depth=0.9)
    saved = runs.content()
    del saved["estimations"]["sequence", METHODS["adapt"]]
    with pytest.raises(ValueError, match="no score with the settings method='adapt'"):
        Reference.from_run(runs.save(tmp_path / "two variants", saved), method="adapt")


def test_a_folder_with_several_runs(tmp_path):
    first = runs.save(tmp_path / "runs")
    other = runs.save(tmp_path / "other", runs.content(shift=1.0))
    other.rename(first.with_name("ue_manager_seed2"))
    with pytest.raises(ValueError, match=r"holds 2 runs over other answers: name one"):
        Reference.from_run(first.parent)
