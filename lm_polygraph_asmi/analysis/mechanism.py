"""How much masking changes a model's predictions, and for which tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import Interval, finite
from lm_polygraph_asmi.analysis.comparison import auroc_interval
from lm_polygraph_asmi.analysis.labelled import Labelled

OVER_ROBUST = 0.005
"""If the mean MI_t is smaller than this, in nats, masking hardly changes predictions.

The value lies between the paper's 0.002 (Llama-2-7B on BabiQA, where ASMI fails) and 0.016
(Qwen3-4B on BabiQA, where it works). It was not validated.
"""


@dataclass(frozen=True)
class MaskingResponse:
    """How much masking changes predictions: mean and median of MI_t (nats), number of tokens."""

    mean: float
    median: float
    tokens: int

    @property
    def over_robust(self) -> bool:
        """Whether the mean MI_t is below `OVER_ROBUST`: perhaps a screen for settings that fail."""
        return self.mean < OVER_ROBUST


def masking_response(information: Sequence[np.ndarray]) -> MaskingResponse:
    """Masking response of answers, from n arrays (T,) of MI_t in nats. No labels are needed.

    Example:
        >>> response = masking_response([np.array([0.001, 0.003]), np.array([0.002])])  # 2 answers
        >>> round(response.mean, 4), response.tokens, response.over_robust  # nats; below 0.005
        (0.002, 3, True)
    """
    tokens = finite(information=np.concatenate([*information, []]))
    if not len(tokens):
        raise ValueError("expected at least one token, got none")
    return MaskingResponse(float(tokens.mean()), float(np.median(tokens)), len(tokens))


@dataclass(frozen=True)
class ErrorSeparation:
    """Disagreement in right and in wrong answers. Source: table "babiqa-mechanism" of the paper.

    Attributes:
        right, wrong: mean MI_t over the tokens of right and of wrong answers, in nats. NaN if there
            are no such answers.
        auroc: AUROC of error detection by each score.
    """

    right: float
    wrong: float
    auroc: dict[str, Interval]


def error_separation(
    information: Sequence[np.ndarray], scores: dict[str, ArrayLike], answers: Labelled
) -> ErrorSeparation:
    """Mean MI_t by correctness, and error-detection AUROC of `scores` with cluster intervals.

    `information`: n arrays (T,) of MI_t in nats, where T may vary.

    Example:
        >>> mi = [np.array([0.1, 0.1]), np.array([0.5]), np.array([0.1]), np.array([0.5])]
        >>> means, answers = [0.1, 0.5, 0.1, 0.5], Labelled([0, 1, 0, 1], list("abcd"))
        >>> split = error_separation(mi, {"mean MI": means}, answers)
        >>> round(split.right, 2), round(split.wrong, 2), split.auroc["mean MI"].value
        (0.1, 0.5, 1.0)
    """
    wrong = answers.wrong
    if len(information) != len(wrong):
        raise ValueError(f"expected tokens for each of {len(wrong)} labels, got {len(information)}")
    tokens = finite(information=np.concatenate(information))
    of_wrong = np.repeat(wrong, [len(answer) for answer in information])
    means = (tokens[of_wrong == kind] for kind in (False, True))
    right_mean, wrong_mean = (float(part.mean()) if len(part) else float("nan") for part in means)
    by_score = {name: auroc_interval(score, answers) for name, score in scores.items()}
    return ErrorSeparation(right_mean, wrong_mean, by_score)


class Vote(NamedTuple):
    """What the subnetworks predict at one position.

    Attributes:
        agree: share of masks under which the answer's token is the most likely one.
        alternative: id of the other token that is most often the most likely one; None without any.
        share: share of masks under which the alternative is the most likely one.
    """

    agree: float
    alternative: int | None
    share: float


def votes(top_tokens: Int[np.ndarray, "S T"], tokens: ArrayLike) -> list[Vote]:
    """The subnetworks' votes at each token of an answer.

    Args:
        top_tokens: (S, T) id of each subnetwork's most likely token.
        tokens: (T,) ids of the answer's tokens. IndexError if there are more than in `top_tokens`.

    Example:
        >>> votes(np.array([[7], [7], [7], [2]]), tokens=[7])  # four masks, one token
        [Vote(agree=0.75, alternative=2, share=0.25)]
    """
    by_position = []
    for position, token in enumerate(np.asarray(tokens).tolist()):
        counts = Counter(np.asarray(top_tokens)[:, position].tolist())
        agree = counts.pop(token, 0)
        alternative, times = next(iter(counts.most_common(1)), (None, 0))
        by_position.append(Vote(agree / len(top_tokens), alternative, times / len(top_tokens)))
    return by_position
