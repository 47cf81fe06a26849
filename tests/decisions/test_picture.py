"""The page of a calibration: its numbers are those of the labels, and it loads nothing."""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions.calibration import Calibration, Sample
from lm_polygraph_asmi.decisions.fit import CalibrationOptions, fit
from lm_polygraph_asmi.decisions.picture import SCALE, bounds_of, error_rates, page_of
from lm_polygraph_asmi.decisions.rows import write_ordered_sheet
from lm_polygraph_asmi.tables import read_table
from tests.analysis.simulation import keys
from tests.decisions.conftest import ABOUT, done, run, table, write
from tests.report import runs
from tests.scoring.test_page import NASTY, Elements


def calibrated(n, per=1, shift=1.0, risk=0.2, signal="msp", unlabelled=False):
    """Wrong answers, 30 %, have a higher score, rounded to make ties."""
    draw = np.random.default_rng(n)
    wrong = draw.random(n) < 0.3
    columns = {
        name: np.round(draw.normal(size=n) + shift * wrong, 2) for name in ("msp", "perplexity")
    }
    others = {name: draw.normal(size=n) for name in columns} if unlabelled else {}
    answers = Labelled(wrong, keys(n // per, per), resamples=50)
    return fit(
        columns, answers, CalibrationOptions(risk, 0.9, signal), unlabelled=others,
        features=lambda: {"free": np.column_stack([*columns.values()])}, **ABOUT,
    )  # fmt: skip


def marks(page):
    """Of a page: its marks by class, its table, and all of its text."""
    found = Elements(page)
    kinds = [attributes.get("class") for tag, attributes in found.tags]
    cells = re.findall(r"<th[^>]*>(.*?)</th><td>(.*?)</td>", page)
    drawn = page.split('<ul class="key">')[0].split("</style>")[-1]
    return {k: drawn.count(f'class="{k}"') for k in {*kinds} if k}, dict(cells), found.text


@pytest.mark.parametrize(
    ("n", "signal", "unlabelled"),
    [(150, "msp", False), (150, "msp", True), (150, "best", False), (600, "msp", False)],
)
def test_bounds_are_those_of_clopper_and_pearson(n, signal, unlabelled):
    """At the level of each test; the last that passes is the threshold, none follows a failure."""
    found = calibrated(n, signal=signal, unlabelled=unlabelled)
    values, wrong = found.sample.values, found.sample.wrong
    bounds, tested = bounds_of(found)
    total = 0.1 / (2 if signal == "best" else 1)
    levels = [total] if n <= 300 else [0.3 * total, 0.7 * total]
    assert (sorted({one.level for one in bounds}), tested) == (pytest.approx(levels), n)
    for one in bounds:
        accepted = round(one.share * n)
        errors = wrong[np.argsort(values, kind="stable")[:accepted]].sum()
        exact = beta.ppf(1 - one.level, errors + 1, accepted - errors)
        assert exact <= one.bound + 1e-9 <= exact + 1 / SCALE + 2e-9
        assert one.outcome == ("passed" if one.bound <= 0.2 else "failed")
    assert max(one.share for one in bounds if one.outcome == "passed") == found.guarantee.coverage
    for level in levels:
        outcomes = [one.outcome for one in bounds if one.level == pytest.approx(level)]
        assert "failed" not in outcomes[:-1]


@pytest.mark.parametrize(
    ("n", "signal", "tested"), [(400, "msp", 100), (2400, "msp", 1920), (400, "learned", 50)]
)
def test_clusters_are_thinned_or_bet_on_as_in_the_tests(n, signal, tested):
    """Of a learned score, those that chose it do not test."""
    found = calibrated(n, per=4, shift=2.0, signal=signal)
    bounds, used = bounds_of(found)
    assert (used, [one.level for one in bounds]) == (tested, pytest.approx([0.1] * len(bounds)))
    assert all((one.bound <= 0.2) == (one.outcome == "passed") for one in bounds)
    assert max(one.share for one in bounds if one.outcome == "passed") == found.guarantee.coverage
    words = f"from {tested} of the {n} answers{'; one per cluster' if n == 400 else ''}."
    assert words in marks(page_of(found))[2]


def drawn_at(page, name):
    """Places along the page of the marks of a class, from 0 to 1000."""
    path = re.search(rf'class="{name}" d="(.*?)"', page)[1]
    return [float(tick.split()[0]) for tick in path.split("M")[1:]]


@pytest.mark.parametrize("seed", range(12))
def test_error_rates_are_those_of_a_loop(seed):
    """With ties and labels that are missing anywhere; up to the last answer with a label."""
    rng = np.random.default_rng(seed)
    values, wrong = rng.integers(0, (6, 1000)[seed % 2], 30), 1.0 * (rng.random(30) < 0.4)
    wrong[(values > np.quantile(values, rng.random())) | (rng.random(30) < 0.2)] = np.nan
    known, expected = ~np.isnan(wrong), []
    for limit in sorted({*values}):
        kept, before = values <= limit, values < limit
        if (known & kept).any() and known[before].sum() < known.sum():
            expected.append((kept.mean(), wrong[known & kept].mean()))
    found = error_rates(Sample(values.astype(float), wrong, keys(30, 1)))
    np.testing.assert_allclose(np.transpose(found), np.reshape(expected, (-1, 2)))


def test_the_page_has_the_numbers_of_the_labels():
    found = calibrated(150)
    sample, rule = found.sample, found.guarantee
    drawn, cells, text = marks(page := page_of(found))
    shares, rates = error_rates(sample)
    (path,) = re.findall(r'class="rate" d="M(.*?)"', page)
    steps = np.array(re.findall(r"([\d.]+)[ V]([-\d.]+)", path), dtype=float)
    top = page.count('class="grid"') - 1  # lines at each tenth
    assert steps[:, 0] == pytest.approx(1000 * shares, abs=0.051)
    assert steps[:, 1] == pytest.approx(1000 - 1000 * rates / (top / 10), abs=0.051)
    passed = sum(one.outcome == "passed" for one in bounds_of(found)[0])
    assert (drawn["passed"], drawn["failed"], drawn["limit"]) == (passed, 1, 2)
    ranked = sample.wrong[np.argsort(sample.values, kind="stable")]
    for kind, name in enumerate(("right", "wrong")):
        expected = 1000 * (np.flatnonzero(ranked == kind) + 0.5) / 150
        assert drawn_at(page, name) == pytest.approx(expected, abs=0.051)
    kept = sample.wrong[sample.values <= rule.threshold]
    assert cells == {
        "Labels": "150", "Clusters": "150", "Wrong among the labels": f"{sample.wrong.sum():.0f}",
        "Accepted": f"{len(kept) / 150:.0%}", "Risk": "20%", "Confidence": "90%",
        "Error rate among accepted labels": f"{kept.mean():.0%}",
    }  # fmt: skip
    assert f"<h1>Guarantee: {rule.promise}.</h1>" in page
    assert "fewer than 50 clusters" not in text
    assert "at 90% confidence. They are computed from all 150 answers." in text


def test_nothing_is_loaded_and_names_are_text():
    page = page_of(replace(calibrated(150), name=NASTY, label_source=NASTY, following=NASTY))
    found = Elements(page)
    assert not {"script", "link", "img", "a", "x"} & {tag for tag, _ in found.tags}
    assert not re.search(r"https?:|url\(|@import|src=|href=", page.replace(NASTY, ""))
    assert found.text.count(NASTY) == 3


@pytest.mark.parametrize(
    ("labelled", "right", "skipped", "outcomes"),
    [
        (38, 30, (), {"passed", "failed"}), (20, 30, (), {"passed", "open"}),
        (4, 30, (1,), {"open"}), (0, 0, (), {"open"}), (38, 0, (), {"failed"}),
    ],
)  # fmt: skip
def test_labels_from_the_surest_on(scored, tmp_path, labelled, right, skipped, outcomes):
    """The next test is marked, of as many labels as are told."""
    scores, sheet, page = (tmp_path / name for name in ("s.jsonl", "labels.csv", "page.html"))
    write(scores, [row | {"correct": None} for row in scored])
    assert write_ordered_sheet(scores, sheet, "msp")[0] == 38
    rows = [row.content for row in read_table(sheet)]
    for rank, row in enumerate(rows[:labelled]):
        row["correct"] = "" if rank in skipped else rank % 6 != 5 and rank < right
    table(sheet, rows)
    asked = ("--risk", 0.4, "--confidence", 0.8, "--out", tmp_path / "c.json", "--html", page)
    assert done("calibrate", scores, "--labels", sheet, *asked).endswith(f"Page: {page}")
    drawn, cells, text = marks(html := page.read_text("utf-8"))
    assert {k for k in ("passed", "failed") if k in drawn} == outcomes - {"open"}
    assert ("limit" in drawn, cells["Accepted"] != "nothing") == ("passed" in outcomes,) * 2
    assert drawn.get("next", 0) == ("open" in outcomes) == ("Next test: label" in text)
    given = labelled - len(skipped)
    assert cells["Labels"] == f"{given} of 38 answers, from the surest on"
    assert sum(len(drawn_at(html, name)) for name in ("right", "wrong")) == given
    assert "fewer than 50 clusters" in text


def test_of_a_run_and_not_of_a_loaded_one(tmp_path):
    path, out, page = runs.save(tmp_path / "squad"), tmp_path / "c.json", tmp_path / "page.html"
    asked = ("calibrate", "--run", path, "--risk", 0.3, "--out", out, "--html")
    assert "--html" in run(*asked, tmp_path / "page.txt")[1]
    status, said = run(*asked, page, "--metric", "BLEU")
    assert (status, "no quality metric 'BLEU'" in said, out.exists()) == (1, True, False)
    done(*asked, page)
    assert marks(page.read_text("utf-8"))[1]["Labels"] == "60"
    with pytest.raises(ValueError, match="just made"):
        page_of(Calibration.load(out))
