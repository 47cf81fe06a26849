"""The parts of the benchmark's prompts: what clusters, baselines and tables read from their text.

Written by `runs.squad` and, for CoQA, by LM-Polygraph's data sets.
"""

STORY = r"\nStory: (.*?)\n\nQuestion: "
"""CoQA's story, as LM-Polygraph's prompts have it."""
PASSAGE = r"\nPassage:\n(.*)\nQuestion: "
"""SQuAD's passage in the paper's zero-shot prompt."""
PASSAGE_OR_STORY = r"\n(?:Passage:\n|Story: )(.*?)\n+Question: "
"""Either, up to the first question."""
QUESTION, ANSWER = "Question:", "Answer:"


def last_question(prompt: str) -> str:
    """The text between the last "Question:" and "Answer:", else the prompt's end."""
    _, marker, rest = prompt.rpartition(QUESTION)
    question = rest.rpartition(ANSWER)[0] or rest
    return (question if marker else prompt[-120:]).strip()[:120]
