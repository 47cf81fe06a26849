"""What a model ships for generation: left out, or refused by name."""

import json
import shutil
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from lm_polygraph_asmi.host.generation import plain_generation, read_shipped
from lm_polygraph_asmi.runs.checks import CHECKS, Plan
from lm_polygraph_asmi.stat_calculators.masked_heads import load_stat_calculator
from tests import tiny_lm
from tests.composing import composed

SPECIAL = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
CHANGING = {
    "bad_words_ids": [[token] for token in range(200, 340)], "max_time": 1e-9, "min_length": 30,
    "begin_suppress_tokens": list(range(200, 340)), "sequence_bias": [[[200], 9.0]],
    "guidance_scale": 3.0, "forced_eos_token_id": 9, "watermarking_config": {"bias": 9.0},
    "no_repeat_ngram_size": 1, "renormalize_logits": True, "penalty_alpha": 0.5, "min_p": 0.5,
    "typical_p": 0.1, "some_future_setting": 0,
}  # fmt: skip
NEUTRAL = {
    "use_cache": False, "max_length": 4096, "cache_implementation": "hybrid",
    "no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": [], "guidance_scale": 1.0,
    "renormalize_logits": False, "num_assistant_tokens": 5,
}  # fmt: skip
SET_BY_RUNS = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "do_sample": True, "num_beams": 3,
               "stop_strings": ["x"], "repetition_penalty": 1.5}  # fmt: skip
"""LM-Polygraph passes these with every call."""


def test_nothing_but_special_tokens_is_kept():
    """Of every field that the installed release has, whatever it does."""
    config = GenerationConfig(**SPECIAL)
    for name in set(vars(config)) - {*SPECIAL, "transformers_version", "_from_model_config"}:
        setattr(config, name, "shipped")
    assert plain_generation(config).to_json_string() == GenerationConfig(**SPECIAL).to_json_string()


def test_a_manager_built_by_hand_refuses_them_by_name():
    model, usual = tiny_lm.whitebox(), SPECIAL | NEUTRAL | SET_BY_RUNS
    for name, value in CHANGING.items():
        model.model.generation_config = GenerationConfig(**usual | {name: value})
        with pytest.raises(ValueError, match=f"own generation config sets {name}. "):
            load_stat_calculator({}, SimpleNamespace(model=model))
    model.model.generation_config = GenerationConfig(**usual)
    load_stat_calculator({}, SimpleNamespace(model=model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("shipped", "overrides", "fatal", "named"),
    [
        (CHANGING, [], [False], [*CHANGING, "as in a score"]),
        ({}, [], [], []),
        (SET_BY_RUNS, [], [], []),
        *((SET_BY_RUNS, [f"generation_params.{name}=null"], [True],
           [f"generation_params.{name} is not set", str(SET_BY_RUNS[name])])
          for name in ("do_sample", "top_k", "stop_strings")),
        ({}, ["+generation_params.min_p=0.3"], [True], ["does not read generation_params.min_p:"]),
        (CHANGING, ["+model.load_model_args.gguf_file=x.gguf"], [], []),
    ],
)  # fmt: skip
def test_before_the_model_is_loaded(folder, shipped, overrides, fatal, named):
    content = json.dumps(GenerationConfig(**SPECIAL).to_dict() | shipped)
    (folder / "generation_config.json").write_text(content)
    config = composed("asmi_coqa", "model=asmi_local", f"model.path={folder}", *overrides)
    found = list(CHECKS["generation"](Plan(config)))
    assert [finding.fatal for finding in found] == fatal
    assert [name for name in named if name not in found[0].text] == []


def test_settings_in_the_configuration_of_an_older_model(folder, tmp_path):
    older = shutil.copytree(folder, tmp_path / "older")
    (older / "generation_config.json").unlink(missing_ok=True)
    content = json.loads((older / "config.json").read_text()) | {"no_repeat_ngram_size": 2}
    (older / "config.json").write_text(json.dumps(content))
    assert read_shipped({"path": str(older)}) == {"no_repeat_ngram_size": 2}
