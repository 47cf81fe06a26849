"""NLI model and cross-encoder: pairs as trained, and what is wrong with a folder or a name."""

import json
import shutil
from itertools import product

import pytest
import torch
import transformers
from lm_polygraph.stat_calculators import SemanticMatrixCalculator
from transformers import AutoTokenizer

from lm_polygraph_asmi.host.side_models import (
    classifier_problem,
    load_nli_model,
    use_single_separator,
)
from lm_polygraph_asmi.runs.checks import CHECKS, read_plan
from tests.composing import composed

pytestmark = pytest.mark.usefixtures("at_stand_ins")
TWO_SEPARATORS = int(transformers.__version__.split(".")[0]) >= 5
CLS, SEP = 1, 2
FIRST, SECOND = "The ferry was built in 1931.", "Who built it?"


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_other_tokenizers_stay_as_they_are(stand_ins):
    others = [AutoTokenizer.from_pretrained(stand_ins.cross_encoder)]
    if TWO_SEPARATORS:  # transformers 4 needs a SentencePiece file for this one
        words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁The", "▁ferry")
        others.append(transformers.DebertaV2Tokenizer(vocab=[(word, 0.0) for word in words]))
    for tokenizer in others:
        before = tokenizer("The ferry", "The")
        assert use_single_separator(tokenizer) is False
        assert tokenizer("The ferry", "The") == before


def test_host_s_calculator_sees_the_pairs_as_trained(stand_ins, caplog):
    caplog.set_level("INFO", logger="lm_polygraph")
    nli = load_nli_model(str(stand_ins.nli), batch_size=3, device="cpu")
    assert ("[CLS] A [SEP] B [SEP]" in caplog.text) is TWO_SEPARATORS
    texts = [FIRST, SECOND, "1931", FIRST]
    tokens = [ids(nli.deberta_tokenizer, text) for text in texts]
    statistics = SemanticMatrixCalculator(nli)({"sample_texts": [texts]}, [""], None)
    for i, j in product(range(len(texts)), repeat=2):
        with torch.no_grad():
            pair = torch.tensor([[CLS, *tokens[i], SEP, *tokens[j], SEP]])
            contra, _, entail = nli.deberta(pair).logits[0].softmax(-1).tolist()
        found = [statistics[f"semantic_matrix_{of}"][0, i, j] for of in ("contra", "entail")]
        assert found == pytest.approx([contra, entail], abs=1e-5)


def changed(source, folder, **config):
    shutil.copytree(source, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def labelled(*labels):
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def side_model_findings(stand_ins, *overrides):
    """What a run is told of its side models, with stand-ins for those not named."""
    plan = read_plan(
        composed("asmi_coqa", "estimators=asmi_side_models", *stand_ins.overrides, *overrides)
    )
    return list(CHECKS["side models"](plan))


SETTINGS = {"nli": "NLI model", "cross_encoder": "cross-encoder"}
NOT_A_CLASSIFIER = {"architectures": ["DebertaForMaskedLM"]}
REFUSED = [  # a name, the files that are left, or changed entries of the configuration
    *((which, *fault) for which in SETTINGS for fault in (
        ("some/none", "is not on this machine, and HF_HUB_OFFLINE blocks the hub; where"),
        ("/no/such/folder", "is neither a local folder nor a valid hub ID"),
        ([], "lacks its configuration and weights and tokenizer; to"),
        (["config.json", "vocab.json", "merges.txt"], "lacks its weights;"),
        (["config.json", "model.safetensors"], "lacks its tokenizer; to"),
        (NOT_A_CLASSIFIER, "is a DebertaForMaskedLM, expected a model for sequence"),
    )),
    ("nli", labelled("LABEL_0", "LABEL_1"), "has the labels LABEL_0, LABEL_1, lacks"),
    ("nli", labelled("entailment", "not_entailment"), "lacks CONTRADICTION, NEUTRAL; "),
    ("nli", {"label2id": None}, "has the labels none in its label2id, lacks CONTRADICTION"),
    ("nli", {"label2id": {"ENTAILMENT": 1, "NEUTRAL": 2, "CONTRADICTION": 3}},
     "label of class 3 of 3"),
    ("nli", {"model_type": "roberta"}, "is of type roberta, expected deberta or deberta-v2"),
    ("nli", {"model_type": "no such type"}, "has no configuration that transformers reads"),
    ("cross_encoder", labelled("a", "b"), "has 2 outputs, expected one, a similarity; to"),
]  # fmt: skip


@pytest.mark.parametrize(("which", "fault", "message"), REFUSED)
def test_faults_are_told_before_the_language_model_is_loaded(
    stand_ins, tmp_path, which, fault, message
):
    path, source = tmp_path / "model", getattr(stand_ins, which)
    if isinstance(fault, dict):
        changed(source, path, **fault)
    elif isinstance(fault, list):
        shutil.copytree(source, path, ignore=lambda _, files: set(files) - set(fault))
    path = fault if isinstance(fault, str) else str(path)
    ((text, fatal),) = side_model_findings(stand_ins, f'{which}_path="{path}"')
    assert text.startswith(f"the {SETTINGS[which]} {path!r} ")
    assert (message in text, f"set {which}_path" in text, fatal) == (True, True, True)


def test_only_models_that_a_method_needs(stand_ins):
    wrong = ["nli_path=some/none", "cross_encoder_path=some/none", "align_score_path=none.ckpt"]
    _, _, checkpoint = side_model_findings(stand_ins, *wrong)
    assert checkpoint.text.startswith("none.ckpt cannot be read as weights (FileNotFoundError: ")
    assert checkpoint.fatal
    assert side_model_findings(stand_ins, "estimators=asmi_no_side_models", *wrong[:2]) == []


def test_a_model_in_the_cache_of_the_hub(stand_ins, tmp_path):
    name, cache = "microsoft/stand-in", str(tmp_path)
    repository, commit = tmp_path / "models--microsoft--stand-in", "0" * 40
    snapshot = shutil.copytree(stand_ins.nli, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert load_nli_model(name, device="cpu", hf_cache=cache).deberta_path == name
    (snapshot / "model.safetensors").unlink()
    assert classifier_problem("deberta_path", name, cache).startswith(
        "the NLI model 'microsoft/stand-in' is on this machine without its weights, and HF_HUB_OFF"
    )


def test_labels_in_any_case_and_order(stand_ins, tmp_path, monkeypatch):
    config = labelled("entailment", "Neutral", "contradiction")
    path = changed(stand_ins.nli, tmp_path / "nli", **config)
    assert load_nli_model(path, device="cpu").deberta.config.label2id["ENTAILMENT"] == 0
    monkeypatch.chdir(tmp_path)  # LM-Polygraph changes no labels of models by this publisher
    changed(stand_ins.nli, tmp_path / "microsoft" / "nli", **config)
    assert "lacks CONTRADICTION, ENTAILMENT, NEUTRAL" in classifier_problem(
        "deberta_path", "microsoft/nli"
    )
    changed(stand_ins.nli, tmp_path / "microsoft" / "v2", model_type="deberta-v2")
    assert "is of type deberta-v2, expected deberta; " in classifier_problem(
        "deberta_path", "microsoft/v2"
    )
