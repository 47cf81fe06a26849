"""The state a model is put into while it is scored, and its exact return."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.model.model_cache import model_cache, model_cache_of, model_lock

Setting = list[tuple[PretrainedConfig, str | None]]
"""What each configuration of a model says of attention."""


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation in use, such as "sdpa" or "eager".

    Example:
        >>> attention_of(model)
        'sdpa'
    """
    # Transformers has a public setter but, as of 5.x, no public getter.
    return model.config.get_text_config()._attn_implementation


def _setting(model: PreTrainedModel) -> Setting:
    configs = {id(config): config for config in _configs(model)}
    return [(config, config._attn_implementation) for config in configs.values()]


def _configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    yield model.config
    yield model.config.get_text_config()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            yield config


def _apply(setting: Setting) -> None:
    for config, attention in setting:
        config._attn_implementation_internal = attention


def _switch_attention(model: PreTrainedModel, attention: str) -> Setting:
    """Switch the text's attention and no other, the second time without transformers' search.

    Returns what `_apply` needs to undo it.

    Raises:
        ValueError: the model cannot use that implementation.
    """
    switches = model_cache_of(model).switches
    text = model.config.get_text_config()
    if attention not in switches:
        before = _setting(model)
        try:
            _ask_for(model, attention)
            # Layers hold the text's configuration, or, once copied, one like it.
            kind, now = type(text), attention_of(model)
            switches[attention] = [
                (config, now) for config, _ in before if isinstance(config, kind)
            ]
        finally:
            _apply(before)
    undo = [(config, config._attn_implementation) for config, _ in switches[attention]]
    _apply(switches[attention])
    return undo


def _ask_for(model: PreTrainedModel, attention: str) -> None:
    reason: Exception | None = None
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # Some transformers releases switch all the same and drop the soft-capping in silence.
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
    with ExitStack() as off:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _as_written(model: PreTrainedModel) -> Iterator[None]:
    """Set aside what `module.compile()` has put into modules: it would not see hooks set later."""
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    own = [module._compiled_call_impl for module in compiled]
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in zip(compiled, own, strict=True):
            module._compiled_call_impl = call


@contextmanager
def scoring_session(model: PreTrainedModel, attention: str | None = None) -> Iterator[None]:
    """Evaluation mode, no gradients and one attention implementation; all undone at the end.

    Undone also after an exception: every module's training flag, the attention implementation. What
    `module.compile()` has put into modules is set aside meanwhile. One
    thread at a time is let in per model, the others wait. Sessions of a thread may be nested; the
    inner one costs next to nothing where it changes nothing. Weights are not to change inside.
    Gradient checkpointing needs no care, since it acts in training mode alone. `torch.autocast`
    around it is off inside: a model is scored in the precision it was loaded in.

    Args:
        model: the model to be scored.
        attention: implementation for all passes inside ("sdpa", "eager" ...); None keeps the
            model's own, also inside a session that switched it.

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
    cache = model_cache_of(model)
    with model_lock(model), _without_autocast(), _as_written(model):
        outermost = cache.attention is None
        training = [module for module in model.modules() if module.training]
        before = attention_of(model)
        if outermost:
            model_cache(model)
            cache.attention = before or ""
        wanted = attention or cache.attention or before
        undo: Setting = []
        try:
            if wanted != before:
                undo = _switch_attention(model, wanted)
            if training:
                model.eval()
            with torch.inference_mode():
                yield
        finally:
            if outermost:
                cache.attention = None
            _apply(undo)
            for module in training:
                module.training = True
