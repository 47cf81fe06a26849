"""`Scorer`: a model prepared to score many answers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_polygraph_asmi.model import PrefixCache
from lm_polygraph_asmi.scoring.many import Outcome, attempt
from lm_polygraph_asmi.scoring.prepared import PreparedModel
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.streaming import Stream
from lm_polygraph_asmi.scoring.text import Answer, Prompt
from lm_polygraph_asmi.validation import check_one_of


class Scorer(PreparedModel):
    """A model prepared to score many answers; arguments as for `score`.

    The self-check (masked passes against full forward passes) runs once.

    Args:
        result_cache: folder in which `score_batch` and files of rows store each finished batch, so
            that a killed run resumes with the same scores; None: no cache.

    Raises:
        OSError, TypeError, ValueError: as `score`, except errors of an answer.

    Example:
        >>> scorer = Scorer("smollm2", scope="response")
        >>> for answer in (" Edda Holm", " Brask"):
        ...     result = scorer.score(prompt, answer)
        ...     assert 0 <= result.score <= result.highest  # nats
    """

    def score(
        self,
        prompt: Prompt,
        answer: Answer | None = None,
        samples: Sequence[Answer] | None = None,
    ) -> Score:
        """Score one answer; see `lm_polygraph_asmi.score`.

        Example:
            >>> scorer.score(prompt, " Edda Holm").answer
            ' Edda Holm'
        """
        return self.score_answer(prompt, answer, samples, PrefixCache())

    def stream(self, prompt: Prompt) -> Stream:
        """Score the greedy answer token by token; see `lm_polygraph_asmi.stream`.

        Always with scope "response" and masks seeded by the prompt, whatever the scorer's settings.

        Example:
            >>> with scorer.stream(prompt) as tokens:
            ...     first = next(tokens)
            >>> tokens.result.tokens == (first,)
            True
        """
        return Stream(self, prompt)

    def score_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Score rows one by one as they arrive; none is stored.

        With scope "response", the prefix that a row shares with the row before is not computed
        again: sort rows by passage and prompt. Scores equal those of single calls up to rounding.

        Args:
            rows: texts, or mappings with `prompt` and optionally `answer`, `samples` and
                `offsets`, as for `score` and `Score.with_spans`. They are not changed.
            on_error: "return": a bad row gives an outcome with an error; "raise": it raises.
            id_field: name of the field with a row's id.

        Yields:
            An `Outcome` for each row, in order.

        Example:
            >>> rows = [{"id": "q1", "prompt": prompt, "answer": " Edda Holm"}, {"id": "q2"}]
            >>> for outcome in scorer.score_many(rows):
            ...     print(outcome.id, outcome.score is not None, outcome.error)
            q1 True None
            q2 False expected a text, or an object with a "prompt", got the fields id
        """
        check_one_of("on_error", on_error, ("return", "raise"))
        return self._outcomes(rows, on_error, id_field)

    def _outcomes(self, rows: Iterable[Any], on_error: str, id_field: str) -> Iterator[Outcome]:
        prefix_cache = PrefixCache()
        for index, row in enumerate(rows):
            outcome, failure = attempt(self, index, row, prefix_cache, id_field)
            if failure is not None and on_error == "raise":
                raise failure
            yield outcome
