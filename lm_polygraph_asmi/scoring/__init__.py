"""One answer, scored by a call: no benchmark runner, no NLI model, nothing downloaded."""

from lm_polygraph_asmi.scoring.call import score
from lm_polygraph_asmi.scoring.reference import Reference
from lm_polygraph_asmi.scoring.result import Score, Token

__all__ = ["Reference", "Score", "Token", "score"]
