"""A tiny model and its tokenizer for all tests of this part."""

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny_lm
from tests.scripted import likeliest

PROMPT = "Who built the ferry?"
MESSAGES = [{"role": "user", "content": PROMPT}]
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('roles!') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_lm.tokenizer()


@pytest.fixture(scope="session")
def chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return templated(tokenizer, CHAT)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return tiny_lm.whitebox().model


def templated(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    copy = deepcopy(tokenizer)
    copy.chat_template = template
    return copy


def greedy(model, tokenizer, length):
    """The model's own answer of so many tokens, or up to an end token."""

    def ended(answer):
        return len(answer) == length or tokenizer.eos_token_id in answer

    return likeliest(model, tokenizer(PROMPT)["input_ids"], ended)


def ending_model(stop_strings: list[str] | None = None):
    """A LM-Polygraph model whose answers often end: </s> outdoes a token it would say early."""
    model = tiny_lm.whitebox(stop_strings=stop_strings)
    early, weight = greedy(model.model, model.tokenizer, 3)[-1], model.model.lm_head.weight
    with torch.no_grad():
        weight[model.tokenizer.eos_token_id] = 1.2 * weight[early]
    return model
