"""With the tokenizer of another model, scores would be of other words."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("own"), max_position_embeddings=256)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_own_one_is_right_also_from_elsewhere(folder, model, tmp_path):
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert Scorer(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)).tokenizer


def test_another_size(folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{i}" for i in range(100)])
    with pytest.raises(ValueError, match="it has 452 tokens, the model 352"):
        Scorer(model, tokenizer=tokenizer)


def test_other_ends(folder, model):
    model.generation_config.eos_token_id = model.config.eos_token_id = 50
    model.config.bos_token_id = None
    with pytest.raises(ValueError, match=r"\[50\], which begin and end the model's texts, are ord"):
        Scorer(model, tokenizer=AutoTokenizer.from_pretrained(folder))


def test_other_words_under_the_same_size_and_ends(folder, model, tmp_path):
    """As of Llama 2 and Mistral."""
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    ids = saved["model"]["vocab"]
    ordinary = [token for token, number in ids.items() if number > 2]
    saved["model"]["vocab"] = ids | dict(
        zip(ordinary, [ids[token] for token in ordinary[::-1]], strict=True)
    )
    file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"3\d\d tokens of the one saved in .* have other ids"):
        Scorer(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
