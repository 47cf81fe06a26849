"""Turn SQuAD-format questions into ones whose passage has another answer, or none.

    python scripts/build_counterfactual.py xquad.en.json FOLDER
    python scripts/build_counterfactual.py xquad.en.json FOLDER --change passage
    polygraph_eval --config-name asmi_offline benchmark=asmi_squad data.source=FOLDER

`--change answer`: replaces the gold answer everywhere in the passage by an answer from another
article with the same sequence of word shapes (year, number, capitalised, other), which becomes the
gold answer. A correct answer follows the passage; the original answer comes from memory (or the
passage was not read). Questions without such a replacement, or that name their answer, are dropped.

`--change passage`: gives each question a passage of another article that does not contain its
answer; the gold answer is unchanged. No answer can come from the passage.

Ids and clusters are those of the unchanged questions, so that rows can be compared.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
from datasets import Dataset

from lm_polygraph_asmi.runs.rows import DataRow, cluster_key, spread
from lm_polygraph_asmi.runs.squad import Question, prompt_of, read_squad

SEED = 0


def articles_of(file: Path, questions: list[Question]) -> list[int]:
    """Index of each question's article in the file."""
    articles = json.loads(file.read_text(encoding="utf-8"))["data"]
    index = {p["context"]: i for i, article in enumerate(articles) for p in article["paragraphs"]}
    return [index[question.passage] for question in questions]


def shape(answer: str) -> tuple[str, ...]:
    """The kinds of an answer's words, in order."""
    return tuple(_kind(word) for word in answer.split())


def _kind(word: str) -> str:
    bare = word.strip(".,;:%$£€()\"'")
    if re.fullmatch(r"1\d{3}|20\d{2}", bare):
        return "year"
    if re.fullmatch(r"\d[\d.,]*", bare):
        return "number"
    return "capitalised" if bare[:1].isupper() else "other"


def occurs(answer: str, text: str) -> bool:
    """Whether a text contains an answer as whole words."""
    return _whole_words(answer).search(text) is not None


def _whole_words(answer: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)


def other_answers(questions: list[Question], articles: list[int]) -> Iterator[tuple[int, Question]]:
    """(index, changed question) of questions whose answer can be replaced in the passage."""
    by_shape = defaultdict(list)
    for question, article in zip(questions, articles, strict=True):
        by_shape[shape(question.answer)].append((article, question.answer))
    rng = random.Random(SEED)
    for index, (question, article) in enumerate(zip(questions, articles, strict=True)):
        text = f"{question.passage} {question.question}"
        others = sorted(
            {
                answer
                for source, answer in by_shape[shape(question.answer)]
                if source != article and not occurs(answer, text)
            }
        )
        if not others or occurs(question.answer, question.question):
            continue
        new = rng.choice(others)
        pattern = _whole_words(question.answer)
        passage, count = pattern.subn(lambda _, new=new: new, question.passage)
        if count:
            yield index, question._replace(passage=passage, answer=new)


def other_passages(
    questions: list[Question], articles: list[int]
) -> Iterator[tuple[int, Question]]:
    """(index, question with a passage of another article that does not contain its answer)."""
    passages = sorted(
        {(article, q.passage) for q, article in zip(questions, articles, strict=True)}
    )
    rng = random.Random(SEED)
    for index, (question, article) in enumerate(zip(questions, articles, strict=True)):
        others = [p for a, p in passages if a != article and not occurs(question.answer, p)]
        if others:
            yield index, question._replace(passage=rng.choice(others))


CHANGES = {"answer": other_answers, "passage": other_passages}


@click.command(help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--change", type=click.Choice(sorted(CHANGES)), default="answer", show_default=True)
@click.option("--prompt-style", default="paper", show_default=True, help="As data.prompt_style.")
@click.option("--limit", type=click.IntRange(1), help="Number of questions, evenly spaced.")
@click.option(
    "--except-limit", type=click.IntRange(1), help="Leave out questions that this limit selects."
)
def main(
    file: Path,
    folder: Path,
    change: str,
    prompt_style: str,
    limit: int | None,
    except_limit: int | None,
) -> None:
    questions = read_squad(file)
    prompt = prompt_of(prompt_style, closed_book=False)
    excluded = set(spread(list(range(len(questions))), except_limit)) if except_limit else set()
    rows = [
        DataRow(changed.id, cluster_key(questions[index].passage), prompt(changed), changed.answer)
        for index, changed in CHANGES[change](questions, articles_of(file, questions))
        if index not in excluded
    ]
    rows = spread(rows, limit)
    if not rows:
        raise click.ClickException(f"{file} has no question that could be changed")
    Dataset.from_list([row._asdict() for row in rows]).save_to_disk(folder)
    click.echo(f"{len(rows)} of {len(questions)} questions in {folder}")


if __name__ == "__main__":
    main()
