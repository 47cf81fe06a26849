"""Parts of a long answer: where they are, and what they say."""

import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from lm_polygraph_asmi import score
from lm_polygraph_asmi.scoring.segments import segment_answer
from tests.scoring.conftest import PROMPT
from tests.scoring.pages import CJK, CODE
from tests.scoring.test_page import Elements
from tests.scoring.test_result import printed


def texts(answer):
    return [answer[start:end] for start, end in segment_answer(answer)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" Guests", ["Guests"]),
        ("It costs $3.50. He paid!", ["It costs $3.50.", "He paid!"]),
        ("Mr. Berg came. Who?\nNo one knows", ["Mr. Berg came.", "Who?", "No one knows"]),
        ("One line\nof one sentence.\n\nAnother.", ["One line\nof one sentence.", "Another."]),
        (
            CODE,
            ["Use `sorted`:", "def best(rows):", "found = {}", "for row in rows:",
             CODE.splitlines()[6].strip(),
             "return found", "| name | guests |", "| ---- | ------ |", "| Ondine |  214 |",
             "1. It runs.", "2. It is short.", "- and plain"],
        ),
        (CJK, [f"{part}。" for part in CJK.split("。")[:-1]]),
        ("مرحبا بك. كيف حالك؟ جيد.", ["مرحبا بك.", "كيف حالك؟", "جيد."]),
        ("```\na\n~~~\nb", ["a", "~~~", "b"]),
        ("* one. Two.\n* three", ["* one. Two.", "* three"]),
        ("- one\n  goes on. Here\nnot here", ["- one\n  goes on. Here", "not here"]),
        ("1. a\n\n  b", ["1. a", "b"]),
        ("# Head\nText one. Two", ["# Head", "Text one.", "Two"]),
        (
            "def one():\n    x = 1\n\treturn x\nprint(1)",
            ["def one():", "x = 1", "return x", "print(1)"],
        ),
        (" \n\n", []),
        ("", []),
    ],
)  # fmt: skip
def test_where_parts_are(answer, expected):
    assert texts(answer) == expected
    places = segment_answer(answer)
    assert all(one[1] <= two[0] for one, two in pairwise(places))


@pytest.fixture(scope="module")
def found(model, tokenizer):
    return score(
        model, PROMPT, " In Brask. It was né 🪁.\n- 1931", tokenizer=tokenizer, num_masks=6
    )


def test_what_a_part_says(found):
    """By a loop over characters: a token belongs where one of its characters stands."""
    assert [span.text for span in found.spans] == ["In Brask.", "It was né 🪁.", "- 1931"]
    for span in found.spans:
        own, waiting = [], []
        for token in found.tokens:
            waiting.append(token)
            if not token.text:
                continue  # bytes of a character: with the one that ends it
            if any(span.start <= place < span.end for place in range(token.start, token.end)):
                own += waiting
            waiting = []
        assert span.tokens == len(own)
        for name in ("u", "mi", "entropy"):
            assert getattr(span, name) == pytest.approx(np.mean([getattr(t, name) for t in own]))
        likelihood = np.mean([token.log_likelihood for token in own])
        assert span.perplexity == pytest.approx(-likelihood)
        strongest = max(token.alternative_share for token in own)
        assert span.alternative_share == strongest
        assert (span.alternative, span.instead_of) in [
            (t.alternative, t.text) for t in own if t.alternative_share == strongest
        ]


def test_parts_of_ones_own(found):
    own = found.with_spans([(0, 3), (4, 9)])
    assert [span.text for span in own.spans] == [" In", "Brask"]
    assert float(own) == float(found)
    assert [part["text"] for part in own.to_dict()["spans"]] == [" In", "Brask"]
    for place in ((-1, 3), (3, 3), (0, 900)):
        with pytest.raises(ValueError, match="expected a span within the"):
            found.with_spans([place])
    for places in ([[0, 2.5]], [["0", "3"]], [[0]], [3], "0-3", 7):
        with pytest.raises(ValueError, match="expected offsets as pairs of integers"):
            found.with_spans(places)


def test_what_ends_an_answer_is_part_of_none(found):
    assert found.scored_text.endswith("</s>")
    assert all(span.end <= found.scored_text.index("</s>") for span in found.spans)


def test_they_are_shown(found):
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [part["u"] for part in content["spans"]] == [span.u for span in found.spans]
    page = Elements(found.to_html()).text
    terminal = " ".join(printed(found, width=160).split())
    for span in found.spans:
        assert span.text in page
        assert span.text in terminal
        assert f"{span.u:.4f}" in page
        assert f"{span.perplexity:.2f}" in terminal
    for shown in (page, terminal):
        assert "ot validated: the paper finds the effect for whole answers" in shown


def test_a_short_answer_has_none(model, tokenizer, monkeypatch):
    """And spaCy, which takes a second to import, is not asked."""
    monkeypatch.setitem(sys.modules, "spacy", None)
    one = score(model, PROMPT, " Brask, $3.50", tokenizer=tokenizer, num_masks=4)
    assert len(one.spans) == 1
    assert one.parts == ()
    assert one.to_dict()["spans"] == []
    assert "Parts of the answer" not in one.to_html() + printed(one)
