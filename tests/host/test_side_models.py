import inspect
import json
import logging
import shutil
from itertools import product
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import RepositoryNotFoundError
from lm_polygraph.defaults.stat_calculator_builders import utils as host
from lm_polygraph.stat_calculators import SemanticMatrixCalculator
from transformers import AutoTokenizer, DebertaTokenizer

from lm_polygraph_asmi.host import side_models
from lm_polygraph_asmi.host.side_models import load_nli_model, use_single_separator
from lm_polygraph_asmi.runs.checks import CHECKS, read_plan
from tests.composing import composed
from tests.stand_ins import StandIns, make_stand_ins

TWO_SEPARATORS = int(transformers.__version__.split(".")[0]) >= 5
CLS, SEP = 1, 2
FIRST, SECOND = "The ferry was built in 1931.", "Who built it?"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> StandIns:
    return make_stand_ins(tmp_path_factory.mktemp("stand-ins"))


@pytest.fixture
def tokenizer(stand_ins):
    return DebertaTokenizer.from_pretrained(stand_ins.nli)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# The pair form


@pytest.mark.parametrize("loader", [DebertaTokenizer, AutoTokenizer])
def test_pairs_as_deberta_was_trained(stand_ins, loader):
    tokenizer = loader.from_pretrained(stand_ins.nli)
    a, b = ids(tokenizer, FIRST), ids(tokenizer, SECOND)
    if TWO_SEPARATORS:  # by itself
        assert tokenizer(FIRST, SECOND)["input_ids"] == [CLS, *a, SEP, SEP, *b, SEP]
    assert use_single_separator(tokenizer) is TWO_SEPARATORS
    encoded = tokenizer(FIRST, SECOND)
    assert encoded["input_ids"] == [CLS, *a, SEP, *b, SEP]
    assert encoded["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert tokenizer(FIRST)["input_ids"] == [CLS, *a, SEP]
    assert use_single_separator(tokenizer) is False


def test_padding_and_truncation(tokenizer):
    use_single_separator(tokenizer)
    a, b = ids(tokenizer, FIRST), ids(tokenizer, SECOND)
    batch = tokenizer([(FIRST, SECOND), (SECOND, SECOND)], padding=True)
    padding = len(a) - len(b)
    assert batch["input_ids"][1] == [CLS, *b, SEP, *b, SEP] + [tokenizer.pad_token_id] * padding
    assert batch["attention_mask"][1] == [1] * (2 * len(b) + 3) + [0] * padding
    cut = tokenizer(FIRST, SECOND, truncation="only_first", max_length=len(b) + 5)
    assert cut["input_ids"] == [CLS, *a[:2], SEP, *b, SEP]


def test_other_tokenizers_stay_as_they_are(stand_ins):
    others = [AutoTokenizer.from_pretrained(stand_ins.cross_encoder)]
    if TWO_SEPARATORS:  # transformers 4 needs a SentencePiece file for this one
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁The", "▁ferry"]
        others.append(transformers.DebertaV2Tokenizer(vocab=[(word, 0.0) for word in words]))
    for tokenizer in others:
        before = tokenizer("The ferry", "The")
        assert use_single_separator(tokenizer) is False
        assert tokenizer("The ferry", "The") == before


def test_host_s_calculator_sees_the_pairs_as_trained(stand_ins, caplog):
    caplog.set_level(logging.INFO, logger="lm_polygraph")
    nli = load_nli_model(str(stand_ins.nli), batch_size=3, device="cpu")
    assert ("[CLS] A [SEP] B [SEP]" in caplog.text) is TWO_SEPARATORS
    texts = [FIRST, SECOND, "1931", FIRST]
    statistics = SemanticMatrixCalculator(nli)({"sample_texts": [texts]}, [""], None)
    entail = statistics["semantic_matrix_entail"][0]
    contra = statistics["semantic_matrix_contra"][0]
    for (i, first), (j, second) in product(enumerate(texts), repeat=2):
        pair = [CLS, *ids(nli.deberta_tokenizer, first), SEP]
        pair += [*ids(nli.deberta_tokenizer, second), SEP]
        with torch.no_grad():
            expected = nli.deberta(torch.tensor([pair])).logits[0].softmax(-1)
        assert contra[i, j] == pytest.approx(expected[0].item(), abs=1e-5)
        assert entail[i, j] == pytest.approx(expected[2].item(), abs=1e-5)
    if TWO_SEPARATORS:
        uncorrected = SemanticMatrixCalculator(host.load_nli_model(str(stand_ins.nli), 3, "cpu"))
        other = uncorrected({"sample_texts": [texts]}, [""], None)["semantic_matrix_entail"][0]
        assert abs(other - entail).max() > 1e-3


# Models that are not there, or not what a method needs


def changed(source, folder, **config):
    """A copy of a folder with a model, with some entries of its config.json changed."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def labelled(*labels):
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


NOT_THERE = [
    ("some/none", "is neither a local folder nor in the hub's cache, and HF_HUB_OFFLINE"),
    ("/no/such/folder", "is neither a local folder nor a valid hub ID"),
    # Files that are left.
    ([], "lacks its configuration and weights and tokenizer: set"),
    (["config.json", "vocab.json", "merges.txt", "tokenizer_config.json"], "lacks its weights:"),
    (["config.json", "model.safetensors"], "lacks its tokenizer: set"),
]
NOT_NLI = [
    (labelled("LABEL_0", "LABEL_1", "LABEL_2"), "has the labels LABEL_0, LABEL_1, LABEL_2, lacks"),
    (labelled("entailment", "not_entailment"), "lacks CONTRADICTION, NEUTRAL: "),
    ({"label2id": None}, "has the labels none in its label2id, lacks CONTRADICTION"),
    ({"label2id": {"ENTAILMENT": 0, "NEUTRAL": 1, "CONTRADICTION": 7}}, "label of class 7 of 3"),
    ({"architectures": ["DebertaForMaskedLM"]}, "is a DebertaForMaskedLM, expected a model for s"),
    ({"model_type": "roberta"}, "is of type roberta, expected deberta or deberta-v2"),
    ({"model_type": "no such type"}, "has no configuration that transformers reads"),
]
NOT_SIMILAR = [
    (labelled("a", "b"), "has 2 outputs, expected one, a similarity: set"),
    ({"architectures": ["RobertaModel"]}, "is a RobertaModel, expected a model for sequence"),
]


@pytest.mark.parametrize(
    ("name", "setting", "fault", "message"),
    [
        *(("NLI model", "nli_path", *fault) for fault in NOT_THERE + NOT_NLI),
        *(("cross-encoder", "cross_encoder_path", *fault) for fault in NOT_THERE + NOT_SIMILAR),
    ],
)
def test_faults_are_told_before_the_language_model_is_loaded(
    stand_ins, tmp_path, name, setting, fault, message
):
    path, source = tmp_path / "model", stand_ins.cross_encoder
    if setting == "nli_path":
        source = stand_ins.nli
    if isinstance(fault, str):
        path = fault
    elif isinstance(fault, dict):
        changed(source, path, **fault)
    else:
        path.mkdir()
        for file in fault:
            shutil.copy(source / file, path)
    (finding,) = side_model_findings(stand_ins, **{setting: str(path)})
    assert finding.text.startswith(f"the {name} {str(path)!r} ")
    assert message in finding.text
    assert finding.text.endswith(f": set {setting} to a local folder with such a model")
    assert finding.fatal
    if setting == "nli_path":
        assert side_models.nli_problem(str(path)) == finding.text
        with pytest.raises(ValueError, match="the NLI model"):
            load_nli_model(str(path), device="cpu")


def test_nothing_missing_and_other_errors_pass_unchanged(stand_ins, monkeypatch):
    assert side_models.nli_problem(str(stand_ins.nli)) is None
    parameters = inspect.signature(host.load_nli_model).parameters
    assert parameters["deberta_path"].default == side_models.NLI_MODEL
    monkeypatch.setattr(host, "load_nli_model", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        load_nli_model(str(stand_ins.nli))


@pytest.fixture
def hub_cache(stand_ins, tmp_path, monkeypatch):
    """The stand-in for the NLI model, as the hub's client keeps what it downloaded."""
    repository = tmp_path / "models--microsoft--stand-in"
    commit = "0" * 40
    shutil.copytree(stand_ins.nli, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.chdir(stand_ins.working_directory)  # where no such folder is
    return tmp_path


def test_cached_model(hub_cache):
    name, cache = "microsoft/stand-in", str(hub_cache)
    assert side_models.nli_problem(name, cache) is None
    assert load_nli_model(name, device="cpu", hf_cache=cache).deberta_path == name
    for file in hub_cache.rglob("model.safetensors"):
        file.unlink()
    assert side_models.nli_problem(name, cache) == (
        "the NLI model 'microsoft/stand-in' is in the hub's cache without its weights, and "
        "HF_HUB_OFFLINE blocks the hub: set nli_path to a local folder with such a model"
    )


def test_hub(monkeypatch, tmp_path):
    model_info = Mock()
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)

    def missing():
        return side_models.nli_problem(cache=str(tmp_path))

    assert missing() is None
    model_info.assert_called_once_with(side_models.NLI_MODEL, timeout=5)
    model_info.side_effect = TimeoutError
    assert "and the hub does not answer: set nli_path" in missing()
    model_info.side_effect = RepositoryNotFoundError("404", response=Mock())
    assert "the hub has no model of this name" in missing()


def test_labels_in_any_case_and_order(stand_ins, tmp_path, monkeypatch):
    config = labelled("entailment", "Neutral", "contradiction")
    path = str(changed(stand_ins.nli, tmp_path / "nli", **config))
    assert side_models.nli_problem(path) is None
    assert load_nli_model(path, device="cpu").deberta.config.label2id["ENTAILMENT"] == 0
    monkeypatch.chdir(tmp_path)  # LM-Polygraph changes no labels of models by this publisher
    changed(stand_ins.nli, tmp_path / "microsoft" / "nli", **config)
    assert "lacks CONTRADICTION, ENTAILMENT, NEUTRAL" in side_models.nli_problem("microsoft/nli")
    changed(stand_ins.nli, tmp_path / "microsoft" / "v2", model_type="deberta-v2")
    found = side_models.nli_problem("microsoft/v2")
    assert "is of type deberta-v2, expected deberta: " in found


def test_no_checkpoint_of_align_score(stand_ins, tmp_path):
    """test_align_score.py has the other faults."""
    (finding,) = side_model_findings(stand_ins, align_score_path=str(tmp_path / "x.ckpt"))
    assert finding.text.startswith(f"{tmp_path / 'x.ckpt'} does not exist")
    assert "expected align_score_path to name the file" in finding.text
    assert finding.fatal


def test_only_models_that_a_method_needs(stand_ins):
    wrong = {"nli_path": "some/none", "cross_encoder_path": "some/none"}
    assert len(side_model_findings(stand_ins, **wrong)) == 2
    assert side_model_findings(stand_ins, "estimators=asmi_no_side_models", **wrong) == []


def side_model_findings(stand_ins, *overrides, **paths):
    """What a run is told of its side models, with stand-ins for those not named."""
    own = [text for text in stand_ins.overrides if text.partition("=")[0] not in paths]
    config = composed(
        "asmi_coqa", *overrides, *own, *(f'{name}="{path}"' for name, path in paths.items())
    )
    found = CHECKS["side models"](read_plan(config))
    return [finding for finding in found if "spaCy" not in finding.text]
