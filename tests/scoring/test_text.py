"""Token ids and character offsets, with tokenizers that make them hard."""

import random
from itertools import pairwise

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lm_polygraph_asmi import score
from lm_polygraph_asmi.host.stopping import decode
from lm_polygraph_asmi.scoring.text import answer_tokens, prompt_tokens, spans
from tests import tiny_lm
from tests.scoring.conftest import CHAT, MESSAGES, PROMPT, templated
from tests.scripted import space_tokenizer

pytestmark = pytest.mark.usefixtures("unseen")

ANSWERS = [
    "Brask", " Brask in 1931", " né à Čapek", " 日本語 🪁 kite", "a\n\nb\tc",
    " <s> inside</s> more</s>", " \ufffd is a character", " e\u0301 combining",
]  # fmt: skip
SENTENCEPIECE = space_tokenizer(["▁Brask", "▁in", "▁The", "▁ferry", "as"])
"""As Llama 2 has it: the decoder drops the first space."""
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


def check_cover(text, places):
    assert places[0][0] == 0
    assert places[-1][1] == len(text)
    assert all(start <= end for start, end in places)
    assert all(one[1] == two[0] for one, two in pairwise(places))
    assert "".join(text[start:end] for start, end in places) == text


def bytes_of(tokenizer, token):
    piece = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.all_special_ids:
        return piece.encode()
    if tokenizer is not SENTENCEPIECE:  # a character of byte-level BPE stands for a byte
        return bytes(BYTES[letter] for letter in piece)
    return bytes([int(piece[3:5], 16)]) if piece[:3] == "<0x" else piece.replace("▁", " ").encode()


@pytest.mark.parametrize("prompt", [PROMPT, "", "<s>", PROMPT + "\n", "né 🪁"])
@pytest.mark.parametrize("tokenizer", [tiny_lm.tokenizer(), SENTENCEPIECE], ids=["bytes", "spaces"])
def test_a_token_ends_where_its_bytes_do(tokenizer, prompt):
    """Of prompt and answer that are tokenised together, as a benchmark's are."""
    before = prompt_tokens(tokenizer, prompt).tolist()
    for answer in ANSWERS:
        ids, follows = answer_tokens(tokenizer, prompt, before, answer)
        assert (follows, before + ids) == (True, tokenizer(prompt + answer)["input_ids"])
        text, places = spans(tokenizer, before, ids)
        check_cover(text, places)
        if tokenizer is SENTENCEPIECE and not prompt:  # a text's first space is the tokenizer's
            text, answer = text.removeprefix(" "), answer.removeprefix(" ")
        assert text == answer
        if "\ufffd" in answer or not prompt:
            continue  # like bytes that are not complete, it goes with what follows
        spelled = [bytes_of(tokenizer, token) for token in ids]
        begun = (b"".join(spelled[: n + 1]).decode(errors="ignore") for n in range(len(ids)))
        assert [end for _, end in places] == list(map(len, begun))


def test_offsets_of_any_token_ids(tokenizer):
    """Models say bytes that make no character; then, too, nothing is lost or doubled."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        ids = torch.randint(0, len(tokenizer), (12,), generator=generator).tolist()
        text, places = spans(tokenizer, [1, 5], ids)
        check_cover(text, places)
        assert (len(places), text) == (len(ids), tokenizer.decode(ids))
    kite = tokenizer("🪁", add_special_tokens=False)["input_ids"]
    assert spans(tokenizer, [1], kite[:3]) == ("\ufffd", [(0, 0), (0, 0), (0, 1)])
    text, places = spans(tokenizer, [1, *kite[:2]], [*kite[2:], 6])  # it begins in the prompt
    check_cover(text, places)
    assert text == tokenizer.decode([*kite[2:], 6])


def test_broken_bytes_spoil_only_themselves():
    """As bytes are decoded by Python, so a text never changes when tokens are added."""
    draw = random.Random(5)
    parts = {f"<0x{byte:02X}>": bytes([byte]) for byte in "\n🪁é".encode()}
    parts |= {"▁": b" ", "a": b"a", "▁in": b" in"}
    for _ in range(200):
        drawn = draw.choices(list(parts), k=10)
        ids = SENTENCEPIECE.convert_tokens_to_ids(drawn)
        text = b"".join(map(parts.get, drawn)).decode(errors="replace").removeprefix(" ")
        assert decode(SENTENCEPIECE, ids) == text
        for length in range(1, 10):
            assert text.startswith(decode(SENTENCEPIECE, ids[:length]).rstrip("\ufffd"))


@pytest.mark.parametrize("template", ["{{ 1 + 'a' }}", "{% for", "{{ 1 / 0 }}"])
def test_a_broken_template_concerns_chats_alone(model, tokenizer, template):
    broken = templated(tokenizer, template)
    assert not score(model, PROMPT, " Brask", tokenizer=broken).warnings
    with pytest.raises(ValueError, match="the chat template does not support these messages"):
        score(model, MESSAGES, " Brask", tokenizer=broken)


def test_a_merge_over_the_border_is_not_made(model, tokenizer):
    prompt, answer = "Where do the blue ki", "tes start?"
    before = tokenizer(prompt)["input_ids"]
    assert tokenizer(prompt + answer)["input_ids"][: len(before)] != before
    found = score(model, prompt, answer, tokenizer=tokenizer)
    assert list(found.ids) == [*tokenizer(answer, add_special_tokens=False)["input_ids"], 2]
    (warning,) = found.warnings
    assert "would merge the end of the prompt" in warning


def test_chat(model, chat):
    written = f"<s>user: {PROMPT}</s><s>assistant:"
    ids = chat(written, add_special_tokens=False)["input_ids"]
    assert prompt_tokens(chat, MESSAGES).tolist() == ids
    found = score(model, MESSAGES, " Brask", tokenizer=chat)
    as_text = templated(chat, CHAT)
    as_text._tokenizer.post_processor = None  # the text below has its BOS
    assert float(found) == float(score(model, written, " Brask", tokenizer=as_text))
    assert (found.prompt, found.scored_text, found.warnings) == (MESSAGES, " Brask</s>", ())
    # The assistant's last message is the answer.
    answered = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": " Brask"}]}]
    last = score(model, answered, tokenizer=chat)
    assert (float(last), last.answer, last.prompt) == (float(found), " Brask", MESSAGES)
    assert last.warnings == ("The chat's last message, the assistant's, was scored.",)


def test_prompts_of_special_tokens_and_none(model, tokenizer):
    for prompt, ids in (("<s></s>", [1, 1, 2]), ("", [1])):
        assert prompt_tokens(tokenizer, prompt).tolist() == ids
        assert score(model, prompt, " Brask", tokenizer=tokenizer).scored_text == " Brask</s>"
