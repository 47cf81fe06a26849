"""An answer has one score: generated, as ids, as text and in a batch."""

import random
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch

from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.text import answer_tokens, decoded, prompt_tokens
from tests.rounding import allowed
from tests.scripted import byte_tokenizer, scripted_model, space_tokenizer

pytestmark = pytest.mark.usefixtures("unseen")
PROMPT = "Who built the ferry?"
CHAT = [{"role": "user", "content": PROMPT}]
FINISHED = {"num_masks": 8, "mask_rate": 0.4}
WORDS = ("Brask", "in", "1931", "the", "ferry", "né", "🪁", "a", "Ondine.", "I'm", "\n", "</b>")
STOPS = ("\n", "\n\n", ".", "n 19", "ne", "🪁", "</s>", "e f", " the")


@dataclass(frozen=True)
class Case:
    """A scripted answer and how it may end."""

    tokenizer: object
    script: list
    stops: tuple = ()
    end_ids: tuple = (2,)
    chat: bool = False
    settings: dict = None

    @property
    def prompt(self):
        return CHAT if self.chat else PROMPT

    @cached_property
    def model(self):
        length = len(prompt_tokens(self.tokenizer, self.prompt))
        return scripted_model(self.tokenizer, length, self.script, self.end_ids)

    def scorer(self, **settings):
        settings = FINISHED | {"stop": self.stops} | (self.settings or {}) | settings
        return Scorer(self.model, tokenizer=self.tokenizer, **settings)


def ids_of(tokenizer, *pieces):
    """Ids of a vocabulary's pieces, each of which it must have."""
    ids = tokenizer.convert_tokens_to_ids(list(pieces))
    assert None not in ids
    return ids


def check_equal(scorer, some, other):
    """Two scores of the same tokens, up to the rounding of the model itself."""
    ids = [token.id for token in some.tokens]
    assert [token.id for token in other.tokens] == ids
    prompt_ids = prompt_tokens(scorer.tokenizer, some.prompt).tolist()
    bound = allowed(scorer.model, torch.tensor([*prompt_ids, *ids]))
    assert abs(some.msp - other.msp) <= bound * len(ids)
    for name in ("entropy", "mi", "log_likelihood"):
        values = [[getattr(token, name) for token in score.tokens] for score in (some, other)]
        np.testing.assert_allclose(*values, atol=bound, rtol=0)
    assert (some.ending, some.counted, some.answer) == (other.ending, other.counted, other.answer)


def check_all_ways(case):
    """Every way to score the model's own answer; returns the scores of the answer and its text."""
    scorer = case.scorer()
    by_model = scorer.score(case.prompt)
    ids = [token.id for token in by_model.tokens]
    limit = scorer.config.max_new_tokens
    ended = scorer._conditions.closes(ids)
    assert ended or len(ids) == limit
    assert ids[: len(case.script)] == case.script[: len(ids)]
    assert (by_model.ending != "") == ended
    by_ids = scorer.score(case.prompt, ids)
    check_equal(scorer, by_model, replace(by_ids, answer=by_model.answer))
    if not by_model.answer:  # a text must have a character
        return by_model, None
    from_text = scorer.score(case.prompt, by_model.answer)
    (outcome,) = scorer.score_many([{"prompt": case.prompt, "answer": by_model.answer}])
    check_equal(scorer, from_text, outcome.result)
    assert [token.id for token in from_text.tokens] == with_end(case, scorer, by_model.answer)
    return by_model, from_text


def with_end(case, scorer, text):
    """The tokenizer's tokens of an answer, and the likeliest end by a full pass."""
    prompt = prompt_tokens(case.tokenizer, case.prompt).tolist()
    ids, _ = answer_tokens(case.tokenizer, case.prompt, prompt, text)
    if scorer._conditions.closes(ids):
        return ids
    with torch.no_grad():
        logits = case.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].tolist()
    ends = [[token] for token in sorted(case.end_ids)]
    for stop in case.stops:
        whole, _ = answer_tokens(case.tokenizer, case.prompt, prompt, text + stop)
        end = whole[len(ids) :]
        if whole[: len(ids)] != ids:
            end = case.tokenizer(stop, add_special_tokens=False)["input_ids"]
        if decoded(case.tokenizer, prompt, [*ids, *end])[1].endswith(stop):
            ends.append(end)
    return ids + max(ends, key=lambda end: logits[end[0]])


def segmented(draw, tokenizer, text):
    """Tokens that spell a text: the tokenizer's, or any others of its vocabulary."""
    if draw.random() < 0.3:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    by_piece = {}
    for piece, number in tokenizer.get_vocab().items():
        if number > 4 and not piece.startswith("<0x"):
            by_piece[piece] = number
    written = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    spelled, ids = "".join(part for part, _ in written), []
    while spelled:
        fitting = [piece for piece in by_piece if spelled.startswith(piece)]
        if not fitting:  # as bytes
            ids += [
                tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in spelled[0].encode()
            ]
            spelled = spelled[1:]
            continue
        piece = draw.choice(fitting)
        ids.append(by_piece[piece])
        spelled = spelled[len(piece) :]
    return ids


def drawn_case(seed):
    """A random tokenizer, answer, end and settings."""
    draw = random.Random(seed)
    if draw.random() < 0.75:
        letters = ["Ġ B", "Ġ i", "Ġi n", "a s", "as k", "r ask", "Ġ 1", "9 3", "t h", "th e", ". Ċ"]
        letters += ["Ċ Ċ", "Ġ the", "e Ġ", "Ã ©", "n Ã©", "< /", "ð Ł", "n e", "ne .", "Ġ f"]
        merges = []
        for merge in letters:  # those whose parts exist
            known = {"".join(pair.split(" ")) for pair in merges}
            parts = merge.split(" ")
            if all(len(part) == 1 or part in known for part in parts) and draw.random() < 0.8:
                merges.append(merge)
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
    return Case(tokenizer, script, stops, end_ids, draw.random() < 0.4, settings)


@pytest.mark.parametrize("seed", [*range(3), 5149, 5194])  # the last: bytes of no character
def test_drawn_answers(seed):
    check_all_ways(drawn_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 1100, 100))
def test_many_drawn_answers(start):
    for seed in range(start, start + 100):
        check_all_ways(drawn_case(seed))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(
        ["a s", "as k", "r ask", "i n", "Ġ in", "Ċ Ċ", ". Ċ", "1 9", "19 3", "193 1"]
    )


def by_hand(case, ids):
    """Negative log-likelihood of tokens after the case's prompt, from a full forward pass."""
    prompt = prompt_tokens(case.tokenizer, case.prompt).tolist()
    with torch.no_grad():
        log_probs = case.model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
    predicting = log_probs[len(prompt) - 1 : -1]
    return -float(predicting[torch.arange(len(ids)), ids].sum())


@pytest.mark.parametrize(("chat", "end"), [(False, "<|end|>"), (True, "</s>")])
def test_two_end_tokens(tokenizer, chat, end):
    """A text ends with the end token that the model writes, not with a fixed one."""
    ids = ids_of(tokenizer, "Ġ", "x", end)
    case = Case(tokenizer, ids, end_ids=(2, 3), chat=chat)
    by_model, from_text = check_all_ways(case)
    assert from_text.ending == by_model.ending == end
    assert from_text.msp == pytest.approx(by_hand(case, ids), rel=1e-3, abs=1e-5)
    assert from_text.msp < 0.1
    other = "</s>" if end == "<|end|>" else "<|end|>"
    assert by_hand(case, [*ids[:-1], *ids_of(tokenizer, other)]) > 5
    assert not from_text.warnings


@pytest.mark.parametrize("closing_token", [True, False])
def test_one_token_by_hand(tokenizer, closing_token):
    """As ids, and as a text with its end: minus the log-softmax."""
    (one,), end = ids_of(tokenizer, "x"), ids_of(tokenizer, "</s>")
    case = Case(tokenizer, [one, *end], settings={"closing_token": closing_token})
    scorer = case.scorer()
    for answer, ids, counted in (
        ([one], [one], 1),
        (end, end, 1),
        ("x", [one, *end], 1 + closing_token),
    ):
        score = scorer.score(PROMPT, answer)
        assert [token.id for token in score.tokens] == ids
        assert score.counted == counted
        assert score.msp == pytest.approx(by_hand(case, ids[:counted]), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("fallback", [True, False])
def test_a_stop_string_of_several_byte_tokens(tokenizer, fallback):
    """Its last byte ends the answer; a byte before it is not enough."""
    letters = "x"
    if fallback:
        tokenizer = space_tokenizer([])
        letters = "▁x"
        kite = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in "🪁".encode()))
    else:
        kite = tokenizer("🪁", add_special_tokens=False)["input_ids"]
    assert len(kite) == 4
    ids = [*ids_of(tokenizer, *letters), *kite]
    by_model, _ = check_all_ways(Case(tokenizer, [*ids, *kite], stops=("🪁",)))
    assert [token.id for token in by_model.tokens] == ids
    assert (by_model.answer.strip(), by_model.ending) == ("x", "🪁")


def test_a_stop_string_that_begins_another(tokenizer):
    for stops, end in ((("\n", "\n\n"), "ĊĊ"), (("\n\n", "\n"), "Ċ")):
        case = Case(tokenizer, ids_of(tokenizer, "Ġ", "x", end), stops=stops)
        by_model, from_text = check_all_ways(case)
        assert (by_model.answer, from_text.answer) == (" x", " x")


def test_a_stop_string_that_begins_in_the_prompt(tokenizer):
    """Only the answer's text is searched."""
    ids = ids_of(tokenizer, "?", "Ġ", "x", "</s>")
    case = Case(tokenizer, ids, stops=("??",))
    by_model, _ = check_all_ways(case)
    assert by_model.answer == "? x"


def test_without_the_closing_token(tokenizer):
    """The masks are those of the closed answer, which is one token longer than what counts."""
    ids = ids_of(tokenizer, "Ġ", "x", "<|end|>")
    settings = {"closing_token": False}
    by_model, from_text = check_all_ways(Case(tokenizer, ids, (), (2, 3), settings=settings))
    assert from_text.counted == by_model.counted == 2
    assert not from_text.warnings


UNUSUAL = {
    "only an end": (["</s>"], {}),
    "only a stop": (["Ċ"], {"stops": ("\n",)}),
    "blank": (["Ġ", "</s>"], {}),
    "an end token as stop": (["x", "</s>"], {"stops": ("</s>",)}),
    "an end token in bytes": (["x", "<", "/", "s", ">"], {"stops": ("</s>",)}),
    "half a character": (["x", *"ðŁª"], {"settings": {"max_new_tokens": 4}}),
    "a special token inside": (["x", "<|user|>", "y", "</s>"], {}),
    "another end token inside": (["x", "<|end|>", "y", "</s>"], {}),
    "the start of a stop": (["x", "e", "n", "x", "</s>"], {"stops": ("end",)}),
    "a stop in three tokens": (["x", "e", "n", "d"], {"stops": ("end",)}),
    "beyond the window": ([*"abcdefgh", "</s>"], {"settings": {"max_new_tokens": 500}}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_answers(tokenizer, name):
    pieces, fields = UNUSUAL[name]
    check_all_ways(Case(tokenizer, ids_of(tokenizer, *pieces), **fields))


@pytest.mark.parametrize(
    ("pieces", "chat"),
    [
        (["▁Brask", "</s>"], False),
        (["▁Brask", "</s>"], True),
        (["B", "r", "</s>"], False),
        (["▁in", "<0x0A>"], True),
    ],
)
def test_a_space_that_the_tokenizer_adds(pieces, chat):
    tokenizer = space_tokenizer(["▁Brask", "▁in"])
    case = Case(tokenizer, ids_of(tokenizer, *pieces), stops=("\n",), chat=chat)
    by_model, from_text = check_all_ways(case)
    assert from_text.msp == pytest.approx(by_model.msp, abs=1e-4)


def test_a_stop_string_of_several_tokens_ends_a_text_whole(tokenizer):
    ids = ids_of(tokenizer, "Ġ", "x", "e", "n", "d")
    case = Case(tokenizer, ids, ("end",))
    from_text = case.scorer().score(PROMPT, " x")
    assert from_text.ending == "end"
    assert [token.id for token in from_text.tokens] == ids
    assert from_text.msp == pytest.approx(by_hand(case, ids), rel=1e-3, abs=1e-5)
