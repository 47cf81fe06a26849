"""Finds the modules of a model that ASMI needs, by recording short passes.

It looks for a stack of layers that run once each, in order. In each layer it looks for the softmax
over keys (one row of probabilities per head), followed by the projection of the concatenated head
outputs. It also looks for the module whose output the unembedding takes. Names of classes and
modules are not used. One pass of a dozen tokens shows all of this. A few more passes check that the
model is deterministic and causal, that each head has its own block of the projection's input, and
that head outputs go only into the projection.

What is not found this way may be named (`name_modules`); the same checks follow. If the softmax
over keys is hidden, the number of heads is the configuration's, and the named projection must be
the first in its layer whose input mixes tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import module_paths
from lm_polygraph_asmi.model.devices import dtypes_of, execution_device, lowest_precision
from lm_polygraph_asmi.model.layer_call import MASKABLE, KeyValueTap, with_cache
from lm_polygraph_asmi.model.model_cache import (
    held_tensors,
    model_cache,
    model_cache_of,
    plain_values,
)
from lm_polygraph_asmi.model.session import attention_of, scoring_session

TOKENS = 13
"""Tokens in the recorded pass; no model has this number of heads."""


@dataclass(frozen=True)
class HeadSite:
    """The heads of one layer.

    Attributes:
        projection: path from the layer to the projection whose input is the concatenated heads.
        heads: H, the number of query heads.
        width: width of the projection's input, H times the width of a head's output.
        attention: path from the layer to the module that returns the projection's output; None if
            there is none, so that attention must run before its heads can be replaced.
        returns: length of the tuple which that module returns, the projected heads first; 0 if it
            returns only these.
    """

    projection: str
    heads: int
    width: int
    attention: str | None
    returns: int = 2


@dataclass(frozen=True)
class Structure:
    """Paths of the modules that ASMI needs, relative to the model.

    Attributes:
        base_model: the module whose first output is the final states, the input of the logits.
        layers: the list of decoder layers.
        final_norm: the module between the last layer and the end of the base model, or None.
        sites: heads by layer index, for the layers that have heads.
        num_layers: L, layers with and without heads.
        takes_cache: whether the base model accepts a cache and computes the same with it.
        chained: whether each layer's output is exactly the next layer's input, so that layers can
            be called one by one.

    Example:
        >>> structure = structure_of(model)
        >>> isinstance(structure, Structure), structure.chained, sorted(structure.sites)
        (True, True, [0, 1, 2, 3])
        >>> structure.sites[2].projection
        'self_attn.o_proj'
    """

    base_model: str
    layers: str
    final_norm: str | None
    sites: Mapping[int, HeadSite]
    num_layers: int
    chained: bool = True
    takes_cache: bool = True


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, adapters active; other models unchanged.

    Raises:
        TypeError: an adapter that adds tokens to the prompt, an adapter that is triggered by
            tokens (aLoRA), or not a transformers model.

    Example:
        >>> plain_model(model) is model
        True
        >>> plain_model(torch.nn.Linear(2, 2))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: expected a transformers model, got Linear: ...
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


NAME_THEM = (
    "; or name the modules: structure='layers=...,projection=...,final_norm=...,lm_head=...'"
)


def name_modules(model: PreTrainedModel, structure: str | None) -> None:
    """Let `structure_of` take modules by path, as the setting `structure` of `ASMIConfig` has them.

    Paths of modules that are not named are found; None: of all. Other names than before are another
    state of the model, for which nothing cached holds.

    Example:
        >>> name_modules(model, "projection=self_attn.o_proj")
        >>> structure_of(model).sites[2].projection
        'self_attn.o_proj'
        >>> name_modules(model, None)
    """
    cache = model_cache_of(model)
    if cache.named != structure:
        cache.named, cache.state = structure, None


def _named(model: PreTrainedModel) -> dict[str, str]:
    return module_paths(model_cache_of(model).named)


def output_embeddings(model: PreTrainedModel) -> nn.Module:
    """The module that returns the logits.

    Raises:
        TypeError: it is neither named nor known to transformers.
    """
    path = _named(model).get("lm_head")
    module = model.get_output_embeddings() if path is None else model.get_submodule(path)
    if module is None:
        raise TypeError(
            f"{type(model).__name__} has no unembedding (get_output_embeddings), and so no "
            f"logits{NAME_THEM}"
        )
    return module


def layers_of(model: PreTrainedModel, structure: Structure) -> nn.ModuleList:
    """The decoder layers of a structure."""
    layers = model.get_submodule(structure.layers)
    return layers if isinstance(layers, nn.ModuleList) else nn.ModuleList(layers.children())


def structure_of(model: PreTrainedModel) -> Structure:
    """The structure of a model; cached until its modules or weights change.

    Raises:
        TypeError: the heads of this model cannot be masked; the message gives the reason.

    Example:
        >>> structure_of(model).layers, structure_of(model).num_layers
        ('model.layers', 4)
    """
    cache = model_cache(model)
    if "structure" not in cache:
        _check_not_compiled(model)
        cache["structure"] = _find_structure(model)
    structure: Structure = cache["structure"]
    return structure


def _check_not_compiled(model: PreTrainedModel) -> None:
    """Raise for compiled code, which ignores hooks and forward methods set later."""
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if "_orig_mod" in module._modules or hasattr(forward, "_torchdynamo_orig_callable"):
            raise TypeError(
                f"{type(model).__name__}: {path or 'the model'} is compiled by torch.compile: pass "
                "it as transformers loads it. (In-place module.compile() is fine: it is disabled "
                "while a model is scored)"
            )


@dataclass
class _Call:
    """One call of a module in the recorded pass; it keeps tensors so addresses are not reused."""

    module: nn.Module
    order: int
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any = None
    stack: tuple[nn.Module, ...] = ()

    @property
    def entering(self) -> Tensor | None:
        arguments = (*self.inputs, *self.keywords.values())
        return next((value for value in arguments if isinstance(value, Tensor)), None)

    @property
    def leaving(self) -> Tensor | None:
        return first_tensor(self.output)


@dataclass
class _Softmax:
    """One softmax over keys: number of heads, order, and enclosing modules."""

    heads: int
    order: int
    stack: tuple[nn.Module, ...]


def _factors(heads: int) -> Tensor:
    """Random factors of at least 1, one per head and token, to scale head outputs."""
    return 1 + torch.rand(heads, TOKENS, 1, generator=torch.Generator().manual_seed(heads))


def _factors_of_one(heads: int, head: int) -> Tensor:
    """Factors of 1.5 for one head and 1 for the others."""
    return 1 + 0.5 * (torch.arange(heads) == head)[:, None, None].expand(-1, TOKENS, 1)


class _SoftmaxRecorder(TorchFunctionMode):
    """Records every softmax over keys; multiplies its result by `scale(number of heads)` if
    `scale` is passed."""

    def __init__(self, trace: "_Trace", scale: Callable[[int], Tensor] | None = None) -> None:
        super().__init__()
        self.trace, self.scale = trace, scale

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if not isinstance(result, Tensor):
            return result
        if name not in ("scaled_dot_product_attention", "softmax"):
            return result
        if name == "softmax" and result.shape[-1] < TOKENS:  # not over keys
            return result
        rows = result.shape[:-1]
        # (1, H, tokens) or, batch and heads in one axis, (H, tokens)
        if rows[-1] != TOKENS or len(rows) not in (2, 3) or (len(rows) == 3 and rows[0] != 1):
            return result
        heads = rows[-2]
        if len(rows) == 2 and heads == 1:  # the shape of a router over experts
            return result
        self.trace.softmax(heads)
        if self.scale is not None:
            result = result * self.scale(heads).to(result)
        return result


class _Trace:
    """Module calls of a pass in order, and the softmaxes over keys among them."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.softmaxes: list[_Softmax] = []
        self._stack: list[_Call] = []
        self._clock = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def by_module(self) -> dict[nn.Module, list[_Call]]:
        calls: dict[nn.Module, list[_Call]] = {}
        for call in self.calls:
            calls.setdefault(call.module, []).append(call)
        return calls

    def softmax(self, heads: int) -> None:
        stack = tuple(call.module for call in self._stack)
        self.softmaxes.append(_Softmax(heads, self._tick(), stack))

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        stack = tuple(call.module for call in self._stack)
        call = _Call(module, self._tick(), args, kwargs, stack=stack)
        self.calls.append(call)
        self._stack.append(call)

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        while self._stack and self._stack[-1].module is not module:
            self._stack.pop()
        if self._stack:
            self._stack.pop().output = output

    @contextmanager
    def recording(
        self, root: nn.Module, scale: Callable[[int], Tensor] | None = None
    ) -> Iterator[None]:
        with ExitStack() as hooks:
            for module in root.modules():
                # First pre-hook and last hook, so that changes by other hooks are included.
                for handle in (
                    module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
                    module.register_forward_hook(self.leave, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
            hooks.enter_context(_SoftmaxRecorder(self, scale))
            yield


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor in a module's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return next((x for part in output if (x := first_tensor(part)) is not None), None)
    return None


def states_of(output: Any) -> Tensor:
    """The final states in a base model's output: its first tensor."""
    states = first_tensor(output)
    if states is None:
        raise RuntimeError(f"expected a pass to return a tensor, got {type(output).__name__}")
    return states


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are the same: at one address, or equal copies on two devices."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device == b.device:
        return a.data_ptr() == b.data_ptr()
    return _same_numbers(a, b)


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())


def special_tokens(model: PreTrainedModel) -> set[int]:
    """Token ids named in the configuration; a model may treat them differently."""
    cache = model_cache(model)
    if "special tokens" not in cache:
        special: set[int] = set()
        for part in (model.config, model.config.get_text_config(decoder=True)):
            for name, value in part.to_dict().items():
                if name.endswith(("token_id", "token_index", "token_ids")):
                    special |= set(value if isinstance(value, list) else [value])
        cache["special tokens"] = special
    special_ids: set[int] = cache["special tokens"]
    return special_ids


def _ordinary_tokens(model: PreTrainedModel) -> Tensor:
    """Token ids (1, `TOKENS`) of a short text without any special token, where the model runs."""
    config = model.config.get_text_config(decoder=True)
    special = special_tokens(model)
    ordinary = [token for token in range(min(config.vocab_size, 200)) if token not in special]
    tokens = torch.tensor([[ordinary[(7 * i + 3) % len(ordinary)] for i in range(TOKENS)]])
    return tokens.to(execution_device(model.get_input_embeddings()))


def _find_structure(model: PreTrainedModel) -> Structure:
    """Find the structure in short passes; see the module's docstring."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder model: use a decoder-only model")
    named = _named(model)
    for part, path in named.items():
        if part != "projection" and path not in dict(model.named_modules()):
            raise TypeError(
                f"{name}: structure names {part}={path}, which is no module of the model: take a "
                f"path of model.named_modules(), such as {_longest_path(model)!r}"
            )
    output_embeddings(model)
    trace = _Trace()
    # The softmax of other implementations is not visible.
    attention = None if attention_of(model) in MASKABLE else "eager"
    with scoring_session(model, attention):
        values_before = [(id(module), plain_values(module)) for module in model.modules()]
        tensors_before = _ModuleTensors(model)
        tokens = _ordinary_tokens(model)
        try:
            with trace.recording(model):
                model(input_ids=tokens, use_cache=False, return_dict=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise TypeError(_failure_message(model, error)) from error
        if not trace.softmaxes and "projection" not in named:
            raise TypeError(
                f"{name} has no attention heads that ASMI could mask: no softmax over keys in a "
                "pass (its layers are linear attention, state spaces or recurrences, or attention "
                "runs in an opaque kernel: then load it with attn_implementation='eager'"
                f"{NAME_THEM})"
            )
        values_after = [(id(module), plain_values(module)) for module in model.modules()]
        changed: str | None = (
            "a pass changes its settings (BigBird chooses its attention by the length of the first "
            "text)"
        )
        if values_after == values_before:
            changed = tensors_before.changed_by_pass(tokens.flip(1))
        if changed:
            raise TypeError(
                f"{name} changes itself in a pass: {changed}. Its results depend on earlier inputs"
            )
        structure = _read_structure(model, trace)
        states = _check_causal(model, structure, tokens)
        _check_heads(model, structure, trace)
        return replace(structure, takes_cache=_takes_cache(model, structure, tokens, states))


class _ModuleTensors:
    """Tensors of a model's modules other than parameters, as they were before a pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tensors = {module: held_tensors(module) for module in model.modules()}
        self.attributes = {module: set(vars(module)) for module in model.modules()}
        self.versions = {
            id(tensor): _version(tensor)
            for tensors in self.tensors.values()
            for tensor in tensors.values()
        }

    def changed_by_pass(self, tokens: Tensor) -> str | None:
        """State left by a pass that changes the next pass; None if there is none.

        State that does not change the next pass is allowed: recurrences restart with every text.
        """
        changed = []
        for path, module in self.model.named_modules():
            before, after = self.tensors[module], held_tensors(module)
            for name in before.keys() | after.keys():
                old, new = before.get(name), after.get(name)
                if new is not None and new is old:
                    if _version(new) != self.versions[id(new)]:
                        return f"it writes to {name!r} in {path!r}"
                elif not _same_values(old, new):
                    changed.append((path, module, name))
        if not changed:
            return None
        logits_after = self._logits(tokens)
        self._restore(changed)
        logits_restored = self._logits(tokens)
        self._restore(changed)
        if _close(self.model, logits_after, logits_restored):
            return None
        path, _, name = changed[0]
        return f"it leaves {name!r} in {path!r}"

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, return_dict=True).logits
        return logits

    def _restore(self, changed: list[tuple[str, nn.Module, str]]) -> None:
        for _, module, name in changed:
            attributes, buffers = vars(module), vars(module)["_buffers"]
            if name in buffers:
                buffers[name] = self.tensors[module].get(name)
            elif name in self.attributes[module]:
                attributes[name] = self.tensors[module].get(name)
            else:
                attributes.pop(name, None)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same_values(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether a tensor was replaced by an equal one, or by a meta tensor (offloading)."""
    if first is None or second is None:
        return first is second
    return first.is_meta or second.is_meta or _same_numbers(first, second)


def _failure_message(model: PreTrainedModel, error: Exception) -> str:
    """Message for a model whose forward pass over a text failed."""
    failure = f"{type(error).__name__}: {error}"
    dtypes = sorted(map(str, dtypes_of(model)))
    if len(dtypes) > 1:
        return (
            f"{type(model).__name__} has weights in {' and '.join(dtypes)} and does not run "
            f"({failure}): load it in one precision. Autocast is off while a model is scored"
        )
    return (
        f"{type(model).__name__} does not run on token ids only ({failure}): use a model whose "
        "only input is text"
    )


def _read_structure(model: PreTrainedModel, trace: _Trace) -> Structure:
    """Structure from the recorded calls."""
    name = type(model).__name__
    calls = trace.by_module()
    named = _named(model)
    path, stack = _stack_of_layers(model, trace, calls, named.get("layers"))
    layers = tuple(stack.children())
    names = path.split(".")
    parents = (".".join(names[:depth]) for depth in range(1, len(names)))
    called_once = (part for part in parents if len(calls.get(model.get_submodule(part), [])) == 1)
    base_model_path = next(called_once, "")
    if not base_model_path:
        raise TypeError(
            f"{name}: expected a module around the {len(layers)} layers at {path!r} that runs once "
            "and returns the final states, found none"
        )
    final = calls[model.get_submodule(base_model_path)][0].leaving
    layer_calls = [calls[layer][0] for layer in layers]
    chained = all(_same(before.leaving, after.entering) for before, after in pairwise(layer_calls))
    chained &= all(
        call.entering is not None
        and call.leaving is not None
        and call.entering.shape == call.leaving.shape
        and call.entering.shape[:2] == (1, TOKENS)
        and call.entering.ndim == 3
        for call in layer_calls
    )
    norm_path = None
    if "final_norm" in named:
        norm_path = named["final_norm"]
        _check_final_norm(model, norm_path, calls, layer_calls[-1].leaving, final)
    elif not _same(layer_calls[-1].leaving, final):
        stack_modules = set(stack.modules())
        last = layer_calls[-1].order
        norms = [
            call
            for call in trace.calls
            if call.order > last
            and call.module not in stack_modules
            and _same(call.leaving, final)
            and _same(call.entering, layer_calls[-1].leaving)
        ]
        if norms:
            norm_path = _path_of(model, norms[-1].module)
        else:
            chained = False
    if "lm_head" in named:
        _check_lm_head(model, named["lm_head"], calls, layer_calls[-1].order)
    sites = _sites(model, trace, layers, path, named.get("projection"))
    return Structure(base_model_path, path, norm_path, sites, len(layers), chained)


def _sites(
    model: PreTrainedModel,
    trace: _Trace,
    layers: Sequence[nn.Module],
    path: str,
    projection: str | None,
) -> dict[int, HeadSite]:
    """Heads by layer index, at the projection that is named or found."""
    candidates = (
        _site(layer, trace) if projection is None else _named_site(model, layer, trace, projection)
        for layer in layers
    )
    sites = {index: site for index, site in enumerate(candidates) if site}
    name = type(model).__name__
    if not sites and projection is None:
        raise TypeError(
            f"{name}: the layers at {path!r} have a softmax over keys, but no projection of the "
            f"concatenated head outputs after it{NAME_THEM}"
        )
    if not sites:
        raise TypeError(
            f"{name}: structure names projection={projection}, which is no module of the layers at "
            f"{path!r}: take a path inside a layer, such as {_longest_path(layers[0])!r}"
        )
    return sites


def _longest_path(module: nn.Module) -> str:
    return max((path for path, _ in module.named_modules()), key=lambda path: path.count("."))


def _check_final_norm(
    model: PreTrainedModel,
    path: str,
    calls: Mapping[nn.Module, list[_Call]],
    last: Tensor | None,
    final: Tensor | None,
) -> None:
    """Raise unless a named final norm turns the last layer's output into the final states."""
    its_calls = calls.get(model.get_submodule(path), [])
    sides = (
        [(its_calls[0].entering, last), (its_calls[0].leaving, final)]
        if len(its_calls) == 1
        else []
    )
    if not sides or any(a is None or b is None or not _same_numbers(a, b) for a, b in sides):
        raise TypeError(
            f"{type(model).__name__}: structure names final_norm={path}, expected the module that "
            "gets the last layer's output and returns the final states, got one that is called "
            f"{len(its_calls)} times or has another input or output: name that module, or leave it "
            "out"
        )


def _check_lm_head(
    model: PreTrainedModel, path: str, calls: Mapping[nn.Module, list[_Call]], last: int
) -> None:
    """Raise unless a named output projection runs once, after the layers, into the vocabulary."""
    its_calls = calls.get(model.get_submodule(path), [])
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    widths = [call.leaving.shape[-1] for call in its_calls if call.leaving is not None]
    if widths != [vocabulary] or its_calls[0].order < last:
        raise TypeError(
            f"{type(model).__name__}: structure names lm_head={path}, expected a module that runs "
            f"once after the layers and returns {vocabulary} numbers a token, got {len(its_calls)} "
            f"calls that return {widths}: name the module that returns the logits"
        )


def _stack_of_layers(
    model: PreTrainedModel,
    trace: _Trace,
    calls: Mapping[nn.Module, list[_Call]],
    named: str | None,
) -> tuple[str, nn.Module]:
    """Path and module of the outermost list of layers with a softmax over keys, or of the named."""
    name = type(model).__name__
    with_softmax = {module for softmax in trace.softmaxes for module in softmax.stack}
    lists: list[tuple[str, nn.Module]] = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(layer in with_softmax for layer in module)
    ]
    outermost = [
        (path, module)
        for path, module in lists
        if not any(path.startswith(other + ".") for other, _ in lists)
    ]
    if named is not None:
        outermost = [(named, model.get_submodule(named))]
    if len(outermost) != 1:
        paths = (
            ", ".join(f"{path!r} ({len([*module.children()])})" for path, module in outermost)
            or "none"
        )
        raise TypeError(
            f"{name}: expected one stack of layers with attention heads, got {paths}{NAME_THEM}"
        )
    path, stack = outermost[0]
    times = [len(calls.get(layer, [])) for layer in stack.children()]
    orders = [calls[layer][0].order for layer in stack.children() if layer in calls]
    if set(times) != {1} or orders != sorted(orders):
        raise TypeError(
            f"{name}: the {len(times)} layers at {path!r} do not run once each in order (calls: "
            f"{times}), so there is no single place to mask a layer"
        )
    return path, stack


def _path_of(root: nn.Module, module: nn.Module) -> str:
    return next(path for path, part in root.named_modules() if part is module)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix, whatever the storage format."""
    if isinstance(module, nn.Embedding):
        return False
    if hasattr(module, "in_features"):
        return True
    # Quantised weights are buffers, under any name.
    tensors = [getattr(module, "weight", None), *module.buffers(recurse=False)]
    return any(isinstance(tensor, Tensor) and tensor.ndim == 2 for tensor in tensors)


def _site(layer: nn.Module, trace: _Trace) -> HeadSite | None:
    """The heads of a layer: its softmax, and the projection after it."""
    softmaxes = [softmax for softmax in trace.softmaxes if layer in softmax.stack]
    if not softmaxes:
        return None
    softmax = softmaxes[-1]
    calls = [call for call in trace.calls if layer in call.stack]
    projections = [call for call in calls if _multiplies(call.module)]
    earlier = [call.entering for call in projections if call.order < softmax.order]
    for call in projections:
        heads = call.entering
        if call.order < softmax.order or heads is None or heads.ndim < 2:
            continue
        if any(_same(heads, other) for other in earlier):  # a gate parallel to the heads
            continue
        if heads.shape[-1] % softmax.heads or heads.shape[:-1].numel() != TOKENS:
            return None
        return _site_at(layer, calls, call, softmax)
    return None


def _site_at(layer: nn.Module, calls: list[_Call], call: _Call, softmax: _Softmax) -> HeadSite:
    """The heads of a softmax that enter a call of the projection; `calls` are the layer's."""
    attention_calls = [
        outer
        for outer in calls
        if outer.module in call.stack
        and outer.module in softmax.stack
        and outer.order < softmax.order
        and _same(outer.leaving, call.leaving)
    ]
    attention = attention_calls[0] if attention_calls else None
    returned = attention.output if attention else None
    assert call.entering is not None
    return HeadSite(
        projection=_path_of(layer, call.module),
        heads=softmax.heads,
        width=call.entering.shape[-1],
        attention=_path_of(layer, attention.module) if attention else None,
        returns=len(returned) if isinstance(returned, tuple) else 0,
    )


def _named_site(
    model: PreTrainedModel, layer: nn.Module, trace: _Trace, path: str
) -> HeadSite | None:
    """The heads of a layer whose projection is named; None if it has no module of that name."""
    modules = dict(layer.named_modules())
    if path not in modules:
        return None
    calls = [call for call in trace.calls if layer in call.stack]
    its_calls = [call for call in calls if call.module is modules[path]]
    softmaxes = [softmax for softmax in trace.softmaxes if layer in softmax.stack]
    # Without one that is seen, no module is known to hold all of attention.
    config = model.config.get_text_config(decoder=True)
    hidden = _Softmax(getattr(config, "num_attention_heads", None) or 0, 0, ())
    softmax = softmaxes[-1] if softmaxes else hidden
    shapes = [tuple(call.entering.shape) for call in its_calls if call.entering is not None]
    fits = len(shapes) == 1 and isinstance(softmax.heads, int) and softmax.heads > 0
    if not fits or shapes[0][-1] % softmax.heads or shapes[0][:-1] not in ((1, TOKENS), (TOKENS,)):
        raise TypeError(
            f"{type(model).__name__}: structure names projection={path}, expected a module that a "
            f"layer calls once, on concatenated outputs of {softmax.heads or 'num_attention_heads'}"
            f" heads for each of {TOKENS} tokens, got inputs of shape {shapes}: name the "
            "projection that ends attention, as a path inside a layer"
        )
    return _site_at(layer, calls, its_calls[0], softmax)


def _check_causal(model: PreTrainedModel, structure: Structure, tokens: Tensor) -> Tensor:
    """Final states of `tokens`; raises unless the model is deterministic and causal."""
    base_model = model.get_submodule(structure.base_model)
    other = tokens.clone()
    other[0, -1] = tokens[0, 0]
    states, repeated, changed = (
        states_of(base_model(input_ids=ids, use_cache=False)) for ids in (tokens, tokens, other)
    )
    if not states.isfinite().all():
        half = "; if float16 overflows, load the model in bfloat16 or float32"
        raise TypeError(
            f"{type(model).__name__} returns states that are not finite (NaN or infinity), already "
            f"for {tokens.shape[1]} tokens: check its weights"
            f"{half if lowest_precision(model) == torch.float16 else ''}"
        )
    if not _close(model, states, repeated):
        raise TypeError(
            f"{type(model).__name__} is not deterministic: the same tokens give other states the "
            "second time. Turn off randomness (such as dropout) and layers that count their calls"
        )
    if not _close(model, states[:, :-1], changed[:, :-1]):
        batched = states_of(base_model(input_ids=torch.cat([tokens, other]), use_cache=False))
        if not _close(model, states, batched[:1]):
            raise TypeError(
                f"{type(model).__name__} has batch-dependent rounding (such as dynamic "
                "quantization), which is unsupported: a row would depend on the rows beside it. "
                "Quantize only the weights"
            )
        raise TypeError(
            f"{type(model).__name__} is not causal: tokens attend to later tokens, so teacher "
            "forcing differs from generation. If it can be a decoder, set is_decoder=True"
        )
    return states


def _close(model: PreTrainedModel, first: Tensor, second: Tensor) -> bool:
    """Whether two passes agree up to rounding."""
    rounding = 1e-3 if lowest_precision(model).itemsize >= 4 else 0.1
    first, second = first.float(), second.float()
    return bool((first - second).abs().max() <= rounding * first.abs().max())


def _takes_cache(
    model: PreTrainedModel, structure: Structure, tokens: Tensor, states: Tensor
) -> bool:
    base_model = model.get_submodule(structure.base_model)
    tap = KeyValueTap(lambda key, value, _: (key, value), model.config)
    try:
        tapped = states_of(
            base_model(input_ids=tokens, **with_cache(base_model, tap), use_cache=True)
        )
    except Exception:  # models with their own cache class may raise anything
        return False
    return bool((states - tapped).norm() <= 1e-2 * states.norm())


def _check_heads(model: PreTrainedModel, structure: Structure, trace: _Trace) -> None:
    """Raise unless each head changes only its own block of the projection's input, and the layer's
    output only through that input."""
    tight = 1e-3 if lowest_precision(model).itemsize >= 4 else 0.05
    layers = layers_of(model, structure)
    for index, site in structure.sites.items():
        layer = layers[index]
        (layer_call,) = [call for call in trace.calls if call.module is layer]
        if not any(layer in softmax.stack for softmax in trace.softmaxes):
            _check_mixes_first(model, index, layer, layer_call, site.projection, tight)
            continue  # heads that are hidden cannot be scaled
        probe = _Probe(layer, layer_call, site)
        name, path = type(model).__name__, site.projection
        heads, output = probe()
        if probe.times != 1:
            raise TypeError(
                f"{name}: the projection of the heads of layer {index}, {path!r}, is called "
                f"{probe.times} times, so there is no single place to mask heads"
            )
        scaled, output_scaled = probe(_factors)
        _, output_bypassed = probe(_factors, first_input=True)
        factors = _factors(site.heads).transpose(0, 1).to(heads)
        by_head = heads.shape[0], site.heads, -1
        if not _only_scaled(heads.view(by_head) * factors, scaled.view(by_head), tight):
            for head in range(site.heads):
                scaled, _ = probe(partial(_factors_of_one, head=head))
                if not _changes_own_block(heads.view(by_head), scaled.view(by_head), head, tight):
                    raise TypeError(
                        f"{name}: at layer {index}, head {head} of {site.heads} has no block of "
                        f"its own in the input of {path!r}: heads are mixed before they are "
                        "projected, so masking blocks would not mask heads"
                    )
        if not (output_bypassed - output).norm() <= tight * (output_scaled - output).norm():
            raise TypeError(
                f"{name}: at layer {index}, head outputs reach the layer's output by another path "
                f"than {path!r} (a second projection or a second attention), so masking its input "
                "would not mask heads. Supported: layers with one attention and one projection"
            )


def _check_mixes_first(
    model: PreTrainedModel, index: int, layer: nn.Module, first: _Call, path: str, tight: float
) -> None:
    """Raise unless a named projection is the first of its layer whose input mixes tokens: those of
    queries, keys and values come before attention, those of an MLP after it."""
    entering = first.entering
    assert entering is not None
    changed = entering.clone()
    changed[:, 0] = -changed[:, 0].roll(1, -1)  # reaches the other tokens by attention only
    traces = []
    for hidden in (entering, changed):
        trace = _Trace()
        inputs = [hidden if value is entering else value for value in first.inputs]
        keywords = {n: hidden if v is entering else v for n, v in first.keywords.items()}
        with trace.recording(layer):
            layer(*inputs, **keywords)
        traces.append(trace.calls)
    named = layer.get_submodule(path)
    mixing = None
    for call, other in zip(*traces, strict=True):
        a, b = call.entering, other.entering
        weights = [part.ndim for part in call.module.parameters(recurse=False)]
        if max(weights, default=0) < 2 and not _multiplies(call.module):
            continue
        if a is None or b is None or a.shape[:-1].numel() != TOKENS:
            continue
        a, b = (x.float().reshape(TOKENS, -1)[1:] for x in (a, b))
        if (a - b).norm() > tight * a.norm():
            mixing = call.module
            break
    if mixing is not named:
        actual = "none" if mixing is None else repr(_path_of(layer, mixing))
        raise TypeError(
            f"{type(model).__name__}: structure names projection={path}, expected the projection "
            f"of the head outputs, the first of layer {index} whose input mixes tokens, got "
            f"another: the first is {actual}. Name that"
        )


class _Probe:
    """Calls a layer again with the recorded arguments, heads scaled.

    Attributes:
        times: number of calls of the projection in the last run.
    """

    def __init__(self, layer: nn.Module, call: _Call, site: HeadSite) -> None:
        self.layer, self.call, self.site, self.times = layer, call, site, 0
        self.first_heads: Any = None  # input of the projection in the first run

    def __call__(
        self, scale: Callable[[int], Tensor] | None = None, first_input: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Input of the projection, (tokens, width), and output of the layer.

        Args:
            scale: factors for the heads, from their number.
            first_input: whether the projection gets the input of the first run instead.
        """
        inputs: list[Tensor] = []

        def record(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            inputs.append(args[0])
            return (self.first_heads, *args[1:]) if first_input else None

        projection = self.layer.get_submodule(self.site.projection)
        handle = projection.register_forward_pre_hook(record)
        try:
            with _Trace().recording(self.layer, scale):
                output = first_tensor(self.layer(*self.call.inputs, **self.call.keywords))
        finally:
            handle.remove()
        self.times = len(inputs)
        if self.first_heads is None and inputs:
            self.first_heads = inputs[0]
        assert output is not None
        heads = inputs[0].float().reshape(TOKENS, -1) if inputs else output
        return heads, output.float()


def _only_scaled(expected: Tensor, actual: Tensor, tight: float) -> bool:
    """Whether each head's block is as expected, up to a common factor (from a norm over heads).
    Both are (tokens, heads, width)."""
    along = (actual * expected).sum((1, 2)) / expected.square().sum((1, 2))
    expected = along[:, None, None] * expected
    off, size = (x.norm(dim=-1).mean(0) for x in (actual - expected, expected))
    return bool((off <= tight * size).all())


def _changes_own_block(before: Tensor, after: Tensor, head: int, tight: float) -> bool:
    """Whether a head changes its own block and, up to a common factor, no other."""
    change = (after - before)[:, head].norm(dim=-1).mean()
    others = torch.arange(before.shape[1]) != head
    before, after = before[:, others], after[:, others]
    along = (after * before).sum((1, 2)) / before.square().sum((1, 2))
    turned = (after - along[:, None, None] * before).norm(dim=-1).mean(0)
    return bool(change > 0) and bool((turned <= tight * change).all())
