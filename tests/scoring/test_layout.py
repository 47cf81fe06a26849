"""Pages that are hard to show, measured in a browser: nothing beyond the border, nothing hidden."""

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from lm_polygraph_asmi.scoring.page import pieces, render
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.scoring.conftest import PROMPT
from tests.scoring.test_page import NASTY, made_nasty
from tests.scoring.test_result import decided
from tests.tiny_lm import whitebox

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")

LONG = (
    "In the year 1931 the ferry carried 214 guests from Brask to the islands. Nobody counted those "
    "who went on foot, since the bridge was not built yet.\n\nIt cost $3.50."
)
CODE = (
    "Use `sorted`:\n\n```python\ndef best(rows):\n\tfound = {}\n    for row in rows:\n"
    "        found[row['name']] = max(found.get(row['name'], 0), row['a_rather_long_column_name'])"
    "\n    return found\n```\n\n| name | guests |\n| ---- | ------ |\n| Ondine |  214 |\n\n"
    "1. It runs.\n2. It is short.\n   - and plain"
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
TEXTS = {"long": LONG, "code": CODE, "cjk": CJK, "arabic": ARABIC, "emoji": EMOJI}
WIDTHS = (400, 1200)
MEASURE = """
<script>
const root = document.documentElement, found = {width: innerWidth, page: root.scrollWidth, out: []};
const inside = (box, name) => { if (box.width && (box.left < -.5 || box.right > innerWidth + .5))
  found.out.push(name + ' ' + box.left + ' ' + box.right); };
document.querySelectorAll('.answer, .answer *, .rows *, .verdict li, h2, .wide').forEach(part =>
  [...part.getClientRects()].forEach(box => inside(box, part.className || part.tagName)));
const tokens = [...document.querySelectorAll('.answer .token')];
found.tokens = tokens.length;
found.title = document.title;
found.text = document.body.textContent;
found.lines = document.querySelector('.answer').innerText.split('\\n').length;
found.tops = new Set(tokens.map(t => Math.round(t.getClientRects()[0].top))).size;
found.direction = tokens.slice(0, 2).map(t => t.getClientRects()[0].left);
const canvas = document.createElement('canvas').getContext('2d');
const mixed = (...colours) => { colours.forEach(colour => {
  canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); });
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
const card = getComputedStyle(document.querySelector('.asmi'));
const styles = tokens.map(token => getComputedStyle(token));
found.ink = mixed(card.color);
found.paper = mixed(card.backgroundColor);
found.shades = styles.map(style => mixed(card.backgroundColor, style.backgroundColor));
found.bars = styles.map(style => parseFloat(style.borderBottomWidth));
found.order = [...document.querySelectorAll('.rows a')].map(link => link.textContent);
document.body.setAttribute('data-measured', JSON.stringify(found));
</script>
"""


def measure(pages, folder):
    """What a browser made of each page, (its text, width); it starts once for all.

    They stand in frames, since a headless window is never narrower than 500 pixels.
    """
    frames = ""
    for number, (page, width) in enumerate(pages):
        inner = page.replace("</body>", f"{MEASURE}</body>")
        (folder / f"inner{number}.html").write_text(inner, encoding="utf-8")
        frames += (
            f'<iframe src="inner{number}.html" width="{width}" height="900" style="border:0">'
            "</iframe>"
        )
    outer = (
        f'<!DOCTYPE html><body style="margin:0">{frames}<script>onload = () => document.body'
        ".setAttribute('data-measured', '[' + [...document.querySelectorAll('iframe')].map(frame =>"
        " frame.contentDocument.body.getAttribute('data-measured')) + ']')</script>"
    )
    (folder / "outer.html").write_text(outer, encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         f"--user-data-dir={folder / 'profile'}", "--window-size=1300,950", "--dump-dom",
         (folder / "outer.html").as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r'data-measured="(.*?)"', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def scores(tokenizer):
    """With fragilities from none to the darkest shade, so that all of them are seen."""
    model = whitebox(max_position_embeddings=1100).model
    scorer = Scorer(model, scope="response", num_masks=4, mask_rate=0.3, tokenizer=tokenizer)
    found = {}
    for name, text in TEXTS.items():
        score = scorer.score(PROMPT, " " + text)
        tokens = (
            replace(token, u=0.12 * math.sin(0.7 * number) ** 6)
            for number, token in enumerate(score.tokens)
        )
        found[name] = replace(score, tokens=tuple(tokens))
    return found


@pytest.fixture(scope="module")
def several(scores):
    short = [scores[name] for name in ("code", "cjk", "arabic", "emoji")]
    return [decided(short[1]), *short]


@pytest.fixture(scope="module")
def measured(scores, several, tmp_path_factory):
    """What a browser made of every page."""
    pages = {}
    for width in WIDTHS:
        pages |= {(name, width): (scores[name].to_html(), width) for name in TEXTS}
        pages["several", width] = render([one.card for one in several], "several"), width
    nasty = render([one.card for one in made_nasty(scores["emoji"])], "Fragility")
    pages["nasty"] = nasty, 900
    for scheme in ("light", "dark"):
        page = scores["emoji"].to_html().replace("scheme: light dark", f"scheme: {scheme}")
        pages[scheme] = page, 800
    found = measure(pages.values(), tmp_path_factory.mktemp("pages"))
    return dict(zip(pages, found, strict=True))


def check(found, own, width):
    """Nothing sticks out, and every token is there."""
    assert found["width"] == width
    assert found["page"] <= width
    assert found["out"] == []
    assert found["tokens"] == own


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TEXTS)
def test_an_answer(scores, measured, name, width):
    one, found = scores[name], measured[name, width]
    check(found, len(pieces(one.tokens)), width)
    assert found["lines"] == 1 + TEXTS[name].count("\n")
    assert found["tops"] >= TEXTS[name].count("\n") + 1
    first, second = found["direction"]
    assert (first > second) == (name == "arabic")


@pytest.mark.parametrize("width", WIDTHS)
def test_several_answers(several, measured, width):
    found = measured["several", width]
    check(found, sum(len(pieces(one.card.score.tokens)) for one in several), width)
    numbers = {str(1 + place): -one.card.rank for place, one in enumerate(several)}
    assert [numbers[n] for n in found["order"]] == sorted(numbers.values(), reverse=True)


def test_hostile_text_is_shown_and_never_run(measured):
    assert measured["nasty"]["title"] == "Fragility"
    assert measured["nasty"]["text"].count(NASTY) >= 22


def luminance(colour):
    """WCAG 2.2, relative luminance of a colour in sRGB, 0 to 255."""
    parts = [part / 255 for part in colour]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_bars_and_contrast(scores, measured, scheme):
    """Text is read on the darkest shade (WCAG AA); bars say the same without colour."""
    found, ink = measured[scheme], luminance(measured[scheme]["ink"])
    assert (ink > luminance(found["paper"])) == (scheme == "dark")
    assert len(set(map(tuple, found["shades"]))) > 4
    for shade in map(luminance, found["shades"]):
        assert (max(ink, shade) + 0.05) / (min(ink, shade) + 0.05) >= 4.5
    own = [max(token.shade for token in piece) for piece in pieces(scores["emoji"].tokens)]
    bars = [bar for _, bar in sorted(zip(own, found["bars"], strict=True))]
    assert bars == sorted(bars)
    assert (bars[0], bars[-1]) == (0, 8)
