"""Tiny datasets in the exact prompt formats of LM-Polygraph's dataset builders."""

from pathlib import Path

from datasets import Dataset

from tests.runs.test_squad import QUESTION, write

STORIES = ("A mill stood by the river.\nIt was red.", "Edda Holm built a ferry in Brask.")
EXAMPLES = (
    "Question: Where do kites fly?\nAnswer:sky\nQuestion: Who built the ferry?\nAnswer:edda holm\n"
    "Question: What is red?\nAnswer:mill\nQuestion: Where is Brask?\nAnswer:north\n"
    "Question: What is blue?\nAnswer:kite\n"
)


def coqa_prompt(story: str, before: list[tuple[str, str]], question: str) -> str:
    """A story, the questions so far with their answers, and the next question."""
    asked = "".join(f"\n\nQuestion: {q}\nAnswer:{a}" for q, a in before)
    return (
        "The following are stories and questions about them. Each story is followed by a question "
        f"and answer to a given question.\n\nStory: {story}{asked}\n\nQuestion: {question}\nAnswer:"
    )


def babi_prompt(context: str, question: str) -> str:
    return (
        "Imagine that you are only able to say a single word. Answer the question given a context. "
        "You must only output the full name of the location the same way it is mentioned in the "
        "text. Do not try to be polite of helpful.\n\nExample:\n\nContext:\nMary moved to the "
        "bathroom. John went to the hallway. Daniel went back to the hallway. Sandra moved to the "
        "garden. John moved to the office. Sandra journeyed to the bathroom. Mary moved to the "
        "hallway. Daniel travelled to the office. John went back to the garden. John moved to the "
        "bedroom.\nQuestion:\nWhere is Sandra?\nAnswer:\nbathroom\n\n"
        f"Context:\n{context}\n\nQuestion:\n{question}\nAnswer:\n"
    )


TALK = [("What was built?", "a mill"), ("Where?", "by the river")]
COLUMNS = {
    "asmi_coqa": {
        "input": [
            coqa_prompt(story, TALK[:number], question)
            for story in STORIES
            for number, (question, _) in enumerate(TALK)
        ],
        "output": [answer for _, answer in TALK] * len(STORIES),
    },
    "asmi_babiqa": {
        "input": [
            babi_prompt("Mary went to the garden. John moved to the office.", f"Where is {who}?")
            for who in ("Mary", "John")
        ],
        "output": ["garden", "office"],
    },
    "asmi_triviaqa": {
        "input": [
            f"{EXAMPLES}Question: {question}\nAnswer:"
            for question in (
                "Who was the man behind the ferry?",
                "Which colour has the mill?",
                "Where is Brask?",
            )
        ],
        "output": [["Edda Holm", "Holm"], ["red", "Red colour"], ["the north"]],
    },
}
"""Benchmark -> the columns of its data set."""


def hub_dataset(benchmark: str, folder: Path) -> str:
    """What `data.source` can be set to in the place of a benchmark's hub dataset."""
    if benchmark not in COLUMNS:
        answers = ("red", "None", "007")
        rows = [QUESTION._replace(id=str(i), answer=a) for i, a in enumerate(answers)]
        return str(write(folder / "squad.json", rows))
    # A folder of parquet files is read as a dataset of the hub is.
    Dataset.from_dict(COLUMNS[benchmark]).to_parquet(folder / benchmark / "test.parquet")
    return str(folder / benchmark)
