"""A tiny model and its tokenizer for all tests of this part."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_lm import tokenizer as tiny_tokenizer
from tests.tiny_lm import whitebox

PROMPT = "Who built the ferry?"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return whitebox().model


def ending_model(stop_strings: list[str] | None = None):
    """A LM-Polygraph model whose answers often end: </s> outdoes a token it would say early."""
    model = whitebox(stop_strings=stop_strings)
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model.model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        weight = model.model.lm_head.weight
        weight[model.tokenizer.eos_token_id] = 1.2 * weight[ids[0, -1]]
    return model
