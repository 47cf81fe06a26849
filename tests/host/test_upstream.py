"""What LM-Polygraph 0.7 should do and does not: the tests of docs/reference/lm-polygraph.md.

Each asserts what is right, and fails with LM-Polygraph as it is. When one passes, a release has
mended its point: its note and its remedy can leave.
"""

import numpy as np
import pytest
import torch
import transformers
from lm_polygraph.generation_metrics import RougeMetric
from lm_polygraph.stat_calculators import GreedyProbsCalculator, SamplingGenerationCalculator
from lm_polygraph.utils.deberta import Deberta
from lm_polygraph.utils.manager import _delete_nans
from transformers import GenerationConfig, StopStringCriteria

from tests.pages import DOCS
from tests.tiny_lm import whitebox

FIRST, SECOND = "Who built the ferry?", "Where do the blue kites start? The answer is in"
fails = pytest.mark.xfail(raises=AssertionError, strict=True)


def greedy(model, *prompts, seed=0):
    """LM-Polygraph's greedy answers, and what it computes of them."""
    torch.manual_seed(seed)
    return GreedyProbsCalculator(output_attentions=False)({}, list(prompts), model, 8)


def sampled(model, prompt):
    return SamplingGenerationCalculator(1)({}, [prompt], model, 8)["sample_tokens"]


@pytest.mark.skipif(transformers.__version__ < "5", reason="encodes pairs as trained")
@fails
def test_note_1_pairs_have_one_separator(stand_ins):
    nli = Deberta(str(stand_ins.nli), device="cpu")
    nli.setup()
    tokenizer = nli.deberta_tokenizer
    ids = tokenizer(FIRST, SECOND)["input_ids"]
    assert ids.count(tokenizer.sep_token_id) == 2  # one between the texts, one at the end


@fails
def test_note_2_greedy_answers_are_not_sampled():
    model = whitebox()
    model.generation_parameters.do_sample = True  # as of a generation_config.json
    first, second = (greedy(model, FIRST, seed=seed)["greedy_tokens"] for seed in (0, 1))
    assert first == second


@fails
def test_note_3_a_shipped_constraint_changes_no_answer():
    model = whitebox()
    before = greedy(model, FIRST)["greedy_tokens"]
    model.model.generation_config = GenerationConfig(bad_words_ids=[[before[0][0]]])
    assert greedy(model, FIRST)["greedy_tokens"] == before


@fails
def test_note_4_an_answer_does_not_depend_on_its_batch():
    (alone,) = greedy(whitebox(), FIRST)["greedy_texts"]
    stops = [alone[2]]
    (expected,) = greedy(whitebox(stop_strings=stops), FIRST)["greedy_tokens"]
    beside = greedy(whitebox(stop_strings=stops), FIRST, SECOND)["greedy_tokens"][0]
    assert beside == expected


@fails
def test_note_5_a_missing_score_is_not_the_most_confident():
    scores, _ = _delete_nans([np.nan, 0.1, 0.2], [0.0, 1.0, 1.0])
    assert scores.argmin() != 0


@fails
def test_note_6_likelihoods_are_those_of_the_model():
    model = whitebox()
    end = model.tokenizer.eos_token_id
    statistics = greedy(model, FIRST)
    prompt = model.tokenize([FIRST])["input_ids"]
    with torch.no_grad():
        likelihoods = model.model(prompt).logits[0, -1].log_softmax(-1)
    assert likelihoods[end] > -torch.inf
    assert statistics["greedy_log_likelihoods"][0][0] == pytest.approx(
        likelihoods[statistics["greedy_tokens"][0][0]].item(), abs=1e-5
    )


@fails
def test_note_7_the_vocabulary_is_read_once(monkeypatch):
    built, build = [], StopStringCriteria.__init__

    def counted(self, *arguments, **options):
        built.append(self)
        build(self, *arguments, **options)

    monkeypatch.setattr(StopStringCriteria, "__init__", counted)
    model = whitebox(stop_strings=["zz"])
    greedy(model, FIRST)
    greedy(model, SECOND)
    assert len(built) == 1


@fails
def test_note_8_other_letters_make_another_word():
    other = {"greedy_texts": ["Huệ"]}  # a lily
    assert RougeMetric("rougeL")(other, ["Huế"])[0] < 1  # a city


@fails
def test_note_9_samples_do_not_depend_on_the_question_before():
    model = whitebox()
    torch.manual_seed(0)
    alone = sampled(model, SECOND)
    torch.manual_seed(0)
    sampled(model, FIRST)
    assert sampled(model, SECOND) == alone


def test_each_note_has_its_test():
    notes = (DOCS / "reference/lm-polygraph.md").read_text().split("\n## ")[1:]
    numbered = [note for note in notes if note[0].isdigit()]
    named = [name for name in globals() if name.startswith("test_note_")]
    assert [note.partition(".")[0] for note in numbered] == [name.split("_")[2] for name in named]
