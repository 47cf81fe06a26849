"""Check that a tokenizer is the model's: with another, scores are meaningless."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 0.1
"""Share of a vocabulary that may differ: embeddings are padded, tokens added."""


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if a tokenizer is not the model's.

    Compares the vocabulary size; the ids of the tokens that begin and end a text, which no
    tokenizer uses for ordinary pieces; and the tokenizer saved with the model, if it is here.
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
    elif moved := _moved(config.name_or_path, tokenizer):
        reason = f"{moved} tokens of the one saved in {config.name_or_path} have other ids in it"
    else:
        return
    raise ValueError(
        f"the tokenizer is not the model's own: {reason}. Load both from the same folder or name"
    )


def _moved(model: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens of a model's saved tokenizer have other ids here; 0 if they are a few."""
    if not model or model == tokenizer.name_or_path:
        return 0
    try:
        own = AutoTokenizer.from_pretrained(model, local_files_only=True).get_vocab()
    except (OSError, ValueError):  # none is on this machine
        return 0
    known = tokenizer.get_vocab()
    moved = sum(known.get(token) != number for token, number in own.items())
    return moved if moved > TOLERANCE * len(own) else 0


def _ids(*settings: Any) -> set[int]:
    """Token ids of settings that hold none, one or several."""
    lists = [part if isinstance(part, list | tuple) else [part] for part in settings]
    return {number for part in lists for number in part if number is not None}
