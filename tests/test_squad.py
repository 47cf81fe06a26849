import json

import pytest
from datasets import load_from_disk
from lm_polygraph.utils.dataset import Dataset

from lm_polygraph_asmi.squad import (
    DEMO_DATA,
    Question,
    build_dataset,
    cached_dataset,
    read_squad,
    spread,
)

QUESTION = Question("q1", "The mill is red.", "What colour is the mill?", "red")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path, questions: list[Question]):
    paragraphs: dict[str, list] = {}
    for q in questions:
        qa = {"id": q.id, "question": q.question, "answers": [{"text": q.answer}]}
        paragraphs.setdefault(q.passage, []).append(qa)
    layout = [{"context": passage, "qas": qas} for passage, qas in paragraphs.items()]
    path.write_text(json.dumps({"data": [{"paragraphs": layout}]}))
    return path


def test_paper_prompts():
    rows = build_dataset([QUESTION], "paper", closed_book=False)
    assert rows["input"][0] == (
        "Read the following passage and answer the question.\n"
        "Passage:\nThe mill is red.\nQuestion: What colour is the mill?\nAnswer:"
    )
    closed = build_dataset([QUESTION], "paper", closed_book=True)
    assert closed["input"][0] == "Question: What colour is the mill?\nAnswer:"


@pytest.mark.parametrize("style", ["demo", "paper"])
def test_closed_book_twin_lacks_the_passage_and_keeps_the_rest(style):
    opened = build_dataset([QUESTION], style, closed_book=False)
    closed = build_dataset([QUESTION], style, closed_book=True)
    assert QUESTION.passage in opened["input"][0]
    assert QUESTION.passage not in closed["input"][0]
    assert "Ondine was built in" not in closed["input"][0]
    for column in ("id", "passage", "output"):
        assert opened[column][0] == closed[column][0]
    tail = f"Question: {QUESTION.question}\nAnswer:"
    assert opened["input"][0].endswith(tail)
    assert closed["input"][0].endswith(tail)


def test_unknown_style():
    with pytest.raises(ValueError, match=r"prompt style must be one of \['demo', 'paper'\]"):
        build_dataset([QUESTION], "haiku", closed_book=False)


@pytest.mark.parametrize("answer", ["None", "NA", "007", "1,200", "Zürich 🙂"])
def test_the_host_reads_every_answer_as_text(tmp_path, answer):
    folder = cached_dataset(
        write(tmp_path / "q.json", [QUESTION._replace(answer=answer)]), "paper", False, None
    )
    loaded = Dataset.load(str(folder), "input", "output", batch_size=1, load_from_disk=True)
    (prompts, answers, _) = next(iter(loaded))
    assert answers == [answer]
    assert prompts[0].endswith("Answer:")


def test_a_dataset_is_built_once_per_content(tmp_path):
    file = write(tmp_path / "q.json", [QUESTION])
    first = cached_dataset(file, "paper", False, None)
    assert cached_dataset(file, "paper", False, None) == first
    assert cached_dataset(file, "paper", True, None) != first
    write(file, [QUESTION._replace(answer="green")])
    assert cached_dataset(file, "paper", False, None) != first
    assert load_from_disk(first)["output"][0] == "red"


def test_limit_spreads_over_the_file():
    questions = [QUESTION._replace(id=str(i)) for i in range(10)]
    assert [q.id for q in spread(questions, 4)] == ["0", "2", "5", "7"]
    assert spread(questions, None) == questions
    assert spread(questions, 99) == questions


@pytest.mark.parametrize("content", ["{}", "[]", "not json", '{"data": [{"paragraphs": [{}]}]}'])
def test_a_file_in_another_layout(tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"bad.json is not SQuAD-format JSON"):
        read_squad(file)


def test_a_file_without_questions(tmp_path):
    file = tmp_path / "empty.json"
    file.write_text('{"data": []}')
    with pytest.raises(ValueError, match="holds no question"):
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


@pytest.mark.parametrize("limit", [0, -3])
def test_no_questions_asked_for(limit):
    with pytest.raises(ValueError, match="limit must be at least 1 or null"):
        cached_dataset(None, "demo", False, limit)
