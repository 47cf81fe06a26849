"""Stand-ins for the side models of LM-Polygraph's baselines and AlignScore, without downloads.

Tiny and random: with them a run shows that every piece works together, never what a score means.

    python -m tests.stand_ins FOLDER    # writes them and prints how to start a run with them
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import click

import lm_polygraph_asmi

DEMO_DATA = Path(lm_polygraph_asmi.__file__).parent / "data" / "demo_qa.json"
SEED = 20
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    # Ten times the usual: else a random model gives all texts nearly the same score.
    "initializer_range": 0.2,
}
ROBERTA_SIZES = SIZES | {"max_position_embeddings": 514, "type_vocab_size": 1}
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
DEBERTA_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]


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
            f'nli_path="{self.nli}"',
            f'cross_encoder_path="{self.cross_encoder}"',
            f'align_score_path="{self.align_score}"',
        ]

    @property
    def instructions(self) -> str:
        """Shell lines that start a run with the stand-ins."""
        exports = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        run = ["polygraph_eval --config-name CONFIG", *map(shlex.quote, self.overrides)]
        return "\n".join(
            [
                "# STAND-INS, tiny and random: a run shows that it works, not what a score means.",
                f"cd {shlex.quote(str(self.working_directory))}",
                f"export {' '.join(exports)}",
                " \\\n  ".join(run),
            ]
        )


def make_stand_ins(folder: Path) -> StandIns:
    """Write all stand-ins into `folder`; the same bytes every time."""
    folder = folder.resolve()
    stand_ins = StandIns(
        nli=folder / "stand-in-deberta-mnli",
        cross_encoder=folder / "stand-in-stsb-roberta",
        align_score=folder / "stand-in-align-score.ckpt",
        working_directory=folder / "stand-in-working-directory",
        environment={"HF_HUB_OFFLINE": "1", "NLTK_DATA": str(folder / "stand-in-nltk-data")},
    )
    _make_nli(stand_ins.nli)
    _make_cross_encoder(stand_ins.cross_encoder)
    _make_align_score(stand_ins.align_score, stand_ins.working_directory / "roberta-large")
    _make_spacy_pipeline(stand_ins.working_directory / "en_core_web_sm")
    _make_punkt(Path(stand_ins.environment["NLTK_DATA"]))
    return stand_ins


def _make_nli(folder: Path) -> None:
    import torch
    from transformers import DebertaConfig, DebertaForSequenceClassification

    labels = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]
    config = DebertaConfig(
        **SIZES,
        vocab_size=_make_tokenizer(folder, "DebertaTokenizer", DEBERTA_TOKENS),
        pooler_hidden_size=SIZES["hidden_size"],
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
        type_vocab_size=0,
        pad_token_id=DEBERTA_TOKENS.index("[PAD]"),
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        DebertaForSequenceClassification(config).save_pretrained(folder)


def _make_cross_encoder(folder: Path) -> None:
    import torch
    from transformers import RobertaConfig, RobertaForSequenceClassification

    vocabulary = _make_tokenizer(folder, "RobertaTokenizer", ROBERTA_TOKENS)
    config = RobertaConfig(**ROBERTA_SIZES, vocab_size=vocabulary, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        RobertaForSequenceClassification(config).save_pretrained(folder)


def _make_align_score(checkpoint: Path, roberta: Path) -> None:
    """The checkpoint, in the names of LM-Polygraph's model, and the RoBERTa it is loaded over."""
    import torch
    from torch import nn
    from transformers import RobertaConfig, RobertaForMaskedLM, RobertaModel

    vocabulary = _make_tokenizer(roberta, "RobertaTokenizer", ROBERTA_TOKENS)
    config = RobertaConfig(**ROBERTA_SIZES, vocab_size=vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        masked_lm = RobertaForMaskedLM(config)
        pieces = nn.ModuleDict(
            {
                "base_model": RobertaModel(config),
                "mlm_head": masked_lm.lm_head,
                "bin_layer": nn.Linear(config.hidden_size, 2),
                "tri_layer": nn.Linear(config.hidden_size, 3),
                "reg_layer": nn.Linear(config.hidden_size, 1),
            }
        )
    masked_lm.save_pretrained(roberta)
    torch.save({"state_dict": pieces.state_dict()}, checkpoint)


def _make_spacy_pipeline(folder: Path) -> None:
    import spacy

    spacy.blank("en", meta={"name": "stand_in"}).to_disk(folder)


def _make_punkt(nltk_data: Path) -> None:
    """Empty parameters: sentences then end wherever punctuation suggests it."""
    folder = nltk_data / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (folder / file).touch()


def _make_tokenizer(folder: Path, kind: str, special_tokens: list[str]) -> int:
    """Byte-level BPE trained on the demo's texts, in files every release reads; returns its size.

    The length of 512 is what AlignScore pads to.
    """
    from tokenizers import ByteLevelBPETokenizer

    paragraphs = [p for a in json.loads(DEMO_DATA.read_text())["data"] for p in a["paragraphs"]]
    texts = [p["context"] for p in paragraphs] + [
        q["question"] for p in paragraphs for q in p["qas"]
    ]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, 1000, show_progress=False, special_tokens=special_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save_model(str(folder))
    settings = {"tokenizer_class": kind, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return bpe.get_vocab_size()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Write random stand-ins for the side models into FOLDER and print how to use them."""
    click.echo(make_stand_ins(folder).instructions)


if __name__ == "__main__":
    main()
