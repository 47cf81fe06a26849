"""Models that are loaded by name, and what is said of files that do not fit."""

import shutil
import warnings
from logging import lastResort

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.host.loading import load_named, log, quiet
from tests import tiny_lm


def test_a_name_simply_loads(tmp_path, capfd):
    folder = str(tiny_lm.save(tmp_path / "tiny"))
    capfd.readouterr()
    scorer = Scorer(folder, method="asmi", max_new_tokens=2)
    found = scorer.score("Who?", " Brask")
    assert found.model == folder
    assert capfd.readouterr() == ("", "")  # no bars, no notes of other libraries
    assert (scorer.model.dtype, scorer.model.training) == (torch.float32, False)
    seen = load_named.cache_info().misses
    assert float(Scorer(folder, method="asmi").score("Who?", " Brask")) == float(found)
    assert load_named.cache_info().misses == seen  # a notebook calls again and again
    assert Scorer(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    for dtype in ("float99", "nn"):
        with pytest.raises(ValueError, match=f"expected dtype auto or a torch dtype.*'{dtype}'"):
            Scorer(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("file", "length", "message"),
    [
        ("", 0, "the folder does not exist"),
        ("config.json", 0, r"config\.json is missing|the folder is incomplete"),
        ("model.safetensors", 0, r"the folder is incomplete\. .*model\.safetensors"),
        ("model.safetensors", 500, "cannot load the model .*weights is damaged or incomplete"),
        ("tokenizer.json", 500, "cannot load the tokenizer of .*damaged or incomplete"),
    ],
)
def test_files_that_are_missing_or_damaged(tmp_path, file, length, message):
    """`length`: bytes that are left of a file."""
    folder = tiny_lm.save(tmp_path / "tiny")
    damaged = folder / file
    content = damaged.read_bytes()[:length] if file else b""
    shutil.rmtree(folder) if not file else damaged.unlink()
    if content:
        damaged.write_bytes(content)
    with pytest.raises((OSError, ValueError), match=message):
        load_named(str(folder))


def test_an_adapter_with_a_resized_vocabulary(tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_lm.save(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    settings = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    adapted = peft.get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(tmp_path / "adapter")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="other shapes than its base model") as error:
        load_named(str(tmp_path / "adapter"))
    assert "merge_and_unload" in str(error.value)
    sizes = model.config.vocab_size, model.config.vocab_size - 8
    assert f"[{sizes[0]}, {model.config.hidden_size}]" in str(error.value)
    assert f"[{sizes[1]}, {model.config.hidden_size}]" in str(error.value)
    assert "\x1b" not in str(error.value)


def test_notes_are_hidden_and_kept_for_errors(capsys):
    logger, verbosity = logging.get_logger("transformers.test"), logging.get_verbosity()
    with quiet():
        logger.warning("a note")

    def fails(note: str) -> None:
        with quiet():
            logger.warning(note)
            raise RuntimeError("see above.")

    with pytest.raises(ValueError, match=r"see above\. The report:\na reason"):
        fails("a reason")
    with pytest.raises(RuntimeError, match=r"^see above\.$"):
        fails("")
    assert capsys.readouterr().err == ""
    assert logging.get_verbosity() == verbosity


def test_own_warnings_are_logged_after_the_block(capsys, monkeypatch):
    monkeypatch.setattr(log, "handlers", [lastResort])  # what prints them where nothing is set up
    with quiet():
        log.warning("a word")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "a word\n"
