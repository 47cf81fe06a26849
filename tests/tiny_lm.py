"""A tiny random language model with a real tokenizer, as LM-Polygraph wants it; no downloads."""

from copy import deepcopy
from functools import cache
from pathlib import Path

from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.model import WhiteboxModel
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from tests.families import share_structure, tiny_model

TEXT = (
    "True\n"  # one token at the start of a text, as PTrue wants it
    "The ferry Ondine was built in Brask in 1931. Who built it? A question about the passage. "
    "Where do the blue kites start? The answer is in the passage: True or False, Yes or No.\n"
)


@cache
def tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, 400 tokens, left padding, BOS in front of every text."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [TEXT] * 3, vocab_size=400, min_frequency=1, special_tokens=["<pad>", "<s>", "</s>"]
    )
    bpe._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>",
        pad_token="</s>" if pad_is_eos else "<pad>", padding_side="left", model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def whitebox(
    family: str = "llama", stop_strings: list[str] | None = None, pad_is_eos: bool = False,
    **overrides: object,
) -> WhiteboxModel:  # fmt: skip
    """A LM-Polygraph model around a tiny random one."""
    tok = tokenizer(pad_is_eos)
    sizes = {"vocab_size": len(tok), "max_position_embeddings": 256} | overrides
    model = tiny_model(family, **sizes)
    share_structure(model, f"{family} {sizes}")
    model.generation_config.pad_token_id = tok.pad_token_id
    return WhiteboxModel(
        model, tok, "tiny", "CausalLM",
        GenerationParameters(stop_strings=stop_strings, temperature=0.5),
    )  # fmt: skip


UNMASKABLE = {"heads": "has no attention heads", "an unembedding": "has no unembedding"}
"""What a model may lack, and its message."""


def unmaskable(lacks: str) -> WhiteboxModel:
    """A LM-Polygraph model that can answer and has no heads to mask, or nothing to read them by."""
    found = whitebox()
    if lacks == "heads":
        sizes = {"vocab_size": len(found.tokenizer), "hidden_size": 32, "num_hidden_layers": 2}
        found.model = MambaForCausalLM(MambaConfig(**sizes)).eval()
    else:
        found.model = deepcopy(found.model)  # of which nothing is known
        found.model.get_output_embeddings = lambda: None
    return found


def save(folder: Path, family: str = "llama", **overrides: object) -> Path:
    """Model and tokenizer as a folder for `from_pretrained`."""
    model = whitebox(family, **overrides)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder
