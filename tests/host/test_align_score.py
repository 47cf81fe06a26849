"""AlignScore's checkpoint: read whole, or an error that names what is wrong."""

import inspect
import logging
import os
import sys
from types import ModuleType

import nltk
import pytest
import torch
from lm_polygraph.generation_metrics.alignscore import AlignScore as HostAlignScore

from lm_polygraph_asmi.host.align_score import CHECKPOINT, AlignScore, read_weights
from tests.stand_ins import StandIns, make_stand_ins

STATS = {"greedy_texts": ["The ferry was built in Brask.", "No kite"], "input_texts": ["", ""]}
TARGETS = ["Edda Holm built it.", "Kites are blue."]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> StandIns:
    return make_stand_ins(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture(autouse=True)
def here(stand_ins, monkeypatch):
    monkeypatch.chdir(stand_ins.working_directory)
    monkeypatch.setattr(nltk.data, "path", [stand_ins.environment["NLTK_DATA"]])
    monkeypatch.setattr(nltk, "download", lambda *_: True)


@pytest.fixture
def changed(stand_ins, tmp_path):
    """Writes the stand-in's checkpoint with other weights."""

    def write(change):
        content = torch.load(stand_ins.align_score, weights_only=True)
        change(content["state_dict"])
        torch.save(content, tmp_path / "changed.ckpt")
        return str(tmp_path / "changed.ckpt")

    return write


def test_the_metric_is_that_of_the_host(stand_ins, caplog):
    ours = AlignScore(ckpt_path=str(stand_ins.align_score))
    assert "UNTRAINED" not in caplog.text
    theirs = HostAlignScore(ckpt_path=str(stand_ins.align_score))
    assert str(ours) == str(theirs) == "AlignScore"
    assert ours(STATS, TARGETS).tolist() == theirs(STATS, TARGETS).tolist()
    assert len(set(ours(STATS, TARGETS))) == 2
    assert inspect.signature(HostAlignScore).parameters["ckpt_path"].default == CHECKPOINT


def without_a_head(weights):
    for name in [n for n in weights if n.startswith(("tri_layer", "bin_layer"))]:
        weights.pop(name)


def renamed(weights):
    for name in list(weights):
        weights[f"model.{name}"] = weights.pop(name)


def narrow(weights):
    weights["tri_layer.weight"] = weights["tri_layer.weight"][:, :8].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_head, "no checkpoint of AlignScore-large.*2 missing: tri_layer"),
        (renamed, r"missing: base_model.*\.\.\.; \d+ unexpected: model\."),
        (narrow, r"tri_layer.weight \(3, 8\) instead of \(3, 32\)"),
    ],
)
def test_another_models_checkpoint_is_refused_by_name(changed, change, message):
    """LM-Polygraph scores with an untrained head."""
    with pytest.raises(ValueError, match=message):
        AlignScore(ckpt_path=changed(change))


def test_what_a_score_does_not_need_is_no_error(changed, caplog):
    caplog.set_level(logging.WARNING, "lm_polygraph")

    def older(weights):
        weights["base_model.embeddings.position_ids"] = torch.arange(514)[None]

    AlignScore(ckpt_path=changed(older))
    assert "does not use" not in caplog.text
    AlignScore(ckpt_path=changed(lambda w: w.update({"loss.weight": torch.ones(2)})))
    assert "1 unexpected: loss.weight" in caplog.text


def test_a_trainers_objects_beside_the_weights_are_skipped(stand_ins, tmp_path, monkeypatch):
    """As a checkpoint of Lightning has them; their classes are missing, and no code runs."""
    module = ModuleType("some_trainer")

    class Settings(dict):
        def __setstate__(self, state):
            os.environ["SOME_TRAINER"] = "ran"

    Settings.__module__, Settings.__qualname__ = "some_trainer", "Settings"
    module.Settings = Settings
    content = torch.load(stand_ins.align_score, weights_only=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "some_trainer", module)
        settings = Settings(lr=1e-5)
        settings.more = 1
        path, legacy = tmp_path / "trained.ckpt", tmp_path / "legacy.ckpt"
        torch.save({"hyper_parameters": settings, "folder": tmp_path, **content}, path)
        torch.save(
            torch.load(path, weights_only=False), legacy, _use_new_zipfile_serialization=False
        )
    os.environ.pop("SOME_TRAINER")
    with pytest.raises(Exception, match="some_trainer"):
        HostAlignScore(ckpt_path=str(path))
    for file in (path, legacy):
        weights = read_weights(file)
        assert "SOME_TRAINER" not in os.environ
        assert all(torch.equal(weights[n], value) for n, value in content["state_dict"].items())


def test_no_checkpoint(tmp_path):
    def said(path):
        with pytest.raises((FileNotFoundError, ValueError)) as error:
            AlignScore(ckpt_path=str(path))
        return str(error.value)

    file = tmp_path / "x.ckpt"
    assert "is a folder: expected align_score_path to name" in said(tmp_path)
    assert "does not exist" in said(file)
    file.write_text("weights")
    assert "cannot be read as weights" in said(file)
    torch.save({"weights": {}}, file)
    assert "has no state_dict" in said(file)


def test_a_url_is_downloaded_once(stand_ins, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    url, calls = "https://hub.invalid/AlignScore-large.ckpt", []

    def download(source, target, **_):
        calls.append(source)
        if len(calls) == 1:
            raise OSError("no route")
        os.link(stand_ins.align_score, target)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with pytest.raises(ConnectionError, match=r"no route.*name the file with align_score_path"):
        read_weights(url)
    assert read_weights(url).keys() == read_weights(url).keys() == (
        read_weights(stand_ins.align_score).keys()
    )  # fmt: skip
    assert calls == [url, url]
