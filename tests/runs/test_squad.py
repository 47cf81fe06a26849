"""Questions in SQuAD's format, and the paper's prompts of them."""

import json

import pytest

from lm_polygraph_asmi.runs.squad import DEMO_DATA, Question, prompt_of, questions_of, read_squad

QUESTION = Question("q1", "The mill is red.", "What colour is the mill?", "red")


def write(path, questions: list[Question]):
    paragraphs: dict[str, list] = {}
    for q in questions:
        paragraphs.setdefault(q.passage, []).append(
            {"id": q.id, "question": q.question, "answers": [{"text": q.answer}]}
        )
    layout = [{"context": passage, "qas": qas} for passage, qas in paragraphs.items()]
    path.write_text(json.dumps({"data": [{"paragraphs": layout}]}))
    return path


def test_prompts():
    closed = f"Question: {QUESTION.question}\nAnswer:"
    for question in (QUESTION, QUESTION._replace(passage="{question}")):  # no place to fill
        assert prompt_of("paper", closed_book=False)(question) == (
            "Read the following passage and answer the question.\n"
            f"Passage:\n{question.passage}\n{closed}"
        )
        assert prompt_of("paper", closed_book=True)(question) == closed
    few, few_closed = (prompt_of("demo", closed_book=closed)(QUESTION) for closed in (False, True))
    assert few.endswith(f"Passage: {QUESTION.passage}\n{closed}")
    assert few_closed.endswith(f"\n\n{closed}")
    for text in (few, few_closed):
        assert text.count("\nQuestion: ") == text.count("\nAnswer:") == 5
    assert "assage" not in few_closed
    with pytest.raises(ValueError, match=r"\['demo', 'paper'\]"):
        prompt_of("haiku", closed_book=False)


def test_the_hubs_columns_give_the_questions_of_the_file(tmp_path):
    """Columns as the hub's `squad` has them, answers as a dictionary of lists."""
    questions = [QUESTION, QUESTION._replace(id="q2", passage="A blue mill.", answer="blue")]
    columns = [
        {"id": q.id, "title": "Mills", "context": q.passage, "question": q.question,
         "answers": {"text": [q.answer, "another"], "answer_start": [0, 0]}}
        for q in questions
    ]  # fmt: skip
    assert questions_of(columns) == read_squad(write(tmp_path / "q.json", questions)) == questions
    columns[1]["answers"] = {"text": [], "answer_start": []}
    assert [q.answer for q in questions_of(columns)] == [QUESTION.answer, None]


def test_the_demo_set_is_sound():
    questions = read_squad(DEMO_DATA)
    ids, texts = ({getattr(q, name) for q in questions} for name in ("id", "question"))
    assert len(ids) == len(texts) == len(questions) >= 60
    assert all(q.answer in q.passage for q in questions)
