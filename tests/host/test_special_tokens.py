"""Special tokens spelled in texts are named."""

from copy import deepcopy
from random import Random

import pytest

from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.inputs import parse_request
from lm_polygraph_asmi.scoring.advice import special_warnings
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.text import prompt_tokens
from tests.scripted import byte_tokenizer, scripted_model, space_tokenizer

PROMPT = "Who built the ferry?"


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(["a s", "Ġ B", "< /"]),
        byte_tokenizer(["a s"], bos=False),
        space_tokenizer(["▁Brask", "ask", "</s"]),
    ],
    ids=["bytes", "no bos", "spaces"],
)
def test_places_are_those_at_which_the_tokenizer_reads_them(tokenizer):
    """Also of a token that begins another one."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|end|>>", "</s>/"]})
    special, generator, seen = SpecialTokens(tokenizer), Random(0), set()
    pieces = ["</s>", "<|end|>", ">", "/", " Brask", "< /s>", "1931", "<"]
    for _ in range(200):
        text = "".join(generator.choices(pieces, k=5))
        read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = zip(read["input_ids"], read["offset_mapping"], strict=True)
        names = {number: token for token, number in special.ids.items()}
        expected = [(names[i], text.index(names[i], at)) for i, (at, _) in places if i in names]
        assert special.spelled(text) == expected, text
        seen |= {token for token, _ in expected}
    assert seen >= {"</s>", "<|end|>", "<|end|>>", "</s>/"}


@pytest.fixture(scope="module")
def scorer():
    """Its template writes every field of a message but `id`."""
    tokenizer = byte_tokenizer(["a s", "Ġ B", "< /"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}({{ m.name }}): {{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}assistant:"
    )
    length = len(prompt_tokens(tokenizer, PROMPT))
    model = scripted_model(tokenizer, length, tokenizer.convert_tokens_to_ids(["x", "</s>"]))
    return Scorer(model, tokenizer=tokenizer, scope="response", num_masks=4, mask_rate=0.5)


ASKS = {"role": "user", "content": "?"}
CALL = {"function": {"name": "f", "arguments": {"said": 'a "b" </s>'}}}
CALLS = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
CHAT = [{"role": "user", "content": "a <|end|>"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "</s></s></s></s>?"}]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "answer", "places"),
    [
        (PROMPT, " Brask</s> in 1931", ["In the answer, '</s>' at character 6 became a control"]),
        (PROMPT, " Brask< /s> in 1931", []),
        (PROMPT, " Brask</s>", []),  # the end of the answer
        (f"<|user|>{PROMPT}", " x", ["In the prompt, '<|user|>' at character 0 became"]),
        (CHAT, " x", ["content of message 1, '<|end|>' at character 2 became",
                      "message 3, '</s>' at character 0, '</s>' at character 4, '</s>' at "
                      "character 8 and 1 more became"]),
        ([ASKS | {"name": "Ada</s>"}], " x", ["In the name of message 1, '</s>' at character 3"]),
        ([CALLS, ASKS], " x",
         ["In the tool_calls[0].function.arguments.said of message 1, '</s>' at character 6"]),
        ([ASKS, {"role": "tool", "content": "5", "tool_call_id": "</s>"}], " x", []),  # not written
    ],
)  # fmt: skip
def test_warnings(scorer, prompt, answer, places):
    score = scorer.score(prompt, answer)
    for place, warning in zip(places, score.warnings, strict=True):
        assert place in warning
        assert "write it in another way, such as with a space in it" in warning
        rendered = "If a chat template wrote the prompt, pass its messages" in warning
        assert rendered == ("answer" not in place)
    if "</s>" in answer:
        assert score.scored_text == answer.removesuffix("</s>") + "</s>"
        assert [token.id for token in score.tokens].count(2) == score.scored_text.count("</s>")


def test_samples_are_numbered(scorer):
    request = parse_request(PROMPT, None, [" a", " <s> b", [2]])
    samples = special_warnings(SpecialTokens(scorer.tokenizer), {2}, request, PROMPT)
    assert [note[:15] for note in samples] == ["In the sample 2"]
