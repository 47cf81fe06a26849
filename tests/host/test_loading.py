"""Models that are loaded by name, and what is said of files that do not fit."""

import warnings
from copy import deepcopy
from logging import lastResort

import pytest
import torch
from lm_polygraph.utils.common import load_external_module
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.core.model import attention_of
from lm_polygraph_asmi.host import loading
from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.host.loading import load_named, log, quiet
from tests import tiny_lm


@pytest.fixture
def folder(tmp_path):
    return tiny_lm.save(tmp_path / "tiny")


def test_a_name_simply_loads(folder, capfd):
    name = str(folder)
    capfd.readouterr()
    scorer = Scorer(name, method="asmi", max_new_tokens=2)
    found = scorer.score("Who?", " Brask")
    assert capfd.readouterr() == ("", "")  # no bars, no notes of other libraries
    assert (found.model, scorer.model.dtype, scorer.model.training) == (name, torch.float32, False)
    seen = load_named.cache_info().misses
    assert float(Scorer(name, method="asmi").score("Who?", " Brask")) == float(found)
    assert load_named.cache_info().misses == seen  # a notebook calls again and again


def test_load_script_leaves_remote_code_off_and_sets_attention(folder):
    script = load_external_module(str(configs_path() / "model" / "asmi_causal.py"))
    model = script.load_model(str(folder), dtype="bfloat16", device_map=None)
    assert (attention_of(model), model.dtype, model.training) == ("eager", torch.bfloat16, False)
    assert script.load_tokenizer(str(folder)).padding_side == "left"
    assert not any(
        "trust_remote_code: true" in source
        for source in [p.read_text() for p in configs_path().rglob("*.yaml")]
    )


@pytest.mark.parametrize(
    ("has", "caps", "expected"),
    [
        ("", {}, False), ("BF16", {}, True), ("AMX", {}, True),
        ("AMX", {"DNNL": "avx512_core"}, False), ("AMX", {"ONEDNN": "DEFAULT"}, True),
        ("AMX", {"ONEDNN": "AVX512_CORE_BF16", "DNNL": "AVX2"}, True),
        ("AMX", {"ONEDNN": "avx2"}, False),
    ],
)  # fmt: skip
def test_processors_with_instructions_for_bfloat16(monkeypatch, has, caps, expected):
    for name in ("ONEDNN", "DNNL"):
        monkeypatch.setenv(f"{name}_MAX_CPU_ISA", caps.get(name, ""))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has == "BF16")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has == "AMX")
    assert loading.has_bfloat16() == expected


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("bfloat16"), tiny_lm.whitebox()
    deepcopy(model.model).to(torch.bfloat16).save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_bfloat16_of_files(in_bfloat16, monkeypatch, caplog, dtype, has, quantized):
    """What a processor is slow in is left only if nothing asks for it."""
    load = AutoModelForCausalLM.from_pretrained

    def loaded(*arguments, **options):
        model = load(*arguments, **options)
        model.hf_quantizer = "a quantizer" if quantized else None
        return model

    monkeypatch.setattr(loading, "has_bfloat16", lambda: has)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loaded)
    found = loading.load_model(str(in_bfloat16), dtype, None)
    changed = dtype == "auto" and not has and not quantized
    expected = torch.float32 if changed or dtype == "float32" else torch.bfloat16
    assert (found.dtype, "is loaded in float32" in caplog.text) == (expected, changed)


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("{}/none", {}, "neither a local folder nor a valid hub ID"),
        ("some/none", {}, "HF_HUB_OFFLINE blocks the hub; where .*; name a local folder"),
        ("smolm2", {}, r"\(did you mean smollm2\?\)"),
        ("{}", {"dtype": "float99"}, "dtype .*'float99'"),
        ("{}", {"dtype": "nn"}, "dtype .*'nn'"),
        ("smollm2", {"dtype": "float16"}, "dtype .*'float16'"),
    ],
)
def test_names_and_settings_that_are_refused(folder, name, settings, word):
    with pytest.raises((OSError, ValueError), match=word):
        load_named(name.format(folder), **settings)


@pytest.mark.parametrize(
    ("file", "left", "message"),
    [
        ("config.json", 0, r"config\.json is missing|files are missing"),
        ("model.safetensors", 0, r"files are missing\. .*model\.safetensors"),
        ("model.safetensors", 500, "cannot load the model .*weights is damaged or incomplete"),
        ("tokenizer.json", 500, "cannot load the tokenizer of .*damaged or incomplete"),
    ],
)
def test_files_that_are_missing_or_damaged(folder, file, left, message):
    content = (folder / file).read_bytes()[:left]
    (folder / file).unlink()
    if left:
        (folder / file).write_bytes(content)
    with pytest.raises((OSError, ValueError), match=message):
        load_named(str(folder))


@pytest.mark.parametrize("left_out", ["config.json", "README.md"])
def test_an_adapter_without_peft(folder, monkeypatch, left_out):
    """Beside a model's own weights, transformers would leave it out in silence."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / left_out).unlink(missing_ok=True)
    monkeypatch.setattr(loading, "is_peft_available", lambda: False)
    with pytest.raises(ValueError, match="pip install peft"):
        load_named(str(folder))


def test_an_adapter_with_a_resized_vocabulary(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    adapted = peft.get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    with warnings.catch_warnings(action="ignore"):
        adapted.save_pretrained(tmp_path / "adapter")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="shapes of this adapter differ from its base") as error:
        load_named(str(tmp_path / "adapter"))
    said = str(error.value)
    for part in ("merge_and_unload", f"[{size + 8}, 32]", f"[{size}, 32]"):
        assert part in said
    assert "\x1b" not in said


def test_notes_are_hidden_and_kept_for_errors(capsys, monkeypatch):
    monkeypatch.setattr(log, "handlers", [lastResort])  # what prints them where nothing is set up
    logger, verbosity = logging.get_logger("transformers.test"), logging.get_verbosity()
    with quiet():
        logger.warning("a note")
        log.warning("a word of ours")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "a word of ours\n"

    @quiet()
    def fails(note: str) -> None:
        logger.warning(note)
        raise RuntimeError("see above.")

    with pytest.raises(ValueError, match=r"see above\. The report:\na reason$"):
        fails("a reason")
    with pytest.raises(RuntimeError, match=r"^see above\.$"):
        fails("")
    assert capsys.readouterr().err == ""
    assert logging.get_verbosity() == verbosity
