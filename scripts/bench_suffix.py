"""Time ASMI's masked passes, a plain implementation, and sampling.

    python scripts/bench_suffix.py                           # SmolLM2-135M-Instruct, CPU, float32
    python scripts/bench_suffix.py --model qwen3-4b --dtype bfloat16  # its shape, random weights
    python scripts/bench_suffix.py --model qwen3-4b --dtype bfloat16 --compile

All methods take turns in one process with the same tokens and masks, after a check that outputs
agree. Token ids are random, because the cost does not depend on them.
"""

import ctypes
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core import maths
from lm_polygraph_asmi.core.model import (
    MaskedModel,
    masked_model,
    readout,
    run_unmasked,
    scoring_session,
    structure_of,
    unembedding,
)
from lm_polygraph_asmi.core.model.choice import PASSES, passes_to_try
from lm_polygraph_asmi.host.loading import load_named
from tests.families import subnetwork_log_probs

SHAPES = {
    "qwen3-4b": transformers.Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "llama-2-7b": transformers.LlamaConfig(),  # the defaults are its sizes
    "tiny": transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=100,
    ),
}  # fmt: skip
SAMPLES, DEPTH, MASK_RATE, TOP_K = 10, 0.6, 0.15, 64
NO_KERNEL = ("as_strided", "view", "_unsafe_view", "_reshape_alias", "empty", "detach", "alias")
"""Beginnings of operators that compute nothing."""


def load(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """SmolLM2, a shape with random weights, or any model that transformers can load by `name`."""
    if name in SHAPES:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(SHAPES[name], dtype=dtype).eval()
    return load_named(name)[0].to(device, dtype)


class Contenders:
    """Methods to time; most compute the S x T distributions of an answer."""

    def __init__(
        self, f: MaskedModel, ids: Tensor, prompt_length: int, layer: int, masks: Tensor
    ) -> None:
        self.f, self.model, self.input_ids, self.prompt_length = f, f.model, ids, prompt_length
        self.layer, self.masks = layer, masks
        self.predicting = slice(prompt_length - 1, len(ids) - 1)

    def scoring_pass(self) -> Tensor:
        """One unmasked pass over prompt and answer: the unit of the paper's cost estimate."""
        unmasked = run_unmasked(self.f, self.input_ids, self.prompt_length, [])
        return readout(self.f, unmasked.final_hidden)

    def naive(self, positions: slice = slice(None)) -> Tensor:
        """S full forward passes, each with logits at every position, and a hook that masks."""
        rows, projection = [], self.f.projection(self.layer)
        for mask in self.masks:

            def hook(_: nn.Module, args: tuple[Tensor, ...], mask: Tensor = mask) -> Tensor:
                heads = args[0].clone()
                kept = mask.to(heads).repeat_interleave(heads.shape[-1] // len(mask))
                heads[:, positions] *= kept
                return heads

            handle = projection.register_forward_pre_hook(hook)
            try:
                logits = self.model(input_ids=self.input_ids[None], use_cache=False).logits
            finally:
                handle.remove()
            rows.append(logits[0, self.predicting].float().log_softmax(-1))
        return torch.stack(rows)

    def _asmi(self, scope: str) -> Tensor:
        given = self.model, self.input_ids, self.prompt_length, self.layer, self.masks
        return subnetwork_log_probs(*given, scope=scope, compiles=self.f.compiles)

    def exact(self) -> Tensor:
        return self._asmi("all")

    def response(self) -> Tensor:
        return self._asmi("response")

    def _generate(self, **options: object) -> Tensor:
        length = len(self.input_ids) - self.prompt_length
        ids: Tensor = self.model.generate(
            self.input_ids[None, : self.prompt_length],
            attention_mask=torch.ones_like(self.input_ids[None, : self.prompt_length]),
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            **options,
        )
        return ids

    def samples(self) -> None:
        """Samples for Semantic Entropy, drawn by transformers: the prompt runs once per sample."""
        self._generate(do_sample=True, temperature=0.5, num_return_sequences=SAMPLES)

    def greedy(self) -> None:
        self._generate(do_sample=False)

    def kernels(self, scope: str) -> int:
        """Kernels of one masked pass: on a processor, operators that call no other and compute."""
        found = run_unmasked(self.f, self.input_ids, self.prompt_length, [self.layer], scope)
        run = PASSES[scope][passes_to_try(self.f, self.layer, scope).first]
        on_gpu = self.model.device.type == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            run(self.f, found, self.layer, self.masks[:2])
        names = [event.name for event in profiler.events() if not event.cpu_children]
        if on_gpu:
            return sum(not name.startswith("Mem") for name in names)
        computed = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
        return sum(not name.startswith(NO_KERNEL) for name in computed)

    def check(self) -> dict[str, float]:
        """Difference of log-probabilities from the naive passes of the same scope.

        The largest; in 16 bits the root mean square, since the largest of millions is many times
        the rounding. For scale, also the difference between two masks and, as rounding, between
        two attention implementations.

        Raises:
            click.ClickException: it is larger than rounding, or than a fifth of the difference
                between masks (16 bits: half, since passes of other shapes round otherwise), if
                rounding is smaller.
        """
        wide = self.model.dtype == torch.float32

        def size(difference: Tensor) -> float:
            if wide:
                return difference.abs().max().item()
            return difference.float().square().mean().sqrt().item()

        naive = self.naive()
        with scoring_session(self.model, "eager"):
            noise = size(self.naive() - naive)
        differences = {
            "exact": size(self.exact() - naive),
            "response": size(self.response() - self.naive(self.predicting)),
        }
        effect = size(naive - naive[:1])
        rounding = 1e-3 if wide else 0.5  # nats
        tolerance = max(min(rounding, effect / (5 if wide else 2)), 2 * noise)
        if not max(differences.values()) <= tolerance:
            raise click.ClickException(
                f"outputs differ by more than {tolerance:.2g}: {differences}"
            )
        return differences | {"between masks": effect, "rounding": noise}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> float:
    """Peak memory of `run` above the memory in use before; NaN where it cannot be measured.

    On a GPU, memory allocated by PyTorch; on a CPU, resident memory of the process (Linux).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # return freed memory to the system first
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    except OSError:
        return float("nan")
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def projection_counter() -> FlopCounterMode:
    """Counts FLOPs of matrix products with weights.

    Without those of attention: not every system counts them, nor torch 2.11 grouped queries.
    """
    of_attention = [op for op in flop_registry if "attention" in str(op) or "bmm" in str(op)]
    return FlopCounterMode(
        display=False, custom_mapping=dict.fromkeys(of_attention, lambda *_, **__: 0)
    )


def machine(device: torch.device) -> str:
    """Processor and versions, for the caption."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        named = [
            line.split(":")[1].strip()
            for line in (info.read_text().splitlines() if info.exists() else [])
            if line.startswith("model name")
        ]
        processor = (
            f"{(named or [platform.processor()])[0]}, {torch.get_num_threads()} threads of "
            f"{os.cpu_count()} cores"
        )
    return f"{processor}; torch {torch.__version__}, transformers {transformers.__version__}"


@click.command(help=__doc__)
@click.option("--model", "name", default="smollm2", show_default=True,
              help=f"{', '.join(SHAPES)}, smollm2, or a path or hub name.")  # fmt: skip
@click.option("--dtype", default="float32", show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--prompt-tokens", default=260, show_default=True, type=click.IntRange(1))
@click.option("--response-tokens", default=4, show_default=True, type=click.IntRange(1))
@click.option("--num-masks", default=40, show_default=True, type=click.IntRange(2))
@click.option("--compile", "compiles", is_flag=True, help="As the setting asmi.compile.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
def main(
    name: str, dtype: str, device: str, prompt_tokens: int, response_tokens: int, num_masks: int,
    compiles: bool, repeats: int,
) -> None:  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 120)
    model = load(name, getattr(torch, dtype), device)
    place = model.device
    generator, length = torch.Generator().manual_seed(0), prompt_tokens + response_tokens
    input_ids = torch.randint(model.config.vocab_size, (length,), generator=generator).to(place)
    structure = structure_of(model)
    layer = structure.layer_at(DEPTH)
    masks = maths.sample_head_masks(num_masks, structure.heads[layer], MASK_RATE, generator)
    distinct = masks.unique(dim=0)
    to_run = int((~distinct.all(dim=1)).sum())
    console.print(
        f"{name}, {dtype}, SDPA: {prompt_tokens} prompt and {response_tokens} "
        f"response tokens, layer {layer} of {structure.num_layers}, p = {MASK_RATE}, "
        f"S = {num_masks}, of which {to_run} distinct and not all-ones\n{machine(place)}",
        highlight=False,
    )
    with masked_model(model, "sdpa", compiles=compiles) as f:
        contenders = Contenders(f, input_ids, prompt_tokens, layer, masks)
        differences = contenders.check()
        kernels = [f"{scope} {contenders.kernels(scope)}" for scope in SCOPES]
        log_probs = contenders.exact()

        def statistics_alone() -> None:
            maths.mutual_information(log_probs, TOP_K)
            maths.semantic_agreement(log_probs, unembedding(f), TOP_K)

        timed: dict[str, Callable[[], object]] = {
            f"naive, {num_masks} passes": contenders.naive,
            "ours, exact": contenders.exact,
            "ours, response": contenders.response,
            f"{SAMPLES} samples": contenders.samples,
            "greedy answer": contenders.greedy,
            "one scoring pass": contenders.scoring_pass,
            f"MI and A, K = {TOP_K}": statistics_alone,
        }
        durations: dict[str, list[float]] = {label: [] for label in timed}
        # In turn, so that a slow phase of the machine affects all; the first round is the warm-up.
        with tqdm(total=(repeats + 1) * len(timed), desc="rounds", leave=False) as progress:
            for _ in range(repeats + 1):
                for label, run in timed.items():
                    durations[label].append(seconds(run, place))
                    progress.update()
        peaks, flops = {}, {}
        for label, run in timed.items():
            with projection_counter() as counter:
                peaks[label] = peak_bytes(run, place)
            flops[label] = counter.get_total_flops()
    medians = {label: statistics.median(times[1:]) for label, times in durations.items()}
    naive, *_ = timed
    table = Table(title="Cost of an answer")
    for column in ("", "seconds", "naive / this", "FLOP / scoring pass", "peak MB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for label, median in medians.items():
        table.add_row(
            label,
            f"{median:.3f}",
            f"{medians[naive] / median:.1f}",
            f"{flops[label] / flops['one scoring pass']:.2f}",
            f"{peaks[label] / 1e6:.0f}",
        )
    console.print(table)
    worst = ", ".join(f"{label} {value:.1g}" for label, value in differences.items())
    console.print(
        f"Medians of {repeats} rounds after a warm-up; peak memory is above the weights; FLOPs are "
        "those of products with weights, without attention scores.\nLargest difference in a "
        f"log-probability from naive passes and, for scale, between masks: {worst} nats.\n"
        f"Kernels of a masked pass: {', '.join(kernels)}.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
