import json
import shutil
import subprocess

import pandas as pd
import pytest

from lm_polygraph_asmi.analysis.distinct import AGGREGATIONS
from lm_polygraph_asmi.report import build_report
from lm_polygraph_asmi.report.item import ReportItem
from lm_polygraph_asmi.report.items.benchmark import benchmark
from lm_polygraph_asmi.report.items.signal import payoff
from lm_polygraph_asmi.report.latex import PREAMBLE, latex_table
from tests.report.runs import content, loaded, manifest, simple_signals

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


def test_a_caption_is_of_the_table_and_stands_alone(tmp_path):
    """Without what is only of the figure; it says what u_sem is, and at which depth."""
    groups = loaded(tmp_path)
    ranked, *_ = benchmark(groups)
    drawn, *_ = payoff(groups)
    for item in (ranked, drawn):
        assert any("Figure: " in note for note in item.caption)
        assert "Figure: " not in latex_table(item)
        assert r"ASMI's operating depth: 60~\%." in latex_table(item)
    assert r"$u_{\mathrm{sem}}$: the score of Sem-ASMI" in latex_table(drawn)
    assert "the score of Sem-ASMI" not in latex_table(ranked)
    # Standard errors are spoken of just where they are printed.
    assert r"$\pm$: standard error, 1,000 resamples of answers." in latex_table(ranked)


def test_no_path_of_this_machine(report):
    """Neither in a table nor in what a figure says of itself."""
    found = [path for path in report.rglob("*.*") if path.is_file()]
    assert {path.suffix for path in found} == {".tex", ".md", ".json", ".csv", ".png", ".svg"}
    for path in found:
        assert b"secret" not in path.read_bytes(), path
    (group,) = json.loads((report / "provenance.json").read_text())
    assert group["runs"][0]["file"] == "run/ue_manager_seed1"
    assert (group["model"], group["dataset"]) == ("tiny/snapshot", "shared/squad.json")


def test_a_table_is_no_wider_than_the_page():
    table = pd.DataFrame({"method": ["MaximumSequenceProbability"], "value": [0.5]})
    lines = latex_table(ReportItem("x", "X & Y", [], table, notes=["Said."])).splitlines()
    assert lines[0] == r"\begin{table*}[t]"
    assert r"\caption{X \& Y. Said.}" in lines
    assert r"\begin{tabular}{lr}" in lines
    assert r"method & value \\" in lines
    assert r"MSP & 0.50 \\" in lines
    assert lines[lines.index(r"\begin{tabular}{lr}") - 1].startswith(r"\resizebox")
    assert r"\end{tabular}}" in lines


def test_texts_are_set_as_they_are_read():
    long = "Adapt-ASMI (60%, K=64, scope=response, balanced masks)"
    table = pd.DataFrame({"method": [long], "tokens": ["236.5"], "text": ["a\n<|im_end|>"]})
    found = latex_table(ReportItem("x", "u_sem", [], table, notes=["MI_t (1 − A_t), 95 %."]))
    assert r"\begin{tabular}{>{\raggedright\arraybackslash}p{4cm}rl}" in found
    assert r"a $\hookleftarrow$ \textless{}\textbar{}im\_end\textbar{}\textgreater{}" in found
    assert r"\caption{$u_{\mathrm{sem}}$. $\mathrm{MI}_t$ (1 $-$ $A_t$), 95~\%." in found
