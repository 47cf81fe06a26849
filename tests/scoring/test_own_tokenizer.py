"""With the tokenizer of another model, scores would be of other words."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.tiny_lm import whitebox


@pytest.mark.parametrize("vocabulary", [200, 3000])
def test_another_size(tokenizer, vocabulary):
    with pytest.raises(ValueError, match=f"it has {len(tokenizer)} tokens, the model {vocabulary}"):
        Scorer(whitebox(vocab_size=vocabulary).model, tokenizer=tokenizer)


@pytest.mark.parametrize("padding", [-30, 30])
def test_padded_embeddings_and_added_tokens_are_no_matter(tokenizer, padding):
    assert Scorer(whitebox(vocab_size=len(tokenizer) + padding).model, tokenizer=tokenizer)


def test_other_tokens_begin_and_end_a_text(tokenizer):
    model = whitebox().model
    model.config.bos_token_id, model.config.eos_token_id = 70, [71, 72]
    model.generation_config.eos_token_id = 73
    with pytest.raises(ValueError, match=r"\[70, 71, 72, 73\], which .* are ordinary in it"):
        Scorer(model, tokenizer=tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # one that is its own
    assert Scorer(model, tokenizer=tokenizer)


def test_other_words_under_the_same_size_and_ends(folder, tmp_path):
    """As of Llama 2 and Mistral: seen by the tokenizer that is saved with the model."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert Scorer(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    ids = saved["model"]["vocab"]
    ordinary = [token for token, number in ids.items() if number > 2]
    moved = zip(ordinary, [ids[token] for token in ordinary[::-1]], strict=True)
    saved["model"]["vocab"] = ids | dict(moved)
    file.write_text(json.dumps(saved))
    other = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"3\d\d tokens of the one saved in .* have other ids"):
        Scorer(model, tokenizer=other)
    model.config.name_or_path = "nobody/none"  # nothing to compare with
    assert Scorer(model, tokenizer=other)
