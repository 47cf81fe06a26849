from math import nan
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib import rc_context, rcParams

from lm_polygraph_asmi.analysis import PRR, Interval
from lm_polygraph_asmi.report.figures import forest, save
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
    item = ReportItem("x", "X", groups, pd.DataFrame({"a": [value]}), signed=signed, resamples=7)
    said = " ".join(item.caption)
    assert ("±: standard error" in said) == isinstance(value, PRR)
    assert ("interval, 7 resamples" in said) == (value[1] == 0)
    assert ("it excludes 0" in said) == (value[1] == 0 and signed != ())
    assert "Too small for reliable intervals: b. " in said


def test_a_table_is_flat_in_a_file_and_escaped_and_marked_in_html_and_latex(tmp_path):
    table = pd.DataFrame(
        {
            "method": ["MaximumSequenceProbability", r"$\x <b>_|&%#{}"],
            "gap Δ": [None, Interval(0.1, 0.0, 0.2)],
            "PRR": [Marked(PRR(0.5, 0.1), BOLD), Marked(PRR(-0.4, 0.1), ITALIC)],
        }
    )
    item = ReportItem("x", "X_t & 5 %", [], table, notes=["Said & done."])
    flat = item.flat()
    assert [*flat] == ["method", "gap Δ", "gap Δ low", "gap Δ high", "PRR", "PRR standard error"]
    assert flat["PRR"].tolist() == [0.5, -0.4]
    assert flat["gap Δ high"][1] == 0.2
    assert np.isnan(flat["gap Δ"].astype(float)[0])
    for form in ("csv", "md", "tex"):  # each alone
        _write_table(item, tmp_path / form, [form])
        assert [file.name for file in (tmp_path / form).iterdir()] == [f"x.{form}"]
    html = item.styled("html").to_html(table_uuid="x")
    assert "<b>_" not in html
    assert all(text in html for text in ("&lt;b&gt;_", "font-weight: bold", "MSP</td>"))
    lines = latex_table(item).splitlines()
    assert lines[:2] == ["% X_t & 5 %", "% Said & done."]
    assert r"\caption{X\_t \& 5 \%}" in lines
    assert lines[lines.index(r"\begin{tabular}{lrr}") - 1].startswith(r"\resizebox")
    assert r"method & gap $\Delta$ & PRR \\" in lines
    assert r"MSP & – & \bfseries 0.50 $\pm$ 0.10 \\" in lines
    assert (
        r"\$\textbackslash x <b>\_|\&\%\#\{\} & 0.10 [0.00, 0.20] & \itshape $-$0.40 $\pm$ 0.10 \\"
        in lines
    )
    assert r"\end{tabular}}" in lines


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
    assert item.table["x"].tolist() == [1.0]
    assert item.notes == ["said", "Left out: too few rows: 5 wanted, got 1: use more (bad; worse)."]
    (item,) = frame("x", "X", computed(["silent"], compute), otherwise="nothing here")
    assert item == MissingItem("X", "nothing here")


def test_a_users_own_style_changes_no_figure(tmp_path):
    """As a matplotlibrc would, such as one that draws texts by a LaTeX that is not there."""
    panels = {"PRR, $a_b": {"MSP": Interval(0.1, 0.0, 0.2)}}
    own = {"text.usetex": True, "font.size": 30, "savefig.transparent": True, "figure.dpi": 20}
    for name, style in (("plain", {}), ("own", own)):
        with rc_context(style):
            save(forest(panels, "ΔPRR"), tmp_path / f"{name}.svg")
            assert [rcParams[key] for key in style] == [*style.values()]
    assert (tmp_path / "own.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()
