"""Baseline for grounded answers: AlignScore of passage and answer."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from lm_polygraph_asmi.prompts import PASSAGE_OR_STORY
from lm_polygraph_asmi.results.names import require

EMPTY = "(empty)"
"""Replaces an answer without text, as in the quality metric."""


class GroundedAlignScore(Estimator):
    """1 - AlignScore of passage and answer, in [0, 1]; higher = more uncertain.

    A baseline for answers that should follow from a passage. The quality metric AlignScore
    compares the answer with the gold answer instead, which users do not have. That metric uses the
    same model, so a word-based correctness label is the fairer one here. Source: Zha et al. (2023),
    AlignScore.

    Args:
        checkpoint: file or URL of AlignScore's weights; None: LM-Polygraph's default.
        passage: regular expression whose first group is the passage in the prompt.
        batch_size: pairs per batch.

    Raises:
        ValueError: a regular expression without a group.

    Example:
        >>> estimator = GroundedAlignScore(passage="Context: (.*?) Question: ")
        >>> stats = {"input_texts": ["Who built it?"], "greedy_texts": ["Edda"]}
        >>> estimator(stats)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: GroundedAlignScore (passage=...) finds no passage in the prompt 'Who ...
    """

    def __init__(
        self, checkpoint: str | None = None, passage: str = PASSAGE_OR_STORY, batch_size: int = 16
    ) -> None:
        super().__init__(["input_texts", "greedy_texts"], "sequence")
        self.checkpoint, self.batch_size = checkpoint, int(batch_size)
        self.passage = re.compile(passage, re.DOTALL)
        if self.passage.groups < 1:
            raise ValueError(
                f"passage: expected a group, such as {PASSAGE_OR_STORY!r}, got {passage!r}"
            )
        self._scorer: Any = None

    def __str__(self) -> str:
        pattern = self.passage.pattern
        setting = "" if pattern == PASSAGE_OR_STORY else f" (passage={pattern})"
        return f"GroundedAlignScore{setting}"

    def __call__(self, stats: dict[str, Any]) -> np.ndarray:
        """One score per example of the batch.

        Raises:
            KeyError: a statistic is missing.
            ValueError: a prompt without a passage, or a score that is not finite.
        """
        passages = [self._passage_of(prompt) for prompt in require(stats, "input_texts")]
        answers = [text if text.strip() else EMPTY for text in require(stats, "greedy_texts")]
        scores = 1 - np.asarray(self.scorer.score(contexts=passages, claims=answers), dtype=float)
        if not np.isfinite(scores).all():
            raise ValueError(f"{self}: expected finite scores, got {scores}: damaged weights?")
        return scores

    def _passage_of(self, prompt: str) -> str:
        match = self.passage.search(prompt)
        if match is None or not match[1].strip():
            raise ValueError(
                f"{self} finds no passage in the prompt {prompt!r:.200}: set `passage` to a "
                "regular expression that matches it, or leave this estimator out"
            )
        return match[1]

    @property
    def scorer(self) -> Any:
        """AlignScore's scorer, loaded on first use; errors as of `host.align_score.AlignScore`."""
        if self._scorer is None:
            from lm_polygraph_asmi.host.align_score import CHECKPOINT, AlignScore

            metric = AlignScore(ckpt_path=self.checkpoint or CHECKPOINT, batch_size=self.batch_size)
            self._scorer = metric.scorer
        return self._scorer


def load_estimator(config: Mapping[str, Any]) -> GroundedAlignScore:
    return GroundedAlignScore(**config)
