from pathlib import Path

import nltk
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from lm_polygraph.generation_metrics.alignscore import AlignScore
from lm_polygraph.generation_metrics.alignscore_utils import BERTAlignModel
from lm_polygraph.utils.deberta import Deberta, MultilingualDeberta
from sentence_transformers import CrossEncoder

from tests.stand_ins import StandIns, main, make_stand_ins

PAIRS = [("The mill is red.", "The mill is blue."), ("It was built in 1931.", "Edda Holm")]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> StandIns:
    return make_stand_ins(tmp_path_factory.mktemp("a folder"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_the_command_writes_the_same_bytes_and_leaves_torch_s_seed_alone(stand_ins, tmp_path):
    state, folder = torch.get_rng_state(), tmp_path / "it's a folder"
    result = CliRunner().invoke(main, [str(folder)])
    assert torch.equal(torch.get_rng_state(), state)
    first = contents(stand_ins.nli.parent)
    assert len(first) > 20
    assert contents(folder) == first
    assert result.exit_code == 0, result.output
    note, cd, export, *run = result.stdout.splitlines()
    assert "STAND-INS" in note
    assert cd.startswith("cd ")
    assert export.startswith("export HF_HUB_OFFLINE=1 NLTK_DATA=")
    assert run[0] == "polygraph_eval --config-name CONFIG \\"
    assert all("stand-in" in line for line in [cd, export, *run[1:]])


@pytest.mark.parametrize("host_class", [Deberta, MultilingualDeberta])
def test_nli(stand_ins, host_class):
    loaded = host_class(str(stand_ins.nli), device="cpu")
    assert loaded.deberta.config.label2id == {"CONTRADICTION": 0, "NEUTRAL": 1, "ENTAILMENT": 2}
    with torch.no_grad():
        encoded = loaded.deberta_tokenizer(PAIRS, padding=True, return_tensors="pt")
        probabilities = loaded.deberta(**encoded).logits.softmax(-1)
    assert probabilities.shape == (2, 3)
    assert (probabilities[0] - probabilities[1]).abs().max() > 0.01


def test_cross_encoder(stand_ins):
    scores = CrossEncoder(str(stand_ins.cross_encoder), device="cpu").predict(PAIRS)
    assert np.all((scores > 0) & (scores < 1))
    assert abs(scores[0] - scores[1]) > 0.01


def test_align_score(stand_ins, monkeypatch):
    monkeypatch.chdir(stand_ins.working_directory)
    # What the variable NLTK_DATA sets when nltk is imported.
    monkeypatch.setattr(nltk.data, "path", [stand_ins.environment["NLTK_DATA"]])
    monkeypatch.setattr(nltk, "download", lambda _: False)
    # The host loads whatever names fit and is silent about the rest.
    expected = BERTAlignModel(model="roberta-large").state_dict()
    checkpoint = torch.load(stand_ins.align_score)["state_dict"]
    assert {k: v.shape for k, v in checkpoint.items()} == {k: v.shape for k, v in expected.items()}

    metric = AlignScore(ckpt_path=str(stand_ins.align_score))
    assert torch.equal(
        metric.scorer.model.model.tri_layer.weight.cpu(), checkpoint["tri_layer.weight"]
    )
    answers, targets = zip(*PAIRS, strict=True)
    scores = metric({"greedy_texts": list(answers), "input_texts": ["", ""]}, list(targets))
    assert np.all((scores > 0) & (scores < 1))
    assert abs(scores[0] - scores[1]) > 0.01
