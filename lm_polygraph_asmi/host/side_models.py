"""The side models of LM-Polygraph's baselines and of AlignScore: checks before a run, and loading.

A run loads them late. Each function `missing_...` returns what is missing and what to do, or None.
Only `load_nli_model` downloads anything. `missing_model` and `weights_bytes` work for any model,
including that of a run.
"""

import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger("lm_polygraph")

NLI_MODEL = "microsoft/deberta-large-mnli"
CROSS_ENCODER = "cross-encoder/stsb-roberta-large"
ALIGN_SCORE = "https://huggingface.co/yzha/AlignScore/resolve/main/AlignScore-large.ckpt"
"""LM-Polygraph's defaults."""

_SECONDS_TO_ANSWER = 5
_SET_NLI = "set nli_path to a local folder with such a model"
_PARTS = {
    "configuration": ["config.json"],
    "weights": [
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
    ],
    "tokenizer": [
        "tokenizer.json",
        "vocab.json",
        "vocab.txt",
        "spm.model",
        "sentencepiece.bpe.model",
        "tokenizer.model",
    ],
}
"""Part of a model -> files, one of which must exist."""


def load_nli_model(
    deberta_path: str = NLI_MODEL,
    batch_size: int = 10,
    device: str | None = None,
    hf_cache: str | None = None,
) -> Any:
    """LM-Polygraph's NLI model, with text pairs encoded as in its training.

    Raises:
        FileNotFoundError: the model, or a part of it, is neither local nor on the hub.
    """
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
    """Why the NLI model cannot be loaded; `cache` is the hub's folder, None its default."""
    return missing_model(f"the NLI model {path!r}", path, _SET_NLI, cache)


def missing_cross_encoder(path: str = CROSS_ENCODER) -> str | None:
    """Why the cross-encoder of SAR and SentenceSAR cannot be loaded."""
    cache = os.environ.get("SENTENCE_TRANSFORMERS_HOME")  # the only place that is searched
    remedy = "set cross_encoder_path to a local folder with such a model"
    return missing_model(f"the cross-encoder {path!r}", path, remedy, cache)


def missing_align_score(checkpoint: str = ALIGN_SCORE) -> str | None:
    """Why AlignScore's checkpoint, a file or a URL, cannot be loaded."""
    import torch

    if os.path.exists(checkpoint):
        return _unreadable_checkpoint(checkpoint)
    remedy = "set align_score_path to the file AlignScore-large.ckpt"
    if "://" not in checkpoint:
        return f"AlignScore's checkpoint {checkpoint!r} does not exist: {remedy}"
    cached = Path(torch.hub.get_dir(), "checkpoints", checkpoint.rpartition("/")[-1])
    if cached.exists() or not (reason := _url_problem(checkpoint)):
        return None
    return f"AlignScore's checkpoint {str(cached)!r} does not exist, and {reason}: {remedy}"


def missing_align_score_roberta() -> str | None:
    """Why the RoBERTa of AlignScore's checkpoint cannot be loaded."""
    remedy = "start the run in a folder that has it as subfolder roberta-large"
    return missing_model("AlignScore's 'roberta-large'", "roberta-large", remedy)


def missing_spacy_pipeline() -> str | None:
    """Why AlignScore cannot load its spaCy pipeline."""
    import spacy

    if spacy.util.is_package("en_core_web_sm") or Path("en_core_web_sm").exists():
        return None
    return (
        "spaCy's en_core_web_sm, which AlignScore loads, is not installed, and the run "
        "would install it with pip from GitHub: run `python -m spacy download en_core_web_sm`, or "
        "start in a folder that has it as subfolder en_core_web_sm"
    )


def missing_punkt() -> str | None:
    """Why AlignScore cannot load its nltk sentence splitter."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        return (
            "nltk's punkt_tab, which AlignScore uses to split sentences, is not installed, and the "
            "run would download it: run `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to "
            "a folder with tokenizers/punkt_tab"
        )
    return None


def missing_model(
    model: str,
    path: str,
    remedy: str,
    cache: str | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
) -> str | None:
    """Why `from_pretrained` cannot load a model, or None.

    Args:
        model: how the message names it.
        path: folder, or hub ID.
        remedy: what the message tells to do.
        cache: the hub's folder, None its default.
        revision: branch, tag or commit on the hub.
        gguf_file: the file of a GGUF model.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    parts = {f"file {gguf_file}": [gguf_file]} if gguf_file else _PARTS

    def here(file: str) -> bool:
        if Path(path).is_dir():
            return Path(path, file).is_file()
        cached = try_to_load_from_cache(path, file, cache_dir=cache, revision=revision)
        return isinstance(cached, str)

    try:
        lacking = [part for part, files in parts.items() if not any(map(here, files))]
    except HFValidationError:
        return f"{model} is neither a local folder nor a valid hub ID: {remedy}"
    if not lacking:
        return None
    if Path(path).is_dir():
        return f"{model} lacks its {' and '.join(lacking)}: {remedy}"
    if not (reason := _hub_problem(path, revision)):
        return None
    place = "neither a local folder nor in the hub's cache"
    if len(lacking) < len(parts):
        place = f"in the hub's cache without its {' and '.join(lacking)}"
    return f"{model} is {place}, and {reason}: {remedy}"


def weights_bytes(path: str, revision: str | None = None) -> int | None:
    """Size of a model's weight files; None if unknown, as for a GGUF file.

    Args:
        path: folder, or hub ID.
        revision: branch, tag or commit on the hub.
    """
    from huggingface_hub import model_info, try_to_load_from_cache

    def weights(sizes: dict[str, int]) -> int | None:
        # Many models have both formats, and transformers loads the first.
        for start, end in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            names = [name for name in sizes if name.startswith(start) and name.endswith(end)]
            if names:
                return sum(sizes[name] for name in names)
        return None

    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    size = weights({file.name: file.stat().st_size for file in folder.glob("*")})
    if size or Path(path).is_dir():
        return size
    try:
        files = model_info(
            path, revision=revision, files_metadata=True, timeout=_SECONDS_TO_ANSWER
        ).siblings
    except Exception:  # of many types, as below
        return None
    return weights({file.rfilename: file.size or 0 for file in files or ()})


def _hub_problem(name: str, revision: str | None) -> str | None:
    from huggingface_hub import model_info
    from huggingface_hub.errors import (
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        model_info(name, revision=revision, timeout=_SECONDS_TO_ANSWER)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE blocks the hub"
    except RepositoryNotFoundError:
        return "the hub has no model of this name"
    except RevisionNotFoundError:
        return f"the hub has no revision {revision!r} of it"
    except Exception:  # its type depends on the HTTP library, which depends on the release
        return "the hub does not answer"
    return None


def _url_problem(url: str) -> str | None:
    from urllib.request import Request, urlopen

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(url, method="HEAD"), timeout=_SECONDS_TO_ANSWER).close()
    except OSError as error:
        return f"its URL does not answer ({error})"
    return None


def _unreadable_checkpoint(file: str) -> str | None:
    """LM-Polygraph loads local checkpoints with torch's weights_only, downloaded ones without."""
    import torch

    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (ValueError, RuntimeError):
        return f"AlignScore's checkpoint {file!r} is damaged, torch cannot read it: copy it again"
    if not unsafe:
        return None
    place = Path(torch.hub.get_dir(), "checkpoints", ALIGN_SCORE.rpartition("/")[-1])
    return (
        f"AlignScore's checkpoint {file!r} has objects that torch does not load from a local "
        f"file ({', '.join(unsafe)}): if you trust it, move it to {str(place)!r} and leave "
        "align_score_path at its default"
    )
