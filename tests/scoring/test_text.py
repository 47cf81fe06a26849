"""Token ids and character offsets, with tokenizers that make them hard."""

import random
from contextlib import nullcontext

import pytest
import torch
from tokenizers.processors import TemplateProcessing
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
# As Llama 2 has it: the decoder drops the first space.
SENTENCEPIECE = space_tokenizer(["▁Brask", "▁in", "▁The", "▁ferry", "as"])
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


def check_cover(text, places):
    """Each token begins where the one before ends, from the first character to the last."""
    ends = [end for _, end in places]
    assert (places, ends[-1:]) == (list(zip([0, *ends], ends, strict=False)), [len(text)])
    assert ends == sorted(ends)


def bytes_of(tokenizer, token):
    piece = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.all_special_ids:
        return piece.encode()
    if tokenizer is not SENTENCEPIECE:  # a character of byte-level BPE stands for a byte
        return bytes(BYTES[letter] for letter in piece)
    return bytes([int(piece[3:5], 16)]) if piece[:3] == "<0x" else piece.replace("▁", " ").encode()


@pytest.mark.parametrize("prompt", [PROMPT, "", "<s>", "<s></s>", PROMPT + "\n", "né 🪁"])
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
    drawn = torch.randint(0, len(tokenizer), (200, 12), generator=torch.Generator().manual_seed(3))
    kite = tokenizer("🪁", add_special_tokens=False)["input_ids"]
    begun_in_the_prompt = [1, *kite[:2]], [*kite[2:], 6]
    for before, ids in (*(([1, 5], ids) for ids in drawn.tolist()), begun_in_the_prompt):
        text, places = spans(tokenizer, before, ids)
        check_cover(text, places)
        assert (len(places), text) == (len(ids), tokenizer.decode(ids))


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


def test_chat(model, chat):
    """Its numbers are those of its text; that the last message was scored is said."""
    answered = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": " Brask"}]}]
    found, last = (
        score(model, MESSAGES, " Brask", tokenizer=chat),
        score(model, answered, tokenizer=chat),
    )
    assert (found.scored_text, found.tokens, found.warnings) == (" Brask</s>", last.tokens, ())
    assert (last.answer, last.prompt) == (" Brask", MESSAGES)
    assert ["last message" in said for said in last.warnings] == [True]
    as_text, written = templated(chat, CHAT), f"<s>user: {PROMPT}</s><s>assistant:"
    as_text._tokenizer.post_processor = None  # the text has its BOS
    assert found.tokens == score(model, written, " Brask", tokenizer=as_text).tokens


@pytest.mark.parametrize(
    ("added", "prompt", "word"),
    [
        ("$A", "", "no token"),
        ("$A </s>", PROMPT, "appends"),
        ("<s> $A </s>", "", "appends"),
        ("<s> $A </s>", PROMPT + "</s>", None),
        ("<s> $A", "</s>", None),
        *(("</s> $A", text, None) for text in ("", PROMPT)),  # it begins every text
    ],
)
def test_what_a_tokenizer_adds_to_a_prompt(tokenizer, added, prompt, word):
    adding = templated(tokenizer, None)
    adding._tokenizer.post_processor = TemplateProcessing(
        single=added, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    with nullcontext() if word is None else pytest.raises(ValueError, match=word):
        assert prompt_tokens(adding, prompt).tolist() == adding(prompt)["input_ids"]
