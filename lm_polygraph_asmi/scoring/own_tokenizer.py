"""Check that a tokenizer belongs to the model, since scores are meaningless with another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from typing import Any, TypeVar, cast

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 0.1  # of the vocabulary may differ: embeddings are padded, and tokens are added
RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Parts of a fast tokenizer, besides its vocabulary, that change how a text is tokenized."""
Found = TypeVar("Found")


def check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the tokenizer does not belong to the model.

    Three things are compared: the size of the vocabulary; the ids of the tokens that begin and end
    a text, which no tokenizer uses for ordinary tokens; and, if it is on this machine, the
    tokenizer that was saved with the model.
    """
    config = model.config.get_text_config()
    size, expected = len(tokenizer), config.vocab_size
    boundaries = _ids(
        config.bos_token_id,
        config.eos_token_id,
        getattr(model.generation_config, "eos_token_id", None),
    )
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    reason = ""
    if abs(size - expected) > TOLERANCE * expected:
        reason = f"it has {size} tokens, the model {expected}"
    elif boundaries and not boundaries & special:
        reason = f"it uses {sorted(boundaries)}, which begin and end the model's texts, as ordinary"
    elif moved := _tokens_with_other_ids(config.name_or_path, tokenizer):
        reason = f"{moved} tokens have other ids than in the one saved in {config.name_or_path}"
    if reason:
        raise ValueError(
            f"the tokenizer is not the model's own: {reason}. Load both from the same folder or "
            "name"
        )


def _tokens_with_other_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of the saved tokenizer's tokens that have another id here; 0 if there are only few."""
    if not model or model == tokenizer.name_or_path:
        return 0
    try:
        saved_ids = AutoTokenizer.from_pretrained(model, local_files_only=True).get_vocab()
    except (OSError, ValueError):  # no tokenizer is saved on this machine
        return 0
    ids = tokenizer.get_vocab()
    moved = sum(ids.get(token) != number for token, number in saved_ids.items())
    return moved if moved > TOLERANCE * len(saved_ids) else 0


def _ids(*settings: Any) -> set[int]:
    """The token ids in settings that hold none, one or several each."""
    lists = [part if isinstance(part, list | tuple) else [part] for part in settings]
    return {number for part in lists for number in part if isinstance(number, int)}


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that changes if the tokenizer's tokens, special tokens, template or rules change.

    Only the size of the vocabulary is included, since reading all of it takes as long as scoring a
    short answer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [getattr(tokenizer, name, None) for name in ("added_tokens_decoder", "chat_template")]
    parts += [getattr(backend, name, None) for name in RULES]
    flags = [part for part in vars(tokenizer).items() if isinstance(part[1], bool)]
    return repr([len(tokenizer), id(backend), tokenizer.special_tokens_map, flags, parts])


@contextmanager
def unchanged(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Raise ValueError at the end of the block if the tokenizer was changed inside it."""
    before = tokenizer_state(tokenizer)
    yield
    if tokenizer_state(tokenizer) != before:
        raise ValueError(
            f"the {type(tokenizer).__name__} was changed while an answer was scored with it, so "
            "the score is invalid. Give each thread its own tokenizer"
        )


def found_of(
    find: Callable[[PreTrainedTokenizerBase], Found], tokenizer: PreTrainedTokenizerBase
) -> Found:
    """`find(tokenizer)`, cached until the tokenizer changes."""
    return cast("Found", _found(find, tokenizer, tokenizer_state(tokenizer)))


def unshared(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer that no other code calls, cached until the tokenizer changes.

    A tokenizer keeps truncation and padding between calls. A call in another thread that sets them
    could cut a prompt that is tokenized at the same time.
    """
    return found_of(deepcopy, tokenizer)


@lru_cache(maxsize=8)  # enough for two tokenizers
def _found(find: Callable[[Any], Any], tokenizer: Any, _: str) -> Any:
    return find(tokenizer)
