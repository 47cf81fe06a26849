"""Does the memory of `Scorer.score_many` stay constant over very many rows?

    python scripts/memory_of_many.py                 # 100,000 rows
    python scripts/memory_of_many.py --rows 1000

Rows are generated lazily: all prompts differ, one row in ten has no answer (the model answers),
one in a hundred is invalid. The model is tiny and random: rows are cheap, and memory that is kept
per row shows.
"""

import time
from collections.abc import Iterator
from typing import Any

import click
import psutil
import torch
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_polygraph_asmi import Scorer


def tiny_scorer() -> Scorer:
    """A scorer of a model with two layers of four heads and one token per byte."""
    vocabulary = dict(zip(pre_tokenizers.ByteLevel.alphabet(), range(256), strict=True))
    bpe = ByteLevelBPETokenizer(vocab=vocabulary | {"</s>": 256}, merges=[])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(tokenizer),
        eos_token_id=256,
    )
    model = LlamaForCausalLM(config).eval()
    return Scorer(
        model, tokenizer=tokenizer, scope="response", num_masks=4, mask_rate=0.25, max_new_tokens=1
    )


def rows(number: int) -> Iterator[dict[str, Any]]:
    for index in range(number):
        answer = None if index % 10 == 0 else str(index % 7)
        prompt = None if index % 100 == 1 else f"{index:x}?"
        yield {"id": index, "prompt": prompt, "answer": answer}


@click.command(help=__doc__)
@click.option("--rows", "number", default=100_000, show_default=True, type=click.IntRange(10))
def main(number: int) -> None:
    torch.set_num_threads(1)
    scorer, process = tiny_scorer(), psutil.Process()
    failed, start = 0, time.perf_counter()
    print("rows    failed  MB resident  rows a second")
    for count, score in enumerate(scorer.score_many(rows(number)), start=1):
        failed += score.error is not None
        if count % (number // 10) == 0 or count == number // 100:
            resident = process.memory_info().rss / 1e6
            rate = count / (time.perf_counter() - start)
            print(f"{count:<7} {failed:<7} {resident:<12.1f} {rate:.0f}", flush=True)


if __name__ == "__main__":
    main()
