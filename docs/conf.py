"""Settings of Sphinx for these pages; `scripts/docs.sh` builds them.

Environment variables, both off by default so that a build needs no network:
    ASMI_INTERSPHINX=1: link to the documentation of Python, NumPy, PyTorch and transformers.
    ASMI_SOURCE=URL: link sources to URL/lm_polygraph_asmi/FILE#L1 instead of pages of this site.
"""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # its files, so that formulas need no network
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",  # tabs
]
SOURCE = os.environ.get("ASMI_SOURCE")
extensions += ["sphinx.ext.linkcode" if SOURCE else "sphinx.ext.viewcode"]
if os.environ.get("ASMI_INTERSPHINX") == "1":
    extensions += ["sphinx.ext.intersphinx"]
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "transformers": ("https://huggingface.co/docs/transformers/main/en", None),
    }
exclude_patterns = ["_build"]
suppress_warnings = ["toc.not_included"]  # the plans in evidence/; a test lists all others
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}

myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["colon_fence", "dollarmath"]

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # files that notebooks write are deleted
nb_execution_timeout = 900  # seconds, on a busy machine
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

default_role = "code"  # single backticks in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "A `Score`: nats" is one sentence; types are in the signature
napoleon_custom_sections = [("Attributes", "params_style")]  # dataclass fields
maximum_signature_line_length = 88

smartquotes = False  # options keep their hyphens
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output):not(.highlight-text) > div.highlight > pre"

html_theme = "furo"
html_title = f"ASMI {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False  # the licence is in the repository
html_copy_source = False

DOCS = Path(__file__).parent
API_INDEX = DOCS / "reference/api/index.rst"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)\.(?:md|rst)\)")
NOTEBOOK = "file_format: mystnb"
API = {
    "lm_polygraph_asmi": "Start here",
    "lm_polygraph_asmi.scoring": "Scoring",
    "lm_polygraph_asmi.decisions": "Calibration and decisions",
    "lm_polygraph_asmi.estimators": "Estimators",
    "lm_polygraph_asmi.report": "Report",
    "lm_polygraph_asmi.analysis": "Statistics",
    "lm_polygraph_asmi.core.scores": "Scores of an answer",
    "lm_polygraph_asmi.core.mask_plan": "Number and rate of masks",
    "lm_polygraph_asmi.core.maths": "Formulas",
    "lm_polygraph_asmi.core.model": "Masked passes",
    "lm_polygraph_asmi.heads.analysis": "Experiments",
}
"""Module with public names -> title of its page."""
PACKAGE = "lm_polygraph_asmi"
SUBMODULE_NAMES = {
    "lm_polygraph_asmi.scoring": ["rows.read_rows"],
    "lm_polygraph_asmi.decisions": [],
}
"""Module -> public names of its submodules."""


def toctrees(index: str) -> str:
    """One hidden toctree for each heading of the front page, with the labels of its list."""
    trees = []
    for kind, entries in SECTION.findall(index):
        labels: dict[str, str] = {}
        for label, page in LINK.findall(entries):
            labels.setdefault(page, label.replace("`", ""))
        pages = "\n".join(f"{label} <{page}>" for page, label in labels.items())
        if pages:
            trees.append(f"```{{toctree}}\n:hidden:\n:caption: {kind}\n\n{pages}\n```\n")
    return "\n".join(trees)


def download(page: str) -> str:
    """A link to the notebook of a page."""
    url = "../" * page.count("/") + f"notebooks/{Path(page).name}.ipynb"
    return f'<a class="notebook" href="{url}" download>Download as a notebook</a>\n'


def change_sources(_: "Sphinx", page: str, source: list[str]) -> None:
    """The front page's lists are the order of the site; notebooks link to their download."""
    if page == "index":
        source[0] += "\n" + toctrees(source[0])
    elif NOTEBOOK in source[0][:60]:
        source[0] = re.sub(
            r"(?m)^# .*\n", lambda title: f"{title[0]}\n{download(page)}", source[0], count=1
        )


def write_notebooks(app: "Sphinx", error: Exception | None) -> None:
    """Write the pages that are notebooks as Jupyter notebooks, without outputs."""
    import nbformat
    from myst_nb.core.read import read_myst_markdown_notebook

    folder = Path(app.outdir) / "notebooks"
    for page in () if error or app.builder.name != "html" else sorted(app.env.found_docs):
        file = DOCS / f"{page}.md"
        text = file.read_text() if file.exists() else ""
        if NOTEBOOK in text[:60]:
            folder.mkdir(exist_ok=True)
            notebook = read_myst_markdown_notebook(text, path=file)
            for block in notebook.cells:  # links to pages only work on the site
                if block.cell_type == "markdown":
                    block.source = re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", block.source)
            nbformat.write(notebook, folder / f"{file.stem}.ipynb")


def public(module: str) -> list[str]:
    """Full names of a module's public objects; those of the package's own page appear once."""
    names = importlib.import_module(module).__all__
    public_names = [f"{module}.{name}" for name in names if not name.startswith("__")]
    top = importlib.import_module("lm_polygraph_asmi")
    same = [getattr(top, name) for name in top.__all__ if name in TOP_LEVEL]
    if module == "lm_polygraph_asmi":
        public_names = [f"{module}.{name}" for name in top.__all__ if name in TOP_LEVEL]
    elif module in SUBMODULE_NAMES:
        public_names = [name for name in public_names if load_object(name) not in same]
    return public_names + [f"{module}.{name}" for name in SUBMODULE_NAMES.get(module, ())]


TOP_LEVEL = (
    "ASMIConfig", "score", "score_file", "decide", "available_stat_calculators",
    "estimate_uncertainty",
)  # fmt: skip
"""Names with their page under the package, not under the subpackage that defines them."""


def load_object(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def summary(name: str) -> str:
    """The first paragraph of an object's docstring."""
    target = load_object(name)
    text = inspect.getdoc(target) if callable(target) else None
    return ": " + " ".join((text or "").partition("\n\n")[0].split()) if text else ""


def entry(name: str) -> str:
    """The page of one public name, in reStructuredText."""
    last = name.rpartition(".")[2]
    target = load_object(name)
    options = ""
    if inspect.isclass(target):
        kind, options = "class", "   :members:\n"
        foreign = [base for base in target.__mro__ if not base.__module__.startswith(PACKAGE)]
        if len(foreign) < len(target.__mro__) - 1:  # it inherits from a class of this package
            options += f"   :inherited-members: {', '.join(base.__name__ for base in foreign)}\n"
    elif callable(target):
        kind = "function"
    else:
        kind, options = "data", "   :no-value:\n"
    return f"{last}\n{'=' * len(last)}\n\n.. auto{kind}:: {name}\n{options}"


def api_pages() -> dict[str, str]:
    """Page below reference/api -> its text: one for each module and each public name."""
    pages = {}
    for module, title in API.items():
        folder = module.replace("lm_polygraph_asmi.", "").replace(".", "_")
        names = public(module)
        listed = "".join(f"- :py:obj:`~{name}`{summary(name)}\n" for name in names)
        below = "".join(f"   {folder}/{name.rpartition('.')[2]}\n" for name in names)
        pages[folder] = (
            f"{title}\n{'=' * len(title)}\n\n.. automodule:: {module}\n   :no-members:\n\n"
            f"{listed}\n"
            f".. toctree::\n   :hidden:\n\n{below}"
        )
        pages |= {f"{folder}/{name.rpartition('.')[2]}": entry(name) for name in names}
    return pages


def write_api(*_: object) -> None:
    """Write the pages that have changed, and delete those of removed names."""
    folder = DOCS / "reference/api/generated"
    pages = {folder / f"{name}.rst": text for name, text in api_pages().items()}
    for old in set(folder.rglob("*.rst")) - pages.keys():
        old.unlink()
    for file, text in pages.items():
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """URL of the source of an object, with ASMI_SOURCE."""
    if domain != "py" or not info["module"]:
        return None
    target: Any = sys.modules.get(info["module"])
    try:
        for part in info["fullname"].split("."):
            target = getattr(target, part)
        target = inspect.unwrap(target)
        file, (_, line) = inspect.getsourcefile(target), inspect.getsourcelines(target)
    except (AttributeError, TypeError, OSError):
        return None
    _, package, path = str(file).rpartition("/lm_polygraph_asmi/")
    return f"{SOURCE}{package}{path}#L{line}" if package else None


def skip_alias(*event: object) -> bool | None:
    """Skip fields of a NamedTuple: its signature and its docstring list them."""
    _, _, _, member, *_ = event
    return True if (member.__doc__ or "").startswith("Alias for field number") else None


def escape_options(_: "Sphinx", __: object, lines: list[str]) -> None:
    """Keep backslashes and bars in the help of options."""
    lines[:] = [line.replace("\\", "\\\\").replace("|", "\\|") for line in lines]


def shorten_types(*event: Any) -> tuple[str | None, str | None]:
    """ArrayLike by its name, not as the union that it is."""
    from numpy.typing import ArrayLike
    from sphinx.util.typing import stringify_annotation

    union = stringify_annotation(ArrayLike, "smart")
    *_, signature, returns = event
    return signature and signature.replace(union, "ArrayLike"), returns


def setup(app: "Sphinx") -> None:
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("sphinx-click-process-options", escape_options)
    app.connect("config-inited", write_api)
    app.connect("source-read", change_sources)
    app.connect("autodoc-skip-member", skip_alias)
    app.connect("build-finished", write_notebooks)
