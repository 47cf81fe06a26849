"""What a model ships for generation: left out by a run as by a score, or refused by name."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, StoppingCriteria, StopStringCriteria

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.host.generation import plain_generation, shipped_settings
from lm_polygraph_asmi.host.whitebox import StopsOnceModel
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.checks import CHECKS, Plan
from lm_polygraph_asmi.stat_calculators.masked_heads import load_stat_calculator
from tests import tiny_lm
from tests.composing import composed
from tests.polygraph import polygraph_eval_here

PROMPTS = ["Who built the ferry?", "Where do the blue kites start? The answer is in"]
SPECIAL = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
CHANGING = {
    "bad_words_ids": [[token] for token in range(200, 340)],
    "begin_suppress_tokens": list(range(200, 340)),
    "no_repeat_ngram_size": 1,
    "sequence_bias": [[[200], 9.0]],
    "guidance_scale": 3.0,
    "forced_eos_token_id": 9,
    "min_length": 30,
    "watermarking_config": {"bias": 9.0},
    "renormalize_logits": True,
    "penalty_alpha": 0.5,
    "min_p": 0.5,
    "typical_p": 0.1,
    "max_time": 1e-9,
    "some_future_setting": 3,
}


def shipping(**shipped):
    model = tiny_lm.whitebox()
    model.model.generation_config = GenerationConfig(**SPECIAL, **shipped)
    return model


def prepared(host):
    """LM-Polygraph's model as a run makes it, which prepares stop strings once; same weights."""
    parameters = host.generation_parameters
    return StopsOnceModel(host.model, host.tokenizer, "tiny", "CausalLM", parameters)


def generated(model, texts=PROMPTS[:1], max_new_tokens=8, **options):
    batch = model.tokenize(texts)
    torch.manual_seed(0)
    options |= {"output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=max_new_tokens, **options)
    return out.sequences, torch.stack(out.scores)


@pytest.mark.parametrize("name", ["bad_words_ids", "no_repeat_ngram_size", "sequence_bias"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_run_sets_what_a_model_ships(name, sampled):
    plain = generated(prepared(shipping()), do_sample=sampled)
    model = shipping(**{name: CHANGING[name]})
    assert not torch.equal(generated(model, do_sample=sampled)[0], plain[0])
    for found, expected in zip(generated(prepared(model), do_sample=sampled), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nothing_but_special_tokens_is_kept():
    """Of every field that the installed release has, whatever it does."""
    config = GenerationConfig(**SPECIAL)
    for name in set(vars(config)) - {*SPECIAL, "transformers_version", "_from_model_config"}:
        setattr(config, name, "shipped")
    kept = plain_generation(config)
    assert kept.to_json_string() == GenerationConfig(**SPECIAL).to_json_string()


def test_a_manager_built_by_hand_refuses_them_by_name_and_nothing_else():
    for name, value in CHANGING.items():
        model = shipping(**{name: value})
        with pytest.raises(ValueError, match=f"generation config of the model sets {name}"):
            load_stat_calculator({}, SimpleNamespace(model=model))
    neutral = {"use_cache": False, "max_length": 4096, "cache_implementation": "hybrid"}
    neutral |= {"no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": []}
    neutral |= {"renormalize_logits": False, "guidance_scale": 1.0, "num_assistant_tokens": 5}
    assert shipped_settings(GenerationConfig(**SPECIAL, **neutral)) == {}
    model = shipping(temperature=0.6, top_p=0.9, do_sample=True, repetition_penalty=1.1)
    load_stat_calculator({}, SimpleNamespace(model=model))  # set by LM-Polygraph's parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


def ship(folder, **shipped):
    content = GenerationConfig(**SPECIAL).to_dict() | shipped
    (folder / "generation_config.json").write_text(json.dumps(content))


def findings(folder, *overrides):
    config = composed("asmi_coqa", "model=asmi_local", f"model.path={folder}", *overrides)
    return list(CHECKS["generation"](Plan(config)))


def test_before_the_model_is_loaded(folder):
    ship(folder, **CHANGING)
    (finding,) = findings(folder)
    assert not finding.fatal
    assert all(name in finding.text for name in CHANGING)
    ship(folder)
    assert findings(folder) == []
    ship(folder, do_sample=True, top_k=7, stop_strings=["x"], num_beams=3, repetition_penalty=1.5)
    assert findings(folder) == []  # the shipped config sets them
    for name, value in (("do_sample", "True"), ("top_k", "7"), ("stop_strings", "['x']")):
        (finding,) = findings(folder, f"generation_params.{name}=null")
        assert finding.fatal
        assert finding.text.startswith(f"generation_params.{name} is not set")
        assert value in finding.text


def test_settings_in_config_json_as_older_models_have_them(tmp_path):
    tiny_lm.save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"no_repeat_ngram_size": 2, "repetition_penalty": 1.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (finding,) = findings(tmp_path)
    assert "no_repeat_ngram_size, as in a score" in finding.text


def test_parameters_that_lm_polygraph_does_not_read(folder):
    assert list(CHECKS["generation"](Plan(composed("asmi_demo")))) == []  # a GGUF file
    ship(folder)
    (finding,) = findings(folder, "+generation_params.no_repeat_ngram_size=3")
    assert finding.fatal
    assert "does not read generation_params.no_repeat_ngram_size" in finding.text


def test_a_run_and_a_score_agree(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ship(folder, bad_words_ids=CHANGING["bad_words_ids"], no_repeat_ngram_size=1)
    Dataset.from_dict({"input": PROMPTS, "output": ["x", "b"]}).save_to_disk(tmp_path / "rows")
    polygraph_eval_here(
        "--config-name", "asmi_offline", "benchmark=asmi_babiqa", "data.source=rows",
        "model=asmi_local", f"model.path={folder}", "estimators=asmi_single_pass",
        "generation_metrics=[{name: RougeMetric, args: [rougeL]}]",
        "max_new_tokens=8", "asmi.result_cache=null", "hydra.run.dir=run",
    )  # fmt: skip
    run = load_run(tmp_path / "run")
    scorer = Scorer(str(folder), stop="\n", max_new_tokens=8)
    for row, prompt in enumerate(run.stats["input_texts"]):
        score = scorer.score(prompt, list(run.stats["greedy_tokens"][row]))
        # LM-Polygraph forbids the end token at the first two positions, which moves the rest.
        assert run.scores["MaximumSequenceProbability"][row] == pytest.approx(score.msp, abs=0.01)
        assert list(scorer.score(prompt).ids) == run.stats["greedy_tokens"][row]


# Stop strings prepared once: the answers of LM-Polygraph's own model, in less time


@pytest.fixture
def criteria(monkeypatch) -> list[tuple]:
    """The stop strings of each criterion that is built, which reads the vocabulary."""
    built: list[tuple] = []
    build = StopStringCriteria.__init__

    def counted(self, tokenizer, stop_strings):
        built.append(tuple(stop_strings))
        build(self, tokenizer, stop_strings)

    monkeypatch.setattr(StopStringCriteria, "__init__", counted)
    return built


def models(stops):
    host = tiny_lm.whitebox(stop_strings=stops)
    return host, prepared(host)


@pytest.mark.parametrize(
    ("stops", "texts", "sampled"),
    [
        (["e"], PROMPTS[:1], False),
        (["e"], PROMPTS, True),
        (["zz", "th", "i"], PROMPTS[:1], True),
        (["zz", "th", "i"], PROMPTS, False),
        ("\n", PROMPTS, False),
        (None, PROMPTS, True),
    ],
)
def test_answers_are_those_of_the_host(stops, texts, sampled, criteria):
    host, ours = models(stops)
    for seed_text in (texts, texts[::-1]):
        expected, logs = generated(host, seed_text, 12, do_sample=sampled)
        sequences, own_logs = generated(ours, seed_text, 12, do_sample=sampled)
        torch.testing.assert_close(sequences, expected, rtol=0, atol=0)
        torch.testing.assert_close(own_logs, logs, rtol=0, atol=0)
    assert len(criteria) == (3 if stops else 0)  # two of the host, one of ours


def test_stops_end_an_answer_early():
    """Else the comparison above would compare answers of full length."""
    lengths = {
        len(generated(models(stops)[1], max_new_tokens=12)[0][0]) for stops in (["e", "i"], None)
    }
    assert len(lengths) == 2


def test_one_criterion_for_each_list_and_tokenizer(criteria):
    _, model = models(["e"])
    for options in ({}, {}, {"stop_strings": ["i", "e"]}, {"stop_strings": None}, {}):
        generated(model, PROMPTS, 12, **options)
    assert criteria == [("e",), ("i", "e")]
    model.tokenizer = tiny_lm.tokenizer(pad_is_eos=True)
    for _ in range(2):
        generated(model, PROMPTS, 12)
    assert criteria == [("e",), ("i", "e"), ("e",)]


def test_other_criteria_count_too():
    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 12)

    host, ours = models(["zz"])
    given = {"stopping_criteria": [After()]}
    sequences, _ = generated(ours, PROMPTS[:1], 12, **given)
    assert sequences.shape[1] == 12
    assert len(given["stopping_criteria"]) == 1
    torch.testing.assert_close(sequences, generated(host, PROMPTS[:1], 12, **given)[0])
