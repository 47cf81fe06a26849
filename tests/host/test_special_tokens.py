"""Special tokens spelled in texts are named."""

from copy import deepcopy

import pytest

from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.scoring.advice import special_warnings
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.text import parse_request, prompt_tokens
from tests.scripted import byte_tokenizer, scripted_model, space_tokenizer

PROMPT = "Who built the ferry?"
SPELLED = " Brask</s> in <|end|>1931"
TOKENIZERS = {
    "bytes": byte_tokenizer(["a s", "Ġ B", "< /"]),
    "no bos": byte_tokenizer(["a s"], bos=False),
    "spaces": space_tokenizer(["▁Brask", "ask", "</s"]),
}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]


@pytest.fixture(scope="module")
def scorer():
    """Of a scripted model."""
    tokenizer = TOKENIZERS["bytes"]
    length = len(prompt_tokens(tokenizer, PROMPT))
    model = scripted_model(tokenizer, length, tokenizer.convert_tokens_to_ids(["x", "</s>"]))
    settings = {"tokenizer": tokenizer, "scope": "response", "num_masks": 4, "mask_rate": 0.5}
    return Scorer(model, **settings)


def test_places(tokenizer):
    special = SpecialTokens(tokenizer)
    assert special.spelled(SPELLED) == [("</s>", 6), ("<|end|>", 14)]
    assert special.spelled(" Brask < /s>") == []


def test_an_answer_with_an_end_token_inside(scorer):
    control = scorer.score(PROMPT, " Brask</s> in 1931")
    (warning,) = control.warnings
    assert "In the answer, '</s>' at character 6 became a control token" in warning
    assert "write it in another way, such as with a space in it" in warning
    assert [token.id for token in control.tokens].count(2) == 2
    assert control.scored_text == " Brask</s> in 1931</s>"
    assert not scorer.score(PROMPT, " Brask< /s> in 1931").warnings
    # At its end, an end token is the answer's end.
    assert not scorer.score(PROMPT, " Brask</s>").warnings


def test_prompts_chats_and_samples(scorer):
    chat = [{"role": "user", "content": "a <|end|>"}, {"role": "assistant", "content": "b"}]
    chat += [{"role": "user", "content": "</s></s></s></s>?"}]
    for prompt, places in (
        (f"<|user|>{PROMPT}", ["In the prompt, '<|user|>' at character 0 became"]),
        (chat, ["message 1, '<|end|>' at character 2", "message 3, '</s>' at character 0, "]),
    ):
        warnings = scorer.score(prompt, " x").warnings
        assert len(warnings) == len(places)
        for place, warning in zip(places, warnings, strict=True):
            assert place in warning
            assert "If it is a chat that a template rendered, pass its messages" in warning
    assert "at character 8 and 1 more" in scorer.score(chat, " x").warnings[1]
    request = parse_request(PROMPT, None, [" a", " <s> b", [2]])
    samples = special_warnings(SpecialTokens(scorer.tokenizer), {2}, request, PROMPT)
    assert [note[:15] for note in samples] == ["In the sample 2"]


def test_every_field_of_a_message_is_read(scorer):
    """Where the template writes it; a field that no token comes from has no warning."""
    tokenizer = deepcopy(TOKENIZERS["bytes"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}({{ m.name }}): {{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}assistant:"
    )
    scorer = Scorer(scorer.model, tokenizer=tokenizer, num_masks=2, mask_rate=0.5)
    call = {"function": {"name": "f", "arguments": {"said": 'a "b" </s>'}}}
    asks = {"role": "user", "content": "?"}
    for message, place in (
        (
            {"role": "<|user|>", "content": "x"},
            "In the role of message 1, '<|user|>' at character 0",
        ),
        (asks | {"name": "Ada</s>"}, "In the name of message 1, '</s>' at character 3"),
        (
            {"role": "assistant", "content": None, "tool_calls": [call]},
            "In the tool_calls[0].function.arguments.said of message 1, '</s>' at character 6",
        ),
    ):
        (warning,) = scorer.score([message, asks], " x").warnings
        assert place in warning
    assert not scorer.score([asks | {"id": "</s>"}], " x").warnings
