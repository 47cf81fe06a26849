"""The page of a score: whatever it shows is text, and it is readable without colour."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lm_polygraph_asmi import score
from lm_polygraph_asmi.decisions import Decision
from lm_polygraph_asmi.scoring.page import pieces, render, visible
from tests.scoring.conftest import PROMPT

NASTY = (
    """<script>document.title="broken"</script> " ' & {{ 7 * 7 }} {% x %} </style><b onload=x>"""
)


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def found(model, tokenizer):
    settings = {"tokenizer": tokenizer, "mask_rate": 0.3, "num_masks": 30}
    return score(model, PROMPT, " in Brask\n né 🪁", **settings)


def made_nasty(found):
    """Hostile text in every place that has text."""
    shown = {"text": NASTY, "alternative": NASTY, "alternative_share": 0.4}
    tokens = tuple(replace(token, **shown) for token in found.tokens[:3])
    plain = replace(
        found, prompt=NASTY, answer=3 * NASTY, tokens=tokens, model=NASTY, warnings=(NASTY,)
    )
    return [plain, replace(plain, prompt=[{"role": NASTY, "content": NASTY}])]


def cards(*results):
    return [result.card for result in results]


def test_everything_is_escaped_and_nothing_loaded(found):
    nasty = made_nasty(found)
    page = render(cards(*nasty), NASTY)
    elements = Elements(page).tags
    expected = {tag for tag, _ in Elements(render(cards(found, found), "title")).tags}
    assert {tag for tag, _ in elements} == expected
    assert not expected & {"script", "link", "img", "iframe", "object", "base", "form"}
    for _, attributes in elements:
        assert not {"src", "srcset", "action", "onload"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")  # a place on this page
    assert not re.search(r"https?:|url\(|@import|//", page.replace(NASTY, ""))
    for part in (*(one._repr_html_() for one in nasty), *(one.to_html() for one in nasty)):
        assert "<script" not in part
        # Prompt or its role and content, three tokens twice and their alternatives, and so on.
        assert Elements(part).text.count(NASTY) >= 11


def test_a_page_and_a_part_of_a_notebook(found):
    page, part = found.to_html(), found._repr_html_()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("color-scheme: light dark") == 2  # the cards' and the page's
    assert "<title>Fragility of an answer</title>" in page
    assert "<title>Mine</title>" in found.to_html("Mine")
    tags = [tag for tag, _ in Elements(part).tags]
    assert not {"html", "head", "body", "meta", "title"} & set(tags)
    assert tags.count("section") == tags.count("style") == 1
    # Styles of a notebook's own are left alone.
    selectors = re.findall(r"([^{}]+)\{", re.search(r"<style>(.*?)</style>", part, re.DOTALL)[1])
    assert all(".asmi" in selector or "@media" in selector for selector in selectors), selectors


def test_readable_without_colour(found):
    """All numbers are in a table; bytes that make up one character share a piece."""
    page = found.to_html()
    rows = re.findall(r"<tr><td>(.*?)</tr>", page, re.DOTALL)
    for row, token in zip(rows, found.tokens, strict=True):
        share = f"({100 * token.alternative_share:.0f}\xa0%)"
        assert f"<td>{token.u:.4f}</td><td>{token.mi:.4f}</td>" in row
        assert f"<td>{100 * token.vote:.0f}\xa0%</td>" in row
        assert (share in row) == (token.alternative is not None)
    *_, kite, end = parts = pieces(found.tokens)
    assert page.count('<span class="token"') == len(parts)
    assert [[token.text for token in part] for part in (kite, end)] == [[*3 * [""], "🪁"], ["</s>"]]
    for cut in range(1, len(found.tokens)):
        unfinished = found.tokens[:cut]
        assert [token for piece in pieces(unfinished) for token in piece] == list(unfinished)


def test_characters_that_steer(found):
    nasty = "a\u202eb\u2066c\x07d\u200be\x1b[31m"
    token = replace(found.tokens[0], text=nasty, alternative=nasty)
    page = replace(found, tokens=(token,), scored_text=nasty, content_end=8).to_html()
    assert page.count("a�b�c�d�e�[31m") >= 3
    for character in "\u202e\u2066\x07\u200b\x1b":
        assert character not in page
    assert visible("می\u200cخواهم 👩\u200d🚀 \ta") == "می\u200cخواهم 👩\u200d🚀 ⇥a"


def test_several_answers_on_a_page(found):
    other = replace(found, warnings=("Look out.",), score=found.score + 1)
    page = render(cards(found, other, other), "three")
    assert re.findall(r'href="#answer-(\d)"', page) == ["2", "3", "1"]  # the most uncertain first
    assert page.count('<section class="asmi" id="answer-') == 3
    assert page.count(found.explanation[-1]) == 1  # a sentence common to all appears once
    assert page.count("Look out.") == 2  # and what some say, with them
    assert page.count("Shade and bar show") == 1
    assert "3 answers" in Elements(page).text
    assert page.count("<style>") == 2  # the cards', once, and the page's


def test_a_decision_on_a_page(found):
    """With a score its heat map, without one the answer as text; a score is not computed for it."""
    with_score = Decision(
        accept=True, reason="Accept: MSP 1 nats is at most 2.", signal="msp", value=1.0,
        signals=found.signals, threshold=2.0, warnings=("A warning.",), prompt=found.prompt,
        answer=found.answer, text=found.scored_text, ids=found.ids,
        prompt_tokens=found.prompt_tokens, settings=found.settings, model=found.model,
        calibration="tiny", score=found,
    )  # fmt: skip
    without = replace(with_score, score=None)
    for one in (with_score, without):
        text = Elements(one.to_html()).text
        assert all(sentence in text for sentence in one.sentences)
        assert ("Shade and bar show" in text) == (one is with_score)
    assert visible(without.text) in text.replace("\n", "")
    page = render(cards(with_score, replace(without, accept=False)), "two")
    for word in ("accept", "abstain"):
        assert page.count(f'<span class="outcome">{word}</span>') == 1
