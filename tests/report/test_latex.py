import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import PRR
from lm_polygraph_asmi.report import build_report, load_cells
from lm_polygraph_asmi.report.exhibit import Exhibit
from lm_polygraph_asmi.report.latex import MANY, PREAMBLE, ROWS_A_PAGE, latex_tables
from tests.report.runs import content, manifest, save

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a LaTeX (texlive-latex-base)")
def test_every_table_compiles(tmp_path):
    """As they stand, in an article of two columns, names and texts of all kinds among them."""
    saved = content(depths=(60, 80))
    saved["stats"]["input_texts"] = [
        f"Passage:\np{i // 2}\nQuestion: Où est $x_{i}$ & 日本 #{i} ~^\\ {{}} “%”?\nAnswer:"
        for i in range(60)
    ]
    saved["estimations"]["sequence", r"A $\frac$ <b>_|&%#{}"] = list(range(60))
    save(tmp_path / "run", saved, manifest(60) | {"device": "a_b & 100 %"})
    build_report(load_cells([tmp_path / "run"]), tmp_path / "out")
    tables = sorted((tmp_path / "out/tables").glob("*.tex"))
    assert len(tables) > 20
    long = pd.DataFrame({"method": "m" * 30, **{f"value {i}": range(100) for i in range(9)}})
    said = Exhibit("long", "Long", [], long.astype(float, errors="ignore"), notes=["word, " * 250])
    tables.append(tmp_path / "out/tables/zz_long.tex")
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


def twelve(tmp_path):
    """An exhibit of 12 cells, of three models, without computing any."""
    for model in ("one", "two", "three"):
        for dataset in ("a", "b", "c", "d"):
            about = manifest(6, f"asmi_{dataset}")
            about["model"] = {"name": f"asmi_{model}"}
            save(tmp_path / f"{model}-{dataset}", content(n=20, shift=len(model)), about)
    cells = load_cells(sorted(path for path in tmp_path.iterdir() if path.is_dir()))
    values = {cell.label: [PRR(0.5, 0.1)] for cell in cells}
    table = pd.DataFrame({"method": ["MaximumSequenceProbability"], **values})
    return Exhibit("x", "X & Y", cells, table, notes=["Said: 95 % [low, high]."])


def test_many_cells_stand_under_their_models(tmp_path):
    item = twelve(tmp_path)
    assert len(item.cells) == 12 > MANY
    lines = latex_tables(item).splitlines()
    assert lines[0] == r"\begin{table*}[t]"
    assert r"\begin{tabular}{lrrrrrrrrrrrr}" in lines
    heads = next(line for line in lines if "multicolumn" in line)
    assert heads.count(r"\multicolumn{4}{c}") == 3
    assert r"\cmidrule(lr){2-5}\cmidrule(lr){6-9}\cmidrule(lr){10-13}" in lines
    assert r"method & a & b & c & d & a & b & c & d & a & b & c & d \\" in lines
    assert r"MSP & " + " & ".join(["0.50"] * 12) + r" \\" in lines
    caption = next(line for line in lines if "caption" in line)
    assert caption.startswith(r"\caption{X \& Y. Said: 95 \% [low, high]. Standard errors: see")


def test_long_tables_take_several_floats():
    table = pd.DataFrame({"method": "m", "value": np.arange(float(ROWS_A_PAGE + 3))})
    found = latex_tables(Exhibit("x", "X", [], table, notes=["Said."]))
    assert found.count(r"\begin{table}[t]") == 2
    assert found.count(r"m & ") == ROWS_A_PAGE + 3
    assert r"\caption{X. Said.}" in found
    assert r"\caption{X, continued.}" in found
    assert r"\label{tab:x-2}" in found


def test_no_path_of_this_machine(tmp_path):
    about = manifest(60)
    about["model"]["path"] = "/secret/models/tiny/snapshot"
    about["dataset"]["source"] = "/secret/data/shared/squad.json"
    save(tmp_path / "secret" / "run", about=about)
    build_report(load_cells([tmp_path / "secret" / "run"]), tmp_path / "out")
    found = [path for path in (tmp_path / "out").rglob("*.*") if path.is_file()]
    assert {path.suffix for path in found} >= {".tex", ".md", ".json", ".csv"}
    for path in found:
        assert b"secret" not in path.read_bytes(), path
    (cell,) = json.loads((tmp_path / "out/provenance.json").read_text())
    assert cell["runs"][0]["file"] == "run/ue_manager_seed1"
    assert (cell["model"], cell["dataset"]) == ("tiny/snapshot", "shared/squad.json")
