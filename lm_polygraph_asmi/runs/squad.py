"""Questions in SQuAD's format, which LM-Polygraph cannot read, and prompts made from them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph_asmi.files import read_json

DEMO_DATA = Path(__file__).parents[1] / "data" / "demo_qa.json"


class Question(NamedTuple):
    """One question about a passage, with its first gold answer, or None if it has none."""

    id: str
    passage: str
    question: str
    answer: str | None


def prompt_of(style: str, closed_book: bool) -> Callable[[Question], str]:
    """A function that makes the prompt of a question, with a template of `data/prompts.json`.

    "paper" is the paper's zero-shot prompt, from its appendix "Benchmark Prompts and Examples".
    "demo" has four examples, because without examples SmolLM2-135M-Instruct stops at once or
    rambles. A closed-book prompt leaves out the passage and all that the instruction says of it.
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
            "expected SQuAD-format JSON (data / paragraphs / context, qas / id, question, "
            f"answers / text) in {file}, got an error: {error!r}. Rows in another form can be "
            "JSON lines (.jsonl), CSV or Parquet"
        ) from error


def questions_of(rows: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Questions of the hub dataset `squad`, or of another dataset with the same columns."""
    return [
        Question(
            str(row["id"]),
            row["context"],
            row["question"],
            next(iter((row["answers"] or {}).get("text") or ()), None),
        )
        for row in rows
    ]
