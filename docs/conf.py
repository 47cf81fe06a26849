"""How Sphinx makes a site of these pages; `scripts/docs.sh` runs it."""

import re
from typing import TYPE_CHECKING

from lm_polygraph_asmi import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "lm_polygraph_asmi"
author = "the authors of lm_polygraph_asmi"
release = __version__
language = "en"

extensions = [
    "myst_nb",  # Markdown, and notebooks kept as Markdown
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # its files, so that formulas need no network
    "sphinx_click",
]
exclude_patterns = ["_build", "evidence"]  # plans and tables: files to open or download
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}

myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["dollarmath"]

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # what notebooks write is thrown away
nb_execution_timeout = 900  # seconds, on a busy machine
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

default_role = "code"  # single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # fields, told in one place
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"ASMI {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False  # the licence stands in the repository
html_copy_source = False

KIND = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"\]\(([^)#:]+)\.(?:md|rst)\)")


def toctrees(index: str) -> str:
    """One hidden toctree for each heading of the front page, with the pages its list links to."""
    made = []
    for kind, entries in KIND.findall(index):
        pages = "\n".join(dict.fromkeys(PAGE.findall(entries)))
        made.append(f"```{{toctree}}\n:hidden:\n:caption: {kind}\n\n{pages}\n```\n")
    return "\n".join(made)


def order_pages(_: "Sphinx", page: str, source: list[str]) -> None:
    """The front page's lists are the order of the site: readers of the files see them, too."""
    if page == "index":
        source[0] += "\n" + toctrees(source[0])


def says_nothing(*given: object) -> bool | None:
    """Fields of a NamedTuple stand in its signature, and what there is to say in its docstring."""
    _, _, _, member, *_ = given
    told = member.__doc__ or ""
    return True if told.startswith("Alias for field number") else None


def setup(app: "Sphinx") -> None:
    app.connect("source-read", order_pages)
    app.connect("autodoc-skip-member", says_nothing)
