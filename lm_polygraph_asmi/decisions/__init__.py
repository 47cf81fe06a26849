"""From labelled answers to decisions: accept an answer, or abstain.

The examples here start with a prompt, and with a calibration by MSP on eight answers of
SmolLM2-135M-Instruct:

>>> import pandas as pd
>>> from lm_polygraph_asmi import Scorer, score_file
>>> from lm_polygraph_asmi.decisions import Decider, calibrate_rows
>>> prompt = "Passage: Edda Holm built the ferry in Brask. Question: Who built it? Answer:"
>>> prompts, answers = [f"{number}. {prompt}" for number in range(8)], [" Edda Holm", " Brask"] * 4
>>> labelled = pd.DataFrame({"prompt": prompts, "answer": answers, "correct": [True, False] * 4})
>>> labelled.to_csv("labelled.csv", index=False)
>>> scorer = Scorer("smollm2", stop=".", max_new_tokens=4)
>>> score_file(scorer, "labelled.csv", "answers-of-smollm2.jsonl")
0
>>> calibration = calibrate_rows("answers-of-smollm2.jsonl", 0.1, signal="msp", resamples=50)
>>> decider = Decider(scorer, calibration)
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

if TYPE_CHECKING:
    from lm_polygraph_asmi.analysis.risk_control import (
        RiskThreshold as RiskThreshold,
        risk_threshold as risk_threshold,
    )
    from lm_polygraph_asmi.analysis.risk_monitor import (
        RiskMonitor as RiskMonitor,
        risk_monitor as risk_monitor,
    )
    from lm_polygraph_asmi.decisions.calibration import Calibration as Calibration
    from lm_polygraph_asmi.decisions.decider import Decider as Decider, decide as decide
    from lm_polygraph_asmi.decisions.decision import Decision as Decision
    from lm_polygraph_asmi.decisions.rows import calibrate_rows as calibrate_rows
    from lm_polygraph_asmi.decisions.run import calibrate_run as calibrate_run
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
