"""The state a model is put into while it is scored, and its exact return."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation in use, such as "sdpa" or "eager"."""
    # Transformers has a public setter but, as of 5.x, no public getter.
    return model.config.get_text_config()._attn_implementation


def _switch_attention(model: PreTrainedModel, attention: str) -> None:
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
def scoring_session(model: PreTrainedModel, attention: str | None = None) -> Iterator[None]:
    """Evaluation mode, no gradients and one attention implementation; all undone at the end.

    Undone also after an exception: every module's training flag, the attention implementation.
    Gradient checkpointing needs no care, since it acts in training mode alone.

    Args:
        model: the model to be scored.
        attention: implementation for all passes inside ("sdpa", "eager" ...); None keeps the
            model's own.

    Raises:
        ValueError: the model cannot use that implementation.
    """
    training = [module for module in model.modules() if module.training]
    original = attention_of(model)
    try:
        if attention is not None and attention != original:
            _switch_attention(model, attention)
        model.eval()
        with torch.inference_mode():
            yield
    finally:
        if attention_of(model) != original:
            model.set_attn_implementation(original)
        for module in training:
            module.training = True
