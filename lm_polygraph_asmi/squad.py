"""Question answering data in SQuAD's JSON layout, turned into what LM-Polygraph loads.

LM-Polygraph has no SQuAD, and its CSV reader turns the answer "None" into NaN and "007" into 7;
so the rows become a `datasets` folder (`load_from_disk: true`), where text stays text.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from datasets import Dataset

from lm_polygraph_asmi.validation import check_at_least_one

Row = TypeVar("Row")
DEMO_DATA = Path(__file__).parent / "data" / "demo_qa.json"


class Question(NamedTuple):
    """One question over one passage, with its first reference answer."""

    id: str
    passage: str
    question: str
    answer: str


# SmolLM2-135M stops at once or rambles on the paper's bare prompt; four worked questions over one
# invented passage make it answer with a span.
_EXAMPLE_PASSAGE = (
    "The ferry Ondine was built in Brask in 1931 by Edda Holm. It carried coal until 1950, when "
    "Piet Rell bought it for 900 crowns and turned it into a floating library."
)
_EXAMPLE_QUESTIONS = (
    ("Who built the ferry Ondine?", "Edda Holm"),
    ("In what year did Piet Rell buy the ferry Ondine?", "1950"),
    ("What did the ferry Ondine carry at first?", "coal"),
    ("How much did Piet Rell pay for the ferry Ondine?", "900 crowns"),
)
_EXAMPLES = "".join(f"Question: {q}\nAnswer: {a}\n" for q, a in _EXAMPLE_QUESTIONS)


def _paper(question: Question) -> str:
    return (
        "Read the following passage and answer the question.\n"
        f"Passage:\n{question.passage}\n{_paper_closed(question)}"
    )


def _paper_closed(question: Question) -> str:
    return f"Question: {question.question}\nAnswer:"


def _demo(question: Question) -> str:
    return (
        "Answer each question with the exact words of the passage.\n\n"
        f"Passage: {_EXAMPLE_PASSAGE}\n{_EXAMPLES}\n"
        f"Passage: {question.passage}\n{_paper_closed(question)}"
    )


def _demo_closed(question: Question) -> str:
    return f"Answer each question.\n\n{_EXAMPLES}\n{_paper_closed(question)}"


PROMPTS: dict[tuple[str, bool], Callable[[Question], str]] = {
    ("paper", False): _paper,
    ("paper", True): _paper_closed,
    ("demo", False): _demo,
    ("demo", True): _demo_closed,
}
"""(style, closed book) -> prompt. "paper": the paper's zero-shot prompt, appendix "Benchmark
Prompts and Examples". "demo": four worked questions first. The closed-book twin of either leaves
the passage out and keeps the rest."""


def read_squad(file: str | Path) -> list[Question]:
    """Questions of a SQuAD-format JSON file, in its order.

    Raises:
        ValueError: the file is not in that layout, or a question has no answer.
    """
    try:
        questions = list(_questions(json.loads(Path(file).read_text(encoding="utf-8"))))
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} is not SQuAD-format JSON (data / paragraphs / context, qas / id, question, "
            f"answers / text): {error!r}"
        ) from error
    if not questions:
        raise ValueError(f"{file} holds no question")
    return questions


def _questions(content: dict) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answer = qa["answers"][0]["text"]
                yield Question(str(qa["id"]), paragraph["context"], qa["question"], answer)


def spread(questions: list[Row], limit: int | None) -> list[Row]:
    """At most `limit` questions, evenly spaced over the file: the same ones every time."""
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def build_dataset(questions: list[Question], style: str, closed_book: bool) -> Dataset:
    """Columns id, passage (the cluster key of both twins), input (prompt), output (answer).

    Raises:
        ValueError: an unknown prompt style.
    """
    if (style, closed_book) not in PROMPTS:
        known = sorted({name for name, _ in PROMPTS})
        raise ValueError(f"prompt style must be one of {known}, got {style!r}")
    prompt = PROMPTS[style, closed_book]
    return Dataset.from_dict(
        {
            "id": [q.id for q in questions],
            "passage": [q.passage for q in questions],
            "input": [prompt(q) for q in questions],
            "output": [q.answer for q in questions],
        }
    )


def cached_dataset(
    file: str | Path | None, style: str, closed_book: bool, limit: int | None
) -> Path:
    """Folder of the dataset built from `file` (None: the demo's own), built once per content.

    Under `$XDG_CACHE_HOME` or `~/.cache`, named by a hash of all prompts and answers.
    """
    check_at_least_one("limit", limit)
    questions = spread(read_squad(file or DEMO_DATA), limit)
    dataset = build_dataset(questions, style, closed_book)
    content = json.dumps(dataset.to_dict()).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lm_polygraph_asmi"
    stem = Path(file or DEMO_DATA).stem + ("-closed-book" if closed_book else "")
    folder = cache / f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}"
    if not (folder / "dataset_info.json").exists():
        dataset.save_to_disk(folder)
    return folder
