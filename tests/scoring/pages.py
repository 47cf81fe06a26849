"""Pages that are hard to show, and a browser to look at them with."""

import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lm_polygraph_asmi.scoring.result import Score

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


def spread(score: Score) -> Score:
    """The same with fragilities from none to the darkest shade, so that all of them are seen."""
    tokens = tuple(
        replace(token, u=0.12 * math.sin(0.7 * number) ** 6)
        for number, token in enumerate(score.tokens)
    )
    return replace(score, tokens=tokens)


def browser() -> str | None:
    """The path of a Chromium; None without one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


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
        [browser() or "", *flags, "--headless", "--no-sandbox", "--disable-gpu",
         "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
         "--window-size=1300,950", "--dump-dom", (folder / "outer.html").as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r'data-measured="(.*?)"', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))
