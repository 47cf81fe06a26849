"""Whether prompts fit the context window, counted as the run will count them."""

import pytest
from lm_polygraph import WhiteboxModel
from lm_polygraph.stat_calculators import GreedyProbsCalculator
from transformers import Gemma2Config, Gemma2ForCausalLM

from lm_polygraph_asmi.host.window import read_config, read_window
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
    tiny_lm.save(tmp_path, max_position_embeddings=WINDOW)
    node = {"path": str(tmp_path), "type": "CausalLM", "load_model_args": {}}
    window = read_window(node, read_config(node), instruct)
    assert window.count(PROMPT) == count < WINDOW
    assert window.too_long(PROMPT, WINDOW - count) is None
    for number in (f"its {count} tokens", f"and {WINDOW - count + 1}", f"window of {WINDOW}"):
        assert number in window.too_long(PROMPT, WINDOW - count + 1)
    for unknown in ({}, node | {"type": "Blackbox"}):
        found = read_window(unknown, read_config(unknown), instruct)
        assert found.too_long(PROMPT * 99, 10) is None
    vars(window)["tokenizer"] = None  # an error if it is used
    short = "x" * (WINDOW - 18)  # fits even with a token a byte
    assert instruct or window.too_long(short, 10) is None
    # A template adds to it; of 18 letters, or 3 bytes.
    for prompt in (*[short] * instruct, short + "x", "\ufdfa" * 2, "北" * 8):
        with pytest.raises((TypeError, ValueError)):
            window.too_long(prompt, 10)


def test_attention_maps_are_read_unless_an_answer_crosses_a_sliding_window(tmp_path):
    """If LM-Polygraph reads them there, too, this says that the check is needless."""
    tokenizer, limit = tiny_lm.whitebox().tokenizer, 6
    for window in range(22, 30):
        config = Gemma2Config(
            vocab_size=len(tokenizer) + 10, hidden_size=32, intermediate_size=32, head_dim=8,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=window, attn_implementation="eager", eos_token_id=None,
        )  # fmt: skip
        model = WhiteboxModel(Gemma2ForCausalLM(config), tokenizer)
        config.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        node = {"path": str(tmp_path)}
        crossed = read_window(node, config, False, maps=True).too_long(PROMPT, limit)
        assert read_window(node, config, False).too_long(PROMPT, limit) is None
        try:
            GreedyProbsCalculator(True, False)({}, [PROMPT], model, limit)
        except RuntimeError:
            assert "RAUQ" in str(crossed)
        else:
            assert crossed is None
