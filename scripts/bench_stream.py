"""Time of scoring an answer during generation, relative to generation without scoring.

    python scripts/bench_stream.py                             # SmolLM2-135M-Instruct, CPU, float32
    python scripts/bench_stream.py --clock cpu --threads 1     # on a busy machine

The strategies are those of `bench_suffix.py`; a check that their MI is equal comes first. They take
turns in one process; each round gives one ratio to the greedy answer of that round.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from bench_suffix import DEPTH, POINTS, STRATEGIES, Contenders, load, machine
from rich.console import Console
from rich.table import Table

from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import layer_at, num_heads, scoring_session

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def contenders(model: Any, prompt: int, response: int) -> dict[str, Callable[[], object]]:
    """Name -> function to time; the greedy answer comes first."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (prompt + response,), generator=generator)
    masks = sample_head_masks(2, num_heads(model), 0.5, generator)  # the strategies sample theirs
    timed = Contenders(model, ids.to(model.device), prompt, layer_at(model, DEPTH).layer, masks)
    timed.check_answered()
    return {"greedy answer": timed.greedy} | {
        f"{label}, {design}": partial(timed.answered, strategy, **point)
        for design, point in POINTS.items()
        for label, strategy in STRATEGIES.items()
    }


@click.command(help=__doc__)
@click.option("--model", "name", default="smollm2", show_default=True)
@click.option("--prompt-tokens", default=320, show_default=True, type=click.IntRange(2))
@click.option("--response-tokens", "responses", multiple=True, default=(4, 20), show_default=True)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=torch.get_num_threads(), show_default=True)
@click.option("--clock", default="wall", show_default=True, type=click.Choice(list(CLOCKS)))
def main(
    name: str,
    prompt_tokens: int,
    responses: tuple[int, ...],
    repeats: int,
    threads: int,
    clock: str,
) -> None:
    torch.set_num_threads(threads)
    console, now = Console(width=110), CLOCKS[clock]
    model = load(name, torch.float32, "cpu")
    console.print(f"{name}, {machine(model.device)}, {clock} seconds", highlight=False)
    for length in responses:
        with scoring_session(model, "sdpa"):
            timed = contenders(model, prompt_tokens, length)
            durations: dict[str, list[float]] = {label: [] for label in timed}
            for _ in range(repeats + 1):  # the first round is the warm-up
                for label, run in timed.items():
                    start = now()
                    run()
                    durations[label].append(now() - start)
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


if __name__ == "__main__":
    main()
