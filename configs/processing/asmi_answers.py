"""Answers as the benchmarks compare them; configs name it as `process_output_fn`."""

import re
import string


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and surplus white space.

    The normalisation of the SQuAD and CoQA evaluations.
    """
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalize_triviaqa_answer(text: str) -> str:
    """As above, but punctuation and underscores separate words: the TriviaQA evaluation."""
    separators = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
    return normalize_answer(text.translate(separators))
