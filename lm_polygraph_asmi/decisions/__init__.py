"""From labelled answers to decisions: accept an answer, or abstain.

The examples here start with a prompt, and a calibration on eight answers of
SmolLM2-135M-Instruct, by MSP:

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

from lm_polygraph_asmi.lazy import attach

# Imported on first use.
__getattr__, __dir__, __all__ = attach(__name__, {
    "calibration": "Calibration",
    "decider": "Decider decide",
    "decision": "Decision",
    ".analysis.risk_control": "RiskThreshold risk_threshold",
    ".analysis.risk_monitor": "RiskMonitor risk_monitor",
    "rows": "calibrate_rows",
    "run": "calibrate_run",
})  # fmt: skip
