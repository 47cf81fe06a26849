"""Whether prompts fit the context window, counted as the run will count them."""

import pytest
from lm_polygraph import WhiteboxModel

from lm_polygraph_asmi.host.window import read_window
from tests import tiny_lm

WINDOW = 40
PROMPT = "Who built the ferry? " * 4
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tiny_lm.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=WINDOW)
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None
    return {"path": str(folder), "type": "CausalLM", "load_model_args": {}}


@pytest.mark.parametrize("instruct", [False, True])
def test_tokens_are_counted_as_the_host_does(node, instruct):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = TEMPLATE
    host = WhiteboxModel(tiny_lm.whitebox().model, tokenizer, instruct=instruct)
    count = host.tokenize([PROMPT])["input_ids"].shape[1]
    tokenizer.chat_template = None
    window = read_window(node, instruct)
    assert window.count(PROMPT) == count < WINDOW
    assert window.too_long(PROMPT, WINDOW - count) is None
    assert window.too_long(PROMPT, WINDOW - count + 1) == (
        f"its {count} tokens and the {WINDOW - count + 1} of an answer do not fit the context "
        f"window of {WINDOW}"
    )


def test_short_prompts_need_no_tokenizer(node, monkeypatch):
    monkeypatch.setattr("lm_polygraph_asmi.host.window._tokenizer", None)
    window = read_window(node, instruct=False)
    assert window.too_long("x" * (WINDOW - 18), 10) is None
    with pytest.raises(TypeError):
        window.too_long("x" * (WINDOW - 17), 10)
    with pytest.raises(TypeError):
        window.too_long("\ufdfa" * 2, 10)  # a letter that normalises to 18


def test_models_without_a_known_window(node):
    for unknown in ({}, node | {"type": "Blackbox"}):
        assert read_window(unknown, instruct=False).too_long(PROMPT * 99, 10) is None
