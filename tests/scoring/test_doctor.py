"""What the doctor says of a model."""

import json

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.model.session import attention_of
from lm_polygraph_asmi.scoring import doctor
from tests.scoring.test_result import printed

SHORT = ASMIConfig(max_new_tokens=3)
ALL_WAYS = {f"{how}, {scope}" for how in ("sdpa", "eager") for scope in ("all", "response")}


def states(diagnosis):
    return {check["check"]: check["state"] for check in diagnosis.checks}


def test_a_model_is_described_checked_and_timed(model, tokenizer):
    before = attention_of(model), model.training
    diagnosis = doctor.diagnose_model("tiny", model, tokenizer, SHORT)
    assert (attention_of(model), model.training) == before
    found = {check["check"]: check["text"] for check in diagnosis.checks}
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    expected = {
        "layers": f"model.layers ({layers})",
        "heads": f"{heads} a layer, in {layers} of {layers} layers",
        "output projection of the heads": "self_attn.o_proj",
        "lm head": "lm_head",
    }
    assert found.items() >= expected.items()
    assert {name for name, state in states(diagnosis).items() if state == "ok"} == ALL_WAYS
    assert "packed" in found["sdpa, response"]
    assert " s for 3 tokens after " in found["sdpa, all"]
    assert all(word in printed(diagnosis) for word in ("tiny", "self_attn.o_proj", "suffix"))


@pytest.mark.parametrize(
    ("states", "works"),
    [(["ok"], True), (["slower", "unsupported", "warning"], True), (["ok", "problem"], False),
     (["found", "unsupported", "warning"], False)],
)  # fmt: skip
def test_when_a_model_works(states, works):
    checks = [{"check": state, "state": state, "text": ""} for state in states]
    assert doctor.ModelDiagnosis("tiny", checks).to_dict()["works"] == works


def test_what_is_not_well(model, tokenizer, monkeypatch):
    """Releases that no test ran on, an attention that it has not, slow passes, wrong numbers."""
    plain = doctor.Scorer.score

    def score(self, *args):
        if self.config.attention == "eager":
            raise RuntimeError("self-check failed")
        return plain(self, *args)

    monkeypatch.setattr(doctor, "untested_releases", lambda: ["torch 9"])
    monkeypatch.setattr(doctor, "MASKABLE", ("sdpa", "eager", "none"))
    monkeypatch.setattr(doctor, "passes_in_use", lambda *_: ["full"])
    monkeypatch.setattr(doctor.Scorer, "score", score)
    found = states(doctor.diagnose_model("tiny", model, tokenizer, SHORT))
    expected = {"torch 9": "warning", "none": "unsupported"}
    expected |= {way: "slower" if "sdpa" in way else "problem" for way in ALL_WAYS}
    assert found.items() >= expected.items()


def asked(*options):
    return CliRunner().invoke(main, ["doctor", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "problems"),
    [([], []), (["--structure", "projection=self_attn.q_proj"], ["structure"])],
)
def test_the_command(tiny, options, problems):
    found = asked("--model", tiny, "--max-new-tokens", 3, "--json", *options)
    content = json.loads(found.stdout)
    assert (found.exit_code, content["works"]) == (len(problems), not problems)
    assert [c["check"] for c in content["checks"] if c["state"] == "problem"] == problems


def test_a_model_that_is_not_there(tmp_path):
    assert asked("--model", tmp_path / "nowhere").exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "expected --config-name or --model"),
        ("--config-name asmi_demo --model smollm2", "expected --config-name or --model"),
        ("--model smollm2 a=1", "only --config-name takes --config-dir, --no-run and overrides"),
        ("--config-name asmi_demo --depth 0.7 --dtype float32", "only --model takes depth, dtype"),
    ],
)
def test_options_of_the_other_mode_are_named(options, message):
    found = asked(*options.split())
    assert (found.exit_code, message in " ".join(found.output.split())) == (2, True)
