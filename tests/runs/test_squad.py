import json

import pytest

from lm_polygraph_asmi.runs.squad import DEMO_DATA, Question, prompt_of, questions_of, read_squad

QUESTION = Question("q1", "The mill is red.", "What colour is the mill?", "red")


def write(path, questions: list[Question]):
    paragraphs: dict[str, list] = {}
    for q in questions:
        qa = {"id": q.id, "question": q.question, "answers": [{"text": q.answer}]}
        paragraphs.setdefault(q.passage, []).append(qa)
    layout = [{"context": passage, "qas": qas} for passage, qas in paragraphs.items()]
    path.write_text(json.dumps({"data": [{"paragraphs": layout}]}))
    return path


def test_paper_prompts():
    assert prompt_of("paper", closed_book=False)(QUESTION) == (
        "Read the following passage and answer the question.\n"
        "Passage:\nThe mill is red.\nQuestion: What colour is the mill?\nAnswer:"
    )
    closed = prompt_of("paper", closed_book=True)(QUESTION)
    assert closed == "Question: What colour is the mill?\nAnswer:"


@pytest.mark.parametrize("style", ["demo", "paper"])
def test_closed_book_twin_lacks_the_passage_and_keeps_the_rest(style):
    opened = prompt_of(style, closed_book=False)(QUESTION)
    closed = prompt_of(style, closed_book=True)(QUESTION)
    assert QUESTION.passage in opened
    assert QUESTION.passage not in closed
    assert "Ondine was built in" not in closed
    tail = f"Question: {QUESTION.question}\nAnswer:"
    assert opened.endswith(tail)
    assert closed.endswith(tail)


def test_unknown_style():
    with pytest.raises(ValueError, match=r"expected a prompt style in \['demo', 'paper'\]"):
        prompt_of("haiku", closed_book=False)


def test_the_hubs_columns_give_the_questions_of_the_file(tmp_path):
    """Columns as the hub's `squad` has them, answers as a dictionary of lists."""
    questions = [QUESTION, QUESTION._replace(id="q2", passage="A blue mill.", answer="blue")]
    columns = [
        {
            "id": q.id,
            "title": "Mills",
            "context": q.passage,
            "question": q.question,
            "answers": {"text": [q.answer, "another"], "answer_start": [0, 0]},
        }
        for q in questions
    ]
    assert questions_of(columns) == read_squad(write(tmp_path / "q.json", questions)) == questions
    columns[1]["answers"] = {"text": [], "answer_start": []}
    assert [q.answer for q in questions_of(columns)] == [QUESTION.answer, None]


@pytest.mark.parametrize("content", ["{}", "[]", "not json", '{"data": [{"paragraphs": [{}]}]}'])
def test_a_file_in_another_layout(tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"expected SQuAD-format JSON .* in .*bad.json"):
        read_squad(file)


def test_the_demo_set_is_sound():
    content = json.loads(DEMO_DATA.read_text(encoding="utf-8"))
    paragraphs = [p for article in content["data"] for p in article["paragraphs"]]
    questions = read_squad(DEMO_DATA)
    assert len(paragraphs) >= 15
    assert len(questions) >= 60
    assert len({q.id for q in questions}) == len({q.question for q in questions}) == len(questions)
    for paragraph in paragraphs:
        for qa in paragraph["qas"]:
            (answer,) = qa["answers"]
            start = answer["answer_start"]
            assert paragraph["context"][start : start + len(answer["text"])] == answer["text"]
