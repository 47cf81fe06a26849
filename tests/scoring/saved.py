"""A finished run as it would be read from disk, scored here by the engine."""

from pathlib import Path

import numpy as np
import pandas as pd

from lm_polygraph_asmi.results.runs import Run
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.stat_calculators.masked_heads import by_name
from tests.tiny_lm import tokenizer

QUESTIONS = ("Who built it?", "Where do the kites start?", "True or False?", "The ferry Ondine")


def scored_run(model, texts=QUESTIONS, tokens: int = 4, **settings: object) -> Run:
    """Every text with an answer of random tokens."""
    engine, words, rng = Engine(**settings), tokenizer(), np.random.default_rng(0)
    stats: dict[str, list] = {"input_texts": list(texts)}
    for text in texts:
        prompt = words(text, return_tensors="pt")["input_ids"][0]
        answer = rng.integers(3, len(words), tokens).tolist()
        for name, value in by_name(engine.score(model, prompt, answer)).items():
            stats.setdefault(name, []).append(value)
    empty = pd.DataFrame({"score": np.zeros(len(texts))})
    return Run(Path("run/ue_manager_seed1"), empty, empty, stats)
