"""The page of a scored answer: self-contained, light and dark, readable without colour."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

FULL_SHADE = 0.1
"""Nats of u from which a token has the darkest shade: the same on every page, so pages compare."""


@cache
def _template() -> Template:
    source = files("lm_polygraph_asmi.scoring").joinpath("page.html.jinja").read_text("utf-8")
    # Answers come from models: everything is escaped.
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        source, globals={"full_shade": FULL_SHADE}
    )


def render_part(score: Any) -> str:
    """One answer, a `Score`, as a part of a page, such as a notebook's output."""
    module = _template().make_module()
    return str(Markup(module.style()) + Markup(module.card(score)))  # type: ignore[attr-defined]


def render(scores: Sequence[Any], title: str) -> str:
    """A whole page of answers, each a `Score`."""
    return _template().render(scores=scores, title=title)
