"""A finished run as tables, in Python and in the terminal."""

import io
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from lm_polygraph_asmi.analysis import Clustered, cluster_interval, normalised_prr
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.results.manifest import manifest_path, write_manifest
from lm_polygraph_asmi.results.runs import MSP, load_run

SETTINGS = {
    "depth": 0.6, "layer": 18, "num_layers": 30, "num_heads": 9, "num_masks": 56, "mask_rate": 0.09,
    "top_k": 64, "mask_sampler": "bernoulli", "scope": "all", "seed": 0, "attention": "sdpa",
    "requested_layer": None,
}  # fmt: skip
ASMI = "ASMI (60%, K=64)"


def save(folder, seed=1, quality=(1.0, 0.0, 1.0, 0.4)):
    settings = [{0.6: {"settings": SETTINGS, "mi": np.array(mi)}}
                for mi in ([0.1], [0.2, 0.9], [0.0], [0.2])]  # fmt: skip
    content = {
        "state": "Initialized", "metrics": {},
        "gen_metrics": {("sequence", "Rouge_rougeL"): list(quality)},
        "estimations": {
            ("sequence", ASMI): [0.1, 0.9, 0.2, 0.3],
            ("sequence", "Perplexity"): [3.0, 1.0, 2.0, 4.0],
            ("token", "TokenEntropy"): [np.array([1.0, 2.0])],
        },
        "stats": {
            "asmi_seconds": [9.0, 1.0, 2.0, 1.0], "asmi": settings,
            "greedy_texts": [" 北京", " .\n", " ferry", " 1931"],
        },
    }  # fmt: skip
    torch.save(content, file := folder / f"ue_manager_seed{seed}")
    return file


def show(*paths):
    result = CliRunner().invoke(main, ["results", *map(str, paths)], env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.split())


def test_a_run_as_tables(tmp_path):
    run = load_run(save(tmp_path).parent)
    assert list(run.scores) == [ASMI, "Perplexity"]
    assert run.quality["Rouge_rougeL"].tolist() == [1.0, 0.0, 1.0, 0.4]
    assert run.settings() == [SETTINGS]
    # Depths are equal however they were computed, and after a file.
    assert run.at(0.1 * 6) == run.at(0.6, "mi", "settings") == [r[0.6] for r in run.stats["asmi"]]
    assert run.at(0.9) is run.at(0.6, "mi", "kl") is None
    run.stats["asmi"].pop()
    assert run.at(0.6) is None


def test_a_saved_tensor_is_read_as_well(tmp_path):
    """With torch, which other runs are read without."""
    content = torch.load(file := save(tmp_path), weights_only=False)
    content["stats"]["embeddings"] = [torch.ones(2)] * 4
    torch.save(content, file)
    run = load_run(file)
    assert run.scores[ASMI].tolist() == [0.1, 0.9, 0.2, 0.3]
    assert run.stats["embeddings"][3].tolist() == [1, 1]


def test_table_in_the_terminal(tmp_path):
    code, text = show(save(tmp_path))
    assert code == 0
    assert "PRR over 4 answers" in text
    # Best first, the oracle's order at +1.
    assert text.index(ASMI) < text.index("Perplexity")
    assert f"{ASMI} │ +1.00" in text
    assert "Right answers (Rouge_rougeL at least 0.5): 50%" in text
    assert "do not compare with AlignScore" in text
    assert "MI_t per token, mean 0.2800 nats, median 0.2000" in text
    assert "Empty answers, which cannot be right: 1 of 4." in text
    assert "layer 18 of 30, H = 9, p = 0.09, S = 56, K = 64" in text


@pytest.mark.parametrize(
    ("quality", "said"),
    [
        (
            [1.0, np.nan, 1.0, 0.4],
            ["PRR over 3 answers", "1 answers without a finite score or", "over: 3."],
        ),
        ([1.0, 1.0, 1.0, 1.0], ["undefined", "there are no errors to rank"]),
    ],
)
def test_what_qualities_lack(tmp_path, quality, said):
    code, text = show(save(tmp_path, quality=quality))
    assert (code, [words for words in said if words not in text]) == (0, [])


@pytest.mark.parametrize(
    "changed",
    [
        {"estimations": {}, "gen_metrics": {}, "stats": {"input_texts": list("abcd")}},
        {"gen_metrics": {}},
        {"estimations": {("sequence", ASMI): [0.1, 0.2]}},
        {"stats": {"input_texts": list("abcde")}},  # a row was begun, and none of its scores made
    ],
)
def test_a_run_that_stopped_early(tmp_path, changed):
    """LM-Polygraph saves what it has when it dies."""
    file = save(tmp_path)
    torch.save(torch.load(file, weights_only=False) | changed, file)
    code, text = show(file)
    assert (code, "is incomplete" in text, "Start it again" in text) == (1, True, True)


def test_as_csv(tmp_path):
    file = save(tmp_path)
    shown = CliRunner().invoke(main, ["results", "--csv", str(file)])
    assert shown.exit_code == 0
    rows = pd.read_csv(io.StringIO(shown.stdout))
    assert (set(rows["run"]), set(rows["metric"])) == ({str(file)}, {"Rouge_rougeL"})
    assert rows["method"].tolist() == [ASMI, "Perplexity"]
    assert rows["prr"][0] == pytest.approx(1)
    assert 0 <= rows["standard_error"][1] < 2
    file = save(tmp_path, quality=(1.0, 1.0, 1.0, 1.0))
    shown = CliRunner().invoke(main, ["results", "--csv", str(file)])
    assert pd.read_csv(io.StringIO(shown.stdout))["prr"].isna().all()


def test_no_run_and_several(tmp_path):
    code, text = show(tmp_path)
    assert code == 1
    assert "neither a manager file nor a folder with one" in text
    file = tmp_path / "ue_manager_seed1"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/b.txt", "no run")
    with pytest.raises(ValueError, match="is not a run saved by LM-Polygraph"):
        load_run(file)
    save(tmp_path, 1), save(tmp_path, 2)
    code, text = show(tmp_path)
    assert (code, "seed1" in text, "seed2" in text) == (0, True, True)
    with pytest.raises(ValueError, match="has several seeds"):
        load_run(tmp_path)


@pytest.mark.usefixtures("few_resamples")
def test_differences_from_msp_have_cluster_intervals(tmp_path):
    quality = np.array([0.9, 0.2, 0.8, 0.1, 0.7, 0.4])
    msp, ours = np.array([1.0, 2, 4, 3, 5, 6]), np.array([1.0, 9, 2, 7, 5, 3])
    content = {
        "gen_metrics": {("sequence", "AlignScore"): quality},
        "estimations": {("sequence", MSP): msp, ("sequence", ASMI): ours},
        "stats": {"input_texts": list("uvwxyz"), "greedy_texts": list("UVWXYZ")},
    }
    torch.save(content, file := tmp_path / "ue_manager_seed1")
    write_manifest({"rows": {"ids": list("uvwxyz"), "clusters": list("aabcde")}}, file)

    def difference(rows):
        return normalised_prr(ours[rows], quality[rows]) - normalised_prr(msp[rows], quality[rows])

    value, low, high = cluster_interval(difference, Clustered(list("aabcde"), resamples=10_000))
    code, text = show(file)
    assert code == 0
    assert f"{value:+.2f} [{low:+.2f}, {high:+.2f}]" in text
    assert "Clusters (stories, passages or prompts), which intervals are over: 5." in text
    assert "95 % intervals may be too narrow" in text
    assert "Empty answers" not in text
    manifest_path(file).unlink()  # as a run of a plain config: clusters are of the prompts
    text = show(file)[1]
    assert "over: 6." in text
    assert f"[{low:+.2f}, {high:+.2f}]" not in text


def test_damage_is_seen(tmp_path):
    """A flipped bit anywhere: an error or no effect; never another number."""
    file = save(tmp_path)
    whole, content = load_run(file), file.read_bytes()
    said, places = [], range(0, len(content), 29)
    for place in places:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            run = load_run(file)
        except ValueError as error:
            said.append(str(error))
        else:
            assert run.scores.equals(whole.scores)
            assert run.quality.equals(whole.quality)
    assert len(said) > len(places) / 3
    assert all("is not a run saved by LM-Polygraph" in text for text in said)
