"""What reads the text of a benchmark's prompt knows what is written there."""

import re
from pathlib import Path

import pytest

from lm_polygraph_asmi.analysis.clusters import shared_texts
from lm_polygraph_asmi.prompts import PASSAGE_OR_STORY, last_question
from lm_polygraph_asmi.runs.squad import PROMPTS, Question

CONFIGS = Path(__file__).parents[1] / "configs"
QUESTION = Question("a", "Edda Holm built the ferry.\nIt sank.", "Who built it?", "Edda Holm")


def test_the_passage_of_squad_is_read_as_it_is_written():
    prompt = PROMPTS["paper", False](QUESTION)
    assert shared_texts([prompt, prompt]) == [QUESTION.passage] * 2
    assert re.search(PASSAGE_OR_STORY, prompt, re.DOTALL)[1] == QUESTION.passage


@pytest.mark.parametrize("form", PROMPTS)
def test_the_question_is_read_as_it_is_written(form):
    assert last_question(PROMPTS[form](QUESTION)) == QUESTION.question


def test_the_story_of_coqa():
    prompt = "The following are stories.\n\nStory: Ann saw Bo.\n\nQuestion: Who saw?\nAnswer:"
    assert shared_texts([prompt]) == ["Ann saw Bo."]
    assert re.search(PASSAGE_OR_STORY, prompt, re.DOTALL)[1] == "Ann saw Bo."
    assert shared_texts([prompt, PROMPTS["paper", False](QUESTION)]) is None
