"""The state of a model while it is scored; it is restored exactly."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.core.model.state import (
    changes,
    changes_since,
    findings,
    model_lock,
    record_of,
)


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation in use, such as "sdpa" or "eager"."""
    # Transformers has a public setter but, as of 5.x, no public getter.
    return model.config.get_text_config()._attn_implementation


def _switch_attention(model: PreTrainedModel, attention: str, undo: list[Any]) -> None:
    """Switch the attention of the text model only; `undo` gets what restores each configuration.

    Raises ValueError: the model cannot use that implementation.
    """
    text = model.config.get_text_config()
    owners = [model.config, text, *(getattr(module, "config", None) for module in model.modules())]
    configs = [config for config in owners if isinstance(config, PretrainedConfig)]
    previous = [(config, config._attn_implementation) for config in configs]
    undo.append(partial(_restore, previous))
    try:
        # Some transformers releases switch nevertheless and silently drop the soft-capping.
        if getattr(text, "attn_logit_softcapping", None) is not None:
            raise ValueError("its attention scores are soft-capped")
        model.set_attn_implementation(attention)
        if attention_of(model) != attention:
            raise ValueError(f"it took {attention_of(model)!r}")
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot use the attention implementation {attention!r}: set "
            "the option `attention` to null to keep the model's own"
        ) from error
    # Layers hold the text model's configuration, or a copy of it. Other ones, such as that of
    # images, get back their own.
    _restore((c, attention if isinstance(c, type(text)) else before) for c, before in previous)


def _restore(settings: Iterable[tuple[Any, str | None]]) -> None:
    for config, attention in settings:
        config._attn_implementation_internal = attention


class ModelChanged(ValueError):
    """A model was changed while it was scored."""


@contextmanager
def _unchanged(model: PreTrainedModel, everything: bool) -> Iterator[None]:
    """Raise ModelChanged if the model was changed meanwhile, by another thread or code inside.

    `everything`: also its training mode and whatever `model_state` covers; else its attention.
    """
    attention, failed = attention_of(model), None
    try:
        yield
    except Exception as error:  # of the change, perhaps
        failed = error
    found = []
    if (now := attention_of(model)) != attention:
        found.append(f"its attention implementation is {now!r}, not {attention!r}")
    if everything:
        found += changes_since(model)
    if found and not isinstance(failed, ModelChanged):
        # Forget the state seen, and so all findings: some may have been made after the change.
        record_of(model).seen = None
        raise ModelChanged(
            f"{type(model).__name__} was changed while it was scored ({', and '.join(found)}): "
            "nothing of this score can be trusted. Change no model that another thread scores: "
            "wait for the score, or load a second model for it"
        ) from failed
    if failed is not None:
        raise failed


@contextmanager
def scoring_session(model: PreTrainedModel, attention: str | None = None) -> Iterator[None]:
    """Evaluation mode, no gradients and one attention implementation (None: the model's own), in
    the precision that the model was loaded in; all is restored at the end.

    One thread at a time; it may nest sessions. Other threads that call the model see its evaluation
    mode and attention. Raises ValueError: the model lacks that implementation, or was changed
    inside, as when another thread trains it; a change that was undone inside is not detected.
    """
    record = record_of(model)
    with model_lock(model), ExitStack() as restored, changes() as undo:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")):
            restored.enter_context(torch.autocast(device, enabled=False))
        current, outermost = attention_of(model), not record.in_session
        if outermost:
            _evaluation_mode(model, undo)
            findings(model)  # records the state with which the session's end compares
            undo.append(partial(setattr, record, "in_session", False))
            record.in_session, record.own_attention = True, current
        # If none is named: the model's own outside all sessions, not that of an outer session.
        implementation = attention or record.own_attention or current
        if implementation != current:
            _switch_attention(model, implementation, undo)
        with torch.inference_mode(), _unchanged(model, outermost):
            yield


def _evaluation_mode(model: PreTrainedModel, undo: list[Any]) -> None:
    """Evaluation mode, without compiled calls; `undo` gets what restores each module."""
    modules = list(model.modules())
    for module in modules:  # calls compiled by `module.compile()` ignore later forward methods
        if (call := module._compiled_call_impl) is not None:
            undo.append(partial(setattr, module, "_compiled_call_impl", call))
            module._compiled_call_impl = None
    if training := [module for module in modules if module.training]:
        undo += [partial(setattr, module, "training", True) for module in training]
        model.eval()
