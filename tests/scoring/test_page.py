"""The page of a score: whatever it shows is text, and it is readable in light and dark.

Pages that are hard to show are measured in a browser: nothing beyond the border, nothing hidden.
"""

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lm_polygraph_asmi import Scorer, score
from lm_polygraph_asmi.scoring.page import pieces, render, visible
from tests.scoring.conftest import PROMPT
from tests.scoring.test_result import decided
from tests.tiny_lm import whitebox

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


def made_nasty(found):
    """Hostile text in every place that has text."""
    tokens = tuple(
        replace(token, text=NASTY, alternative=NASTY, alternative_share=0.4)
        for token in found.tokens[:3]
    )
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
    assert '<meta charset="utf-8">' in page
    assert '<meta name="color-scheme" content="light dark">' in page
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
    page = found.to_html()
    rows = re.findall(r"<tr><td>(.*?)</tr>", page, re.DOTALL)
    assert page.count('<span class="token"') == len(pieces(found.tokens))
    for row, token in zip(rows, found.tokens, strict=True):
        share = f"({100 * token.alternative_share:.0f}\xa0%)"
        assert f"<td>{token.u:.4f}</td><td>{token.mi:.4f}</td>" in row
        assert f"<td>{100 * token.vote:.0f}\xa0%</td>" in row
        assert (share in row) == (token.alternative is not None)


def test_bytes_of_a_character_share_a_piece(found):
    *_, kite, end = pieces(found.tokens)
    assert [[token.text for token in piece] for piece in (kite, end)] == [
        ["", "", "", "🪁"],
        ["</s>"],
    ]
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
    for word in ("accept", "abstain"):
        assert page.count(f'<span class="outcome">{word}</span>') == 1


LONG = "In 1931 the ferry carried 214 guests from Brask to the islands.\n\nIt cost $3.50."
CODE = (
    "Use `sorted`:\n\n```python\ndef best(rows):\n\tfound = {}\n    for row in rows:\n"
    "        found[row['name']] = max(found.get(row['name'], 0), row['a_rather_long_column_name'])"
    "\n    return found\n```\n\n| name | guests |\n| ---- | ------ |\n1. It runs.\n   - and plain"
)
CJK = (
    "渡轮建于1931年。它载着二百一十四位客人从布拉斯克驶向群岛，没有人数过步行的人。"
    "東京からの船です。"
)
ARABIC = (
    "بُنيت العبّارة عام 1931 في مدينة Brask وحملت 214 ضيفًا. ثم أبحرت إلى الجزر!\nשלום, ferry.\nEnd."
)
EMOJI = (
    "Crew: 👩‍🚀👨‍👩‍👧 🏳️‍🌈 👍🏽 🇳🇴, "
    "a\u202egnitirw\u202c, bell \x07, zero\u200bwidth, می‌خواهم e\u0301."
)
TEXTS = (LONG, CODE, CJK, ARABIC, EMOJI)
WINDOWS = [(400, "light"), (1200, "dark")]
"""Widths and colours of pages with all answers."""
MEASURE = """
<script>
const root = document.documentElement, found = {width: innerWidth, page: root.scrollWidth, out: []};
const inside = (box, name) => { if (box.width && (box.left < -.5 || box.right > innerWidth + .5))
  found.out.push(name + ' ' + box.left + ' ' + box.right); };
document.querySelectorAll('.answer, .answer *, .rows *, .verdict li, h2, .wide').forEach(part =>
  [...part.getClientRects()].forEach(box => inside(box, part.className || part.tagName)));
const tokens = part => [...part.querySelectorAll('.answer .token')];
found.title = document.title;
found.text = document.body.textContent;
found.answers = [...document.querySelectorAll('.answer')].map(answer => ({
  lines: answer.innerText.split('\\n').length,
  boxes: tokens(answer).map(token => token.getClientRects()[0])}));
const canvas = document.createElement('canvas').getContext('2d');
const mixed = (...colours) => { colours.forEach(colour => {
  canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); });
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
const card = getComputedStyle(document.querySelector('.asmi'));
const styles = tokens(document).map(token => getComputedStyle(token));
found.ink = mixed(card.color);
found.paper = mixed(card.backgroundColor);
found.shades = styles.map(style => mixed(card.backgroundColor, style.backgroundColor));
found.bars = styles.map(style => parseFloat(style.borderBottomWidth));
found.order = [...document.querySelectorAll('.rows a')].map(link => link.textContent);
document.body.setAttribute('data-measured', JSON.stringify(found));
</script>
"""


@pytest.fixture(scope="module")
def shown(tokenizer):
    """Answers with fragilities from none to the darkest shade; the last two are hostile."""
    model = whitebox(max_position_embeddings=1100).model
    scorer = Scorer(model, scope="response", num_masks=2, mask_rate=0.3, tokenizer=tokenizer)
    answers = []
    for text in TEXTS:
        one = scorer.score(PROMPT, " " + text)
        shades = (0.12 * math.sin(0.7 * number) ** 6 for number in range(len(one.tokens)))
        tokens = (replace(token, u=u) for token, u in zip(one.tokens, shades, strict=True))
        answers.append(replace(one, tokens=tuple(tokens)))
    return [*answers, decided(answers[2]), *made_nasty(answers[-1])]


@pytest.fixture(scope="module")
def measured(shown, tmp_path_factory):
    """What a browser made of the page in each window; it starts once for all.

    Windows are frames, since a headless one is never narrower than 500 pixels.
    """
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    browser, folder, frames = next(filter(None, browsers), ""), tmp_path_factory.mktemp("pages"), ""
    if not browser:
        pytest.skip("no Chromium is installed")
    page = render(cards(*shown), "Fragility").replace("</body>", f"{MEASURE}</body>")
    for width, how in WINDOWS:
        inner = page.replace("scheme: light dark", f"scheme: {how}")
        (folder / f"{how}.html").write_text(inner, encoding="utf-8")
        frames += (
            f'<iframe src="{how}.html" width="{width}" height="900" style="border:0"></iframe>'
        )
    (folder / "outer.html").write_text(
        f'<!DOCTYPE html><body style="margin:0">{frames}<script>onload = () => document.body'
        ".setAttribute('data-measured', '[' + [...document.querySelectorAll('iframe')].map(frame =>"
        " frame.contentDocument.body.getAttribute('data-measured')) + ']')</script>"
    )
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         f"--user-data-dir={folder / 'profile'}", "--window-size=1300,950", "--dump-dom",
         (folder / "outer.html").as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = re.search(r'data-measured="(.*?)"', done.stdout, re.DOTALL)
    assert told, done.stderr[-2000:]
    return json.loads(html.unescape(told[1]))


@pytest.mark.parametrize("window", range(len(WINDOWS)), ids=str)
def test_nothing_sticks_out_and_every_token_is_there(shown, measured, window):
    """And hostile text is shown, and never run."""
    told, (width, _) = measured[window], WINDOWS[window]
    assert (told["width"], told["out"], told["title"]) == (width, [], "Fragility")
    assert told["page"] <= width
    assert told["text"].count(NASTY) >= 22
    for text, one, answer in zip(TEXTS, shown, told["answers"], strict=False):
        assert len(answer["boxes"]) == len(pieces(one.tokens))
        assert answer["lines"] == 1 + text.count("\n")
        assert len({round(box["top"]) for box in answer["boxes"]}) >= answer["lines"]
        first, second, *_ = answer["boxes"]
        assert (first["left"] > second["left"]) == (text == ARABIC)
    ranks = [shown[int(number) - 1].card.rank for number in told["order"]]
    assert (len(ranks), ranks) == (len(shown), sorted(ranks))


def luminance(colour):
    """WCAG 2.2, relative luminance of a colour in sRGB, 0 to 255."""
    parts = [part / 255 for part in colour]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("window", range(len(WINDOWS)), ids=str)
def test_colours_bars_and_contrast(shown, measured, window):
    """Text is read on the darkest shade (WCAG AA); bars say the same without colour."""
    told = measured[window]
    ink = luminance(told["ink"])
    assert (ink > luminance(told["paper"])) == (WINDOWS[window][1] == "dark")
    assert len(set(map(tuple, told["shades"]))) > 4
    for shade in map(luminance, told["shades"]):
        assert (max(ink, shade) + 0.05) / (min(ink, shade) + 0.05) >= 4.5
    every = [piece for one in shown for piece in pieces(one.card.score.tokens)]
    own = [max(token.shade for token in piece) for piece in every]
    bars = [bar for _, bar in sorted(zip(own, told["bars"], strict=True))]
    assert bars == sorted(bars)
    assert (bars[0], bars[-1]) == (0, 8)
