"""Stand-ins for the side models of LM-Polygraph's baselines and AlignScore, without downloads.

Tiny and random: with them a run shows that every piece works together, never what a score means.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spacy
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import nn

from lm_polygraph_asmi.runs.squad import DEMO_DATA

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "initializer_range": 0.2}  # fmt: skip
"""The range is ten times the usual: else all texts have nearly the same score."""


@dataclass(frozen=True)
class StandIns:
    """Where the stand-ins lie and what a run needs to use them.

    LM-Polygraph's AlignScore asks for `roberta-large` and `en_core_web_sm` by these very names;
    both are folders of `working_directory`, from which the run must start.
    """

    nli: Path
    cross_encoder: Path
    align_score: Path
    working_directory: Path
    environment: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        """Hydra overrides for the shipped configs."""
        return [
            f'{name}_path="{getattr(self, name)}"'
            for name in ("nli", "cross_encoder", "align_score")
        ]


def make_stand_ins(folder: Path) -> StandIns:
    """Write all stand-ins into `folder`; the same bytes every time."""
    folder = folder.resolve()
    nltk_data, directory = folder / "stand-in-nltk-data", folder / "stand-in-directory"
    made = StandIns(
        nli=folder / "stand-in-deberta-mnli",
        cross_encoder=folder / "stand-in-stsb-roberta",
        align_score=folder / "stand-in-align-score.ckpt",
        working_directory=directory,
        environment={"HF_HUB_OFFLINE": "1", "NLTK_DATA": str(nltk_data)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        _make_nli(made.nli)
        config = _roberta(made.cross_encoder, num_labels=1)
        transformers.RobertaForSequenceClassification(config).save_pretrained(made.cross_encoder)
        _make_align_score(made.align_score, directory / "roberta-large")
    spacy.blank("xx", meta={"name": "stand_in"}).to_disk(directory / "en_core_web_sm")
    # Without abbreviations and the like, sentences end wherever punctuation suggests it.
    punkt = nltk_data / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    for file in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (punkt / file).touch()
    return made


def _make_nli(folder: Path) -> None:
    labels = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]
    tokens = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    config = transformers.DebertaConfig(
        **SIZES, vocab_size=_make_tokenizer(folder, "DebertaTokenizer", tokens),
        pooler_hidden_size=SIZES["hidden_size"], relative_attention=True, pad_token_id=0,
        pos_att_type=["c2p", "p2c"], position_biased_input=False, type_vocab_size=0,
        id2label=dict(enumerate(labels)), label2id={label: i for i, label in enumerate(labels)},
    )  # fmt: skip
    transformers.DebertaForSequenceClassification(config).save_pretrained(folder)


def _roberta(folder: Path, **own: Any) -> transformers.RobertaConfig:
    """The sizes of a RoBERTa whose tokenizer is written into `folder`."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = _make_tokenizer(folder, "RobertaTokenizer", tokens)
    own |= {"max_position_embeddings": 514, "type_vocab_size": 1}
    return transformers.RobertaConfig(**SIZES, vocab_size=vocabulary, **own)


def _make_align_score(checkpoint: Path, folder: Path) -> None:
    """The checkpoint, in the names of LM-Polygraph's model, and the RoBERTa it is loaded over."""
    config = _roberta(folder)
    masked_lm = transformers.RobertaForMaskedLM(config)
    masked_lm.save_pretrained(folder)
    pieces = {
        "base_model": transformers.RobertaModel(config), "mlm_head": masked_lm.lm_head,
        "bin_layer": nn.Linear(config.hidden_size, 2),
        "tri_layer": nn.Linear(config.hidden_size, 3),
        "reg_layer": nn.Linear(config.hidden_size, 1),
    }  # fmt: skip
    torch.save({"state_dict": nn.ModuleDict(pieces).state_dict()}, checkpoint)


def _make_tokenizer(folder: Path, kind: str, special_tokens: list[str]) -> int:
    """Byte-level BPE trained on the demo's texts, in files every release reads; returns its size.

    The length of 512 is what AlignScore pads to.
    """
    paragraphs = [p for a in json.loads(DEMO_DATA.read_text())["data"] for p in a["paragraphs"]]
    texts = [t for p in paragraphs for t in (p["context"], *(q["question"] for q in p["qas"]))]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 1000, show_progress=False, special_tokens=special_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save_model(str(folder))
    settings = {"tokenizer_class": kind, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return bpe.get_vocab_size()
