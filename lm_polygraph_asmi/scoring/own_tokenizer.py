"""Check that a tokenizer is the model's: with another, scores are meaningless."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 0.1
"""Share of a vocabulary that may differ: embeddings are padded, tokens added."""


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if a tokenizer is not the model's.

    Compares the vocabulary size, and the ids of the tokens that begin and end a text, which no
    tokenizer uses for ordinary pieces.
    """
    config = model.config.get_text_config()
    size, expected = len(tokenizer), config.vocab_size
    ends = config.eos_token_id, getattr(model.generation_config, "eos_token_id", None)
    boundaries = _ids(config.bos_token_id, *ends)
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    if abs(size - expected) > TOLERANCE * expected:
        reason = f"it has {size} tokens, the model {expected}"
    elif boundaries and not boundaries & special:
        reason = f"{sorted(boundaries)}, which begin and end the model's texts, are ordinary in it"
    else:
        return
    raise ValueError(
        f"the tokenizer is not the model's own: {reason}. Load both from the same folder or name"
    )


def _ids(*settings: Any) -> set[int]:
    """Token ids of settings that hold none, one or several."""
    lists = [part if isinstance(part, list | tuple) else [part] for part in settings]
    return {number for part in lists for number in part if number is not None}
