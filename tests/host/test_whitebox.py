"""A run's model: the answers of LM-Polygraph's own, in less time."""

from copy import deepcopy
from unittest.mock import create_autospec

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StopStringCriteria

from lm_polygraph_asmi.host import whitebox
from tests import tiny_lm
from tests.host.test_generation import SPECIAL

PROMPTS = ["Who built the ferry?", "Where do the blue kites start? The answer is in"]


def models(stops=None):
    """LM-Polygraph's model, and as a run makes it, with the same weights."""
    host, own = tiny_lm.whitebox(stop_strings=stops), tiny_lm.whitebox()
    for model in (host.model, own.model):
        model.generation_config = GenerationConfig(**SPECIAL)
    parameters = host.generation_parameters
    return host, whitebox.StopsOnceModel(own.model, own.tokenizer, "tiny", "CausalLM", parameters)


def generated(model, texts=PROMPTS, **options):
    torch.manual_seed(0)
    options |= {"max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        out = model.generate(**model.tokenize(texts), **options)
    return out.sequences, torch.stack(out.scores)


class After(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 12)


@pytest.mark.parametrize(
    ("stops", "texts", "options"),
    [
        ("e", PROMPTS, {"do_sample": True}),
        (["zz", "th", "i"], PROMPTS[:1], {"do_sample": True}),
        (["zz", "th", "i"], PROMPTS, {}),
        (None, PROMPTS, {"do_sample": True}),
        (["zz"], PROMPTS[:1], {"stopping_criteria": [After()]}),
    ],
)
def test_answers_are_those_of_the_host(stops, texts, options):
    host, ours = models(stops)
    for ordered in (texts, texts[::-1]):  # the host adds its criterion to the list
        found, expected = (generated(m, ordered, **deepcopy(options)) for m in (ours, host))
        assert all(map(torch.equal, found, expected))
    assert (len(expected[1]) < 12) == bool(stops)


def test_one_criterion_for_each_list_and_tokenizer(monkeypatch):
    """Building one reads the vocabulary."""
    _, model = models(["e"])
    whitebox._criterion.cache_clear()
    build = create_autospec(StopStringCriteria.__init__, side_effect=StopStringCriteria.__init__)
    monkeypatch.setattr(StopStringCriteria, "__init__", build)
    for options in ({}, {}, {"stop_strings": ["i", "e"]}, {"stop_strings": None}, {}):
        generated(model, **options)
    model.tokenizer = tiny_lm.tokenizer(pad_is_eos=True)
    for _ in range(2):
        generated(model)
    assert [call.args[2] for call in build.call_args_list] == [["e"], ["i", "e"], ["e"]]
