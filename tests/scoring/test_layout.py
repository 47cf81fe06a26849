"""Pages that are hard to show, measured in a browser: nothing beyond the border, nothing hidden."""

import re
from functools import cache

import pytest

from lm_polygraph_asmi import score
from lm_polygraph_asmi.scoring.page import pieces, render
from tests.decoders import unchecked
from tests.scoring.conftest import PROMPT
from tests.scoring.pages import TEXTS, Shown, browser, measure, spread
from tests.scoring.test_result import decided
from tests.tiny_lm import whitebox

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")

DARK, LIGHT = (f"--blink-settings=preferredColorScheme={number}" for number in (0, 1))
FORCED = ("--force-high-contrast", "--enable-features=ForcedColors")
WIDTHS = (400, 1200)
THEMES = [(LIGHT, False), (DARK, True)]
"""Of the system, and whether the page is dark then."""


@pytest.fixture(scope="module")
def scores(tokenizer):
    model = whitebox(max_position_embeddings=1100).model
    settings = {"scope": "response", "num_masks": 4, "mask_rate": 0.3}
    with unchecked():
        return {
            name: spread(score(model, PROMPT, " " + text, tokenizer=tokenizer, **settings))
            for name, text in TEXTS.items()
        }


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
