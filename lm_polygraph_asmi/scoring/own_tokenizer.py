"""Check that a tokenizer is the model's: with another, scores are meaningless."""

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 0.1
"""Share of a vocabulary that may differ: embeddings are padded, tokens added."""


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Raise ValueError if a tokenizer is not the model's; return warnings in sentences.

    Compares the vocabulary size; the ids of the tokens that begin and end a text, which no
    tokenizer uses for ordinary pieces; and the vocabulary of the tokenizer saved with the model,
    if it is on this machine.
    """
    config = model.config.get_text_config()
    size, expected = len(tokenizer), config.vocab_size
    ends = _ids(config.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    boundaries, vocabulary = ends | _ids(config.bos_token_id), tokenizer.get_vocab()
    saved = _saved_vocabulary(config.name_or_path, tokenizer.name_or_path)
    differing = sum(vocabulary.get(token) != number for token, number in saved.items())
    reason = None
    if abs(size - expected) > TOLERANCE * expected:
        reason = f"it has {size} tokens, the model {expected}"
    elif boundaries and not boundaries & special:
        token = min(boundaries)
        reason = (
            f"the model's texts begin and end with the tokens {sorted(boundaries)}, which are "
            f"ordinary ones in it ({token} is {tokenizer.convert_ids_to_tokens(token)!r})"
        )
    elif differing > TOLERANCE * len(saved):
        reason = (
            f"{differing} of the {len(saved)} tokens saved in {config.name_or_path} have other ids "
            "in it"
        )
    if reason:
        raise ValueError(
            f"the tokenizer is not the model's own: {reason}. Load both from the same folder or "
            "name"
        )
    end = tokenizer.eos_token_id
    if ends and end is not None and end not in ends:
        return [
            f"The tokenizer ends texts with the token {end}, the model with {sorted(ends)}: check "
            "that it is the model's."
        ]
    return []


def _ids(*settings: Any) -> set[int]:
    """Token ids of settings that hold none, one or several."""
    lists = [part if isinstance(part, list | tuple) else [part] for part in settings]
    return {number for part in lists for number in part if number is not None}


def _saved_vocabulary(model: str | None, tokenizer: str | None) -> dict[str, int]:
    """Token -> id of the tokenizer saved with the model; empty without, or if it is this one."""
    if not model or model == tokenizer:
        return {}
    file: Any = Path(model, "tokenizer.json")
    if not file.is_file():
        try:
            file = try_to_load_from_cache(model, "tokenizer.json")  # never contacts a hub
        except HFValidationError:  # a folder
            return {}
    return dict(Tokenizer.from_file(str(file)).get_vocab()) if isinstance(file, str | Path) else {}
