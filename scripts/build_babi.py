"""Turn a bAbI task file into a dataset folder for LM-Polygraph, with LM-Polygraph's BabiQA prompt.

    python scripts/build_babi.py qa1_single-supporting-fact_test.txt FOLDER
    polygraph_eval --config-name asmi_offline benchmark=asmi_babiqa data.source=FOLDER

For machines without a dataset hub; with one, LM-Polygraph downloads bAbI itself. The column `facts`
is the length of the story so far.
"""

from collections.abc import Iterator
from pathlib import Path

import click
from datasets import Dataset

# The one-shot prompt of LM-Polygraph's own BabiQA (dataset builder babi_qa), with its errors; the
# paper's appendix "Benchmark Prompts and Examples" prints an abridged form of it.
PROMPT = (
    "Imagine that you are only able to say a single word. Answer the question given a context. "
    "You must only output the full name of the location the same way it is mentioned in the text. "
    "Do not try to be polite of helpful.\n\nExample:\n\n"
    "Context:\nMary moved to the bathroom. John went to the hallway. Daniel went back to the "
    "hallway. Sandra moved to the garden. John moved to the office. Sandra journeyed to the "
    "bathroom. Mary moved to the hallway. Daniel travelled to the office. John went back to the "
    "garden. John moved to the bedroom.\nQuestion:\nWhere is Sandra?\nAnswer:\nbathroom\n\n"
    "Context:\n{context}\n\nQuestion:\n{question}\nAnswer:\n"
)


def read_babi(file: Path) -> Iterator[tuple[str, str]]:
    """(prompt, answer) of every question about the sentences of its story so far.

    Raises:
        ValueError: a line that is neither a fact nor a question of a bAbI task.
    """
    story: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        number, _, text = line.partition(" ")
        if not number.isdigit():
            raise ValueError(f"{file}: expected a numbered line of a bAbI task, got {line!r}")
        if number == "1":
            story = []
        if "|" not in text and "\t" not in text:
            story.append(text.strip())
            continue
        question, answer, *_ = text.replace("\t", "|").split("|")
        yield PROMPT.format(context=" ".join(story), question=question.strip()), answer.strip()


@click.command(help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def main(file: Path, folder: Path) -> None:
    prompts, answers = zip(*read_babi(file), strict=True)
    story_facts = [
        prompt.rpartition("Context:\n")[2].split("\n")[0].count(".") for prompt in prompts
    ]
    columns = {"input": prompts, "output": answers, "facts": story_facts}
    Dataset.from_dict(columns).save_to_disk(folder)
    click.echo(f"{len(prompts)} questions in {folder}")


if __name__ == "__main__":
    main()
