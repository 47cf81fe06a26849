"""Token ids and character offsets, with tokenizers that make them hard."""

import random
from itertools import pairwise

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lm_polygraph_asmi import score
from lm_polygraph_asmi.host.stopping import decode
from lm_polygraph_asmi.scoring.text import answer_tokens, prompt_tokens, spans
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


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("prompt", [PROMPT, "", "<s>", PROMPT + "\n", "né 🪁"])
def test_offsets_of_bytes(tokenizer, prompt, answer):
    """Tokenised together, as a benchmark's prompt and answer are."""
    before = prompt_tokens(tokenizer, prompt).tolist()
    ids, follows = answer_tokens(tokenizer, prompt, before, answer)
    assert follows
    assert before + ids == tokenizer(prompt + answer)["input_ids"]
    text, places = spans(tokenizer, before, ids)
    assert text == answer
    check_cover(text, places)
    # A character of byte-level BPE stands for a byte: a token ends where its bytes do.
    special, done = tokenizer.all_special_ids, b""
    for token, (_, end) in zip(ids, places, strict=True):
        if "\ufffd" in answer:
            continue  # like bytes that are not complete: it goes with what follows
        piece = tokenizer.convert_ids_to_tokens(token)
        done += piece.encode() if token in special else bytes(BYTES[c] for c in piece)
        assert end == len(done.decode(errors="ignore"))


def test_offsets_of_any_token_ids(tokenizer):
    """Models say bytes that make no character; then, too, nothing is lost or doubled."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        ids = torch.randint(0, len(tokenizer), (12,), generator=generator).tolist()
        text, places = spans(tokenizer, [1, 5], ids)
        check_cover(text, places)
        assert len(places) == len(ids)
        assert text == tokenizer.decode(ids)


def test_a_character_belongs_to_the_last_of_its_tokens(tokenizer):
    ids = tokenizer("x🪁", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    assert spans(tokenizer, [1], ids) == ("x🪁", [(0, 1), (1, 1), (1, 1), (1, 1), (1, 2)])
    assert spans(tokenizer, [1], ids[:4]) == ("x\ufffd", [(0, 1), (1, 1), (1, 1), (1, 2)])
    # It may begin in the prompt.
    text, places = spans(tokenizer, [1, *ids[:3]], [*ids[3:], 6])
    check_cover(text, places)
    assert text == tokenizer.decode([*ids[3:], 6])


@pytest.mark.parametrize("answer", ["Brask", " Brask in 1931", " The ferry", " 🪁 in Čapek</s>"])
def test_a_decoder_that_drops_a_first_space(answer):
    assert decode(SENTENCEPIECE, SENTENCEPIECE.convert_tokens_to_ids(["▁in"])) == "in"
    before = prompt_tokens(SENTENCEPIECE, PROMPT).tolist()
    ids, _ = answer_tokens(SENTENCEPIECE, PROMPT, before, answer)
    assert [*before, *ids] == SENTENCEPIECE(PROMPT + answer)["input_ids"]
    text, places = spans(SENTENCEPIECE, before, ids)
    assert text == answer
    check_cover(text, places)
    for token, (start, end) in zip(ids, places, strict=True):
        said = SENTENCEPIECE.convert_ids_to_tokens(token)
        assert said.startswith("<0x") or said.replace("▁", " ") == text[start:end]


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
    ids, follows = answer_tokens(tokenizer, prompt, before, answer)
    assert not follows
    assert ids == tokenizer(answer, add_special_tokens=False)["input_ids"]
    found = score(model, prompt, answer, tokenizer=tokenizer)
    assert found.scored_text == answer + "</s>"
    assert [token.id for token in found.tokens] == [*ids, 2]
    (warning,) = found.warnings
    assert "would merge the end of the prompt and the start of the answer" in warning
    assert "end the prompt where a word ends" in warning


def test_chat(model, chat):
    written = f"<s>user: {PROMPT}</s><s>assistant:"
    ids = chat(written, add_special_tokens=False)["input_ids"]
    assert prompt_tokens(chat, MESSAGES).tolist() == ids
    found = score(model, MESSAGES, " Brask", tokenizer=chat)
    as_text = templated(chat, CHAT)
    as_text._tokenizer.post_processor = None  # the text below has its BOS
    assert float(found) == float(score(model, written, " Brask", tokenizer=as_text))
    assert (found.prompt, found.scored_text, found.warnings) == (MESSAGES, " Brask</s>", ())
    assert len(score(model, MESSAGES, tokenizer=chat, max_new_tokens=3).tokens) == 3
    # The assistant's last message is the answer.
    answered = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": " Brask"}]}]
    last = score(model, answered, tokenizer=chat)
    assert (float(last), last.answer, last.prompt) == (float(found), " Brask", MESSAGES)
    assert last.warnings == ("The chat's last message, the assistant's, was scored.",)


def test_prompts_of_special_tokens_and_none(model, tokenizer):
    found = score(model, "<s></s>", " Brask", tokenizer=tokenizer)
    assert prompt_tokens(tokenizer, "<s></s>").tolist() == [1, 1, 2]
    assert found.scored_text == " Brask</s>"
    assert prompt_tokens(tokenizer, "").tolist() == [1]
    assert len(score(model, "", tokenizer=tokenizer, max_new_tokens=2).tokens) == 2
