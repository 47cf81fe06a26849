"""Side models of LM-Polygraph's baselines: loading, and why one cannot be used."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("lm_polygraph")

NLI_MODEL = "microsoft/deberta-large-mnli"
"""LM-Polygraph's default."""
TO_A_FOLDER = "to a local folder with such a model"
_CLASSES = {"CONTRADICTION", "ENTAILMENT", "NEUTRAL"}
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

    if problem := nli_problem(deberta_path, hf_cache):
        raise ValueError(problem)
    nli_model = utils.load_nli_model(deberta_path, batch_size, device, hf_cache)
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


def nli_problem(path: str = NLI_MODEL, cache: str | None = None) -> str | None:
    """Why this (folder or hub ID) is no NLI model that LM-Polygraph can use; None if it is."""
    problem = _problem(path, cache, lambda config: _no_nli(path, config))
    return problem and f"the NLI model {path!r} {problem}: set nli_path {TO_A_FOLDER}"


def cross_encoder_problem(path: str, cache: str | None = None) -> str | None:
    """Why this (folder or hub ID) is no cross-encoder for similarities; None if it is."""
    problem = _problem(path, cache, _no_similarity)
    return problem and f"the cross-encoder {path!r} {problem}: set cross_encoder_path {TO_A_FOLDER}"


def _problem(path: str, cache: str | None, wrong: Callable[[Any], str | None]) -> str | None:
    """What is wrong with a classifier, from its files and configuration, without its weights."""
    from transformers import AutoConfig

    if problem := unavailable(path, cache):
        return problem
    try:
        config = AutoConfig.from_pretrained(path, cache_dir=cache)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not Path(path).is_dir():
            return None  # on a hub that stopped answering
        return "has no configuration that transformers reads"
    (architecture,) = (config.architectures or ["ForSequenceClassification"])[:1]
    if not architecture.endswith("ForSequenceClassification"):
        return f"is a {architecture}, expected a model for sequence classification"
    return wrong(config)


def _no_similarity(config: Any) -> str | None:
    """Why a model returns no similarity, by its configuration."""
    outputs = config.num_labels
    return None if outputs == 1 else f"has {outputs} outputs, expected one, a similarity"


def _no_nli(path: str, config: Any) -> str | None:
    """Why LM-Polygraph cannot use an NLI model, by its configuration."""
    of_microsoft = path.startswith("microsoft")  # as LM-Polygraph decides how to load it
    types = ("deberta",) if of_microsoft else ("deberta", "deberta-v2")
    if config.model_type not in types:
        return f"is of type {config.model_type}, expected {' or '.join(types)}"
    labels = config.label2id or {}
    known = {name if of_microsoft else name.upper(): i for name, i in labels.items()}
    if lacking := sorted(_CLASSES - known.keys()):
        shown = ", ".join(labels) or "none in its label2id"
        return f"has the labels {shown}, lacks {', '.join(lacking)}"
    highest = max(known.values())
    if highest >= config.num_labels:
        return f"has a label of class {highest} of {config.num_labels} in its label2id"
    return None


def unavailable(path: str, cache: str | None = None) -> str | None:
    """Which files of a model (folder or hub ID) cannot be loaded; None: all are there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    local = Path(path).is_dir()

    def is_there(file: str) -> bool:
        found = Path(path, file) if local else try_to_load_from_cache(path, file, cache)
        return isinstance(found, str | Path) and Path(found).is_file()

    try:
        missing = [part for part, files in _PARTS.items() if not any(map(is_there, files))]
    except HFValidationError:
        return "is neither a local folder nor a valid hub ID"
    if local and missing:
        return f"lacks its {' and '.join(missing)}"
    if not missing or not (reason := hub_problem(path)):
        return None
    if len(missing) == len(_PARTS):
        return f"is neither a local folder nor in the hub's cache, and {reason}"
    return f"is in the hub's cache without its {' and '.join(missing)}, and {reason}"


def hub_problem(name: str) -> str | None:
    """Why the hub does not provide a model; None if it does."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        model_info(name, timeout=5)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE blocks the hub"
    except RepositoryNotFoundError:
        return "the hub has no model of this name"
    except Exception:  # its type depends on the HTTP library, which depends on the release
        return "the hub does not answer"
    return None
