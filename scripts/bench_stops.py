"""Processor seconds that stop strings cost a row of a benchmark, with a large vocabulary.

    python scripts/bench_stops.py                       # 150,000 tokens, as of Qwen
    python scripts/bench_stops.py --vocabulary 32000    # as of Llama 2

A row makes 13 calls of `generate`: greedy, ten samples and both P(True). The model is so small that
hardly anything but the stop strings takes time. Both models answer each row, after one row that is
not counted, and their answers are compared.
"""

import statistics
import time
from itertools import product

import click
import torch
from lm_polygraph.stat_calculators import (
    GreedyProbsCalculator,
    PromptCalculator,
    SamplingGenerationCalculator,
    SamplingPromptCalculator,
)
from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.model import WhiteboxModel
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_polygraph_asmi.host.whitebox import StopsOnceModel

SAMPLES, MAX_NEW_TOKENS = 10, 4
PROMPT = "Who built the ferry Ondine, row {row}?"


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with made-up tokens of one to six letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "</s>", "True", *letters]
    words = (
        "".join(word) for length in range(2, 7) for word in product("Ġetaoinshr", repeat=length)
    )
    tokens += [word for word, _ in zip(words, range(vocabulary - len(tokens)), strict=False)]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.add_tokens(["True"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def models_of(vocabulary: int, stops: list[str]) -> dict[str, WhiteboxModel]:
    """LM-Polygraph's model and the one of the shipped configs, with the same weights."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(vocabulary)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)).eval()
    parameters = GenerationParameters(stop_strings=stops, temperature=0.5)
    return {
        "LM-Polygraph": WhiteboxModel(model, tokenizer, "random", "CausalLM", parameters),
        "shipped configs": StopsOnceModel(model, tokenizer, "random", "CausalLM", parameters),
    }


def answers_of(model: WhiteboxModel, prompt: str) -> dict:
    """The statistics of LM-Polygraph's calculators for one prompt, after 13 calls of `generate`."""
    torch.manual_seed(0)
    stats: dict = {"input_texts": [prompt]}
    for calculator in (
        GreedyProbsCalculator(output_attentions=False),
        SamplingGenerationCalculator(SAMPLES),
        PromptCalculator(),
        SamplingPromptCalculator(),
    ):
        stats |= calculator(stats, [prompt], model, MAX_NEW_TOKENS)
    return stats


@click.command(help=__doc__)
@click.option("--vocabulary", default=150_000, show_default=True, help="Number of tokens.")
@click.option("--rows", default=3, show_default=True, help="Rows that are timed.")
@click.option("--stop", "stops", multiple=True, default=["\n"], help="Stop strings.")
def main(vocabulary: int, rows: int, stops: tuple[str, ...]) -> None:
    models = models_of(vocabulary, list(stops))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for row in range(rows + 1):
        answers = []
        for name, model in models.items():
            start = time.process_time()
            stats = answers_of(model, PROMPT.format(row=row))
            seconds[name].append(time.process_time() - start)
            answers.append([stats["greedy_tokens"], stats["sample_texts"], list(stats["p_true"])])
        if answers[0] != answers[1]:
            raise click.ClickException(f"row {row}: the answers differ: {answers}")
    click.echo(f"{vocabulary} tokens, {len(stops)} stop strings, {3 + SAMPLES} calls a row")
    for name, values in seconds.items():
        median = statistics.median(values[1:])
        click.echo(f"{name}: {median:.3f} processor seconds a row, the first {values[0]:.3f}")


if __name__ == "__main__":
    main()
