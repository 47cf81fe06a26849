"""A finished run becomes a setting of the results."""

import evidence
import numpy as np
import pandas as pd
import pytest
from keep import contains
from tables import signals_table

from tests.report import runs
from tests.test_scripts import run_here

N = 60


def test_a_finished_run_becomes_a_setting(tmp_path):
    saved, about = runs.content(N, depths=(60, 90)), runs.manifest(N)
    about["config"] = {"data": {"limit": 80, "source": "a private place"}}
    texts, gold = saved["stats"]["greedy_texts"], saved["stats"]["target_texts"]
    for i in range(0, N, 3):
        gold[i] = ["no such", texts[i].strip()] if i % 2 else texts[i].strip()
    run = runs.save(tmp_path / "run", saved, about)
    file = tmp_path / "qwen3_4b_base/coqa.benchmark.parquet"
    assert "60 answers" in run_here("evidence/keep.py", str(run), str(file))
    (setting,) = evidence.load(tmp_path)
    assert (setting.label, setting.size) == ("Qwen3-4B-Base, CoQA", "60 of 80 / 30")
    assert setting.wrong("contains").tolist() == [i % 3 > 0 for i in range(N)]
    quality = saved["gen_metrics"]["sequence", "AlignScore"]
    assert setting.quality("align").tolist() == pytest.approx(quality)
    for depth in (60, 90):
        kept = setting.column(f"asmi_mi_d{depth}")
        for mine, own in zip(kept, saved["stats"][f"asmi_mi_d{depth}"], strict=True):
            np.testing.assert_allclose(mine, own, rtol=1e-6)  # float32
    msp = saved["estimations"]["sequence", "MaximumSequenceProbability"]
    assert setting.signals["MSP"].tolist() == pytest.approx(msp)
    assert len(signals_table([setting], "align").rows) == 1
    content = file.read_bytes() + str(pd.read_parquet(file)).encode()
    for private in (b"answer 1", b"gold", b"passage 1 0.0", b"a private place"):
        assert private not in content


@pytest.mark.parametrize(
    ("gold", "label"), [("Holm", 1), (["Rell", "edda holm"], 1), (["Rell"], 0), ("Rell", 0)]
)
def test_an_answer_contains_one_of_the_gold_answers(gold, label):
    assert contains("It was Edda Holm.", gold) == label
