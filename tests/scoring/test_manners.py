"""Arguments that are wrong say what to do, and names simply load."""

import re
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from transformers import BertConfig, BertForMaskedLM

from lm_polygraph_asmi import __version__, score
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.host import loading
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm
from tests.scoring.conftest import PROMPT


def test_a_forgotten_tokenizer(model, tokenizer):
    for arguments in ((PROMPT, " Brask"), (PROMPT,)):
        with pytest.raises(ValueError, match=r"expected the model's tokenizer, as in score\("):
            score(model, *arguments)
    with pytest.raises(ValueError, match=r"expected the model's tokenizer, as in score\("):
        Scorer(model, tokenizer=PROMPT)
    with pytest.raises(ValueError, match="expected a prompt as text, or as a list of chat"):
        score(model, tokenizer)


def test_a_name_simply_loads(tmp_path, capfd):
    folder = str(tiny_lm.save(tmp_path / "tiny"))
    capfd.readouterr()
    found = score(folder, PROMPT, " Brask")
    assert found.model == folder
    assert capfd.readouterr() == ("", "")  # no bars, no notes of other libraries
    seen = loading.load_named.cache_info().misses
    again = score(folder, PROMPT, [5])  # a notebook calls again and again
    assert loading.load_named.cache_info().misses == seen
    assert len(again.tokens) == 1
    assert float(Scorer(folder).score(PROMPT, " Brask")) == float(found)
    with pytest.raises(OSError, match="the folder does not exist"):
        score(str(tmp_path / "none"), PROMPT)
    (tmp_path / "empty").mkdir()
    told = (
        r"config\.json is missing or has no model_type|folder is incomplete\. .*model\.safetensors"
    )
    with pytest.raises((ValueError, OSError), match=told):  # the latter: older transformers
        score(str(tmp_path / "empty"), PROMPT)
    shutil.copy(f"{folder}/config.json", tmp_path / "empty")
    with pytest.raises(OSError, match=r"the folder is incomplete\. .*model\.safetensors"):
        score(str(tmp_path / "empty"), PROMPT)
    with pytest.raises(ValueError, match="loads its tokenizer: leave `tokenizer` out"):
        score(folder, PROMPT, tokenizer=tiny_lm.tokenizer())


def test_a_model_that_writes_nothing(tokenizer):
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(TypeError, match="BertForMaskedLM is not among the classes"):
        score(BertForMaskedLM(config).eval(), PROMPT, " Brask", tokenizer=tokenizer)


def test_an_answer_comes_back_as_it_was_given(model, tokenizer):
    for answer in (" Brask", " Brask</s>", [7, 8]):
        found = score(model, PROMPT, answer, tokenizer=tokenizer)
        assert found.answer == answer
        assert found.to_dict()["answer"] == answer
    given = score(model, PROMPT, np.array([7, 8]), tokenizer=tokenizer)
    assert given.to_dict()["answer"] == [7, 8]
    # One of the model's own is the text that would give the same tokens again.
    for settings in ({}, {"stop": tokenizer.decode([given.tokens[0].id])}):
        own = score(model, PROMPT, tokenizer=tokenizer, max_new_tokens=5, **settings)
        assert own.scored_text.startswith(own.answer)


def test_the_version():
    shown = CliRunner().invoke(main, ["--version"])
    assert shown.exit_code == 0
    assert shown.stdout.split()[-1] == __version__


def test_words_are_completed_as_the_help_says():
    shown = CliRunner().invoke(main, ["-h"]).stdout
    (variable,) = re.findall(r"(_\w+_COMPLETE)=bash_source", shown)
    typed = {"COMP_WORDS": "polygraph_asmi sco", "COMP_CWORD": "1", variable: "bash_complete"}
    shown = CliRunner().invoke(main, prog_name="polygraph_asmi", env=typed)
    assert shown.stdout == "plain,score\n"
    typed |= {"COMP_WORDS": "polygraph_asmi decide --calib", "COMP_CWORD": "2"}
    shown = CliRunner().invoke(main, prog_name="polygraph_asmi", env=typed)
    assert shown.stdout == "plain,--calibration\n"


@pytest.mark.parametrize(
    ("file", "message"),
    [("model.safetensors", "cannot load the model .*weights is damaged or incomplete"),
     ("tokenizer.json", "cannot load the tokenizer of .*damaged or incomplete")],
)  # fmt: skip
def test_damaged_files_of_a_model(tmp_path, file, message):
    folder = tiny_lm.save(tmp_path / "tiny")
    damaged = folder / file
    damaged.write_bytes(damaged.read_bytes()[:500])
    with pytest.raises(OSError, match=message):
        Scorer(str(folder))
