"""Whether prompts fit the context window, counted as the run will count them."""

import pytest
from lm_polygraph import WhiteboxModel

from lm_polygraph_asmi.host.window import read_window
from tests import tiny_lm

WINDOW = 40
PROMPT = "Who built the ferry? " * 4


@pytest.mark.parametrize("instruct", [False, True])
def test_tokens_are_counted_as_the_host_does(tmp_path, monkeypatch, instruct):
    model = tiny_lm.whitebox()
    template = "{% for m in messages %}<s>{{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    host = WhiteboxModel(model.model, model.tokenizer, instruct=instruct)
    count = host.tokenize([PROMPT])["input_ids"].shape[1]
    folder = tiny_lm.save(tmp_path, max_position_embeddings=WINDOW)
    node = {"path": str(folder), "type": "CausalLM", "load_model_args": {}}
    window = read_window(node, instruct)
    assert window.count(PROMPT) == count < WINDOW
    assert window.too_long(PROMPT, WINDOW - count) is None
    assert window.too_long(PROMPT, WINDOW - count + 1) == (
        f"its {count} tokens and the {WINDOW - count + 1} of an answer do not fit the context "
        f"window of {WINDOW}"
    )
    for unknown in ({}, node | {"type": "Blackbox"}):
        assert read_window(unknown, instruct).too_long(PROMPT * 99, 10) is None
    monkeypatch.setattr("lm_polygraph_asmi.host.window._tokenizer", None)
    short = "x" * (WINDOW - 18)  # fits even with a token a byte
    assert instruct or window.too_long(short, 10) is None
    counted = [short] * instruct  # a template adds to it
    for prompt in (*counted, short + "x", "\ufdfa" * 2):  # a letter that normalises to 18
        with pytest.raises(TypeError):
            window.too_long(prompt, 10)
