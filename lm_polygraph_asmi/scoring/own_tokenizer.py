"""Check that a tokenizer is the model's: with another, scores are meaningless."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 0.1
"""Share of a vocabulary that may differ: embeddings are padded, tokens added."""


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Raise if a tokenizer is not the model's; return warnings in sentences.

    Compares the vocabulary size; the ids of the tokens that begin and end a text, which no
    tokenizer uses for ordinary pieces; and the vocabulary of the tokenizer saved with the model,
    if it is on this machine.

    Raises:
        ValueError: the tokenizer is not the model's.
    """
    config = model.config.get_text_config()
    size, expected = len(tokenizer), config.vocab_size
    if abs(size - expected) > TOLERANCE * expected:
        raise ValueError(_mismatch(f"it has {size} tokens, the model {expected}"))
    generation = model.generation_config
    ends = _ids(config.eos_token_id, getattr(generation, "eos_token_id", None))
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    boundaries = ends | _ids(config.bos_token_id)
    if boundaries and not boundaries & special:
        token = min(boundaries)
        raise ValueError(
            _mismatch(
                f"the model's texts begin and end with the tokens {sorted(boundaries)}, which are "
                f"ordinary ones in it ({token} is {tokenizer.convert_ids_to_tokens(token)!r})"
            )
        )
    saved = _saved_vocabulary(config.name_or_path, tokenizer.name_or_path)
    if saved is not None:
        vocabulary = tokenizer.get_vocab()
        differing = sum(vocabulary.get(token) != number for token, number in saved.items())
        if differing > TOLERANCE * len(saved):
            raise ValueError(
                _mismatch(
                    f"{differing} of the {len(saved)} tokens saved in {config.name_or_path} have "
                    "other ids in it"
                )
            )
    end = tokenizer.eos_token_id
    if ends and end is not None and end not in ends:
        return [
            f"The tokenizer ends texts with the token {end}, the model with {sorted(ends)}: check "
            "that it is the model's."
        ]
    return []


def _mismatch(reason: str) -> str:
    return f"the tokenizer is not the model's own: {reason}. Load both from the same folder or name"


def _ids(*settings: Any) -> set[int]:
    """Token ids of settings that hold none, one or several."""
    lists = [part if isinstance(part, list | tuple) else [part] for part in settings]
    return {number for part in lists for number in part if number is not None}


def _saved_vocabulary(model: str | None, tokenizer: str | None) -> Mapping[str, int] | None:
    """Token -> id of the tokenizer saved with the model; None without, or if it is this one.

    Never contacts a hub.
    """
    if not model or model == tokenizer:
        return None
    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:  # a folder
        cached = None
    local = Path(model, "tokenizer.json")
    file = local if local.is_file() else cached
    if not isinstance(file, str | Path):
        return None
    return Tokenizer.from_file(str(file)).get_vocab()
