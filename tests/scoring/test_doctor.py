"""What the doctor says of a model."""

import json

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.model.session import attention_of
from lm_polygraph_asmi.scoring import doctor
from tests import tiny_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"))


def asked(folder, *options):
    return CliRunner().invoke(
        main, ["doctor", "--model", str(folder), "--max-new-tokens", "3", *options]
    )


def test_a_model_is_described_checked_and_timed(folder):
    result = asked(folder, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    found = {check["check"]: check["text"] for check in told["checks"]}
    layers = config.num_hidden_layers
    assert found["layers"] == f"model.layers ({layers})"
    heads = config.num_attention_heads
    assert found["heads"] == f"{heads} a layer, in {layers} of {layers} layers"
    assert found["output projection of the heads"] == "self_attn.o_proj"
    assert found["lm head"] == "lm_head"
    states = {check["check"]: check["state"] for check in told["checks"]}
    for attention in ("sdpa", "eager"):
        for scope in ("all", "response"):
            assert states[f"{attention}, {scope}"] == "ok"


def test_tables_for_people(folder):
    result = asked(folder)
    assert result.exit_code == 0, result.output
    for word in ("self_attn.o_proj", "suffix", "packed"):
        assert word in result.output


def test_a_model_that_is_refused_fails(folder):
    result = asked(folder, "--structure", "projection=self_attn.q_proj", "--json")
    assert result.exit_code == 1
    (check,) = [c for c in json.loads(result.stdout)["checks"] if c["state"] == "problem"]
    assert check["check"] == "structure"
    assert "layer 0" in check["text"]
    assert asked(folder / "nowhere").exit_code == 1


def test_a_failed_self_check_fails(folder, monkeypatch):
    """One of both attentions gives other numbers when masked."""
    plain = doctor.Scorer.score

    def score(self, *args):
        if self.config.attention == "eager":
            raise RuntimeError("self-check failed")
        return plain(self, *args)

    monkeypatch.setattr(doctor.Scorer, "score", score)
    result = asked(folder, "--json")
    assert result.exit_code == 1
    states = {c["check"]: c["state"] for c in json.loads(result.stdout)["checks"]}
    assert states["eager, all"] == states["eager, response"] == "problem"
    assert states["sdpa, all"] == "ok"


def test_the_model_is_left_as_it_was():
    model = tiny_lm.whitebox("llama")
    before = attention_of(model.model), model.model.training
    short = ASMIConfig(max_new_tokens=3)
    assert doctor.diagnose_model("tiny", model.model, model.tokenizer, short).works
    assert (attention_of(model.model), model.model.training) == before


@pytest.mark.parametrize("options", [[], ["--config-name", "asmi_demo", "--model", "smollm2"]])
def test_a_run_or_a_model(options):
    result = CliRunner().invoke(main, ["doctor", *options])
    assert result.exit_code == 2
    assert "expected --config-name or --model" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model smollm2 --config-dir .", "only --config-name takes --config-dir, --no-run and"),
        ("--model smollm2 a=1", "only --config-name takes --config-dir, --no-run and overrides"),
        ("--config-name asmi_demo --depth 0.7 --dtype float32", "only --model takes depth, dtype"),
    ],
)
def test_options_of_the_other_mode_are_named(options, message):
    result = CliRunner().invoke(main, ["doctor", *options.split()])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
