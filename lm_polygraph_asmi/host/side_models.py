"""Side models of LM-Polygraph's baselines: load them, and find out why one cannot be used."""

import logging
from typing import Any

from lm_polygraph_asmi.host.hub import Repository

log = logging.getLogger("lm_polygraph")

CLASSIFIERS = {
    "deberta_path": ("NLI model", "nli_path"),
    "cross_encoder_name": ("cross-encoder", "cross_encoder_path"),
}
"""Setting of a LM-Polygraph calculator -> what it names, and our config entry that sets it."""


def load_nli_model(
    deberta_path: str = "microsoft/deberta-large-mnli",
    batch_size: int = 10,
    device: str | None = None,
    hf_cache: str | None = None,
) -> Any:
    """Load an NLI model, by default that of LM-Polygraph; encode text pairs as in its training."""
    import transformers
    from lm_polygraph.defaults.stat_calculator_builders import utils

    if problem := classifier_problem("deberta_path", deberta_path, hf_cache):
        raise ValueError(problem)
    nli_model = utils.load_nli_model(deberta_path, batch_size, device, hf_cache)
    if use_single_separator(nli_model.deberta_tokenizer):
        log.info(
            "The NLI model reads text pairs as [CLS] A [SEP] B [SEP], as in its training. "
            f"transformers {transformers.__version__} would put two [SEP] between them."
        )
    return nli_model


def use_single_separator(tokenizer: Any) -> bool:
    """Make a DeBERTa (v1) tokenizer encode pairs as [CLS] A [SEP] B [SEP], with types 0 and 1.

    The models were trained on this form, which transformers 4 produces. transformers 5 writes [CLS]
    A [SEP] [SEP] B [SEP]. Other tokenizers are left unchanged. Returns whether the tokenizer was
    changed.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import DebertaTokenizer

    of_deberta = isinstance(tokenizer, DebertaTokenizer)
    if not of_deberta or tokenizer.num_special_tokens_to_add(pair=True) == 3:
        return False
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )
    return True


def classifier_problem(setting: str, path: str, cache: str | None = None) -> str | None:
    """Why a folder or hub ID cannot be used for a setting of `CLASSIFIERS`; None if it can.

    Files and configuration are checked, but not the weights.
    """
    what, ours = CLASSIFIERS[setting]
    problem = Repository(path, cache=cache).problem() or _configuration_problem(
        setting, path, cache
    )
    return (
        problem and f"the {what} {path!r} {problem}; to use another, set {ours} to a local folder"
    )


def _configuration_problem(setting: str, path: str, cache: str | None) -> str | None:
    """Why a classifier's configuration does not fit the setting; None if it does."""
    from transformers import AutoConfig

    try:
        here = Repository(path, cache=cache).folder  # a local folder: the hub is not asked
        config = AutoConfig.from_pretrained(here or path, cache_dir=cache)
    except (OSError, ValueError):
        return "has no configuration that transformers reads"
    (architecture,) = (config.architectures or ["ForSequenceClassification"])[:1]
    if not architecture.endswith("ForSequenceClassification"):
        return f"is a {architecture}, expected a model for sequence classification"
    if setting == "deberta_path":
        return _nli_problem(path, config)
    outputs = config.num_labels
    return None if outputs == 1 else f"has {outputs} outputs, expected one, a similarity"


def _nli_problem(path: str, config: Any) -> str | None:
    """Why LM-Polygraph cannot use an NLI model with this configuration; None if it can."""
    of_microsoft = path.startswith("microsoft")  # LM-Polygraph decides by this how to load it
    types = ("deberta",) if of_microsoft else ("deberta", "deberta-v2")
    if config.model_type not in types:
        return f"is of type {config.model_type}, expected {' or '.join(types)}"
    labels = config.label2id or {}
    known = {name if of_microsoft else name.upper(): i for name, i in labels.items()}
    if lacking := sorted({"CONTRADICTION", "ENTAILMENT", "NEUTRAL"} - known.keys()):
        shown = ", ".join(labels) or "none in its label2id"
        return f"has the labels {shown}, lacks {', '.join(lacking)}"
    highest = max(known.values())
    if highest >= config.num_labels:
        return f"has a label of class {highest} of {config.num_labels} in its label2id"
    return None
