"""A finished run as a yardstick: fitted, saved, and silent where it does not rank."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.analysis.calibration import Step, calibrate
from lm_polygraph_asmi.analysis.clusters import Interval, wilson_interval
from lm_polygraph_asmi.scoring import Calibration
from lm_polygraph_asmi.scoring.provenance import prompt_format
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
def calibration(run):
    return Calibration.from_run(run)


def columns(variant="sem"):
    saved = runs.content()
    scores = np.array(saved["estimations"]["sequence", METHODS[variant]])
    wrong = np.array(saved["gen_metrics"]["sequence", "AlignScore"]) < 0.5
    return scores, wrong, saved["stats"]


@pytest.mark.parametrize("variant", METHODS)
def test_what_a_run_gives(run, variant):
    found = Calibration.from_run(run, method=variant)
    scores, wrong, stats = columns(variant)
    assert found.method == METHODS[variant]
    assert found.scores == sorted(scores)
    assert found.median == np.median(scores)
    msp = [-answer.sum() for answer in stats["asmi_log_likelihood"]]
    assert found.msp_median == pytest.approx(np.median(msp))
    assert (found.n, found.clusters, found.errors) == (60, 30, wrong.sum())
    assert (found.model, found.quality) == ("models/tiny", "AlignScore")
    own = {"method": variant, "closing_token": True, "aggregation": "mean", "stop": None}
    own |= {"max_new_tokens": 64, "special_tokens": "control", "prompt_format": "text"}
    gate = {"tau": 0.3, "beta": 10.0, "num_samples": 10, "gate_token": "second_last"}
    gate = gate if variant == "adapt" else {}
    assert found.settings == stats["asmi_settings_d60"][0] | own | gate
    assert found.ranks
    assert 0 < found.prr.low < found.prr.value < found.prr.high


@pytest.mark.parametrize("instruct", [True, False])
def test_a_run_of_chats(tmp_path, instruct):
    """LM-Polygraph's `instruct` stands at the top of a config, and has no system message."""
    about = runs.manifest(60) | {"config": {"instruct": instruct, "model": {}}}
    found = Calibration.from_run(runs.save(tmp_path / "run", about=about)).settings
    user = [{"role": "user", "content": "Who?"}]
    expected = prompt_format(user if instruct else "Who?")
    assert {name: found.get(name) for name in ("prompt_format", "system")} == {
        "system": None
    } | expected


def test_probability_is_read_from_the_steps(calibration):
    scores, wrong, _ = columns()
    assert calibration.calibration == calibrate(scores, wrong)
    for asked in (-1.0, *scores, 9.0):
        ((errors, n),) = {
            (step.errors, step.n)
            for step, later in zip(
                calibration.calibration, [*calibration.calibration[1:], None], strict=True
            )
            if (later is None or asked < later.start)
            and (asked >= step.start or step == calibration.calibration[0])
        }
        assert calibration.error_probability(asked) == pytest.approx(
            (errors + wrong.mean()) / (n + 1)
        )


def test_percentile_counts_lower_scores(calibration):
    scores, _, _ = columns()
    for asked in (-1.0, *scores[:5], scores.max() + 1):
        assert calibration.percentile(asked) == pytest.approx(100 * np.mean(scores < asked))


def with_scores(change):
    """A run whose Sem-ASMI is something else."""
    saved = runs.content()
    key = ("sequence", METHODS["sem"])
    saved["estimations"][key] = change(np.array(saved["estimations"][key])).tolist()
    return saved


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (np.negative, "the score has a negative PRR"),
        (
            lambda scores: np.sin(1e6 * scores),
            "no evidence that the score ranks errors: the PRR interval includes 0",
        ),
    ],
    ids=["reversed", "noise"],
)
def test_a_run_that_does_not_rank_gives_no_rank(tmp_path, change, why):
    found = Calibration.from_run(runs.save(tmp_path / "run", with_scores(change)))
    assert found.prr.low <= 0
    assert not found.ranks
    assert found.percentile(0.1) is found.error_probability(0.1) is None
    (said,) = found.verdict(0.1, found.settings)
    assert said.startswith("No verdict: ")
    assert why in said
    assert f"{found.prr.value:.2f} [{found.prr.low:.2f}, {found.prr.high:.2f}]" in said


@pytest.mark.parametrize("low", [0.0, -0.01, float("nan")])
def test_the_interval_decides(calibration, low):
    assert not replace(calibration, prr=Interval(0.5, low, 0.9)).ranks


def test_verdict(calibration):
    score = calibration.scores[20]
    (said,) = calibration.verdict(score, calibration.settings | {"model": "elsewhere/tiny"})
    prr = calibration.prr
    assert f"PRR of Sem-ASMI (60%, K=64) {prr.value:.2f} [{prr.low:.2f}, {prr.high:.2f}]" in said
    assert "higher than 33 % of the calibration answers;" in said
    step = next(step for step in reversed(calibration.calibration) if step.start <= score)
    assert f"(smoothed; wrong: {step.errors} of the {step.n} calibration answers with" in said
    rate = wilson_interval(step.errors, step.n)
    chance = f"{calibration.error_probability(score):.2f} [{rate.low:.2f}, {rate.high:.2f}]"
    assert f"probability of error {chance} (" in said
    assert f"overall {calibration.errors / 60:.2f}" in said
    assert calibration.brier is None  # four fifths of 60 answers are too few for two steps
    assert "Brier" not in said
    (worth,) = replace(calibration, brier=(0.1, 0.2)).verdict(score, calibration.settings)
    assert "answers 0.100; always predicting the overall share of errors scores 0.200 (low" in worth
    (useless,) = replace(calibration, brier=(0.2, 0.2)).verdict(score, calibration.settings)
    assert "(lower = better): no gain. " in useless
    for errors, shown in ((0, "below 0.01"), (30, "above 0.99")):
        steps = [Step(0.0, 9000, 300 * errors), Step(9.0, 30, errors)]
        certain = replace(calibration, calibration=steps)
        assert f"probability of error {shown} [" in certain.verdict(0.1, certain.settings)[0]
    said = calibration.verdict(1e9, calibration.settings)
    assert said[1] == "The score is outside the range of the calibration."
    (said,) = calibration.verdict(score, calibration.settings | {"model": "models/another"})
    assert "No verdict: the calibration used other settings (model tiny there, another" in said


@pytest.mark.parametrize(
    "other",
    [
        {"method": "asmi"}, {"depth": 0.9, "layer": 5}, {"num_masks": 9}, {"mask_rate": 0.2},
        {"top_k": 8}, {"mask_sampler": "balanced"}, {"scope": "response"}, {"closing_token": False},
        {"stop": ["\n"]}, {"tau": 0.5}, {"beta": 5.0}, {"num_samples": 5},
        {"gate_token": "last"},
    ],
    ids=str,
)  # fmt: skip
def test_another_score_gets_no_verdict(calibration, other):
    gate = {"stop": [], "tau": 0.3, "beta": 10.0, "num_samples": 10, "method": "adapt"}
    gate |= {"gate_token": "second_last"}
    calibration = replace(calibration, settings=calibration.settings | gate)
    (said,) = calibration.verdict(0.1, calibration.settings | other)
    assert said.startswith("No verdict: the calibration used other settings (")
    for name, value in other.items():
        assert f"{name} {calibration.settings[name]} there, {value} here" in said
    # Another draw of masks is the same score, and token ids need no stop string.
    unknown = {name: value for name, value in calibration.settings.items() if name != "stop"}
    assert "No verdict" not in calibration.verdict(0.1, unknown)[0]
    same = calibration.settings | {"seed": 7, "attention": "eager"}
    assert "No verdict" not in calibration.verdict(0.1, same)[0]


def test_what_a_run_says_of_its_gate(tmp_path):
    own = {"tau": 0.25, "beta": 1e-5, "num_samples": 5, "stop": ["\n"]}
    saved = runs.exchanged(runs.content(), **own)
    found = Calibration.from_run(runs.save(tmp_path / "run", saved), method="adapt")
    assert own.items() <= found.settings.items()
    assert found.config.replace(**own) == found.config


def test_saved_and_loaded(calibration, tmp_path):
    file = tmp_path / "calibration.json"
    undefined = replace(
        calibration, name="NaNo, squad", prr=Interval(0.5, float("nan"), float("nan")), brier=None
    )
    for one in (calibration, undefined):
        one.save(file)
        found = Calibration.load(file)
        json.loads(file.read_text(), parse_constant=pytest.fail)  # NaN is not JSON
        assert math.isnan(found.prr.low) == math.isnan(one.prr.low)
        assert isinstance(found.prr, Interval)
        assert isinstance(found.calibration[0], Step)
        assert replace(found, prr=one.prr) == one
    calibration.save(file)
    assert Calibration.read(file) == calibration


def test_read_takes_runs_too(run, calibration):
    assert Calibration.read(run) == Calibration.read(run.parent) == calibration
    assert Calibration.read(run, method="asmi").method == METHODS["asmi"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", "null", "{}", '{"format": 4}', '{"format": 4, "prr": [1, 2, 3]}',
             '{"format": 5}'],
)  # fmt: skip
def test_other_files(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other.json(: expected a| is not a saved) calibration"):
        Calibration.read(file)


def test_another_format(calibration, tmp_path):
    file = tmp_path / "calibration.json"
    calibration.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    with pytest.raises(ValueError, match="expected a calibration of format 4"):
        Calibration.load(file)


def test_nothing_there(tmp_path):
    for name in ("calibration.json", "run"):
        with pytest.raises(FileNotFoundError):
            Calibration.read(tmp_path / name)
    (tmp_path / "ue_manager_seed1").write_text("no run")
    with pytest.raises(ValueError, match="is not a run saved by LM-Polygraph"):
        Calibration.read(tmp_path)


def test_runs_that_teach_nothing(tmp_path):
    saved = runs.content()
    saved["gen_metrics"]["sequence", "AlignScore"] = [0.1] * 60
    with pytest.raises(ValueError, match="expected right and wrong answers, got 60, all wrong"):
        Calibration.from_run(runs.save(tmp_path / "wrong", saved))
    run = runs.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"a score with the settings depth=0\.9"):
        Calibration.from_run(run, depth=0.9)
    saved = runs.content()
    del saved["estimations"]["sequence", METHODS["adapt"]]
    with pytest.raises(ValueError, match="a score with the settings method='adapt'"):
        Calibration.from_run(runs.save(tmp_path / "two variants", saved), method="adapt")


def test_a_folder_with_several_runs(tmp_path):
    first = runs.save(tmp_path / "runs")
    other = runs.save(tmp_path / "other", runs.content(shift=1.0))
    other.rename(first.with_name("ue_manager_seed2"))
    with pytest.raises(ValueError, match="expected one run, got 2 over different answers"):
        Calibration.from_run(first.parent)
