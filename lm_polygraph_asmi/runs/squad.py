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


def prompt_of(style: str, closed_book: bool) -> Callable[[Question], str]:
    """The prompt of a question, as a function, from `data/prompts.json`.

    "paper": the paper's zero-shot prompt, appendix "Benchmark Prompts and Examples". "demo" has
    four examples, since without any SmolLM2-135M-Instruct stops at once or rambles. Closed-book
    prompts leave out the passage, its heading, and what the instruction says of passages.
    """
    prompts = read_json(DEMO_DATA.with_name("prompts.json"))
    if style not in prompts:
        raise ValueError(f"expected a prompt style in {sorted(prompts)}, got {style!r}")
    template = prompts[style]["closed_book" if closed_book else "open_book"]
    return lambda asked: template.format(passage=asked.passage, question=asked.question)


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
            f"/ text) in {file}: {error!r}. Write rows of your own as JSON lines (.jsonl), CSV or "
            "Parquet"
        ) from error


def questions_of(rows: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Questions of the hub dataset `squad`, or of another with its columns."""
    questions = []
    for row in rows:
        answers = (row["answers"] or {}).get("text") or [None]
        questions.append(Question(str(row["id"]), row["context"], row["question"], answers[0]))
    return questions
