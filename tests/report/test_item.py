from math import nan
from types import SimpleNamespace

import pandas as pd
import pytest
from click.testing import CliRunner
from matplotlib import rc_context, rcParams

from lm_polygraph_asmi.analysis import PRR, Interval
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.core import mask_plan
from lm_polygraph_asmi.report.figures import forest, operating_point, save
from lm_polygraph_asmi.report.item import (
    BOLD,
    ITALIC,
    Marked,
    MissingItem,
    ReportItem,
    computed,
    frame,
    text,
)
from lm_polygraph_asmi.report.plan import plan_table
from lm_polygraph_asmi.report.writing import _write_table, latex_table


@pytest.mark.parametrize(
    ("value", "signed", "written"),
    [
        (Interval(0.1234, 0.02, 0.2), True, "+0.123* [+0.020, +0.200]"),
        (Interval(-0.1, -0.2, -0.00004), True, "−0.100* [−0.200, −4e−05]"),
        (Interval(-0.1, -0.2, 0.0), True, "−0.100 [−0.200, +0.000]"),
        (Interval(0.2, -8e-16, 0.48), True, "+0.200 [+0.000, +0.480]"),
        (Interval(0.549, 0.501, 0.595), False, "0.549 [0.501, 0.595]"),
        (Interval(0.5, nan, nan), True, "+0.500"),
        (PRR(0.45, 0.021), True, "+0.450 ± 0.021"),
        (PRR(nan, nan), False, "–"),
        (Marked(PRR(0.45, 0.021), BOLD), False, "0.450 ± 0.021"),
        (None, False, "–"),
        (nan, False, "–"),
        (0.0002, False, "0.0002"),
        (7, False, "7"),
        (True, False, "yes"),
    ],
)
def test_values_as_text(value, signed, written):
    assert text(value, 3, signed) == written


@pytest.mark.parametrize("value", [Interval(0.1, 0.0, 0.2), Interval(0.1, nan, nan), PRR(0.5, 0.1)])
@pytest.mark.parametrize("signed", [(), ("a",)])
def test_a_caption_says_what_its_table_has(value, signed):
    groups = [SimpleNamespace(label=n, answers=SimpleNamespace(too_few=n == "b")) for n in "ab"]
    table, with_ends = pd.DataFrame({"a": [value]}), value[1] == 0
    caption = " ".join(ReportItem("x", "X", groups, table, signed=signed, resamples=7).caption)
    said = {
        "±: standard error": isinstance(value, PRR), ", 7 resamples": with_ends,
        "it excludes 0": with_ends and signed != (), "reliable intervals: b. ": True,
    }  # fmt: skip
    assert {words: words in caption for words in said} == said


def test_a_table_is_flat_in_a_file_and_escaped_and_marked_in_html_and_latex(tmp_path):
    table = pd.DataFrame(
        {
            "method": ["MaximumSequenceProbability", r"$\x <b>_|&%#{}"],
            "gap Δ": [None, Interval(0.1, 0.0, 0.2)],
            "PRR": [Marked(PRR(0.5, 0.1), BOLD), Marked(PRR(-0.4, 0.1), ITALIC)],
        }
    )
    item = ReportItem(
        "x", "X_t & 5 %", [], table, notes=[r"Said & done: {a}\b^2~<c>.", "Figure: drawn."],
        signed=["gap Δ"], resamples=7,
    )  # fmt: skip
    numbers = pd.DataFrame({
        "gap Δ": [nan, 0.1], "gap Δ low": [nan, 0.0], "gap Δ high": [nan, 0.2],
        "PRR": [0.5, -0.4], "PRR standard error": [0.1, 0.1],
    })  # fmt: skip
    pd.testing.assert_frame_equal(item.flat().drop(columns="method").astype(float), numbers)
    for form in ("csv", "md", "tex"):  # each alone
        _write_table(item, tmp_path / form, [form])
        assert [file.name for file in (tmp_path / form).iterdir()] == [f"x.{form}"]
    html = item.styled("html").to_html(table_uuid="x")
    written = {"<b>_": False, "&lt;b&gt;_": True, "font-weight: bold": True, "MSP</td>": True}
    assert {part: part in html for part in written} == written
    lines = latex_table(item).splitlines()
    assert [line for line in lines if line.startswith("%")] == ["% X_t & 5 %"]
    (note,) = (line for line in lines[lines.index(r"\end{tabular}}") :] if "Said" in line)
    assert note.startswith(
        r"Said \& done: \{a\}\textbackslash{}b\textasciicircum{}2\textasciitilde{}$<$c$>$. "
    )
    # What brackets, signs and symbols of the table mean, and nothing of its figure or of others.
    said = {"7 resamples": True, "asterisk": True, "standard error": True, "MSP: $-$log": True,
            "drawn": False, r"u\_sem:": False, "H, entropy": False}  # fmt: skip
    assert {words: words in note for words in said} == said
    assert lines[lines.index(r"\begin{tabular}{lrr}") - 1].startswith(r"\resizebox")
    assert {*lines} >= {
        r"\caption{X\_t \& 5 \%}", r"method & gap $\Delta$ & PRR \\",
        r"MSP & – & \bfseries 0.50 $\pm$ 0.10 \\",
        r"\$\textbackslash x <b>\_|\&\%\#\{\} & +0.10 [+0.00, +0.20] & "
        r"\itshape $-$0.40 $\pm$ 0.10 \\",
        r"\end{tabular}}",
    }  # fmt: skip


def test_the_frame_of_an_item():
    """Rows group by group; reasons whole, also where they hold a colon; none of silent groups."""

    def compute(group):
        if group == "silent":
            return []
        if group != "good":
            raise ValueError("too few rows: 5 wanted, got 1: use more")
        return [{"x": 1.0}]

    found = computed(["good", "bad", "silent", "worse"], compute, str)
    (item,) = frame("x", "X", found, ["said"], otherwise="nothing here")
    (other,) = frame("x", "X", computed(["silent"], compute), otherwise="nothing here")
    assert item.table["x"].tolist() == [1.0]
    assert item.notes == ["said", "Left out: too few rows: 5 wanted, got 1: use more (bad; worse)."]
    assert other == MissingItem("X", "nothing here")


def test_a_users_own_style_changes_no_figure(tmp_path):
    """As a matplotlibrc would, such as one that draws texts by a LaTeX that is not there."""
    own = {"text.usetex": True, "font.size": 30, "savefig.transparent": True, "figure.dpi": 20}
    for name, style in (("plain", {}), ("own", own)):
        with rc_context(style):
            figure = forest({"PRR, $a_b": {"MSP": Interval(0.1, 0.0, 0.2)}}, "ΔPRR")
            save(figure, tmp_path / f"{name}.svg")
            assert [rcParams[key] for key in style] == [*style.values()]
    assert (tmp_path / "own.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()


def test_the_papers_figures_for_32_heads(tmp_path):
    """Appendix "Derivation of the Coverage-Fidelity Constraints"."""
    table = plan_table(32).set_index("p")
    assert table.loc[0.15, "heads, Gaussian"] == pytest.approx(4.8 + 1.645 * 4.08**0.5, abs=1e-3)
    # The last is twice the largest admissible.
    assert (table.loc[0.15, "heads, exact"], table.index[-1]) == (8, 0.30)
    for heads in (4, 64):  # the last admissible row is the default of the estimators
        corner = plan_table(heads).query("admissible").iloc[-1]
        assert (corner["p"], corner["S"]) == mask_plan.operating_point(heads)
        save(operating_point(plan_table(heads), 8), tmp_path / "plan.svg")


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ("32", 0, "p = 0.15, S = 40"), ("3", 2, "--heads"),
        # The paper's, of Qwen3-4B and of Llama-2-7B.
        ("32 --layers 36", 0, "costs 16.2 full"), ("32 --layers 32", 0, "costs 16.8 full"),
    ],
)  # fmt: skip
def test_plan_in_the_terminal(options, status, said):
    done = CliRunner().invoke(main, f"plan --heads {options}", env={"COLUMNS": "120"})
    assert (done.exit_code, said in done.output) == (status, True), done.output
