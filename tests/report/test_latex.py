import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import PRR
from lm_polygraph_asmi.analysis.distinct import AGGREGATIONS
from lm_polygraph_asmi.report import build_report, load_run_groups
from lm_polygraph_asmi.report.item import ReportItem
from lm_polygraph_asmi.report.items.benchmark import benchmark
from lm_polygraph_asmi.report.items.signal import payoff
from lm_polygraph_asmi.report.latex import MANY, NARROW, PREAMBLE, ROWS, latex_tables
from tests.report.runs import content, loaded, manifest, save, simple_signals

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Names and texts of all kinds; for its figures, what they say of themselves."""
    saved = content(depths=(60, 80))
    saved["stats"]["input_texts"] = [
        f"Passage:\np{i // 2}\nQuestion: Où est $x_{i}$ & 日本 #{i} ~^\\ {{}} “%”?\nAnswer:"
        for i in range(60)
    ]
    saved["estimations"]["sequence", r"A $\frac$ <b>_|&%#{}"] = list(range(60))
    about, folder = manifest(60) | {"device": "a_b & 100 %"}, tmp_path_factory.mktemp("report")
    about["model"]["path"] = "/secret/models/tiny/snapshot"
    about["dataset"]["source"] = "/secret/data/shared/squad.json"
    said = lambda _, path, description: path.write_text(description)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch, simple_signals(AGGREGATIONS):
        patch.setattr("lm_polygraph_asmi.report.writing.save", said)
        build_report(loaded(folder / "secret", saved, about), folder / "out")
    return folder / "out"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a LaTeX (texlive-latex-base)")
def test_every_table_compiles(report, tmp_path):
    """As they stand, in an article of two columns."""
    tables = sorted((report / "tables").glob("*.tex"))
    assert len(tables) > 20
    long = pd.DataFrame({"method": "m" * 30, **{f"value {i}": range(100) for i in range(9)}})
    said = ReportItem(
        "long", "Long", [], long.astype(float, errors="ignore"), notes=["word, " * 250]
    )
    tables.append(tmp_path / "zz_long.tex")
    tables[-1].write_text(latex_tables(said))
    document = [r"\documentclass[twocolumn]{article}", PREAMBLE, r"\begin{document}"]
    document += [f"\\input{{{path}}}\\clearpage" for path in tables]
    (tmp_path / "all.tex").write_text("\n".join([*document, r"\end{document}"]))
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    log = done.stdout.decode(errors="replace")
    assert done.returncode == 0, log[-1500:]
    assert "Overfull" not in log
    assert "Float too large" not in log


def test_a_caption_is_of_the_table_and_stands_alone(tmp_path):
    """Without what is only of the figure; it says what u_sem is, and at which depth."""
    groups = loaded(tmp_path)
    ranked, *_ = benchmark(groups)
    drawn, *_ = payoff(groups)
    for item in (ranked, drawn):
        assert any("Figure: " in note for note in item.caption)
        assert "Figure: " not in latex_tables(item)
        assert r"ASMI's operating depth: 60~\%." in latex_tables(item)
    assert r"$u_{\mathrm{sem}}$: the score of Sem-ASMI" in latex_tables(drawn)
    assert "the score of Sem-ASMI" not in latex_tables(ranked)
    # Standard errors are spoken of just where they are printed.
    assert r"$\pm$: standard error, 1,000 resamples of answers." in latex_tables(ranked)


def twelve(tmp_path):
    """An report item of 12 settings, of three models, without computing any."""
    for model in ("one", "two", "three"):
        for dataset in ("a", "b", "c", "d"):
            about = manifest(6, f"asmi_{dataset}")
            about["model"] = {"name": f"asmi_{model}"}
            save(tmp_path / f"{model}-{dataset}", content(n=20, shift=len(model)), about)
    groups = load_run_groups(sorted(path for path in tmp_path.iterdir() if path.is_dir()))
    values = {group.label: [PRR(0.5, 0.1)] for group in groups}
    table = pd.DataFrame({"method": ["MaximumSequenceProbability"], **values})
    return ReportItem("x", "X & Y", groups, table, notes=["Said: 95 % [low, high]."])


def test_many_cells_stand_under_their_models(tmp_path):
    item = twelve(tmp_path)
    assert len(item.groups) == 12 > MANY
    lines = latex_tables(item).splitlines()
    assert lines[0] == r"\begin{table*}[t]"
    assert r"\begin{tabular}{lrrrrrrrrrrrr}" in lines
    heads = next(line for line in lines if "multicolumn" in line)
    assert heads.count(r"\multicolumn{4}{c}") == 3
    assert r"method & a & b & c & d & a & b & c & d & a & b & c & d \\" in lines
    assert r"MSP & " + " & ".join(["0.50"] * 12) + r" \\" in lines
    caption = next(line for line in lines if "caption" in line)
    assert caption.startswith(r"\caption{X \& Y. Said: 95~\% [low, high]. Standard errors: see")
    assert "pm" not in caption


def test_long_tables_take_several_floats():
    table = pd.DataFrame({"method": "m", "value": np.arange(float(ROWS + 3))})
    found = latex_tables(ReportItem("x", "X", [], table, notes=["Said."]))
    assert found.count(r"\begin{table}[t]") == 2
    assert found.count(r"m & ") == ROWS + 3
    assert r"\caption{X. Said.}" in found
    assert r"\caption{X, continued.}" in found
    assert r"\label{tab:x-2}" in found


def test_no_path_of_this_machine(report):
    """Neither in a table nor in what a figure says of itself."""
    found = [path for path in report.rglob("*.*") if path.is_file()]
    assert {path.suffix for path in found} == {".tex", ".md", ".json", ".csv", ".png", ".svg"}
    for path in found:
        assert b"secret" not in path.read_bytes(), path
    (group,) = json.loads((report / "provenance.json").read_text())
    assert group["runs"][0]["file"] == "run/ue_manager_seed1"
    assert (group["model"], group["dataset"]) == ("tiny/snapshot", "shared/squad.json")


def test_a_caption_speaks_of_standard_errors_only_where_there_are_some(tmp_path):
    item = twelve(tmp_path)
    assert "Standard errors" in latex_tables(item)
    item.table = item.table.map(lambda v: v.value if isinstance(v, PRR) else v)
    assert "Standard errors" not in latex_tables(item)


def test_long_heads_break_and_wide_tables_take_both_columns():
    table = pd.DataFrame({"x": [0.5], "share of answers kept": [0.5]})
    found = latex_tables(ReportItem("x", "X", [], table))
    assert r"x & \shortstack{share of\\answers kept} \\" in found
    assert found.startswith(r"\begin{table}[t]")
    many = pd.DataFrame({f"v{i}": [0.5] for i in range(NARROW + 1)})
    assert latex_tables(ReportItem("x", "X", [], many)).startswith(r"\begin{table*}[t]")


def test_texts_are_set_as_they_are_read():
    long = "Adapt-ASMI (60%, K=64, scope=response, balanced masks)"
    table = pd.DataFrame({"method": [long], "tokens": ["236.5"], "text": ["a\n<|im_end|>"]})
    found = latex_tables(ReportItem("x", "u_sem", [], table, notes=["MI_t (1 − A_t), 95 %."]))
    assert r"\begin{tabular}{>{\raggedright\arraybackslash}p{4cm}rl}" in found
    assert r"a $\hookleftarrow$ \textless{}\textbar{}im\_end\textbar{}\textgreater{}" in found
    assert r"\caption{$u_{\mathrm{sem}}$. $\mathrm{MI}_t$ (1 $-$ $A_t$), 95~\%." in found
