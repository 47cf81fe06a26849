"""Finds where the heads of a model are, by the names of its modules.

The table of classes, `classes.csv`, says which classes of transformers were tested and how; other
classes run only if the setting `structure` names the projection of their heads. Before a model is
scored, three short passes show that it is deterministic and causal. Modules are only called, since
accelerate's hooks move weights at each call (`device_map`); whoever reads weights fetches them.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.config import SCOPES, module_paths, target_layer
from lm_polygraph_asmi.core.model.devices import (
    check_distributions,
    dtypes_of,
    execution_device,
)
from lm_polygraph_asmi.core.model.forwards import Forward, replaced_forwards
from lm_polygraph_asmi.core.model.layers import first_tensor
from lm_polygraph_asmi.core.model.rounding import MIXES, RERUN
from lm_polygraph_asmi.core.model.session import scoring_session
from lm_polygraph_asmi.core.model.state import findings, watch

PROJECTIONS = (
    ".self_attn.o_proj", ".attention.output.dense", ".self_attn.out_proj", ".attn.c_proj",
    ".attn.out_proj", ".self_attn.dense", ".self_attention.dense", ".attention.dense",
    ".multi_head_attention.dense", ".attn.attention.out_proj", ".attn.Wo",
    ".temporal_block.o_proj", ".mixer.o_proj",
)  # fmt: skip
"""Ends of the path, inside a layer, of the projection of the concatenated head outputs; each after
a dot, so that it is whole names."""
TOKENS = 13
"""Tokens in the short passes."""
NAME_THEM = "; or name the modules: structure='layers=...,projection=...,lm_head=...'"


@dataclass(frozen=True)
class Structure:
    """Where the heads of a model are; paths are those of modules."""

    base_model: str  # its first output is the final states
    layers: str  # the list of decoder layers
    num_layers: int  # L, layers with and without heads
    projections: dict[int, str]  # path inside a layer, by index of the layers that have heads
    heads: dict[int, int]  # H of each of them
    width: int  # the largest number of inputs of such a projection
    returns: tuple[int, ...]  # length of the tuple that each layer returns; 0: a tensor alone
    passes: dict[str, str]  # by scope, the fastest of `choice.PASSES` that is right for the class
    lm_head: str | None = None  # the module that returns the logits, if the setting names it

    def layer_at(self, depth: float) -> int:
        """The layer to mask at a relative depth: the nearest one that has heads, of two the lower.
        Raises ValueError: depth outside (0, 1)."""
        requested = target_layer(depth, self.num_layers)
        return min(self.heads, key=lambda layer: (abs(layer - requested), layer))


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, adapters active; other models unchanged.

    Raises TypeError: not a transformers model, or an adapter that adds tokens to the prompt or is
    triggered by tokens (aLoRA).
    """
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise TypeError(
                f"adapter {name!r} is an aLoRA, which is unsupported: masked passes do not see its "
                "invocation tokens. Use plain LoRA, or call delete_adapter to score without it"
            )
    if hasattr(model, "get_base_model"):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise TypeError(
                f"{type(model).__name__} puts learned tokens before the prompt, which is "
                "unsupported: positions no longer match the token ids. Use LoRA adapters"
            )
        model = model.get_base_model()  # type: ignore[operator]
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model, got {type(model).__name__}: pass the model as "
            "transformers loads it, neither compiled nor wrapped"
        )
    return model


@cache
def classes() -> dict[str, dict[str, str]]:
    """Rows of the table of classes, by name of the class."""
    with (files(__package__) / "classes.csv").open(encoding="utf-8") as table:
        return {row["class"]: row for row in csv.DictReader(table)}


def row_of(model: PreTrainedModel) -> dict[str, str] | None:
    """The row of a model's class, or of the class of transformers that it inherits from."""
    listed = (kind for kind in type(model).__mro__ if kind.__name__ in classes())
    kind = next((k for k in listed if k.__module__.startswith("transformers.")), None)
    return None if kind is None else classes()[kind.__name__]


def structure_of(model: PreTrainedModel, named: str | None = None) -> Structure:
    """The structure of a model; found once as long as its modules stay the same.

    `named`: paths of modules, as the setting `structure` of `ASMIConfig` has them. Raises
    TypeError: the heads of this model cannot be masked; the message gives the reason.
    """
    known: Structure | None = findings(model).get(("structure", named))
    return known or remember_structure(model, _find_structure(model, module_paths(named)), named)


def remember_structure(
    model: PreTrainedModel, structure: Structure, named: str | None = None
) -> Structure:
    """Let `structure_of` return it; from now on, writes to the projections of heads are noticed."""
    found = findings(model)
    found["structure", named] = structure
    projections: list[nn.Module] = []
    for each in found.values():
        if isinstance(each, Structure):
            layers = list(model.get_submodule(each.layers).children())
            projections += [layers[at].get_submodule(path) for at, path in each.projections.items()]
    watch(model, projections)
    return structure


def context_window(config: PretrainedConfig) -> int | None:
    """Longest sequence in tokens that a model's positions cover; None if not configured."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _find_structure(model: PreTrainedModel, named: dict[str, str]) -> Structure:
    name, row = type(model).__name__, row_of(model)
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder model: use a decoder-only model")
    if reason := refusal(name, row, named):
        raise TypeError(reason)
    _check_not_compiled(model)
    for part in named.keys() - {"projection"}:
        if named[part] not in dict(model.named_modules()):
            raise TypeError(
                f"{name}: structure names {part}={named[part]}, which is no module of the model: "
                "take a path of model.named_modules()"
            )
    output_embeddings(model, named.get("lm_head"))
    path, layers = _layers(model, named.get("layers"))
    projections = dict(_projections(model, path, layers, named.get("projection")))
    heads = {index: _heads(model, layers[index], index, at) for index, at in projections.items()}
    width = max(_width(layers[index], at, heads[index]) for index, at in projections.items())
    with scoring_session(model):
        base, returns = _short_passes(model, path, projections, named.get("lm_head"))
        if "projection" in named:
            _check_named_projection(model, path, *next(iter(projections.items())))
    passes = {} if row is None else {scope: row[scope] for scope in SCOPES if row[scope]}
    return Structure(
        base, path, len(layers), projections, heads, width, returns, passes, named.get("lm_head")
    )


def refusal(name: str, row: dict[str, str] | None, named: dict[str, str]) -> str | None:
    """Why heads of a class cannot be masked, by its row of the table; None if nothing is known."""
    if row is not None and row["heads"] == "refused":  # then the column "all" has the reason
        return f"{name} {row['all']}"
    if (row is None or row["heads"] != "by name") and "projection" not in named:
        return (
            f"{name} is not among the classes that were tested with masked heads "
            f"(docs/reference/models.md){NAME_THEM}"
        )
    return None


def _check_not_compiled(model: PreTrainedModel) -> None:
    """Raise for compiled code, which ignores forward methods set later."""
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if "_orig_mod" in module._modules or hasattr(forward, "_torchdynamo_orig_callable"):
            raise TypeError(
                f"{type(model).__name__}: {path or 'the model'} is compiled by torch.compile: pass "
                "it as transformers loads it. (In-place module.compile() is fine: it is disabled "
                "while a model is scored)"
            )


def output_embeddings(model: PreTrainedModel, path: str | None) -> nn.Module:
    """The module that returns the logits, at a path or else the model's own. Raises TypeError:
    there is none."""
    module = model.get_output_embeddings() if path is None else model.get_submodule(path)
    if module is None:
        raise TypeError(
            f"{type(model).__name__} has no unembedding (get_output_embeddings), and so no "
            f"logits{NAME_THEM}"
        )
    return module


def _layers(model: PreTrainedModel, named: str | None) -> tuple[str, list[nn.Module]]:
    """Path and modules of the decoder layers: of the lists as long as configured, the largest."""
    name = type(model).__name__
    number = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == number
        and not any(sense in path for sense in ("vision", "image", "audio"))
    }
    if named is None and not lists:
        raise TypeError(f"{name} has no list of {number} decoder layers{NAME_THEM}")
    path = named or max(lists, key=lambda at: sum(p.numel() for p in lists[at].parameters()))
    layers = list(model.get_submodule(path).children())
    if len(layers) < len(model.get_submodule(path)._modules):
        raise TypeError(f"{name}: the layers at {path!r} do not run once each: one stands twice")
    return path, layers


def _projections(
    model: PreTrainedModel, path: str, layers: Sequence[nn.Module], named: str | None
) -> Iterator[tuple[int, str]]:
    """Index of each layer that has heads, and the path of their projection in it."""
    config, found = model.config.get_text_config(decoder=True), False
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    for index, layer in enumerate(layers):
        paths = [at for at, _ in layer.named_modules() if at == named]
        # Layers of linear attention have no heads of a softmax, although a module has such a name.
        if named is None and kinds[index] != "linear_attention":
            paths = [at for at, _ in layer.named_modules() if f".{at}".endswith(PROJECTIONS)]
        if len(paths) > 1:
            raise TypeError(
                f"{type(model).__name__}: layer {index} has {len(paths)} projections of heads "
                f"({', '.join(paths)}), so there is no single place to mask them{NAME_THEM}"
            )
        for at in paths:
            found = True
            yield index, at
    if not found:
        listed = named or " or ".join(path[1:] for path in PROJECTIONS[:3])
        raise TypeError(
            f"{type(model).__name__} has no attention heads that ASMI could mask: no layer at "
            f"{path!r} has a module {listed}{NAME_THEM}"
        )


def _heads(model: PreTrainedModel, layer: nn.Module, index: int, path: str) -> int:
    """H of a layer, of its configuration."""
    number: Any = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    number = number[index] if isinstance(number, list | tuple) else number
    width = _width(layer, path, number)
    if not isinstance(number, int) or number < 1 or width % number:
        raise TypeError(
            f"{type(model).__name__}: expected the projection {path!r} of layer {index} to take "
            f"num_attention_heads = {number} heads of equal width, got {width} inputs: name the "
            "projection that ends attention, as a path inside a layer"
        )
    if layer.get_submodule(path)._forward_pre_hooks:
        raise TypeError(
            f"{type(model).__name__}: a hook of other code changes the heads of layer {index} "
            f"before they enter {path!r}, so that masking its input may not mask heads: remove it"
        )
    return number


def _width(layer: nn.Module, path: str, default: Any) -> Any:
    """Inputs of a projection; `default` where it does not say."""
    module = layer.get_submodule(path)
    return getattr(module, "in_features", getattr(module, "nx", default))


def ordinary_tokens(model: PreTrainedModel) -> Tensor:
    """Token ids (1, `TOKENS`) of a short text without those that the configuration names, which a
    model may treat differently; where the model runs."""
    text, special = model.config.get_text_config(decoder=True), set[int]()
    for name, value in [*model.config.to_dict().items(), *text.to_dict().items()]:
        if name.endswith(("token_id", "token_index", "token_ids")):
            special |= set(value if isinstance(value, list) else [value])
    ordinary = [token for token in range(min(text.vocab_size, 200)) if token not in special]
    tokens = torch.tensor([[ordinary[(7 * i + 3) % len(ordinary)] for i in range(TOKENS)]])
    return tokens.to(execution_device(model.get_input_embeddings()))


def _watched(
    model: PreTrainedModel, paths: Iterable[str], tokens: Tensor
) -> tuple[Tensor, dict[str, list[tuple[Any, Any]]]]:
    """Logits of a pass over tokens, (1, N, V), and the calls of modules by path, in the order of
    the first calls: the first tensor that each was given, and its output."""
    calls = defaultdict[str, list[tuple[Any, Any]]](list)

    def watch(path: str, real: Forward, *args: Any, **kwargs: Any) -> Any:
        of_module = calls[path]  # before modules inside it are called
        output = real(*args, **kwargs)
        of_module.append((first_tensor((*args, *kwargs.values())), output))
        return output

    with replaced_forwards(*((model.get_submodule(at), partial(watch, at)) for at in {*paths})):
        logits: Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits
    return logits.float(), calls


def _short_passes(
    model: PreTrainedModel, path: str, projections: dict[int, str], lm_head: str | None
) -> tuple[str, tuple[int, ...]]:
    """Path of the base model, and what layers return; raises unless each layer runs once, and the
    model is deterministic and causal."""
    name, parts, tokens = type(model).__name__, path.split("."), ordinary_tokens(model)
    outer = [".".join(parts[:end]) for end in range(1, len(parts))]
    inner = [f"{path}.{at}" for at in dict(model.get_submodule(path).named_children())]
    heads = [f"{inner[index]}.{at}" for index, at in projections.items()]
    other = tokens.clone()
    other[0, -1] = tokens[0, -2]  # another token
    try:
        watched = [*outer, *inner, *heads, *([lm_head] if lm_head else [])]
        logits, calls = _watched(model, watched, tokens)
        changed, again = (_watched(model, (), text)[0] for text in (other, tokens))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        dtypes = " and ".join(sorted(map(str, dtypes_of(model))))
        raise TypeError(
            f"{name} ({dtypes}) does not run on token ids only ({type(error).__name__}: {error}): "
            "use a model whose only input is text, loaded in one precision"
        ) from error
    times = [len(calls[at]) for at in inner]
    if set(times) != {1} or any(len(calls[at]) != 1 for at in heads):
        raise TypeError(
            f"{name}: expected the {len(inner)} layers at {path!r}, and the projection of their "
            f"heads, to run once each, got {times} calls of the layers and "
            f"{[len(calls[at]) for at in heads]} of the projections{NAME_THEM}"
        )
    base = next((at for at in outer if len(calls[at]) == 1), None)
    if base is None:
        raise TypeError(f"{name}: no module around the layers at {path!r} returns the final states")
    numbers = [output.shape[-1] for _, output in calls[lm_head]] if lm_head else []
    if lm_head and numbers != [logits.shape[-1]]:
        raise TypeError(
            f"{name}: structure names lm_head={lm_head}, expected the module that returns the "
            f"{logits.shape[-1]} logits of a token, got {numbers}"
        )
    _check_causal(model, logits, changed, again)
    outputs = (calls[at][0][1] for at in inner)
    return base, tuple(len(out) if isinstance(out, tuple | list) else 0 for out in outputs)


def _check_named_projection(model: PreTrainedModel, path: str, index: int, named: str) -> None:
    """Raise if the projection that the setting `structure` names is not that of the heads.

    The projection of the heads is the first module called, of those with a matrix, whose input at a
    later token depends on the first token: inputs of queries, keys and values do not, and an MLP
    comes later. This is tried in the first layer with heads.
    """
    layer = f"{path}.{list(dict(model.get_submodule(path).named_children()))[index]}"
    inside = [
        f"{layer}.{at}"
        for at, module in model.get_submodule(layer).named_modules()
        if at and (at == named or hasattr(module, "in_features")
                   or any(p.ndim > 1 for p in module.parameters(recurse=False)))
    ]  # fmt: skip
    tokens = ordinary_tokens(model)
    _, first = _watched(model, [layer, *inside], tokens)
    tokens[0, 0] = tokens[0, 1]  # another token
    _, second = _watched(model, [layer, *inside], tokens)
    mixing = []
    for at in [at for at in first if first[at] and second[at]]:
        one, other = (calls[at][0][0].flatten(0, -2) for calls in (first, second))
        first_token = -(-len(one) // TOKENS)  # rows of the first token, which was changed
        if one.shape != other.shape or (one - other)[first_token:].norm() > MIXES * one.norm():
            mixing.append(at)
    # Where layers below mix tokens, the input of the layer does, and nothing can be said.
    below_mixes = layer in mixing
    if not below_mixes and mixing[:1] != [f"{layer}.{named}"]:
        found = repr(mixing[0].removeprefix(f"{layer}.")) if mixing else "none"
        raise TypeError(
            f"{type(model).__name__}: structure names projection={named}, expected the projection "
            f"of the head outputs, the first of layer {index} whose input mixes tokens, got "
            f"another: the first is {found}"
        )


def _check_causal(model: PreTrainedModel, logits: Tensor, changed: Tensor, again: Tensor) -> None:
    name = type(model).__name__
    check_distributions(model, logits)
    if not _close(model, logits, again):
        raise TypeError(
            f"{name} is not deterministic: the same tokens give other logits after another text. "
            "Turn off randomness (such as dropout), and layers that keep or count what they saw"
        )
    if not _close(model, logits[:, :-1], changed[:, :-1]):
        raise TypeError(
            f"{name} is not causal: tokens attend to later tokens, or are rounded with them "
            "(dynamic quantization), so teacher forcing differs from generation. If it can be a "
            "decoder, set is_decoder=True"
        )


def _close(model: PreTrainedModel, first: Tensor, second: Tensor) -> bool:
    """Whether two passes agree up to rounding."""
    first, second = first.softmax(-1), second.softmax(-1)
    return bool((first - second).abs().sum(-1).max() <= RERUN.of(model))
