"""What is kept on disk as it is made: found again, never trusted when damaged, never fatal."""

import errno
import sqlite3
from unittest.mock import Mock

import diskcache
import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

from lm_polygraph_asmi.core import identity
from lm_polygraph_asmi.core.identity import model_key, tokenizer_key
from lm_polygraph_asmi.core.model import plain_model
from lm_polygraph_asmi.results import cache
from lm_polygraph_asmi.results.cache import ResultCache
from tests.families import tiny_model
from tests.tiny_lm import tokenizer

KEY = {"revision": "tiny", "input_ids": [1, 2, 3], "depth": 0.6}
RESULT = {"asmi_mi": np.array([0.1, 0.2]), "asmi_settings": {"layer": 2}}


def same(found) -> bool:
    return repr(found) == repr(RESULT)


def test_what_was_put_is_found_by_another_process_start(tmp_path, monkeypatch):
    for folder, key, found in (
        (tmp_path, KEY, True),
        (tmp_path, KEY | {"revision": None}, False),  # a model that cannot be identified
        (None, KEY, False),
    ):
        ResultCache(folder).put(key, RESULT)
        assert same(ResultCache(folder).get(dict(reversed(key.items())))) == found
    assert ResultCache(tmp_path).get(KEY | {"depth": 0.7}) is None
    for package in ("lm_polygraph_asmi", "lm-polygraph", "torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setitem(cache.RELEASES, package, f"not {cache.RELEASES[package]}")
            assert ResultCache(tmp_path).get(KEY) is None


def test_nothing_is_ever_thrown_away(tmp_path):
    """Also of a folder whose limit is passed."""
    with diskcache.Cache(str(tmp_path), size_limit=1000):
        result_cache = ResultCache(tmp_path)
    for number in range(20):
        result_cache.put(KEY | {"number": number}, np.zeros(1000))
    assert all(result_cache.get(KEY | {"number": number}) is not None for number in range(20))


def another_number(entry: bytes) -> bytes:
    """Which can be read all the same."""
    return entry.replace(np.float64(0.1).tobytes(), np.float64(0.3).tobytes())


@pytest.mark.parametrize(
    "damage",
    [another_number, lambda b: b[:-1] + b"x", lambda b: b[:40], lambda _: b"", lambda _: 3.0],
)
def test_a_damaged_entry_is_computed_again(tmp_path, caplog, damage):
    ResultCache(tmp_path).put(KEY, RESULT)
    with diskcache.Cache(str(tmp_path)) as entries:
        (digest,) = entries
        entries[digest] = damage(entries[digest])
    assert (ResultCache(tmp_path).get(KEY), "is damaged" in caplog.text) == (None, True)
    ResultCache(tmp_path).put(KEY, RESULT)
    assert same(ResultCache(tmp_path).get(KEY))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), sqlite3.OperationalError("full")])
def test_a_full_disk_does_not_stop_the_run(tmp_path, caplog, monkeypatch, error):
    result_cache = ResultCache(tmp_path)
    result_cache.put(KEY, RESULT)
    monkeypatch.setattr(diskcache.Cache, "set", Mock(side_effect=error))
    for depth in (0.7, 0.8):
        result_cache.put(KEY | {"depth": depth}, RESULT)
    assert caplog.text.count("The run continues") == 1
    assert same(result_cache.get(KEY))  # what was kept before is still there


def test_a_folder_that_cannot_be_made_and_a_damaged_database(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "cache.db").write_bytes(b"not a database" * 100)
    for number, folder in enumerate((tmp_path / "file" / "result_cache", tmp_path), 1):
        result_cache = ResultCache(folder)
        result_cache.put(KEY, RESULT)
        assert result_cache.get(KEY) is None
        assert caplog.text.count("cannot be opened") == number


def test_model_key_tells_models_apart_not_where_or_how_they_were_loaded(monkeypatch, tmp_path):
    key = model_key(tiny_model("llama"))
    monkeypatch.setattr(identity, "_CHUNK", 700)  # as of a large tensor
    monkeypatch.setattr("transformers.configuration_utils.__version__", "4.57.0")
    assert model_key(tiny_model("llama")) == key
    written = tiny_model("llama")
    written.save_pretrained(tmp_path)  # which also completes its configuration
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert model_key(loaded) == model_key(written)
    head, rows, buffer = edited = [tiny_model("llama") for _ in range(3)]
    with torch.no_grad():
        head.model.layers[3].self_attn.o_proj.weight[:, 8:16].zero_()
        rows.lm_head.weight[3:5].copy_(rows.lm_head.weight[[4, 3]])
        buffer.model.layers[0].register_buffer("scales", torch.ones(3))
    others = [
        tiny_model("llama"), tiny_model("llama-tied"), tiny_model("llama").to(torch.bfloat16),
        tiny_model("llama", rope_theta=99.0), *edited,
    ]  # fmt: skip
    assert len({model_key(other)["revision"] for other in others}) == len(others)


def test_the_active_adapter_is_part_of_a_model():
    peft = pytest.importorskip("peft")
    own = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama"), own, "a")
    adapted.add_adapter("b", own)
    keys = [adapted.set_adapter(name) or model_key(plain_model(adapted)) for name in "aba"]
    assert keys[0] == keys[2] != keys[1]


def test_weights_whose_bits_cannot_be_read_are_named():
    model = tiny_model("llama")
    model.model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"weights model\.odd .*asmi.result_cache"):
        model_key(model)


def test_a_hooked_model_has_no_key_and_offloaded_weights_count(caplog):
    own, other, hooked = (tiny_model("llama") for _ in range(3))
    other.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    keys = [model_key(cpu_offload(m, torch.device("cpu")))["revision"] for m in (own, other)]
    assert keys[0] != keys[1]
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    assert (model_key(hooked)["revision"], "forward hooks" in caplog.text) == (None, True)


def test_tokenizer_key_tells_end_tokens_apart():
    key = tokenizer_key(tokenizer())
    tokenizer()(["a text", "a longer text"], padding=True, truncation=True)
    assert tokenizer_key(tokenizer()) == key  # what a call has set is not the tokenizer's
    assert tokenizer_key(tokenizer()) != tokenizer_key(tokenizer(pad_is_eos=True))
