"""Time of scoring an answer during generation, relative to generation without scoring.

    python scripts/bench_stream.py                             # SmolLM2-135M-Instruct, CPU, float32
    python scripts/bench_stream.py --clock cpu --threads 1     # on a busy machine
    python scripts/bench_stream.py --shares                    # time by kind of work
    python scripts/bench_stream.py --count --model llama-2-7b     # counts one step, runs nothing

The strategies are those of `bench_suffix.py`; a check that their MI is equal comes first. They take
turns in one process; each round gives one ratio to the greedy answer of that round.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from lm_polygraph.utils.common import load_external_module
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import layer_at, num_heads, scoring_session, target_layer

bench_suffix: Any = load_external_module(str(Path(__file__).with_name("bench_suffix.py")))

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
POINTS: dict[str, dict[str, Any]] = {
    "S = 40": {"num_masks": 40, "mask_rate": 0.15},
    "20 balanced": {"num_masks": 20, "mask_rate": 0.15, "mask_sampler": "balanced"},
}
PROFILES: dict[str, tuple[float, ...]] = {"60, 70, 90 %": (0.6, 0.7, 0.9), "90 %": (0.9,)}
"""Depths of a profile, and of one layer near the last; derived p and S, cached keys reused."""
PASSES = 6
"""Passes over 32-bit logits: written once, read for sums and the sort."""
STRATEGIES = {"score": "greedy, then response", "reuse": "greedy with reuse", "stream": "stream"}


def contenders(model: Any, prompt: int, response: int, depth: float) -> dict[str, Callable]:
    """Name -> function to time; the greedy answer comes first."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (prompt + response,), generator=generator)
    masks = sample_head_masks(2, num_heads(model), 0.5, generator)  # the strategies sample theirs
    layer = layer_at(model, depth).layer
    timed = bench_suffix.Contenders(model, ids.to(model.device), prompt, layer, masks, depth)
    rows = {
        f"{label}, {design}": partial(timed.answered, strategy, **point)
        for design, point in POINTS.items()
        for strategy, label in STRATEGIES.items()
    }
    rows |= {
        f"greedy with reuse, {design}": partial(timed.answered, "reuse", depths)
        for design, depths in {f"{depth:.0%}": (depth,), **PROFILES}.items()
    }
    timed.check_answered()
    return {"greedy answer": timed.greedy} | rows


def shares(run: Callable[[], object], vocabulary: int) -> dict[str, float]:
    """Seconds by kind of work, and seconds of Python between the operators."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        start = time.perf_counter()
        run()
        total = time.perf_counter() - start
    seconds: Counter[str] = Counter()
    for event in profiled.key_averages(group_by_input_shape=True):
        seconds[_kind(event.key, event.input_shapes, vocabulary)] += event.self_cpu_time_total / 1e6
    return {**dict(seconds.most_common()), "between operators": total - sum(seconds.values())}


def _kind(name: str, shapes: list[Any], vocabulary: int) -> str:
    if name in ("aten::mm", "aten::addmm"):
        rows, (_, width) = shapes[-2][0], shapes[-1]
        of = "unembedding" if width == vocabulary else "layers"
        return f"{of}, {'several rows' if rows > 1 else 'one row'}"
    if "scaled_dot_product" in name:
        return "attention"
    # Arrays as wide as the vocabulary are distributions.
    if any(shape and shape[-1] == vocabulary for shape in shapes if isinstance(shape, list)):
        return "distributions"
    return "other operators"


def products(model: Any, clock: Callable[[], float]) -> str:
    """Milliseconds of a product of rows with the unembedding, the least of three."""
    weight, texts = model.get_output_embeddings().weight.detach(), []
    for rows in (1, 4, 8, 14, 16, 21, 80):
        states, times = torch.randn(rows, weight.shape[1]), []
        for _ in range(3):
            start = clock()
            torch.nn.functional.linear(states, weight)
            times.append(clock() - start)
        texts.append(f"{rows}: {1e3 * min(times):.1f}")
    return f"milliseconds of a product with the unembedding, by rows: {', '.join(texts)}"


def shares_table(parts: dict[str, dict[str, float]]) -> Table:
    """Seconds by kind of work, divided by those of the greedy answer."""
    total = sum(parts["greedy answer"].values())
    table = Table(title="where the time goes; the greedy answer is 1")
    for column in ("", *parts):
        table.add_column(column, justify="right" if column else "left")
    for kind in dict.fromkeys(kind for seconds in parts.values() for kind in seconds):
        table.add_row(kind, *(f"{seconds.get(kind, 0) / total:.2f}" for seconds in parts.values()))
    table.add_row("all", *(f"{sum(seconds.values()) / total:.2f}" for seconds in parts.values()))
    return table


def step_table(name: str, depth: float) -> Table:
    """Bytes read and multiply-adds of a step of generation, and those of masked rows, in 16 bits.

    A GPU that can do more multiply-adds per byte than the last column is bound by memory reads.
    """
    if name not in bench_suffix.SHAPES:
        raise click.BadParameter(
            f"--count needs one of {', '.join(bench_suffix.SHAPES)}, got {name}"
        )
    model = bench_suffix.load(name, torch.bfloat16, "meta")
    layers, heads = model.model.layers, model.config.num_attention_heads
    layers_above = [_weights(layer) for layer in layers[target_layer(depth, len(layers)) + 1 :]]
    unembedding = model.get_output_embeddings().weight.numel()
    all_weights = sum(map(_weights, layers)) + unembedding
    table = Table(title=f"{name}, one step of one sequence, 16-bit weights")
    for column in ("", "rows", "G multiply-adds", "read, GB", "of logits", "multiply-adds a byte"):
        table.add_column(column, justify="right" if column else "left")
    rows_of = {"greedy": 0} | {
        f"stream, {design}": _distinct(heads, **p) for design, p in POINTS.items()
    }
    for label, masked in rows_of.items():
        products = all_weights + masked * (sum(layers_above) + unembedding)
        logits = 4 * (1 + masked) * model.config.vocab_size * PASSES
        read = 2 * all_weights + logits
        table.add_row(
            label, str(1 + masked), f"{products / 1e9:.1f}", f"{read / 1e9:.2f}",
            f"{logits / 1e9:.2f}", f"{products / read:.1f}",
        )  # fmt: skip
    return table


def _weights(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _distinct(heads: int, num_masks: int, mask_rate: float, mask_sampler: str = "bernoulli") -> int:
    """Number of distinct masks, without the one that keeps every head."""
    masks = sample_head_masks(
        num_masks, heads, mask_rate, torch.Generator().manual_seed(0), mask_sampler
    )
    return int((~masks.unique(dim=0).bool().all(dim=1)).sum())


@click.command(help=__doc__)
@click.option("--model", "name", default="smollm2", show_default=True)
@click.option("--prompt-tokens", default=320, show_default=True, type=click.IntRange(2))
@click.option("--response-tokens", "responses", multiple=True, default=(4, 20), show_default=True)
@click.option("--depth", default=0.6, show_default=True)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=torch.get_num_threads(), show_default=True)
@click.option("--clock", default="wall", show_default=True, type=click.Choice(list(CLOCKS)))
@click.option("--shares", "explain", is_flag=True, help="Also print times by kind of work.")
@click.option("--count", is_flag=True, help="Only count what one step of a 16-bit model reads.")
def main(
    name: str,
    prompt_tokens: int,
    responses: tuple[int, ...],
    depth: float,
    repeats: int,
    threads: int,
    clock: str,
    explain: bool,
    count: bool,
) -> None:
    torch.set_num_threads(threads)
    console, now = Console(width=110), CLOCKS[clock]
    if count:
        console.print(step_table(name, depth))
        return
    model = bench_suffix.load(name, torch.float32, "cpu")
    console.print(f"{name}, {bench_suffix.machine(model.device)}, {clock} seconds", highlight=False)
    if explain:
        console.print(products(model, now), highlight=False)
    for length in responses:
        with scoring_session(model, "sdpa"):
            timed = contenders(model, prompt_tokens, length, depth)
            durations: dict[str, list[float]] = {label: [] for label in timed}
            for _ in range(repeats + 1):  # the first round is the warm-up
                for label, run in timed.items():
                    start = now()
                    run()
                    durations[label].append(now() - start)
            parts = {
                label: shares(run, model.config.vocab_size) for label, run in timed.items()
            } if explain else {}  # fmt: skip
        table = Table(title=f"{prompt_tokens} prompt and {length} response tokens")
        for column in ("", "seconds", "on top of greedy", "least to most"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        greedy = durations["greedy answer"][1:]
        for label, (_, *times) in durations.items():
            on_top = sorted(seconds / base - 1 for seconds, base in zip(times, greedy, strict=True))
            table.add_row(
                label,
                f"{statistics.median(times):.3f}",
                f"{statistics.median(on_top):.2f}",
                f"{on_top[0]:.2f} to {on_top[-1]:.2f}",
            )
        console.print(table)
        if parts:
            console.print(shares_table(parts))


if __name__ == "__main__":
    main()
