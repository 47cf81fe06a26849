"""What the doctor says of a model."""

import json

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.model import attention_of
from lm_polygraph_asmi.scoring import doctor
from tests.scoring.test_result import printed

ALL_WAYS = {f"{how}, {scope}" for how in ("sdpa", "eager") for scope in ("all", "response")}


def asked(*options):
    return CliRunner().invoke(main, ["doctor", *map(str, options)])


def test_a_model_is_described_checked_and_timed(tiny):
    done = asked("--model", tiny, "--max-new-tokens", 3, "--json")
    content = json.loads(done.stdout)
    found = {check["check"]: check["text"] for check in content["checks"]}
    expected = {
        "layers": "model.layers (4)",
        "heads": "4 a layer, in 4 of 4 layers",
        "output projection of the heads": "self_attn.o_proj",
        "lm head": "lm_head",
    }
    assert found.items() >= expected.items()
    assert {c["check"] for c in content["checks"] if c["state"] == "ok"} == ALL_WAYS
    assert ("packed" in found["sdpa, response"], done.exit_code, content["works"]) == (
        True,
        0,
        True,
    )
    assert " s for 3 tokens after " in found["sdpa, all"]


@pytest.mark.parametrize(
    ("states", "works"),
    [(["ok"], True), (["slower", "unsupported", "warning"], True), (["ok", "problem"], False),
     (["found", "unsupported", "warning"], False)],
)  # fmt: skip
def test_when_a_model_works(states, works):
    diagnosis = doctor.ModelDiagnosis(
        "tiny", [{"check": state, "state": state, "text": f"[{state}]"} for state in states]
    )
    assert diagnosis.to_dict()["works"] == works
    assert [text for text in ("tiny", f"[{states[-1]}]") if text not in printed(diagnosis)] == []


def test_what_is_not_well(model, tokenizer, monkeypatch):
    """Releases that no test ran on, an attention that it has not, slow passes, wrong numbers; the
    model is left as it was."""
    plain = doctor.Scorer.score

    def score(self, *args):
        if self.config.attention == "eager":
            raise RuntimeError("self-check failed")
        return plain(self, *args)

    monkeypatch.setattr(doctor, "untested_releases", lambda: ["torch 9"])
    monkeypatch.setattr(doctor, "MASKABLE", ("sdpa", "eager", "none"))
    monkeypatch.setattr(doctor, "passes_in_use", lambda *_: ["full"])
    monkeypatch.setattr(doctor.Scorer, "score", score)
    before = attention_of(model), model.training
    diagnosis = doctor.diagnose_model("tiny", model, tokenizer, ASMIConfig(max_new_tokens=3))
    found = {check["check"]: check["state"] for check in diagnosis.checks}
    expected = {"torch 9": "warning", "none": "unsupported"}
    expected |= {way: "slower" if "sdpa" in way else "problem" for way in ALL_WAYS}
    assert found.items() >= expected.items()
    assert (attention_of(model), model.training) == before


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--model {tiny} --structure projection=self_attn.q_proj", 1, "q_proj"),
        ("--model none", 1, "none"),
        ("", 2, "expected --config-name or --model"),
        ("--config-name asmi_demo --model smollm2", 2, "expected --config-name or --model"),
        ("--model smollm2 a=1", 2, "only --config-name takes --config-dir, --no-run and overrides"),
        (
            "--config-name asmi_demo --depth 0.7 --dtype float32",
            2,
            "only --model takes depth, dtype",
        ),
    ],
)
def test_a_model_or_options_that_are_refused(tiny, options, status, message):
    found = asked(*options.format(tiny=tiny).split())
    assert (found.exit_code, message in " ".join(found.output.split())) == (status, True)
