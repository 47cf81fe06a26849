"""The state of a model while it is scored; it is restored exactly."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.state import known_of, known_values, model_lock

AttentionSettings = list[tuple[Any, str | None]]
"""The attention implementation in each configuration of a model."""
RECOMPILES = 64
"""Kinds of layers and arguments that `torch.compile` keeps of one class before it gives up."""


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation in use, such as "sdpa" or "eager".

    Example:
        >>> attention_of(model)
        'sdpa'
    """
    # Transformers has a public setter but, as of 5.x, no public getter.
    return model.config.get_text_config()._attn_implementation


def _switch_attention(model: PreTrainedModel, attention: str) -> AttentionSettings:
    """Switch the attention of the text model only; returns what each configuration had.

    Raises:
        ValueError: the model cannot use that implementation.
    """
    configs = [model.config, model.config.get_text_config()]
    configs += [module.config for module in model.modules() if hasattr(module, "config")]
    previous = {id(config): (config, config._attn_implementation) for config in configs}
    try:
        _set_attention(model, attention)
    except ValueError:
        _restore(previous.values())
        raise
    # Layers hold the text model's configuration, or a copy of it.
    kind = type(model.config.get_text_config())
    _restore(pair for pair in previous.values() if not isinstance(pair[0], kind))
    return list(previous.values())


def _restore(settings: Iterable[tuple[Any, str | None]]) -> None:
    for config, attention in settings:
        config._attn_implementation_internal = attention


def _set_attention(model: PreTrainedModel, attention: str) -> None:
    reason: Exception | None = None
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # Some transformers releases switch nevertheless and silently drop the soft-capping.
        reason = ValueError("its attention scores are soft-capped")
    else:
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            reason = error
    if reason is not None or attention_of(model) != attention:
        raise ValueError(
            f"{type(model).__name__} cannot use the attention implementation {attention!r}: set "
            "the option `attention` to null to keep the model's own"
        ) from reason


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as disabled:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                disabled.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _uncompiled(modules: list[nn.Module]) -> Iterator[None]:
    """Disable calls compiled by `module.compile()`, which ignore hooks set later."""
    compiled = [module for module in modules if module._compiled_call_impl is not None]
    calls = [module._compiled_call_impl for module in compiled]
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


@contextmanager
def scoring_session(
    model: PreTrainedModel, attention: str | None = None, compiles: bool | None = None
) -> Iterator[None]:
    """Evaluation mode, no gradients and one attention implementation, restored at the end.

    The training flags of modules and the attention implementation are restored also after an
    exception. `module.compile()` and `torch.autocast` are disabled inside: a model is scored in the
    precision that it was loaded in. Only one thread at a time has a session of a model; others
    wait. A thread may nest sessions, which costs almost nothing if no setting changes. Weights must
    not change inside. Gradient checkpointing acts only in training mode.

    Other threads may call the model meanwhile, but the training flags and a switched attention
    implementation are the model's, so they see those until the session ends.

    Args:
        model: the model to be scored.
        attention: implementation for all passes inside ("sdpa", "eager" ...); None keeps the
            model's own, also inside a session that switched it.
        compiles: whether `torch.compile` runs the layers; None: as in the session around, or not.

    Raises:
        ValueError: the model cannot use that implementation.

    Example:
        >>> _ = model.train()
        >>> with scoring_session(model, attention="eager"):
        ...     model.training, attention_of(model)
        (False, 'eager')
        >>> model.training, attention_of(model)
        (True, 'sdpa')
    """
    known = known_of(model)
    with model_lock(model), ExitStack() as restored:
        outermost = known.attention is None
        modules = list(model.modules()) if outermost else []  # once for nested sessions
        restored.enter_context(_without_autocast())
        restored.enter_context(_uncompiled(modules))
        training = [module for module in modules if module.training]
        current = attention_of(model)
        if outermost:
            known_values(model)
            known.attention = current or ""
        implementation = attention or known.attention or current
        undo: AttentionSettings = []
        compiled = known.compiles
        try:
            known.compiles = compiled if compiles is None else compiles
            if compiles:  # layers may differ in settings, each kind of which is compiled
                settings = {"specialize_float": True, "recompile_limit": RECOMPILES}
                restored.enter_context(torch._dynamo.config.patch(settings))
            if implementation != current:
                undo = _switch_attention(model, implementation)
            if training:
                model.eval()
            with torch.inference_mode():
                yield
        finally:
            known.compiles = compiled
            if outermost:
                known.attention = None
            _restore(undo)
            for module in training:
                module.training = True
