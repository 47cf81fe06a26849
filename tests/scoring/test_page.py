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
    return score(
        model, PROMPT, " in Brask\n né 🪁", tokenizer=tokenizer, mask_rate=0.3, num_masks=30
    )


def test_everything_is_escaped_and_nothing_loaded(found):
    """Hostile text is in every place that has text: of a text, and of a chat."""
    shown = {"text": NASTY, "alternative": NASTY, "alternative_share": 0.4}
    tokens = tuple(replace(token, **shown) for token in found.tokens[:3])
    of = {"answer": 3 * NASTY, "tokens": tokens, "model": NASTY, "warnings": (NASTY,)}
    prompts = NASTY, [{"role": NASTY, "content": NASTY}]
    nasty = [replace(found, prompt=prompt, **of) for prompt in prompts]
    page = render([one.card for one in nasty], NASTY)
    elements = Elements(page).tags
    expected = {tag for tag, _ in Elements(render(2 * [found.card], "title")).tags}
    assert {tag for tag, _ in elements} == expected
    assert not expected & {"script", "link", "img", "iframe", "object", "base", "form"}
    for _, attributes in elements:
        assert not {"src", "srcset", "action", "onload"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")  # a place on this page
    assert not re.search(r"https?:|url\(|@import|//", page.replace(NASTY, ""))
    for part in (*(one._repr_html_() for one in nasty), *(one.to_html() for one in nasty)):
        # Prompt or its role and content, three tokens twice and their alternatives, and so on.
        assert Elements(part).text.count(NASTY) >= 11


def test_a_page_and_a_part_of_a_notebook(found):
    page, part = Elements(whole := found.to_html("Mine")), found._repr_html_()
    assert whole.startswith("<!DOCTYPE html>")
    assert "<title>Fragility of an answer</title>" in found.to_html()
    assert "Mine" in page.text
    tags = [tag for tag, _ in Elements(part).tags]
    assert {tag for tag, _ in page.tags} - {*tags} == {"html", "head", "body", "meta", "title"}
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
        numbers = (
            f"<td>{token.u:.4f}</td><td>{token.mi:.4f}</td>",
            f"<td>{100 * token.vote:.0f}\xa0%<",
        )
        assert [text in row for text in numbers] == [True, True]
        assert (share in row) == (token.alternative is not None)
    *_, kite, end = parts = pieces(found.tokens)
    assert page.count('<span class="token"') == len(parts)
    *_, cut_off = pieces(found.tokens[:-2])
    texts = [[token.text for token in part] for part in (kite, end, cut_off)]
    assert texts == [[*3 * [""], "🪁"], ["</s>"], 3 * [""]]


def test_characters_that_steer(found):
    nasty = "a\u202eb\u2066c\x07d\u200be\x1b[31m"
    token = replace(found.tokens[0], text=nasty, alternative=nasty)
    page = replace(found, tokens=(token,), scored_text=nasty, content_end=8).to_html()
    assert page.count("a�b�c�d�e�[31m") >= 3
    assert not {*page} & {*"\u202e\u2066\x07\u200b\x1b"}
    assert visible("می\u200cخواهم 👩\u200d🚀 \ta") == "می\u200cخواهم 👩\u200d🚀 ⇥a"


def test_several_answers_on_a_page(found):
    """The most uncertain first; what all say is written once, and what some say, with them."""
    other = replace(found, warnings=("Look out.",), score=found.score + 1)
    page = render([one.card for one in (found, other, other)], "three")
    assert re.findall(r'href="#answer-(\d)"', page) == ["2", "3", "1"]
    expected = {found.explanation[-1]: 1, "Look out.": 2, '<section class="asmi" id="answer-': 3,
                "3 answers": 1, "Shade and bar show": 1, "<style>": 2,
                "color-scheme: light dark": 2}  # fmt: skip
    assert {text: page.count(text) for text in expected} == expected


def test_one_answer_says_all_that_it_has_to_say(found):
    """Also a decision: with a score its heat map, without one the answer as text."""
    names = ("signals", "prompt", "answer", "ids", "prompt_tokens", "settings", "model")
    fields = {name: getattr(found, name) for name in names}
    decided = Decision(
        accept=True, reason="Accept: MSP 1 nats is at most 2.", signal="msp", value=1.0,
        threshold=2.0, warnings=("A warning.",), text=found.scored_text, calibration="tiny",
        score=found, **fields,
    )  # fmt: skip
    unscored = replace(decided, score=None, accept=False)
    for one, said, shaded in (
        (found, found.explanation, True),
        (decided, decided.sentences, True),
        (unscored, [*unscored.sentences, visible(found.scored_text).replace("⏎", "⏎\n")], False),
    ):
        text = Elements(one.to_html()).text
        assert [each for each in said if each not in text] == []
        assert ("Shade and bar show" in text) == shaded
    page = render([decided.card, unscored.card], "two")
    assert re.findall('<span class="outcome">(.*?)</span>', page) == ["accept", "abstain"]
