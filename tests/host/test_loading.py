"""What loading reports of weights that do not fit."""

import warnings
from logging import lastResort

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lm_polygraph_asmi.host.loading import load_named, log, quiet
from tests import tiny_lm


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
