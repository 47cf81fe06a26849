"""LM-Polygraph's NLI model: loading, and why it cannot be loaded."""

import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("lm_polygraph")

NLI_MODEL = "microsoft/deberta-large-mnli"
"""LM-Polygraph's default."""

_SECONDS_TO_ANSWER = 5
_SET_NLI = "set nli_path to a local folder with such a model"
_PARTS = {
    "configuration": ["config.json"],
    "weights": ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json",
                "pytorch_model.bin.index.json"],
    "tokenizer": ["tokenizer.json", "vocab.json", "vocab.txt", "spm.model",
                  "sentencepiece.bpe.model", "tokenizer.model"],
}  # fmt: skip
"""Part of a model -> files, one of which must exist."""


def load_nli_model(
    deberta_path: str = NLI_MODEL,
    batch_size: int = 10,
    device: str | None = None,
    hf_cache: str | None = None,
) -> Any:
    """LM-Polygraph's NLI model, with text pairs encoded as in its training."""
    import transformers
    from lm_polygraph.defaults.stat_calculator_builders import utils

    try:
        nli_model = utils.load_nli_model(deberta_path, batch_size, device, hf_cache)
    except Exception as error:  # the type depends on what is missing and on the release
        if problem := missing_nli_model(deberta_path, hf_cache):
            raise FileNotFoundError(problem) from error
        raise
    # Without its files the tokenizer still loads, and every text becomes empty.
    if not nli_model.deberta_tokenizer.tokenize("yes"):
        raise FileNotFoundError(f"the NLI model {deberta_path!r} lacks its tokenizer: {_SET_NLI}")
    if use_single_separator(nli_model.deberta_tokenizer):
        log.info(
            "The NLI model reads text pairs as [CLS] A [SEP] B [SEP], as in its training. "
            f"transformers {transformers.__version__} would put two [SEP] between them."
        )
    return nli_model


def use_single_separator(tokenizer: Any) -> bool:
    """Make a DeBERTa (v1) tokenizer encode pairs as [CLS] A [SEP] B [SEP], types 0 and 1.

    The models were trained so, and transformers 4 encodes so; transformers 5 writes
    [CLS] A [SEP] [SEP] B [SEP]. Other tokenizers are unchanged. Returns whether it changed.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import DebertaTokenizer

    if not isinstance(tokenizer, DebertaTokenizer):
        return False
    if tokenizer.num_special_tokens_to_add(pair=True) == 3:
        return False
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )
    return True


def missing_nli_model(path: str = NLI_MODEL, cache: str | None = None) -> str | None:
    """Why the NLI model (folder or hub ID) cannot be loaded, and what to do; None: it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    model = f"the NLI model {path!r}"
    folder: Path | None = Path(path)
    if not Path(path).is_dir():
        try:
            folder = Path(snapshot_download(path, cache_dir=cache, local_files_only=True))
        except HFValidationError:
            return f"{model} is neither a local folder nor a valid hub ID: {_SET_NLI}"
        except LocalEntryNotFoundError:
            folder = None
    missing = [
        part
        for part, files in _PARTS.items()
        if folder is None or not any((folder / file).is_file() for file in files)
    ]
    if not missing:
        return None
    if folder == Path(path):
        return f"{model} lacks its {' and '.join(missing)}: {_SET_NLI}"
    if not (reason := hub_problem(path)):
        return None
    location = "neither a local folder nor in the hub's cache"
    if folder:
        location = f"in the hub's cache without its {' and '.join(missing)}"
    return f"{model} is {location}, and {reason}: {_SET_NLI}"


def hub_problem(name: str) -> str | None:
    """Why the hub does not provide a model; None if it does."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        model_info(name, timeout=_SECONDS_TO_ANSWER)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE blocks the hub"
    except RepositoryNotFoundError:
        return "the hub has no model of this name"
    except Exception:  # its type depends on the HTTP library, which depends on the release
        return "the hub does not answer"
    return None
