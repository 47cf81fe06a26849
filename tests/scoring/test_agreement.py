"""An answer has one score: generated, as ids and as text; and one end."""

import random
from dataclasses import replace
from itertools import compress

import numpy as np
import pytest

from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.text import answer_tokens, decoded, prompt_tokens
from tests.scoring.conftest import MESSAGES, PROMPT
from tests.scripted import byte_tokenizer, likeliest, scripted_model, space_tokenizer

pytestmark = pytest.mark.usefixtures("unseen")
WORDS = ("Brask", "in", "1931", "the", "ferry", "né", "🪁", "a", "Ondine.", "I'm", "\n", "</b>")
STOPS = ("\n", "\n\n", ".", "n 19", "ne", "🪁", "</s>", "e f", " the")


def scorer_of(tokenizer, script, stops=(), end_ids=(2,), chat=False, settings=None):
    """A scorer of a model that answers the prompt by a script; and both."""
    prompt = MESSAGES if chat else PROMPT
    model = scripted_model(tokenizer, len(prompt_tokens(tokenizer, prompt)), script, end_ids)
    settings = {"num_masks": 3, "mask_rate": 0.4, "stop": stops} | (settings or {})
    return Scorer(model, tokenizer=tokenizer, **settings), prompt, script


def check_all_ways(scorer, prompt, script):
    """Every way to score the model's own answer; returns the scores of the answer and its text."""
    by_model = scorer.score(prompt)
    ids = list(by_model.ids)
    ended = scorer._conditions.closes(ids)
    assert ended or len(ids) == scorer.config.max_new_tokens
    assert (ids[: len(script)], by_model.ending != "") == (script[: len(ids)], ended)
    cut_off = [said for said in by_model.warnings if f"cut off after {len(ids)} tokens" in said]
    assert ["`stop`" in said for said in cut_off] == [not scorer.config.stop] * (not ended)
    by_ids = scorer.score(prompt, np.array(ids))
    assert (by_ids.answer, "stop" in by_ids.settings) == (ids, False)  # nothing cuts token ids
    of_text = {name: getattr(by_model, name) for name in ("answer", "settings", "warnings")}
    assert replace(by_ids, **of_text, seconds=by_model.seconds) == by_model
    from_text = scorer.score(prompt, by_model.answer)
    most = None if ended else len(ids)  # an answer that was cut off gets an end as text
    whole = by_model.scored_text
    # After the first the model goes on; the second has its end, and the third has one amid.
    others = (scorer.read(prompt, text) for text in (by_model.answer[:-1], whole, f"{whole}x"))
    for found in (from_text, *others):
        assert list(found.ids) == with_end(scorer, prompt, found.answer)
        if "\ufffd" in by_model.answer and not ended:
            continue
        content = found.scored_text[: found.content_end]
        otherwise = content == by_model.answer and found.ids[:most] != by_model.ids
        named = ["writes this answer in other tokens" in said for said in found.warnings]
        assert any(named) == otherwise, (by_model, found)
    for score, answer in ((by_model, None), (from_text, from_text.answer)):
        read = vars(scorer.read(prompt, answer)) | {"features": None}
        signals = {name: score.signals[name] for name in read["signals"]}
        signals = pytest.approx(signals, rel=2e-5, abs=1e-5)
        assert read == {n: getattr(score, n, None) for n in read} | {"signals": signals}
    return by_model, from_text


def with_end(scorer, prompt, text):
    """The tokenizer's tokens of an answer with the end that generation would give it.

    Of all the ways to write it, each step keeps those with the likeliest token, by a full pass.
    """
    tokenizer, model = scorer.tokenizer, scorer.model
    before = prompt_tokens(tokenizer, prompt).tolist()
    ids, _ = answer_tokens(tokenizer, prompt, before, text)
    if ids and scorer._conditions.closes(ids):
        return ids
    ends = {*model.generation_config.eos_token_id, tokenizer.eos_token_id}
    ways = [[*ids, token] for token in sorted(ends)]
    written = decoded(tokenizer, before, ids)[1]
    for stop in scorer.config.stop:
        whole, _ = answer_tokens(tokenizer, prompt, before, text + stop)
        found = [whole, ids + tokenizer(stop, add_special_tokens=False)["input_ids"]]
        texts = [decoded(tokenizer, before, way)[1] for way in found]
        fit = [
            t == written + stop or (written + stop not in texts and t.endswith(stop)) for t in texts
        ]
        ways += compress(found, fit)
    return likeliest(model, before, ways.__contains__, ways)


def segmented(draw, tokenizer, text):
    """Tokens that spell a text: the tokenizer's, or any others of its vocabulary."""
    if draw.random() < 0.3:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    known = sorted(tokenizer.get_vocab().items())
    ids_of = {piece: n for piece, n in known if n > 4 and not piece.startswith("<0x")}
    written = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    spelled, ids = "".join(part for part, _ in written), []
    while spelled:
        fitting = [piece for piece in ids_of if spelled.startswith(piece)]
        piece = draw.choice(fitting) if fitting else spelled[0]
        in_bytes = [f"<0x{byte:02X}>" for byte in piece.encode()]
        ids += tokenizer.convert_tokens_to_ids([piece] if fitting else in_bytes)
        spelled = spelled.removeprefix(piece)
    return ids


CHAINS = [
    ["Ġ B"], ["Ġ i", "Ġi n"], ["a s", "as k", "r ask"], ["Ġ 1"], ["9 3"], [". Ċ"], ["Ċ Ċ"],
    ["t h", "th e", "Ġ the"], ["e Ġ"], ["Ã ©", "n Ã©"], ["< /"], ["ð Ł"], ["n e", "ne ."], ["Ġ f"],
]  # fmt: skip


def drawn_case(seed):
    draw = random.Random(seed)
    if draw.random() < 0.75:
        merges = [merge for each in CHAINS for merge in each[: draw.randint(0, len(each))]]
        bos, words = draw.random() < 0.7, draw.random() < 0.7
        tokenizer = byte_tokenizer(merges, bos, words)
    else:
        words = draw.sample(["▁Brask", "▁in", "▁the", "ask", "ferry", "▁1931", "e▁f"], 4)
        tokenizer = space_tokenizer(words, bos=draw.random() < 0.7)
    words = draw.choices(WORDS, k=draw.randint(0, 4))
    text = "".join(draw.choice([" ", "", " "]) + word for word in words)
    script = segmented(draw, tokenizer, text)
    stops = tuple(draw.sample(STOPS, draw.choice([0, 0, 1, 1, 2])))
    end_ids = draw.choice([(2,), (2, 3), (3, 2), (3,)])
    end = draw.random()
    if end < 0.5:
        script.append(draw.choice(end_ids))
    elif end < 0.85 and stops:
        script += segmented(draw, tokenizer, draw.choice(stops) + draw.choice(["", "31", "\n"]))
    settings = {
        "scope": draw.choice(["all", "response"]),
        "closing_token": draw.random() < 0.8,
        "max_new_tokens": max(1, len(script) + draw.choice([0, 0, 3, -1])),
    }
    return tokenizer, script, stops, end_ids, draw.random() < 0.4, settings


MANY = pytest.param(range(100, 1100), marks=pytest.mark.slow)


@pytest.mark.parametrize("seeds", [range(3), [5020, 5057], MANY], ids=["few", "bytes", "many"])
def test_drawn_answers(seeds):
    for seed in seeds:  # of the second ones, bytes make no character
        check_all_ways(*scorer_of(*drawn_case(seed)))


BYTES = byte_tokenizer(
    ["a s", "as k", "r ask", "i n", "Ġ in", "Ċ Ċ", ". Ċ", "1 9", "19 3", "193 1"]
)
SPACES = space_tokenizer(["▁Brask", "▁in"])
KITE = [*"ðŁªģ"]
KITE_IN_SPACES = [f"<0x{byte:02X}>" for byte in "🪁".encode()]
TWO, UNCOUNTED = {"end_ids": (2, 3)}, {"settings": {"closing_token": False}}
IN_BYTES = {
    "not counted": (["x", "<|end|>"], "x", "<|end|>", TWO | UNCOUNTED),
    "a stop of four bytes": (["x", *2 * KITE], "x", "🪁", {"stops": ("🪁",)}),
    "a stop that begins another": (["x", "ĊĊ"], "x", "\n\n", {"stops": ("\n", "\n\n")}),
    "a stop that another begins": (["x", "Ċ"], "x", "\n", {"stops": ("\n\n", "\n")}),
    "a stop that ends another": (["x", ".Ċ"], "x", ".\n", {"stops": ("\n", ".\n")}),
    "a stop that merges with the text": (["x", "as", "k"], "xas", "k", {"stops": ("k",)}),
    "a stop that begins in the prompt": (["?", "x", "</s>"], "?x", "</s>", {"stops": ("??",)}),
    "the start of a stop": ([*"xenx", "</s>"], "xenx", "</s>", {"stops": ("end",)}),
    "only an end, not counted": (["</s>"], "", "</s>", UNCOUNTED),
    "only a stop": (["Ċ"], "", "\n", {"stops": ("\n",)}),
    "blank": (["Ġ", "</s>"], " ", "</s>", {}),
    "an end token as stop": (["x", "</s>"], "x", "</s>", {"stops": ("</s>",)}),
    "an end token in bytes": ([*"x</s>"], "x", "</s>", {"stops": ("</s>",)}),
    "half a character": (
        ["x", *KITE[:3]],
        "x\ufffd",
        "",
        {"stops": ("?",), "settings": {"max_new_tokens": 4}},
    ),
    "a special token inside": (["x", "<|user|>", "y", "</s>"], "x<|user|>y", "</s>", {}),
    "other tokens": ([*"xiny", "</s>"], "xiny", "</s>", {}),
    "other tokens, cut off": ([*"xin"], "xin", "", {"settings": {"max_new_tokens": 3}}),
    "beyond the window": ([*"abc", "</s>"], "abc", "</s>", {"settings": {"max_new_tokens": 500}}),
}
IN_SPACES = {
    "a space in a chat": (["▁Brask", "</s>"], " Brask", "</s>", {"chat": True}),
    "only a stop in a chat": (["▁", "<0x0A>"], " ", "\n", {"stops": ("\n",), "chat": True}),
    "no space": (["B", "r", "</s>"], "Br", "</s>", {}),
    "a stop of a byte": (["▁in", "<0x0A>"], " in", "\n", {"stops": ("\n",), "chat": True}),
    "a stop of four other bytes": (["x", *2 * KITE_IN_SPACES], "x", "🪁", {"stops": ("🪁",)}),
}
# Tokens of the model's own answer, its text and end, and the rest of `scorer_of`.
ENDINGS = {(name, BYTES): of for name, of in IN_BYTES.items()}
ENDINGS |= {(name, SPACES): of for name, of in IN_SPACES.items()}


@pytest.mark.parametrize(("name", "tokenizer"), ENDINGS, ids=[name for name, _ in ENDINGS])
def test_endings(name, tokenizer):
    pieces, answer, end, fields = ENDINGS[name, tokenizer]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert None not in ids
    by_model, from_text = check_all_ways(*scorer_of(tokenizer, ids, **fields))
    assert (by_model.answer, by_model.ending) == (answer, end)
    for score in (by_model, from_text):
        dropped = fields.get("settings") == UNCOUNTED["settings"] and len(score.ids) > 1
        assert score.counted == len(score.ids) - dropped
        counted = [token.log_likelihood for token in score.tokens[: score.counted]]
        assert score.msp == pytest.approx(-sum(counted))
        said = "answer is empty" in " ".join(score.explanation)
        assert (score.answered, said) == (bool(answer.strip()), not answer.strip())
