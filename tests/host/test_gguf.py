"""A GGUF file that was read once is read from the cache, and nothing else changes."""

import logging
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.host import gguf as reading
from lm_polygraph_asmi.host.loading import load_model, load_named, load_tokenizer
from lm_polygraph_asmi.host.window import Sizes, read_sizes
from lm_polygraph_asmi.results.cache import model_key, tokenizer_key

FILE = "tiny.gguf"
SAVED = ("model-auto", "tokenizer")
saves_tokenizers = pytest.mark.skipif(
    version("transformers").startswith("5.0."),
    reason="transformers 5.0 reads another tokenizer than it saved, so it is never kept",
)


def write_gguf(path: Path, seed: int = 0) -> None:
    """A Llama of two layers and four heads with random weights, in blocks of 8 bits."""
    gguf = pytest.importorskip("gguf")
    words = ["<s>", "</s>", *bytes_to_unicode().values(), "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (len(words) - 2))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator, blocks = np.random.default_rng(seed), gguf.GGMLQuantizationType.Q8_0
    shapes = {"token_embd": (len(words), 32), "output_norm": (32,)}
    for layer in range(2):
        for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32),
                           ("ffn_gate", 32), ("ffn_up", 32), ("ffn_down", 32)):  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = (rows, 32)
        shapes |= {f"blk.{layer}.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        values = generator.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, blocks), raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    write_gguf(tmp_path / "model" / FILE)
    return tmp_path / "model"


def both(folder: Path):
    load_named.cache_clear()
    return load_named(str(folder), FILE)


def saved(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "lm_polygraph_asmi").glob("*"))


def from_file(folder: Path, dtype: str = "auto"):
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token  # as `load_tokenizer` does
    return model, tokenizer


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that are read from a GGUF file, in order."""
    names = []
    for name in ("CONFIG", "TOKENIZER", "MODEL"):
        part = getattr(reading, name)

        def load(path, name=name, part=part, **arguments):
            if "gguf_file" in arguments:
                names.append(name)
            return part.load(path, **arguments)

        for module in ("gguf", "loading", "window"):
            target = f"lm_polygraph_asmi.host.{module}.{name}"
            monkeypatch.setattr(target, part._replace(load=load), raising=False)
    return names


def scores_of(model, tokenizer) -> list[float]:
    result = Scorer(model, tokenizer=tokenizer).score("What is the tooth?", " that")
    return [result.score, result.msp, *(token.mi for token in result.tokens)]


@saves_tokenizers
def test_the_second_reading_is_from_the_cache_and_equal(folder, files_read):
    expected_model, expected_tokenizer = from_file(folder)
    scores = [scores_of(expected_model, expected_tokenizer)]
    for number in (1, 2):
        model, tokenizer = both(folder)
        assert files_read == ["MODEL", "TOKENIZER"]
        assert len(saved(folder)) == 2, number
        assert model_key(model) == model_key(expected_model)
        assert tokenizer_key(tokenizer) == tokenizer_key(expected_tokenizer)
        assert tokenizer("the tooth")["input_ids"] == expected_tokenizer("the tooth")["input_ids"]
        assert model.config.name_or_path == model.name_or_path == str(folder)
        assert tokenizer.name_or_path == str(folder)
        assert model.dtype == expected_model.dtype
        if number == 2:
            assert all(weights.data_ptr() % 64 == 0 for weights in model.parameters())
        before = dict(expected_model.named_parameters())
        assert all(torch.equal(w, before[name]) for name, w in model.named_parameters())
        assert tokenizer.chat_template == expected_tokenizer.chat_template
        scores.append(scores_of(model, tokenizer))
    assert scores[0] == scores[1] == scores[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_precision_is_saved_as_it_is_loaded(folder, files_read, dtype):
    expected, _ = from_file(folder, dtype)
    for _ in range(2):
        model = load_model(str(folder), dtype, None, gguf_file=FILE)
        assert model_key(model) == model_key(expected)
    assert files_read == ["MODEL"]
    load_model(str(folder), "float16", None, gguf_file=FILE)
    assert files_read == ["MODEL", "MODEL"]


def test_the_configuration_is_read_once(folder, files_read):
    node = {"path": str(folder), "load_model_args": {"gguf_file": FILE}}
    for number in (1, 2):  # a node that differs is not in the cache of this process
        assert read_sizes(node | {"number": number}) == Sizes(2, 4, 64)
    assert files_read == ["CONFIG"]


@saves_tokenizers
def test_another_file_and_other_settings_beside_it_are_read_again(folder, files_read):
    load_tokenizer(str(folder), gguf_file=FILE)
    write_gguf(folder / FILE, seed=1)
    load_tokenizer(str(folder), gguf_file=FILE)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 9}')
    tokenizer = load_tokenizer(str(folder), gguf_file=FILE)
    assert tokenizer.model_max_length == from_file(folder)[1].model_max_length
    assert files_read == ["TOKENIZER"] * 3
    assert len(saved(folder)) == 3


def test_other_arguments_are_passed_on(folder):
    load_tokenizer(str(folder), gguf_file=FILE, revision="main")
    assert saved(folder) == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_cache_that_cannot_be_written_is_logged(folder, caplog):
    (folder.parent / "cache").write_text("a file")
    model, _ = both(folder)
    assert model_key(model) == model_key(from_file(folder)[0])
    logged = warnings_of(caplog)
    assert len(logged) == 2
    assert all("is read again each time" in text and "XDG_CACHE_HOME" in text for text in logged)


def test_a_full_disk_leaves_nothing(folder, caplog, monkeypatch):
    def full(_, path):
        (path / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lm_polygraph_asmi.host.loading.MODEL", reading.MODEL._replace(save=full))
    load_model(str(folder), device_map=None, gguf_file=FILE)
    assert saved(folder) == []
    assert "No space left" in "".join(warnings_of(caplog))


def test_what_differs_from_the_file_is_not_kept(folder, caplog, monkeypatch):
    def other(tokenizer, path):
        tokenizer.add_tokens(["mill"])
        tokenizer.save_pretrained(path)

    part = reading.TOKENIZER._replace(save=lambda _, path: other(from_file(folder)[1], path))
    monkeypatch.setattr("lm_polygraph_asmi.host.loading.TOKENIZER", part)
    tokenizer = load_tokenizer(str(folder), gguf_file=FILE)
    assert "mill" not in tokenizer.get_vocab()
    assert saved(folder) == []
    assert "differs" in "".join(warnings_of(caplog))


@pytest.mark.parametrize("changed", ["weights", "setting", "buffer"])
def test_models_are_compared_bit_by_bit(folder, changed):
    first, second = (from_file(folder)[0] for _ in range(2))
    assert reading._model_content(first) == reading._model_content(second)
    with torch.no_grad():
        if changed == "weights":
            second.lm_head.weight[3, 4].mul_(1 + 2**-22)
        elif changed == "setting":
            second.model.layers[1].self_attn.scaling *= 2
        else:
            second.model.rotary_emb.inv_freq[1] *= 1 + 2**-22
    assert reading._model_content(first) != reading._model_content(second)


@saves_tokenizers
def test_a_process_that_saves_is_not_disturbed(folder, caplog, files_read):
    load_tokenizer(str(folder), gguf_file=FILE)
    (complete,) = saved(folder)
    away = complete.rename(folder / "away")
    with locked(f"{complete}.lock", remove=True):
        load_tokenizer(str(folder), gguf_file=FILE)
        assert not complete.exists()
        away.rename(complete)  # the other process has ended
    load_tokenizer(str(folder), gguf_file=FILE)
    assert files_read == ["TOKENIZER"] * 2
    assert warnings_of(caplog) == []


@saves_tokenizers
def test_the_rest_of_a_killed_process_is_replaced(folder):
    load_tokenizer(str(folder), gguf_file=FILE)
    (complete,) = saved(folder)
    partial = complete.rename(f"{complete}.partial")
    (partial / "tokenizer.json").write_text("{")
    load_tokenizer(str(folder), gguf_file=FILE)
    assert saved(folder) == [complete]
    assert load_tokenizer(str(folder), gguf_file=FILE)("the")["input_ids"]


@saves_tokenizers
def test_a_damaged_folder_is_named(folder, caplog):
    model, _ = both(folder)
    damaged = next(path for path in saved(folder) if path.name.endswith("model-auto"))
    (damaged / "model.safetensors").write_bytes(b"half")
    again, _ = both(folder)
    assert model_key(again) == model_key(model)
    (text,) = warnings_of(caplog)
    assert str(damaged) in text
    assert "remove it" in text


@saves_tokenizers
def test_a_large_model_is_not_saved(folder, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST", 1000)
    both(folder)
    assert [path.name.split("-", 2)[2] for path in saved(folder)] == ["tokenizer"]
