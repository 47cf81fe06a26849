"""Questions in SQuAD's format, which LM-Polygraph lacks, and their prompts."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph_asmi.files import read_json

DEMO_DATA = Path(__file__).parents[1] / "data" / "demo_qa.json"


class Question(NamedTuple):
    """One question about one passage, with its first gold answer; None: it has none."""

    id: str
    passage: str
    question: str
    answer: str | None


# With the paper's zero-shot prompt SmolLM2-135M-Instruct stops at once or rambles; four examples
# about one invented passage (4-shot) make it answer with a span.
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


_INSTRUCTION = "Read the following passage and answer the question.\n"


def _paper(question: Question) -> str:
    return f"{_INSTRUCTION}Passage:\n{question.passage}\n{_paper_closed(question)}"


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
Prompts and Examples". "demo": 4-shot. Their closed-book versions leave out the passage, its
heading, and what the instruction says of passages (in "paper", the whole instruction)."""


def prompt_of(style: str, closed_book: bool) -> Callable[[Question], str]:
    """The prompt of a question, as a function."""
    if (style, closed_book) not in PROMPTS:
        known = sorted({name for name, _ in PROMPTS})
        raise ValueError(f"expected a prompt style in {known}, got {style!r}")
    return PROMPTS[style, closed_book]


def read_squad(file: str | Path) -> list[Question]:
    """Questions of a SQuAD-format JSON file, in order."""
    try:
        return [
            Question(
                str(qa["id"]), paragraph["context"], qa["question"],
                qa["answers"][0]["text"] if qa["answers"] else None,
            )
            for article in read_json(file)["data"]
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected SQuAD-format JSON (data / paragraphs / context, qas / id, question, answers "
            f"/ text) in {file}: {error!r}"
        ) from error


def questions_of(rows: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Questions of the hub dataset `squad`, or of another with its columns."""
    questions = []
    for row in rows:
        answers = (row["answers"] or {}).get("text") or [None]
        questions.append(Question(str(row["id"]), row["context"], row["question"], answers[0]))
    return questions
