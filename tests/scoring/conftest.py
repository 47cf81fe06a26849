"""A tiny model and its tokenizer for all tests of this part."""

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_lm import save, whitebox
from tests.tiny_lm import tokenizer as tiny_tokenizer

PROMPT = "Who built the ferry?"
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'other' %}{{ raise_exception('roles!') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return templated(tokenizer, CHAT)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return whitebox().model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Model and tokenizer as a folder; no test changes it."""
    return save(tmp_path_factory.mktemp("tiny"))


def templated(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    copy = deepcopy(tokenizer)
    copy.chat_template = template
    return copy


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
