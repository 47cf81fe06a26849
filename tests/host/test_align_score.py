"""AlignScore's checkpoint: read whole, or an error that names what is wrong."""

import inspect
import os
import sys
from dataclasses import replace
from types import ModuleType
from unittest.mock import Mock

import nltk
import pytest
import torch
from lm_polygraph.generation_metrics.alignscore import AlignScore as HostAlignScore

from lm_polygraph_asmi.host.align_score import (
    CHECKPOINT,
    FILE,
    AlignScore,
    read_weights,
    source_of,
)
from lm_polygraph_asmi.host.hub import Repository

STATS = {"greedy_texts": ["The ferry was built in Brask.", "No kite"], "input_texts": ["", ""]}
TARGETS = ["Edda Holm built it.", "Kites are blue."]
pytestmark = pytest.mark.usefixtures("at_stand_ins")
EXPECTED = "align_score_path .* AlignScore-large.ckpt"


@pytest.fixture(autouse=True)
def no_site(monkeypatch):
    monkeypatch.setattr(nltk, "download", Mock(side_effect=OSError("asked a site")))


def test_the_metric_is_that_of_the_host(stand_ins, caplog):
    ours = AlignScore(ckpt_path=str(stand_ins.align_score))
    assert "UNTRAINED" not in caplog.text
    nltk.download.side_effect = None
    theirs = HostAlignScore(ckpt_path=str(stand_ins.align_score))
    assert str(ours) == str(theirs) == "AlignScore"
    assert ours(STATS, TARGETS).tolist() == theirs(STATS, TARGETS).tolist()
    assert len(set(ours(STATS, TARGETS))) == 2
    default = inspect.signature(HostAlignScore).parameters["ckpt_path"].default
    assert source_of(default) == replace(source_of(CHECKPOINT), revision="main")


def changed(stand_ins, *, without=(), start="", **more):
    """Its weights, some left out, all renamed, or more of them."""
    weights = read_weights(stand_ins.align_score) | more
    return {
        "state_dict": {
            f"{start}{name}": value
            for name, value in weights.items()
            if not name.startswith(tuple(without))
        }
    }


NARROW = {"tri_layer.weight": torch.ones(3, 8)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text", f"cannot be read as weights.*{EXPECTED}"),
        (None, f"has no state_dict.*{EXPECTED}"),
        # LM-Polygraph scores with an untrained head.
        ({"without": ["tri_layer", "bin_"]}, r"lacks tri_layer\.\*, and has "),
        ({"without": ["tri_layer.bias"]}, r"lacks tri_layer\.bias: "),
        ({"start": "model."}, r"lacks base_model\.\*, tri_layer\.\*, and has model\."),
        (NARROW, r"holds weights of another model: .* tri_layer.weight: .*3, 8.*3, 32"),
    ],
)
def test_what_is_no_checkpoint_is_refused(stand_ins, tmp_path, content, message):
    file = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save({} if content is None else changed(stand_ins, **content), file)
    with pytest.raises(ValueError, match=f"x.ckpt {message}"):
        AlignScore(ckpt_path=str(file))


def test_weights_that_a_score_does_not_need(stand_ins, tmp_path, caplog):
    more = {"base_model.embeddings.position_ids": torch.arange(514)[None], "loss.x": torch.ones(2)}
    torch.save(changed(stand_ins, **more), tmp_path / "x.ckpt")
    metric = AlignScore(ckpt_path=str(tmp_path / "x.ckpt"), target_is_claims=False)
    assert (metric.target_is_claims, "does not use: loss.x" in caplog.text) == (False, True)


def test_a_trainers_objects_beside_the_weights_are_skipped(stand_ins, tmp_path, monkeypatch):
    """As a checkpoint of Lightning has them; their classes are missing, and no code runs."""
    module = ModuleType("some_trainer")

    class Settings(dict):
        def __setstate__(self, state):
            os.environ["SOME_TRAINER"] = "ran"

    Settings.__module__, Settings.__qualname__ = "some_trainer", "Settings"
    module.Settings, settings = Settings, Settings(lr=1e-5)
    settings.more = 1  # else it has no state to set
    expected = read_weights(stand_ins.align_score)
    content = {"hyper_parameters": settings, "folder": tmp_path, "state_dict": expected}
    for zipped in (True, False):
        path = tmp_path / f"{zipped}.ckpt"
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "some_trainer", module)
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
        weights = read_weights(path)
        assert "SOME_TRAINER" not in os.environ
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("named", "revision", "file"),
    [
        ("own/Align.Score", None, FILE),
        ("own/Align.Score@0a1b", "0a1b", FILE),
        ("https://mirror.invalid/own/Align.Score/resolve/0a1b/a/b.ckpt?x=1", "0a1b", "a/b.ckpt"),
        ("own/file", None, None),  # which is there
        ("none.ckpt", None, None),
    ],
)
def test_names_of_a_checkpoint_on_a_hub(tmp_path, monkeypatch, named, revision, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").touch()
    assert source_of(named) == (file and Repository("own/Align.Score", revision, part=file))
