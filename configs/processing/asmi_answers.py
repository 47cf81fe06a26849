"""Answers as the benchmarks compare them; configs name it as `process_output_fn`."""

from lm_polygraph_asmi.host.quality import words


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and surplus white space; numbers keep their marks.

    But for numbers, the normalisation of the SQuAD and CoQA evaluations.
    """
    return " ".join(words(text))


def normalize_triviaqa_answer(text: str) -> str:
    """As above, but punctuation and underscores separate words: the TriviaQA evaluation."""
    return " ".join(words(text, gap=" "))
