"""A finished run to a calibration; both doors agree."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lm_polygraph.utils.generation_parameters import GenerationParameters

from lm_polygraph_asmi import config
from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions import calibrate_rows, calibrate_run, risk_threshold
from lm_polygraph_asmi.decisions.calibration import USUAL_SAMPLING
from lm_polygraph_asmi.decisions.run import SAMPLING
from lm_polygraph_asmi.inputs import as_chat
from lm_polygraph_asmi.results.manifest import model_of
from lm_polygraph_asmi.scoring.provenance import prompt_format
from tests.decisions.conftest import ASKED, N, labelled, refused, run
from tests.report import runs
from tests.scoring.conftest import PROMPT

METHODS = {n: f"{label} (60%, K=64)" for n, label in config.METHODS.items()}
RIGHT = [float(row["correct"]) for row in labelled()]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return runs.save(tmp_path_factory.mktemp("runs") / "squad")


def as_a_run(place, scores, rows, metrics):
    """What a benchmark would have saved of scored rows."""
    columns = {
        "mi": "mi", "agreement": "agreement", "asmi_entropy": "entropy",
        "asmi_log_likelihood": "log_likelihood", "greedy_tokens": "id",
    }  # fmt: skip
    stats = {
        name: [np.array([getattr(token, own) for token in one.tokens]) for one in scores]
        for name, own in columns.items()
    }
    settings = [one.settings for one in scores]
    runs.put_at(stats, 0.6, mi=stats.pop("mi"), agreement=stats.pop("agreement"), settings=settings)
    stats |= {
        "input_texts": [row["prompt"] for row in rows],
        "greedy_texts": [one.scored_text.removesuffix("</s>") + "\n More" for one in scores],
        "asmi_prompt_length": [one.prompt_tokens for one in scores],
        "asmi_closing": [True] * len(scores),
    }
    names = {"ids": [row["id"] for row in rows], "clusters": [str(row["cluster"]) for row in rows]}
    about = runs.manifest(len(rows)) | {"rows": names, "model": {"path": scores[0].model}}
    content = {"metrics": {}, "state": "Initialized", "estimations": {}, runs.METHODS: {}}
    content |= {"gen_metrics": {("sequence", n): of for n, of in metrics.items()}, "stats": stats}
    runs.put(content, ASMIConfig(top_k=8, stop=["\n"]), [float(one) for one in scores])
    return runs.save(place, content, about)


PROVENANCE = ("name", "label_source", "model", "settings", "left_out")


def test_both_doors_agree_to_the_digit(scored, scores, scorer, calibration, tmp_path):
    """On a run's rows, exported as labelled ones, all but the provenance is equal."""
    silent = {"prompt": PROMPT, "id": "silent", "cluster": "own", "correct": True}
    right = [*RIGHT, 1.0]
    metrics = {"Rouge_rougeL": [1.0 - one for one in right], "ReferenceInAnswer": right}
    every = [*scores, scorer.score(PROMPT, "\n")]
    place = as_a_run(tmp_path / "run", every, [*labelled(), silent], metrics)
    found, other = (calibrate_run(place, metric=m, **ASKED) for m in ("ReferenceInAnswer", None))
    assert (alike(found, calibration), found.settings["answer_ends"]) == (True, ["complete"])
    assert not found.differences(scores[0].compared_settings | scorer.fingerprints())
    assert found.left_out == "1 empty"
    assert (other.label_source, other.guarantee != found.guarantee) == ("Rouge_rougeL", True)
    # PRR is over the metric itself, not over right and wrong.
    quality = [round(0.1 + 0.8 * np.random.default_rng(i).random(), 3) for i in range(N)]
    lines = [s | {"correct": None, "quality": q} for s, q in zip(scored, quality, strict=True)]
    place = as_a_run(tmp_path / "quality", scores, lines, {"TokenF1": quality})
    assert alike(calibrate_run(place, **ASKED), calibrate_rows(lines, **ASKED))


def alike(found, expected):
    """Whether two calibrations differ at most in where they come from."""
    return replace(found, **{name: getattr(expected, name) for name in PROVENANCE}) == expected


def test_another_revision_of_the_model(planted, tmp_path):
    """A folder's digest, or a commit, as the manifest and the decision read it."""
    (tmp_path / "config.json").write_text("{}")
    there = model_of({"path": str(tmp_path)})["revision"]
    found = replace(calibrate_run(planted, 0.3, signal="msp", resamples=20), model=str(tmp_path))
    settings = found.settings | {"model": str(tmp_path), "answer_end": "complete"}
    for revision, differs in ((there, []), ("0", [f"revision '0' there, {there!r} here"])):
        one = replace(found, settings=found.settings | {"revision": revision})
        assert one.differences(settings) == differs


@pytest.mark.parametrize(("sampled", "differs"), [
    ({}, []),
    (SAMPLING, []),
    ({"temperature": 1.0}, ["temperature 1.0 there, 0.5 here"]),
    ({"temperature": None}, ["temperature None there, 0.5 here"]),
    (None, ["sampling not recorded there", "temperature not recorded there"]),  # as before 0.4
    *(({name: value}, [f"sampling '{name}={value}' there, {USUAL_SAMPLING!r} here"])
      for name, value in (("top_k", 5), ("top_p", 0.9), ("allow_newlines", False))),
])  # fmt: skip
def test_a_run_that_sampled_otherwise(tmp_path, sampled, differs):
    """Adapt-ASMI of an answer samples at 0.5, by LM-Polygraph's defaults; other signals do not."""
    assert vars(GenerationParameters()).items() >= SAMPLING.items()
    about = runs.manifest(60)
    if sampled is not None:
        about |= {"config": {"generation_params": {"temperature": 0.5} | sampled}}
    place = runs.save(tmp_path / "run", about=about)
    for signal, expected in (("adapt", differs), ("sem", [])):
        found = calibrate_run(place, 0.3, signal=signal, resamples=20)
        asked = found.settings | {"model": found.model, "method": signal, "temperature": 0.5}
        del asked["sampling"]
        if sampled is None:
            del found.settings["sampling"]
        assert [
            line.split(":")[0] for line in sorted(found.differences(asked | {"samples": "drawn"}))
        ] == expected


@pytest.mark.parametrize("variant", METHODS)
def test_what_a_run_gives(planted, tmp_path, variant):
    found = calibrate_run(planted, 0.3, signal="score", method=variant, resamples=50)
    saved = runs.content()
    wrong = np.array(saved["gen_metrics"]["sequence", "AlignScore"]) < 0.5
    answers = Labelled(wrong, [str(row // 2) for row in range(60)])
    values = saved["estimations"]["sequence", METHODS[variant]]
    assert found.guarantee == risk_threshold(values, answers, 0.3, 0.95)
    about = found.n, found.errors, found.model, found.label_source
    assert about == (60, wrong.sum(), "models/tiny", "AlignScore")
    of_adapt = {"tau": 0.3, "beta": 10.0, "num_samples": 10, "gate_token": "second_last"}
    own = saved["stats"]["asmi"][0][0.6]["settings"] | (of_adapt if variant == "adapt" else {}) | {
        "method": variant, "closing_token": True, "aggregation": "mean", "stop": None,
        "max_new_tokens": 64, "prompt_format": "text",
    }  # fmt: skip
    beside = ("answer_ends", "revision", "sampling")
    assert {n: v for n, v in found.settings.items() if n not in beside} == own
    prr = found.signals[found.title].prr
    assert 0 < prr.low < prr.value < prr.high
    shorter = runs.save(tmp_path / "run", runs.exchanged(saved, max_new_tokens=20))
    assert (
        calibrate_run(shorter, 0.3, signal="sem", resamples=20).configured({}).max_new_tokens == 20
    )
    # Naming all parameters of the run is naming none.
    named = {n: v for n, v in own.items() if n in ASMIConfig.names("masks", "score")}
    assert calibrate_run(planted, 0.3, signal="score", resamples=50, **named) == found


@pytest.mark.parametrize("instruct", [True, False])
def test_a_run_of_chats(tmp_path, instruct):
    """LM-Polygraph's `instruct` is at the top of a config: no system message, no tools."""
    about = runs.manifest(60) | {"config": {"instruct": instruct, "model": {}}}
    found = calibrate_run(runs.save(tmp_path / "run", about=about), 0.3, resamples=20).settings
    expected = {"system": None, "template": None} | prompt_format(
        as_chat("Who?") if instruct else "Who?", {}
    )
    assert {name: found.get(name) for name in ("prompt_format", "system", "template")} == expected


@pytest.mark.parametrize(
    ("change", "asked", "words"),
    [
        (lambda saved: saved["gen_metrics"].update({("sequence", "AlignScore"): [0.1] * 60}),
         {}, "all wrong"), (None, {"depth": 0.9}, r"depth=0\.9; it has"),
        (None, {"aggregation": "sum"}, "aggregation='sum'"), (None, {"metric": "BLEU"}, "'BLEU'"),
        (lambda saved: saved["estimations"].pop(("sequence", METHODS["adapt"])),
         {"signal": "adapt"}, "method='adapt'"),
        (lambda saved: saved["stats"].pop("asmi"), {}, "asmi"),
        ({}, {}, "expected a manifest"), (runs.manifest(60) | {"model": {}}, {}, "its model"),
    ],
)  # fmt: skip
def test_runs_that_teach_nothing(tmp_path, change, asked, words):
    saved = runs.content()
    if callable(change):
        change(saved)
    place = runs.save(tmp_path / "runs", saved, None if callable(change) else change)
    with pytest.raises(ValueError, match=words):
        calibrate_run(place, 0.3, resamples=20, **asked)


@pytest.mark.parametrize("name", ["greedy_texts", "asmi_closing", "greedy_tokens", "input_texts"])
def test_a_run_that_lacks_a_statistic_is_calibrated_on_all_rows(tmp_path, name):
    saved = runs.content()
    del saved["stats"][name]
    found = calibrate_run(runs.save(tmp_path / "run", saved, runs.manifest(60)), 0.3, resamples=20)
    assert (found.n, bool(found.question_digests)) == (60, name != "input_texts")
    assert ("answer_ends" in found.settings) == (name in ("greedy_texts", "input_texts"))


def test_two_runs_and_none(tmp_path):
    first = runs.save(tmp_path / "runs")
    other = runs.save(tmp_path / "other", runs.content(shift=1.0))
    other.rename(first.with_name("ue_manager_seed2"))
    refused((partial(calibrate_run, first.parent, 0.3), "one run, got 2"))
    with pytest.raises(FileNotFoundError):
        calibrate_run(tmp_path / "no run", 0.3)


def test_labels_of_a_run_that_are_none(scores, tmp_path):
    metrics = {
        "BLEU": [100 * one for one in RIGHT], "Bart": [one - 3 for one in RIGHT],
        "Rouge_rougeL": [np.nan, *RIGHT[1:]], "Rouge_rouge1": RIGHT, "ReferenceInAnswer": RIGHT,
    }  # fmt: skip
    rows = [row | {"cluster": i} for i, row in enumerate(labelled())]
    place = as_a_run(tmp_path / "run", scores, rows, metrics)
    expected = calibrate_run(place, metric="ReferenceInAnswer", **ASKED)
    assert expected.guarantee.clusters == N // 2  # a question twice is one cluster
    for metric, right_from in (("BLEU", 50), ("Bart", -2.5)):
        found = calibrate_run(place, metric=metric, right_from=right_from, **ASKED)
        assert (found.guarantee, found.right_from) == (expected.guarantee, right_from)
    shown = run("results", place)[1]
    said = "BLEU is outside 0 to 1", f"Rouge_rougeL has no value for 1 of {N} rows (q0)"
    assert [words for words in said if words not in shown] == []
    content = torch.load(place, weights_only=False)
    content["stats"]["target_texts"] = ["Хольм 1931", *["Holm"] * (N - 1)]
    torch.save(content, place)
    calls = (
        ("BLEU", {}, "BLEU between 0 and 1, got 100"), ("Bart", {}, "Bart .* got -"),
        ("Rouge_rougeL", {}, r"Rouge_rougeL .* \(q0\)"), ("Rouge_rouge1", {}, "'Хольм 1931'"),
        ("BLEU", {"right_from": float("nan")}, "right_from"),
    )  # fmt: skip
    refused(*((partial(calibrate_run, place, metric=m, **ASKED | own), w) for m, own, w in calls))
