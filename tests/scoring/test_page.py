"""The page of a score: whatever it shows is text, and it is readable in light and dark."""

import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.image
import pytest

from lm_polygraph_asmi import score
from lm_polygraph_asmi.scoring.page import pieces, render, visible
from tests.scoring import pages as hard
from tests.scoring.conftest import PROMPT
from tests.scoring.test_result import decided

NASTY = (
    """<script>document.title="broken"</script> " ' & {{ 7 * 7 }} {% x %} </style><b onload=x>"""
)


class Elements(HTMLParser):
    """Tags with attributes, and the text between them."""

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


@pytest.fixture(scope="module")
def nasty(found):
    """Hostile text in every place that has text."""
    tokens = tuple(
        replace(token, text=NASTY, alternative=NASTY, alternative_share=0.4)
        for token in found.tokens[:3]
    )
    messages = [{"role": NASTY, "content": NASTY}]
    plain = replace(found, prompt=NASTY, answer=3 * NASTY, tokens=tokens, model=NASTY,
                    warnings=(NASTY,))  # fmt: skip
    return [plain, replace(plain, prompt=messages)]


def cards(*results):
    return [result.card for result in results]


def test_everything_is_escaped(found, nasty):
    page = render(cards(*nasty), NASTY)
    tags = {tag for tag, _ in Elements(page).tags}
    expected = {tag for tag, _ in Elements(render(cards(found, found), "title")).tags}
    assert tags == expected
    assert "script" not in tags
    assert not any("onload" in attributes for _, attributes in Elements(page).tags)
    for part in (*(one._repr_html_() for one in nasty), *(one.to_html() for one in nasty)):
        assert "<script" not in part
        # Prompt or its role and content, three tokens twice and their alternatives, and so on.
        assert Elements(part).text.count(NASTY) >= 11


def test_it_loads_nothing(nasty):
    page = render(cards(*nasty), "title")
    for tag, attributes in Elements(page).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "base", "form")
        assert not {"src", "srcset", "action"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")  # a place on this page
    assert not re.search(r"https?:|url\(|@import|//", page.replace(NASTY, ""))


def test_both_colour_schemes(found):
    page = found.to_html()
    assert '<meta name="color-scheme" content="light dark">' in page
    assert page.count("color-scheme: light dark") == 2  # the cards' and the page's
    assert page.startswith("<!DOCTYPE html>")
    assert '<meta charset="utf-8">' in page
    assert "<title>Fragility of an answer</title>" in page
    assert "<title>Mine</title>" in found.to_html("Mine")


def test_readable_without_colour(found):
    """A table has every number."""
    page = found.to_html()
    rows = re.findall(r"<tr><td>(.*?)</tr>", page, re.DOTALL)
    assert page.count('<span class="token"') == len(pieces(found.tokens))
    for row, token in zip(rows, found.tokens, strict=True):
        share = f"({100 * token.alternative_share:.0f}\xa0%)"
        assert f"<td>{token.u:.4f}</td><td>{token.mi:.4f}</td>" in row
        assert f"<td>{100 * token.vote:.0f}\xa0%</td>" in row
        assert (share in row) == (token.alternative is not None)


def test_bytes_of_a_character_share_a_piece(model, tokenizer):
    tokens = score(model, PROMPT, "x🪁", tokenizer=tokenizer, num_masks=4).tokens
    assert [(len(piece), piece[-1].text) for piece in pieces(tokens)] == [
        (1, "x"), (4, "🪁"), (1, "</s>"),
    ]  # fmt: skip
    unfinished = score(model, PROMPT, [t.id for t in tokens[1:3]], tokenizer=tokenizer).tokens
    assert [token for piece in pieces(unfinished) for token in piece] == list(unfinished)


def test_characters_that_steer(found):
    nasty = "a\u202eb\u2066c\x07d\u200be\x1b[31m"
    token = replace(found.tokens[0], text=nasty, alternative=nasty)
    page = replace(found, tokens=(token,), scored_text=nasty, content_end=8).to_html()
    assert page.count("a�b�c�d�e�[31m") >= 3
    for character in "\u202e\u2066\x07\u200b\x1b":
        assert character not in page
    assert visible("می\u200cخواهم 👩\u200d🚀 \ta") == "می\u200cخواهم 👩\u200d🚀 ⇥a"


def test_in_a_notebook(found):
    part = found._repr_html_()
    tags = [tag for tag, _ in Elements(part).tags]
    assert not {"html", "head", "body", "meta", "title"} & set(tags)
    assert tags.count("section") == tags.count("style") == 1
    assert tags.count("tr") == len(found.tokens) + 1
    # Styles of a notebook's own are left alone.
    selectors = re.findall(r"([^{}]+)\{", re.search(r"<style>(.*?)</style>", part, re.DOTALL)[1])
    assert all(".asmi" in selector or "@media" in selector for selector in selectors), selectors


def test_several_answers_on_a_page(found):
    other = replace(found, warnings=("Look out.",))
    page = render(cards(found, other), "two")
    assert page.count('<section class="asmi" id="answer-') == 2
    assert page.count(found.explanation[-1]) == 1  # a sentence common to all appears once
    assert page.count("Look out.") == 1  # and what one says, with it
    assert page.count("Shade and bar show") == 1
    assert "2 answers" in Elements(page).text
    assert page.count("<style>") == 2  # the cards', once, and the page's


def test_a_decision_on_a_page(found):
    """With a score its heat map, without one the answer as text; a score is not computed for it."""
    with_score, without = decided(found), replace(decided(found), score=None)
    for one in (with_score, without):
        text = Elements(one.to_html()).text
        assert "Accept: MSP 1 nats" in text
        assert all(sentence in text for sentence in one.sentences)
    assert "Shade and bar show" in with_score.to_html()
    assert "Shade and bar show" not in without.to_html()
    assert visible(without.text) in Elements(without.to_html()).text.replace("\n", "")
    page = render(cards(with_score, replace(without, accept=False)), "two")
    assert [
        page.count(f'<span class="outcome">{word}</span>') for word in ("accept", "abstain")
    ] == [1, 1]


@pytest.fixture(scope="module")
def browser():
    return hard.browser() or pytest.skip("no Chromium is installed")


@pytest.fixture
def opened(browser, tmp_path):
    """A page as a browser shows it: its elements, a screenshot, and what the console said."""

    def show(page, dark, *flags, width=900):
        file, picture = tmp_path / "page.html", tmp_path / "page.png"
        file.write_text(page, encoding="utf-8")
        done = subprocess.run(
            [browser, *flags, "--headless", "--no-sandbox", "--disable-gpu",
             "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
             f"--window-size={width},900",
             f"--blink-settings=preferredColorScheme={0 if dark else 1}",
             f"--screenshot={picture}", "--dump-dom", file.as_uri()],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, matplotlib.image.imread(picture)[..., :3], said

    return show


def test_in_a_browser(found, nasty, opened):
    page = render(cards(found, *nasty), "Fragility")
    brightness = {}
    for dark in (False, True):
        elements, picture, said = opened(page, dark)
        assert said == []
        shown = Elements(elements)
        assert "<title>Fragility</title>" in elements  # no script of an answer ran
        assert shown.text.count(NASTY) == Elements(page).text.count(NASTY)
        own = sum(len(pieces(one.tokens)) for one in (found, *nasty))
        assert sum("--s" in a.get("style", "") for _, a in shown.tags) == own
        assert picture.std() > 0.05  # something is written
        # Shaded tokens are redder than their surroundings.
        assert ((picture[..., 0] - picture[..., 2]) > 0.2).mean() > 0.002
        brightness[dark] = picture.mean()
    assert brightness[False] > 0.75
    assert brightness[True] < 0.35
