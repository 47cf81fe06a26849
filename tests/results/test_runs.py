"""A finished run as tables, in Python and in the terminal."""

import io
import re
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from lm_polygraph_asmi.analysis import normalised_prr
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.manifest import write_manifest
from lm_polygraph_asmi.results.runs import MSP, load_run

SETTINGS = {
    "depth": 0.6, "layer": 18, "num_layers": 30, "num_heads": 9, "num_masks": 56, "mask_rate": 0.09,
    "top_k": 64, "mask_sampler": "bernoulli", "scope": "all", "seed": 0, "attention": "sdpa",
    "requested_layer": None,
}  # fmt: skip
SHALLOW = SETTINGS | {"depth": 0.3, "layer": 9}
ASMI, QUALITY = "ASMI (60%, K=64)", [1.0, 0.0, 1.0, 0.4]
LOGS = [3.0, 1.0, 2.0, 4.0]
DIFFERENCE = 1 - normalised_prr(np.array(LOGS), np.array(QUALITY))


def save(folder, seed=1, quality=QUALITY, **more):
    """A run whose columns are those of `more` where they are named."""
    settings = [
        {at["depth"]: {"settings": at, "mi": np.array(mi)} for at in (SETTINGS, SHALLOW)}
        for mi in ([0.1], [0.2, 0.9], [0.0], [0.2])
    ]
    content = {
        "state": "Initialized", "metrics": {},
        "gen_metrics": {("sequence", "Rouge_rougeL"): quality},
        "estimations": {
            ("sequence", ASMI): [0.1, 0.9, 0.2, 0.3],
            ("sequence", MSP): LOGS,
            ("token", "TokenEntropy"): [np.array([1.0, 2.0])],
        },
        "stats": {
            "asmi_seconds": [9.0, 1.0, 2.0, 1.0], "asmi": settings,
            "greedy_texts": [" 北京", " .\n", " ferry", " 1931"],
        },
    }  # fmt: skip
    torch.save(content | more, file := folder / f"ue_manager_seed{seed}")
    return file


def show(*paths):
    result = CliRunner().invoke(main, ["results", *map(str, paths)], env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.split())


def test_a_run_as_tables(tmp_path):
    """Scores that are in its manifest only are none of its methods."""
    known = ASMIConfig(method="asmi").to_dict() | {"symbol": "ASMI"}
    write_manifest({"methods": {ASMI: known, "none": known}}, file := save(tmp_path))
    run = load_run(file.parent)
    assert ([*run.scores], [*run.methods]) == ([ASMI, MSP], [ASMI])
    assert run.quality["Rouge_rougeL"].tolist() == QUALITY
    assert run.settings() == [SHALLOW, SETTINGS]
    # Depths are equal however they were computed, and after a file.
    assert run.at(0.1 * 6) == run.at(0.6, "mi", "settings") == [r[0.6] for r in run.stats["asmi"]]
    assert run.at(0.9) is run.at(0.6, "mi", "kl") is None
    run.stats["asmi"].pop()
    assert run.at(0.6) is None


def test_a_saved_tensor_is_read_as_well(tmp_path):
    """With torch, which other runs are read without."""
    run = load_run(save(tmp_path, stats={"embeddings": [torch.ones(2)] * 4}))
    assert run.scores[ASMI].tolist() == [0.1, 0.9, 0.2, 0.3]
    assert run.stats["embeddings"][3].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("quality", "said"),
    [
        # The best first; the oracle's order is at +1.
        (QUALITY, [
            "PRR over 4 answers", f"{ASMI} │ +1.00 │ {DIFFERENCE:+.2f} [", "do not compare with",
            "which intervals are over: 3.", "95 % intervals may be too narrow",
            "Right answers (Rouge_rougeL at least 0.5): 50%", "be right: 1 of 4.",
            "MI_t per token, mean 0.2800 nats, median 0.2000", "Empty answers, which cannot",
            "layer 18 of 30, H = 9, p = 0.09, S = 56, K = 64",
        ]),
        ([1.0, np.nan, 1.0, 0.4], ["PRR over 3 answers", "1 answers without a", "over: 2."]),
        ([1.0, 1.0, 1.0, 1.0], ["undefined", "there are no errors to rank"]),
    ],
)  # fmt: skip
def test_table_in_the_terminal(tmp_path, quality, said):
    file = save(tmp_path, quality=quality)
    write_manifest({"rows": {"ids": list("abcd"), "clusters": list("xyzz")}}, file)
    code, text = show(file)
    assert (code, [words for words in said if words not in text]) == (0, [])
    assert text.index(ASMI) < text.index(MSP)
    for shown in re.findall(r"(\S+) \[(\S+), (\S+)\]", text):
        value, low, high = map(float, shown)
        assert low <= value <= high


@pytest.mark.parametrize(
    ("changed", "status", "read"),
    [
        ({"estimations": {}, "gen_metrics": {}, "stats": {"input_texts": list("abcd")}}, "", False),
        ({"gen_metrics": {}}, "", False),
        ({"estimations": {("sequence", ASMI): [0.1, 0.2]}}, "", False),
        # A row was begun, and none of its scores made.
        ({"stats": {"input_texts": list("abcde")}}, "", False),
        # Between rows; of several seeds, manifests are written at the end of them all.
        ({}, "failed", False),
        ({}, "running", False),
        ({"metrics": {"prr": 1.0}}, "running", True),
    ],
)
def test_a_run_that_stopped_early(tmp_path, changed, status, read):
    """LM-Polygraph saves what it has when it dies, and a manifest tells how the run ended."""
    file = save(tmp_path, **changed)
    if status:
        write_manifest({"status": status}, file)
    code, text = show(file)
    assert {code == 0, "is incomplete" not in text, "Start it again" not in text} == {read}


def test_as_csv(tmp_path):
    for quality, best in ((QUALITY, 1), ([1.0] * 4, np.nan)):
        file = str(save(tmp_path, quality=quality))
        rows = pd.read_csv(io.StringIO(CliRunner().invoke(main, ["results", "--csv", file]).stdout))
        assert rows["prr"][0] == pytest.approx(best, nan_ok=True)
        assert rows[["run", "metric", "method"]].to_numpy().tolist() == [
            [file, "Rouge_rougeL", name] for name in (ASMI, MSP)
        ]
        assert (rows["standard_error"][1] < 2) == (best == 1)


def test_no_run_and_several(tmp_path):
    code, text = show(tmp_path)
    assert (code, "neither a manager file nor a folder with one" in text) == (1, True)
    with zipfile.ZipFile(tmp_path / "ue_manager_seed1", "w") as archive:
        archive.writestr("a/b.txt", "no run")
    with pytest.raises(ValueError, match="not a run"):
        load_run(tmp_path)
    save(tmp_path, 1), save(tmp_path, 2)
    with pytest.raises(ValueError, match="several seeds"):
        load_run(tmp_path)
    code, text = show(tmp_path)
    assert (code, "seed1" in text, "seed2" in text) == (0, True, True)


def test_damage_is_seen(tmp_path):
    """A flipped bit anywhere: an error or no effect; never another number."""
    whole, content = load_run(file := save(tmp_path)), file.read_bytes()
    tables = whole.scores.join(whole.quality)
    refused, places = list[bool](), range(0, len(content), 29)
    for place in places:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            run = load_run(file)
        except ValueError as error:
            refused.append(f"{file} is not a run saved by LM-Polygraph" in str(error))
        else:
            pd.testing.assert_frame_equal(run.scores.join(run.quality), tables)
    assert refused.count(True) == len(refused) > len(places) / 3
