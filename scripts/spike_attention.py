"""Masking heads through transformers' attention interface instead of hooks: the spike of issue 41.

    python scripts/spike_attention.py registry             # every class: is it right that way?
    python scripts/spike_attention.py twins                # nine families, scopes, stream, reuse
    python scripts/spike_attention.py time                 # SmolLM2, the engine before and after
    python scripts/spike_attention.py layers               # SmolLM2, every way to run the masks

A registered attention function wraps the model's own. In one layer it multiplies each head's output
by its mask, before anything is projected. What is compared with is whole passes over copies whose
masked heads have no weight, as in `model_table.py`.
"""

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from bench_suffix import load
from model_table import DEPTH, MASKS, Judge, NotJudged, Question, projection_by_name

from lm_polygraph_asmi import maths
from lm_polygraph_asmi import model as engine
from lm_polygraph_asmi.model import check, perturbation, stepwise, structure, suffix, unmasked
from lm_polygraph_asmi.model.layer_call import LayerCall
from lm_polygraph_asmi.model.layers import decoder_layers, layer_at, num_heads
from lm_polygraph_asmi.model.session import attention_of
from lm_polygraph_asmi.validation import SCOPES
from tests.reference import subnetwork_log_probs as twin
from tests.registry import classes, tiny

Edit = Callable[[Tensor], Tensor]


class Door:
    """The attention function that is registered.

    Attributes:
        calls: modules it was called for.
        edits: by module, what is done to its heads' output, (B, T, H, width of a head).
        instead: by module, what its heads say without being asked.
        answered: how often that was said.
    """

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []
        self.edits: dict[nn.Module, Edit] = {}
        self.instead: dict[nn.Module, Tensor] = {}
        self.answered = 0
        for own in ("eager", "sdpa"):
            AttentionInterface.register(f"asmi_{own}", self._around(own))
            AttentionMaskInterface.register(f"asmi_{own}", AttentionMaskInterface()[own])

    def _around(self, own: str) -> Callable[..., Any]:
        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(module)
            if module in self.instead:
                self.answered += 1
                return self.instead[module], None
            home = vars(sys.modules[type(module).__module__])
            # Each modelling file holds its own eager function, and some hold their own interface.
            table = home.get("ALL_ATTENTION_FUNCTIONS", AttentionInterface())
            function = home["eager_attention_forward"] if own == "eager" else table[own]
            found, *others = function(module, *args, **kwargs)
            edit = self.edits.get(module)
            return (found if edit is None else edit(found), *others)

        return attend

    @contextmanager
    def editing(self, layer: nn.Module, edit: Edit) -> Iterator[None]:
        """Let what a layer's heads say be something else for a while."""
        before = self.edits
        self.edits = {**before, **dict.fromkeys(layer.modules(), edit)}
        try:
            yield
        finally:
            self.edits = before


DOOR = Door()


@contextmanager
def perturbed(
    model: PreTrainedModel, unmasked: Any, layer: int, masks: Tensor, places: Tensor,  # noqa: ARG001
    change: Any = None, before: int = 0,  # noqa: ARG001
) -> Iterator[None]:  # fmt: skip
    """In place of `perturbation.perturbed`: masks of heads alone."""

    def edit(heads: Tensor) -> Tensor:
        heads = heads.clone()
        heads[:, places - before] *= masks.to(heads)[:, None, :, None]
        return heads

    with DOOR.editing(decoder_layers(model)[layer], edit):
        yield


def perturbed_layer(
    model: PreTrainedModel, unmasked: Any, layer: int, masks: Tensor, positions: slice,
    change: Any = None,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """In place of `perturbation.perturbed_layer`: what heads say in the unmasked pass is kept, and
    the attention is not computed again; queries, keys and values are, for every mask."""
    target, module = unmasked.targets[layer], decoder_layers(model)[layer]
    here = unmasked.run(positions)
    heads = target.heads[0, here].unflatten(-1, (masks.shape[1], -1))
    said = heads * masks.to(heads)[:, None, :, None]
    with mock.patch.dict(DOOR.instead, dict.fromkeys(module.modules(), said)):
        hidden = target.hidden[:, here].expand(len(masks), -1, -1)
        return unmasked.calls[layer].replay(module, hidden, here)


@contextmanager
def seen_by_layers(
    model: PreTrainedModel, layers: Any, targets: Any, before: int = 0
) -> Iterator[unmasked.Seen]:
    """In place of `unmasked.seen_by_layers`: heads are seen in the attention function."""
    seen = unmasked.Seen()

    def record(index: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            states, seen.calls[index] = LayerCall.split(module, args, kwargs, before)
            if index in targets:
                seen.hidden[index] = states

        return hook

    def keep(index: int) -> Edit:
        def edit(heads: Tensor) -> Tensor:
            seen.heads.setdefault(index, heads.flatten(2))
            return heads

        return edit

    with ExitStack() as undo:
        for index in layers:
            layer = decoder_layers(model)[index]
            handle = layer.register_forward_pre_hook(record(index), with_kwargs=True, prepend=True)
            undo.callback(handle.remove)
            if index in targets:
                undo.enter_context(DOOR.editing(layer, keep(index)))
        yield seen


@contextmanager
def through_interface() -> Iterator[None]:
    """The engine with these in place of its own."""
    maskable = ("asmi_eager", "asmi_sdpa", "eager", "sdpa")
    with ExitStack() as patched:
        for module in (suffix, stepwise):
            patched.enter_context(mock.patch.object(module, "perturbed", perturbed))
            patched.enter_context(mock.patch.object(module, "perturbed_layer", perturbed_layer))
        for module in (unmasked, stepwise):
            patched.enter_context(mock.patch.object(module, "seen_by_layers", seen_by_layers))
        for module in (unmasked, suffix, check, structure):
            patched.enter_context(mock.patch.object(module, "MASKABLE", maskable))
        yield


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest total variation at a position."""
    return (ours.exp() - theirs.exp()).abs().sum(-1).max().item() / 2


def switch(model: PreTrainedModel, attention: str) -> str | None:
    """Why a model does not take a registered function; None if it does."""
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    now = attention_of(model)
    return None if now == attention else f"stays with {now}"


def asked(model: PreTrainedModel) -> str:
    """What becomes of a class: its whole passes, one mask a row, against the twin's."""
    found = structure.structure_of(model)
    layer, ids = layer_at(model, DEPTH).layer, torch.randint(3, 61, (20,))
    question = Question(12, 8, 5)
    judge = Judge(model, layer)
    said = {}
    for own in ("eager", "sdpa"):
        if switch(model, own) is not None:
            continue
        plain = model(input_ids=ids[None, :-1], use_cache=False).logits
        if (why := switch(model, f"asmi_{own}")) is not None:
            return f"not switched: {why}"
        DOOR.calls.clear()
        through = model(input_ids=ids[None, :-1], use_cache=False).logits
        layers = decoder_layers(model)
        times = {sum(m in set(layers[i].modules()) for m in DOOR.calls) for i in found.sites}
        if times != {1}:
            return f"not called once a layer, but {sorted(times)} times"
        if not torch.allclose(plain, through, atol=1e-4):
            return f"{own}: the model's own pass is another, by {(plain - through).abs().max():.2g}"
        with perturbed(model, None, layer, MASKS[:5], torch.arange(len(ids) - 1)):
            rows = model(input_ids=ids[None, :-1].expand(5, -1), use_cache=False).logits
        ours = rows[:, 11:].float().log_softmax(-1)
        model.set_attn_implementation(own)
        said[own] = apart(ours, judge.log_probs(ids, question, "all", own))
    worst = max(said.values())
    return "right" if worst <= 1e-3 else f"WRONG: {worst:.2g}"


@click.group(help=__doc__)
def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="Verdicts as JSON.")
def registry(names: tuple[str, ...], out: Path | None) -> None:
    """Whole passes of every class that the engine finds heads in."""
    verdicts = {}
    for name, config, kind in classes():
        if names and name not in names:
            continue
        try:
            verdicts[name] = asked(tiny(config, kind))
        except NotJudged as error:
            verdicts[name] = f"not judged: {error}"
        except Exception as error:
            verdicts[name] = f"{type(error).__name__}: {error!s:.150}"
        print(name, verdicts[name], flush=True)
    if out:
        out.write_text(json.dumps(verdicts, indent=1))
    print(f"{sum(said == 'right' for said in verdicts.values())} of {len(verdicts)} right")


FAMILIES = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "GPT2LMHeadModel", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5ForCausalLM",
    "MixtralForCausalLM",
)  # fmt: skip


@main.command()
@click.option("--rounds", default=2, show_default=True)
def layers(rounds: int) -> None:
    """What it costs on SmolLM2 not to call layers again: every way to run the masks."""
    model = load("smollm2", torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (264,), generator=generator)
    layer = layer_at(model, 0.6).layer
    masks = maths.sample_head_masks(40, num_heads(model), 0.15, generator).unique(dim=0)
    with engine.scoring_session(model):
        for way in suffix.WAYS:
            if way.alone:
                continue
            found = engine.run_unmasked(model, ids, 260, [layer], way.scope)
            taken = []
            for _ in range(rounds):
                start = time.process_time()
                for part in masks.split(len(masks) if way.packed else 10):
                    way.run(model, found, layer, part, perturbation.WITHOUT_HEADS)
                taken.append(time.process_time() - start)
            print(f"{way.scope}, {way.name}: {min(taken):.2f} s", flush=True)


def streamed(model: PreTrainedModel, ids: Tensor, prompt: int, layer: int) -> Tensor:
    """Log-probabilities of the subnetworks while the answer is written."""
    with engine.scoring_session(model):
        written = stepwise.steps_of(model, ids[:prompt], layer, MASKS)
        given = [ids[:prompt].tolist(), *([token] for token in ids[prompt:-1].tolist())]
        states = torch.cat([written.steps(tokens)[written.rows] for tokens in given], dim=1)
        return engine.readout(model, states)[written.index]


def reused(model: PreTrainedModel, ids: Tensor, prompt: int, layer: int) -> tuple[Tensor, Tensor]:
    """A greedy answer, and log-probabilities that start from what its generation has kept."""
    if not engine.Memory.serves(model):
        raise NotImplementedError("not served, as today: layers keep more than keys and values")
    cache, memory = transformers.DynamicCache(), engine.Memory()
    with engine.scoring_session(model):
        with engine.states_seen(model, [layer]) as seen:
            given = {"attention_mask": torch.ones(1, prompt, dtype=torch.long)}
            answered = model.generate(
                ids[None, :prompt], past_key_values=cache, do_sample=False, min_new_tokens=8,
                max_new_tokens=8, pad_token_id=0, **given,
            )[0]  # fmt: skip
        memory.take(model, answered.tolist(), cache, seen())
        found = engine.run_unmasked(model, answered, prompt, [layer], "response", memory)
        subnetworks = engine.run_subnetworks(model, found, layer, MASKS)
        return answered, engine.readout(model, subnetworks.hidden)[subnetworks.index]


@main.command()
def twins() -> None:
    """The engine through the interface, against whole passes of copies, in total variation."""
    configs = {name: (config, kind) for name, config, kind in classes()}
    for name in FAMILIES:
        model = tiny(*configs[name])
        layer = layer_at(model, DEPTH).layer
        path = f"{structure.structure_of(model).layers}.{layer}"
        projection = f"{path}.{projection_by_name(decoder_layers(model)[layer])}"
        axis = int(name != "GPT2LMHeadModel")
        ids = torch.randint(3, 61, (32,), generator=torch.Generator().manual_seed(0))
        for own in ("eager", "sdpa"):
            if switch(model, own) is not None or (own == "sdpa" and "Gemma2" in name):
                continue
            # The twin runs under the model's own attention.
            judged = {s: twin(model, projection, axis, ids, 20, MASKS, s) for s in SCOPES}
            said = {}
            if switch(model, f"asmi_{own}") is not None:
                raise click.ClickException(f"{name} does not take the function")
            with through_interface():
                DOOR.answered = 0
                for scope in SCOPES:
                    ours = engine.subnetwork_log_probs(model, ids, 20, layer, MASKS, scope=scope)
                    said[scope] = apart(ours, judged[scope])
                ways = {scope: check.ways_seen_right(model, scope) for scope in SCOPES}
                said["stream"] = apart(streamed(model, ids, 20, layer), judged["response"])
                try:
                    answered, ours = reused(model, ids, 20, layer)
                except NotImplementedError as error:
                    ways["reuse"] = {str(error)}
                else:
                    model.set_attn_implementation(own)
                    theirs = twin(model, projection, axis, answered, 20, MASKS, "response")
                    said["reuse"] = apart(ours, theirs)
            model.set_attn_implementation(own)
            assert DOOR.answered, "masked somewhere else"
            print(name, own, {key: f"{value:.1g}" for key, value in said.items()}, ways, flush=True)


@main.command("time")
@click.option("--name", default="smollm2", show_default=True)
@click.option("--rounds", default=7, show_default=True)
def timed(name: str, rounds: int) -> None:
    """Seconds of CPU, the engine as it is and through the interface, in turn."""
    model = load(name, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (264,), generator=generator)
    layer = layer_at(model, 0.6).layer
    masks = maths.sample_head_masks(40, num_heads(model), 0.15, generator)

    def run(scope: str) -> tuple[float, Tensor]:
        start = time.process_time()
        found = engine.subnetwork_log_probs(model, ids, 260, layer, masks, scope=scope)
        return time.process_time() - start, found

    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for scope in SCOPES:
            model.set_attn_implementation("sdpa")
            before, plain = run(scope)
            model.set_attn_implementation("asmi_sdpa")
            with through_interface():
                after, through = run(scope)
            if turn:
                taken.setdefault((scope, "before"), []).append(before)
                taken.setdefault((scope, "after"), []).append(after)
            else:  # the self-check is in it
                print(f"{scope}: total variation {apart(plain, through):.1g}")
    for scope in SCOPES:
        before, after = (taken[scope, when] for when in ("before", "after"))
        ratios = sorted(b / a for a, b in zip(before, after, strict=True))
        print(
            f"{scope}: {statistics.median(before):.3f} s before, {statistics.median(after):.3f} s "
            f"after; ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
