import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import PRR, Interval
from lm_polygraph_asmi.report.item import (
    Marked,
    MissingItem,
    ReportItem,
    escape,
    frame,
    text,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "signed", "written"),
    [
        (Interval(0.1234, 0.02, 0.2), True, "+0.123* [+0.020, +0.200]"),
        (Interval(-0.1, -0.2, 0.1), True, "−0.100 [−0.200, +0.100]"),
        (Interval(-0.1, -0.2, -0.00004), True, "−0.100* [−0.200, −0.00004]"),
        (Interval(-0.1, -0.2, 0.00004), True, "−0.100 [−0.200, +0.000]"),
        (Interval(-0.1, -0.2, 0.0), True, "−0.100 [−0.200, +0.000]"),
        (Interval(0.549, 0.501, 0.595), False, "0.549 [0.501, 0.595]"),
        (Interval(0.5, NAN, NAN), True, "+0.500"),
        (Interval(NAN, NAN, NAN), True, "–"),
        (PRR(0.45, 0.021), False, "0.450 ± 0.021"),
        (PRR(NAN, NAN), False, "–"),
        (Marked(PRR(0.45, 0.021), "bold"), False, "**0.450 ± 0.021**"),
        (Marked(-0.2, "underline"), False, "<u>−0.200</u>"),
        (None, False, "–"),
        (NAN, False, "–"),
        (7, False, "7"),
        (True, False, "yes"),
        ("a|b\nc", False, r"a\|b ⏎ c"),
    ],
)
def test_values_as_text(value, signed, written):
    assert text(value, 3, signed) == written


def test_latex_is_escaped():
    assert escape("50% of $x_1 & y", "latex") == r"50\% of \$x\_1 \& y"
    assert text(Marked(PRR(-0.45, 0.02), "bold"), 2, markup="latex") == (
        r"\textbf{$-$0.45 $\pm$ 0.02}"
    )


def test_a_flat_table_has_numbers_alone():
    table = pd.DataFrame(
        {
            "setting": ["a", "b"],
            "gap": [Interval(0.1, 0.0, 0.2), None],
            "PRR": [Marked(PRR(0.5, 0.1), "bold"), PRR(0.4, 0.1)],
        }
    )
    flat = ReportItem("x", "X", [], table).flat()
    assert flat.columns.tolist() == [
        "setting", "gap", "gap low", "gap high", "PRR", "PRR standard error",
    ]  # fmt: skip
    assert flat["PRR"].tolist() == [0.5, 0.4]
    assert flat["gap high"][0] == 0.2
    assert np.isnan(flat["gap"].astype(float)[1])


def test_the_frame_of_an_item():
    """Rows group by group; reasons whole, also where they hold a colon; none of silent groups."""

    def compute(group):
        if group == "silent":
            return []
        if group != "good":
            raise ValueError("too few rows: 5 wanted, got 1: use more")
        return [{"x": 1.0}]

    settings = {"label": str, "otherwise": "nothing here"}
    (item,) = frame("x", "X", ["good", "bad", "silent", "worse"], compute, ["said"], **settings)
    assert item.table["x"].tolist() == [1.0]
    assert item.notes == [
        "said",
        "Left out: too few rows: 5 wanted, got 1: use more (bad; worse).",
    ]
    (item,) = frame("x", "X", ["bad"], compute, [], label=str)
    assert item == MissingItem("X", "too few rows: 5 wanted, got 1: use more (bad)")
    (item,) = frame("x", "X", ["silent"], compute, [], otherwise="nothing here")
    assert item == MissingItem("X", "nothing here")
