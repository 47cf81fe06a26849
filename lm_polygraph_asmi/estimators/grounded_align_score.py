"""What users would take instead: does AlignScore find the answer in its passage?"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from lm_polygraph_asmi.results.names import require

PASSAGE = r"\n(?:Passage:\n|Story: )(.*?)\n+Question: "
"""Where the paper's prompts have the passage (SQuAD) or the story (CoQA)."""
EMPTY = "(empty)"
"""In place of an answer without text, as the quality metric does."""


class GroundedAlignScore(Estimator):
    """1 - AlignScore of passage and answer, in [0, 1]; higher = more uncertain.

    A baseline for answers that should come from a given passage. It is not the quality metric
    AlignScore: that compares the answer with the reference, which no user has. Judged by that
    metric, it is judged by the same model; a metric of words is the fairer label. Source: Zha et
    al. (2023), AlignScore.

    Args:
        checkpoint: file or URL of AlignScore's weights; None: those of LM-Polygraph's metric.
        passage: regular expression whose first group is the passage in the prompt.
        batch_size: pairs at once.

    Raises:
        ValueError: an expression without a group.

    Example:
        >>> estimator = GroundedAlignScore(passage="Context: (.*?) Question: ")
        >>> asked = {"input_texts": ["Who built it?"], "greedy_texts": ["Edda"]}
        >>> estimator(asked)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: GroundedAlignScore (passage=...) finds no passage in the prompt 'Who ...
    """

    def __init__(
        self, checkpoint: str | None = None, passage: str = PASSAGE, batch_size: int = 16
    ) -> None:
        super().__init__(["input_texts", "greedy_texts"], "sequence")
        self.checkpoint, self.batch_size = checkpoint, int(batch_size)
        self.passage = re.compile(passage, re.DOTALL)
        if self.passage.groups < 1:
            raise ValueError(f"passage needs a group, such as {PASSAGE!r}; got {passage!r}")
        self._scorer: Any = None

    def __str__(self) -> str:
        own = "" if self.passage.pattern == PASSAGE else f" (passage={self.passage.pattern})"
        return f"GroundedAlignScore{own}"

    def __call__(self, stats: dict[str, Any]) -> np.ndarray:
        """One score per example of the batch.

        Raises:
            KeyError: a statistic is missing.
            ValueError: a prompt without a passage, or a score that is not finite.
        """
        passages = [self._passage_of(prompt) for prompt in require(stats, "input_texts")]
        answers = [text if text.strip() else EMPTY for text in require(stats, "greedy_texts")]
        found = 1 - np.asarray(self.scorer.score(contexts=passages, claims=answers), dtype=float)
        if not np.isfinite(found).all():
            raise ValueError(f"{self} would return {found}: the weights may be damaged")
        return found

    def _passage_of(self, prompt: str) -> str:
        found = self.passage.search(prompt)
        if found is None or not found[1].strip():
            raise ValueError(
                f"{self} finds no passage in the prompt {prompt!r:.200}: it is for answers that "
                "come from a given one. Name where it stands with `passage`, or leave this "
                "estimator out"
            )
        return found[1]

    @property
    def scorer(self) -> Any:
        """AlignScore itself, loaded when first asked for."""
        if self._scorer is None:
            import torch
            from lm_polygraph.generation_metrics.alignscore import AlignScore
            from lm_polygraph.generation_metrics.alignscore_utils import AlignScorer

            default = inspect.signature(AlignScore).parameters["ckpt_path"].default
            self._scorer = AlignScorer(
                model="roberta-large",
                batch_size=self.batch_size,
                device="cuda" if torch.cuda.is_available() else "cpu",
                ckpt_path=self.checkpoint or default,
                evaluation_mode="nli_sp",
            )
        return self._scorer


def load_estimator(config: Mapping[str, Any]) -> GroundedAlignScore:
    return GroundedAlignScore(**config)
