"""Pages that are hard to show, measured in a browser: nothing beyond the border, nothing hidden."""

import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from lm_polygraph_asmi.scoring.page import pieces, render
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.scoring.conftest import PROMPT
from tests.scoring.test_page import NASTY, made_nasty
from tests.scoring.test_result import decided
from tests.tiny_lm import whitebox

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")

LONG = "\n\n".join(
    f"In the year {1900 + year} the ferry carried {37 * year} guests from Brask to the islands. "
    "Nobody counted those who went on foot, since the bridge was not built yet. It cost $3.50."
    for year in range(1, 3)
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


MEASURE = """
<script>
const root = document.documentElement, found = {width: innerWidth, page: root.scrollWidth, out: []};
const inside = (box, name) => { if (box.width && (box.left < -.5 || box.right > innerWidth + .5))
  found.out.push(name + ' ' + box.left + ' ' + box.right); };
const shown = '.answer, .answer *, .rows *, .verdict li, .legend .token, h2, .parts td, .parts th';
document.querySelectorAll(shown).forEach(part =>
  [...part.getClientRects()].forEach(box => inside(box, part.className || part.tagName)));
const tokens = [...document.querySelectorAll('.answer .token')];
found.tokens = tokens.length;
found.title = document.title;
found.text = document.body.textContent;
found.lines = document.querySelector('.answer').innerText.split('\\n').length;
found.tops = new Set(tokens.map(t => Math.round(t.getClientRects()[0].top))).size;
found.direction = tokens.slice(0, 2).map(t => t.getClientRects()[0].left);
found.ink = getComputedStyle(document.querySelector('.asmi')).color;
found.paper = getComputedStyle(document.querySelector('.asmi')).backgroundColor;
found.shades = tokens.map(t => getComputedStyle(t).backgroundColor);
found.bars = tokens.map(t => parseFloat(getComputedStyle(t).borderBottomWidth));
found.overlong = [...document.querySelectorAll('.wide')].filter(w => w.open !== false &&
  w.getBoundingClientRect().right > innerWidth + .5).length;
found.order = [...document.querySelectorAll('.rows a')].map(link => link.textContent);
document.body.setAttribute('data-measured', JSON.stringify(found));
</script>
"""


class Shown(NamedTuple):
    """A page, and how wide it is shown."""

    page: str
    width: int


def measure(pages: Sequence[Shown], folder: Path, *flags: str) -> list[dict]:
    """What a browser made of each page; it starts once for all.

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
        [BROWSER, *flags, "--headless", "--no-sandbox", "--disable-gpu",
         "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
         "--window-size=1300,950", "--dump-dom", (folder / "outer.html").as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r'data-measured="(.*?)"', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


DARK, LIGHT = (f"--blink-settings=preferredColorScheme={number}" for number in (0, 1))
FORCED = ("--force-high-contrast", "--enable-features=ForcedColors")
WIDTHS = (400, 1200)
THEMES = [(LIGHT, False), (DARK, True)]
"""Of the system, and whether the page is dark then."""


def spread(score: Score) -> Score:
    """The same with fragilities from none to the darkest shade, so that all of them are seen."""
    tokens = tuple(
        replace(token, u=0.12 * math.sin(0.7 * number) ** 6)
        for number, token in enumerate(score.tokens)
    )
    return replace(score, tokens=tokens)


@pytest.fixture(scope="module")
def scores(tokenizer):
    model = whitebox(max_position_embeddings=1100).model
    scorer = Scorer(model, scope="response", num_masks=4, mask_rate=0.3, tokenizer=tokenizer)
    return {name: spread(scorer.score(PROMPT, " " + text)) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def several(scores):
    short = [scores[name] for name in ("code", "cjk", "arabic", "emoji")]
    return [decided(short[1]), *short]


@pytest.fixture(scope="module")
def measured(scores, several, tmp_path_factory):
    """What a browser with certain flags made of a page; it starts once for all with these flags."""
    pages = {(LIGHT,): {}, (DARK,): {}, FORCED: {"code": Shown(scores["code"].to_html(), 400)}}
    for width in WIDTHS:
        for name in TEXTS:
            pages[LIGHT,][name, width] = Shown(scores[name].to_html(), width)
        pages[DARK,]["five", width] = Shown(render([one.card for one in several], "five"), width)
    for system, _ in THEMES:
        pages[system,]["emoji"] = Shown(scores["emoji"].to_html(), 800)
        nasty = made_nasty(scores["emoji"])
        pages[system,]["nasty"] = Shown(render([one.card for one in nasty], "Fragility"), 900)

    @cache
    def start(*flags):
        found = measure(list(pages[flags].values()), tmp_path_factory.mktemp("pages"), *flags)
        return dict(zip(pages[flags], found, strict=True))

    return start


def check(found, own, width):
    """Nothing sticks out, and every token is there."""
    assert found["width"] == width
    assert found["page"] <= width
    assert found["out"] == []
    assert found["overlong"] == 0
    assert found["tokens"] == own


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TEXTS)
def test_an_answer(scores, measured, name, width):
    one, found = scores[name], measured(LIGHT)[name, width]
    check(found, len(pieces(one.tokens)), width)
    assert found["lines"] == 1 + TEXTS[name].count("\n")
    assert found["tops"] >= TEXTS[name].count("\n") + 1
    first, second = found["direction"]
    assert (first > second) == (name == "arabic")


@pytest.mark.parametrize("width", WIDTHS)
def test_five_answers(several, measured, width):
    found = measured(DARK)["five", width]
    check(found, sum(len(pieces(one.card.score.tokens)) for one in several), width)
    numbers = {str(1 + place): -one.card.rank for place, one in enumerate(several)}
    order = found["order"]
    assert [numbers[n] for n in order] == sorted(numbers.values(), reverse=True)


@pytest.mark.parametrize("system", [LIGHT, DARK])
def test_hostile_text_is_shown_and_never_run(measured, system):
    found = measured(system)["nasty"]
    assert found["title"] == "Fragility"
    assert found["text"].count(NASTY) >= 22


def luminance(colour):
    """WCAG 2.2, relative luminance of a colour, over black."""
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)][:3]
    scale = 1 if colour.startswith("color(") else 255
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (part / scale for part in parts)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def over(colour, paper):
    """A half transparent colour on an opaque one."""
    *top, alpha = [float(part) for part in re.findall(r"[\d.]+", colour)]
    scale = 255 if colour.startswith("color(") else 1
    below = [float(part) for part in re.findall(r"[\d.]+", paper)][:3]
    mixed = [scale * a * alpha + b * (1 - alpha) for a, b in zip(top, below, strict=True)]
    return f"rgb({', '.join(map(str, mixed))})"


@pytest.mark.parametrize(("system", "dark"), THEMES)
def test_colours_and_their_contrast(measured, system, dark):
    """Text is read on the darkest shade (WCAG AA)."""
    found = measured(system)["emoji"]
    ink, paper = luminance(found["ink"]), luminance(found["paper"])
    assert (ink > paper) == dark
    shades = [over(s, found["paper"]) for s in found["shades"] if s != "rgba(0, 0, 0, 0)"]
    assert len(set(shades)) > 3
    for shade in shades:
        low, high = sorted((ink, luminance(shade)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.slow
def test_forced_colours(scores, measured):
    """Shades go, bars stay."""
    one, found = scores["code"], measured(*FORCED)["code"]
    check(found, len(pieces(one.tokens)), 400)
    bars = found["bars"]
    assert len(set(bars)) > 4
    shades = [max(token.shade for token in piece) for piece in pieces(one.tokens)]
    darkest = max(range(len(bars)), key=lambda number: shades[number])
    assert bars[darkest] == max(bars) >= 4
