"""Check that a tokenizer is the model's: with another, scores are meaningless."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from typing import Any, TypeVar, cast

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 0.1
"""Share of a vocabulary that may differ, since embeddings are padded and tokens are added."""
RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Parts of a fast tokenizer that change what a text becomes, besides its vocabulary."""
Found = TypeVar("Found")


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
    reason = ""
    if abs(size - expected) > TOLERANCE * expected:
        reason = f"it has {size} tokens, the model {expected}"
    elif boundaries and not boundaries & special:
        reason = f"{sorted(boundaries)}, which begin and end the model's texts, are ordinary in it"
    elif moved := _moved(config.name_or_path, tokenizer):
        reason = f"{moved} tokens of the one saved in {config.name_or_path} have other ids in it"
    if reason:
        raise ValueError(
            f"the tokenizer is not the model's own: {reason}. Load both from the same folder or "
            "name"
        )


def _moved(model: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens of the model's saved tokenizer have another id here; 0 if only a few have."""
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
    return {number for part in lists for number in part if isinstance(number, int)}


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that changes if tokens, special tokens, chat template or rules of a tokenizer change.

    Of the vocabulary only the size counts, since reading it takes as long as a short answer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [getattr(tokenizer, name, None) for name in ("added_tokens_decoder", "chat_template")]
    parts += [getattr(backend, name, None) for name in RULES]
    own = [part for part in vars(tokenizer).items() if isinstance(part[1], bool)]
    return repr([len(tokenizer), id(backend), tokenizer.special_tokens_map, own, parts])


@contextmanager
def unchanged(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise ValueError at the end of the block if the tokenizer was changed within."""
    before = tokenizer_state(tokenizer)
    yield
    if tokenizer_state(tokenizer) != before:
        raise ValueError(
            f"the {type(tokenizer).__name__} was changed while an answer was scored with it: "
            "nothing of this score can be trusted. Give each thread its own tokenizer"
        )


def found_of(
    find: Callable[[PreTrainedTokenizerBase], Found], tokenizer: PreTrainedTokenizerBase
) -> Found:
    """`find(tokenizer)`, which is kept until the tokenizer changes."""
    return cast("Found", _found(find, tokenizer, tokenizer_state(tokenizer)))


def unshared(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy that no other program calls; it is kept until the tokenizer changes.

    A tokenizer keeps truncation and padding between calls. So a call of another thread with these
    could cut a prompt that is tokenized at the same time.
    """
    return found_of(deepcopy, tokenizer)


@lru_cache(maxsize=8)  # of two tokenizers at once
def _found(find: Callable[[Any], Any], tokenizer: Any, _: str) -> Any:
    return find(tokenizer)
