"""Does the memory of `Scorer.score_many` stay constant over very many rows?

    python scripts/memory_of_many.py                 # 100,000 rows
    python scripts/memory_of_many.py --rows 1000

Rows are generated lazily: all prompts differ, one row in ten has no answer (the model answers),
one in a hundred is invalid. The model is tiny and random: rows are cheap, and memory that is kept
per row shows.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lm_polygraph_asmi import Scorer
from tests.tiny_lm import whitebox


def rows(number: int) -> Iterator[dict[str, Any]]:
    for index in range(number):
        answer = None if index % 10 == 0 else str(index % 7)
        prompt = None if index % 100 == 1 else f"{index:x}?"
        yield {"id": index, "prompt": prompt, "answer": answer}


@click.command(help=__doc__)
@click.option("--rows", "number", default=100_000, show_default=True, type=click.IntRange(10))
def main(number: int) -> None:
    torch.set_num_threads(1)
    scorer = Scorer(whitebox(), scope="response", num_masks=4, mask_rate=0.25, max_new_tokens=1)
    failed, process, start = 0, psutil.Process(), time.perf_counter()
    print("rows    failed  MB resident  rows a second")
    for count, score in enumerate(scorer.score_many(rows(number)), start=1):
        failed += score.error is not None
        if count % (number // 10) == 0 or count == number // 100:
            resident = process.memory_info().rss / 1e6
            rate = count / (time.perf_counter() - start)
            print(f"{count:<7} {failed:<7} {resident:<12.1f} {rate:.0f}", flush=True)


if __name__ == "__main__":
    main()
