"""Stop strings prepared once: the answers of LM-Polygraph's own model, in less time."""

import pytest
import torch
from transformers import StoppingCriteria, StopStringCriteria

from lm_polygraph_asmi.host.whitebox import StopsOnceModel
from tests import tiny_lm

PROMPTS = ["Who built the ferry?", "Where do the blue kites start? The answer is in"]


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
    """LM-Polygraph's model and the one that prepares stop strings once, of the same weights."""
    host = tiny_lm.whitebox(stop_strings=stops)
    parameters = host.generation_parameters
    return host, StopsOnceModel(host.model, host.tokenizer, "tiny", "CausalLM", parameters)


def generated(model, texts, **options):
    batch = model.tokenize(texts)
    torch.manual_seed(0)
    out = model.generate(
        **batch, max_new_tokens=12, output_scores=True, return_dict_in_generate=True, **options
    )
    return out.sequences, torch.stack(out.scores)


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
    host, prepared = models(stops)
    for seed_text in (texts, texts[::-1]):
        expected, logs = generated(host, seed_text, do_sample=sampled)
        sequences, own_logs = generated(prepared, seed_text, do_sample=sampled)
        torch.testing.assert_close(sequences, expected, rtol=0, atol=0)
        torch.testing.assert_close(own_logs, logs, rtol=0, atol=0)
    assert len(criteria) == (3 if stops else 0)  # two of the host, one of ours


def test_stops_end_an_answer_early():
    """Else the comparison above would compare answers of full length."""
    lengths = {len(generated(models(stops)[1], PROMPTS[:1])[0][0]) for stops in (["e", "i"], None)}
    assert len(lengths) == 2


def test_one_criterion_for_each_list_and_tokenizer(criteria):
    _, model = models(["e"])
    for options in ({}, {}, {"stop_strings": ["i", "e"]}, {"stop_strings": None}, {}):
        generated(model, PROMPTS, **options)
    assert criteria == [("e",), ("i", "e")]
    model.tokenizer = tiny_lm.tokenizer(pad_is_eos=True)
    for _ in range(2):
        generated(model, PROMPTS)
    assert criteria == [("e",), ("i", "e"), ("e",)]


def test_other_criteria_count_too():
    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 12)

    host, prepared = models(["zz"])
    given = {"stopping_criteria": [After()]}
    sequences, _ = generated(prepared, PROMPTS[:1], **given)
    assert sequences.shape[1] == 12
    assert len(given["stopping_criteria"]) == 1
    torch.testing.assert_close(sequences, generated(host, PROMPTS[:1], **given)[0])
