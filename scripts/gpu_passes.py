"""Time masked passes and samples of a model with random weights: JSON lines of label and seconds.

`gpu.py` gives it to Python as standard input, in the checkout of a commit, whose own package it
imports: this one's, or that of 4779b0d, where names were others.

    PYTHONPATH=.:scripts python - qwen3-4b cuda plain 490+6 490+200 < scripts/gpu_passes.py
"""

import json
import statistics
import sys
import time
from functools import partial

import torch
from bench_suffix import load

SLOW = 8.0
"""Seconds after which a call is not repeated."""
_, SHAPE, DEVICE, MODE, *LENGTHS = sys.argv
SAMPLES, TOKENS = 10, 20


def entrance(model):
    """Layer, number of heads, and the function that runs the subnetworks."""
    try:
        from lm_polygraph_asmi.core.model import structure_of
        from tests.families import subnetwork_log_probs
    except ImportError:
        from lm_polygraph_asmi.model import layer_at, num_heads, subnetwork_log_probs

        return layer_at(model, 0.6).layer, num_heads(model), subnetwork_log_probs
    structure = structure_of(model)
    layer = structure.layer_at(0.6)
    compiles = {"compiles": True} if MODE == "compiled" else {}
    return layer, structure.heads[layer], partial(subnetwork_log_probs, **compiles)


def timed(label, run):
    """The median of three calls after a first one."""
    seconds = []
    while len(seconds) < 4 and sum(seconds) < SLOW:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(json.dumps([label, statistics.median(seconds[1:] or seconds), seconds[0]]), flush=True)


def main():
    model = load(SHAPE, torch.bfloat16 if DEVICE == "cuda" else torch.float32, DEVICE)
    layer, heads, run = entrance(model)
    drawn = torch.Generator().manual_seed(0)
    masks = (torch.rand(40, heads, generator=drawn) > 0.15).int()
    for length in LENGTHS:
        prompt, answer = map(int, length.split("+"))
        ids = torch.randint(model.config.vocab_size, (prompt + answer,), generator=drawn).to(DEVICE)
        for scope in ("all", "response"):
            given = {"scope": scope, "attention": "sdpa"}
            timed(f"{scope}, {length}", partial(run, model, ids, prompt, layer, masks, **given))
    if MODE == "samples":
        from lm_polygraph_asmi.host.samples import draw, seeds_of

        prompt = ids[None, :prompt]
        seeds = seeds_of(prompt[0].tolist(), 0, SAMPLES)
        short = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}
        generate = partial(model.generate, **short, do_sample=True, temperature=0.5)
        whole = {"attention_mask": torch.ones_like(prompt), **short}
        timed("a greedy answer", lambda: model.generate(prompt, **whole, do_sample=False))
        timed("ten samples", lambda: draw(generate, model, prompt, seeds, lambda row: row.sequence))


with torch.no_grad():
    main()
