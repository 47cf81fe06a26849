"""What the hub of the tests serves: tiny models and data sets, in files as the real ones have."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file

from tests import tiny_lm
from tests.benchmarks import COLUMNS
from tests.hub import RENAMED
from tests.runs.test_squad import QUESTION
from tests.stand_ins import StandIns

SIZES = {"max_position_embeddings": 2048}
# The last of these would be refused if a run did not leave it out.
QWEN = ("qwen3-qk-norm", SIZES, {"max_new_tokens": 2048, "no_repeat_ngram_size": 1})
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}
BACKBONES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "Qwen/Qwen3-4B-Base": QWEN,
    "Qwen/Qwen3-8B-Base": QWEN,
    "meta-llama/Llama-2-7b-hf": ("llama", SIZES, SAMPLING),
    "mistralai/Mistral-7B-v0.1": ("mistral-window", SIZES | {"sliding_window": 4096}, {}),
}
"""Model -> its family in tests/families.py, sizes, and what its generation config sets."""
BENCHMARKS = {
    "asmi_coqa": ("LM-Polygraph/coqa", "continuation", ("train", "test")),
    "asmi_triviaqa": ("LM-Polygraph/triviaqa", "continuation", ("train", "test")),
    "asmi_babiqa": ("LM-Polygraph/babi_qa", "default", ("train", "test")),
    "asmi_squad": ("rajpurkar/squad", "plain_text", ("train", "validation")),
}
"""Benchmark -> its data set, the configuration with its rows, and that one's splits."""
SQUAD = Dataset.from_list([
    {"id": str(number), "title": "A mill", "context": QUESTION.passage,
     "question": QUESTION.question, "answers": {"text": [gold], "answer_start": [0]}}
    for number, gold in enumerate(("red", "None", "007"))
])  # fmt: skip


def write_hub(root: Path, stand_ins: StandIns) -> Path:
    """Write all into `root`; side models are the stand-ins."""
    for name, how in BACKBONES.items():
        _write_backbone(root / "models" / name, *how)
    _also_as_bin(root / "models/meta-llama/Llama-2-7b-hf")
    models = {
        "microsoft/deberta-large-mnli": stand_ins.nli,
        "cross-encoder/stsb-roberta-large": stand_ins.cross_encoder,
        RENAMED["roberta-large"]: stand_ins.working_directory / "roberta-large",
    }
    for name, folder in models.items():
        shutil.copytree(folder, root / "models" / name)
        _also_as_bin(root / "models" / name)
    (root / "models/microsoft/deberta-large-mnli/model.safetensors").unlink()  # the real has none
    checkpoint = root / "models/yzha/AlignScore/AlignScore-large.ckpt"
    checkpoint.parent.mkdir(parents=True)
    shutil.copy(stand_ins.align_score, checkpoint)
    for benchmark, (name, configuration, splits) in BENCHMARKS.items():
        rows = Dataset.from_dict(COLUMNS[benchmark]) if benchmark in COLUMNS else SQUAD
        write_dataset(root / "datasets" / name, rows, configuration, splits)
    return root


def _write_backbone(
    folder: Path, family: str, sizes: dict[str, int], generation: dict[str, Any]
) -> None:
    """A model in several files of weights, whose answers often end after a few tokens."""
    found = tiny_lm.whitebox(family, **sizes)
    newline = found.tokenizer.convert_tokens_to_ids("Ċ")
    with torch.no_grad():
        found.model.get_output_embeddings().weight[newline] *= 4
    found.model.save_pretrained(folder, max_shard_size="100KB")
    found.tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": found.tokenizer.eos_token_id, "bos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(ends | generation))


def _also_as_bin(folder: Path) -> None:
    """The weights in PyTorch's own format, too, as many repositories have them."""
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    torch.save(weights, folder / "pytorch_model.bin")


def write_dataset(folder: Path, rows: Dataset, configuration: str, splits: tuple[str, ...]) -> None:
    """Parquet files of each split, and the README that says which file is of which.

    The last split has all rows; the one before it, one row less.
    """
    listed = ""
    for fewer, split in zip(reversed(range(len(splits))), splits, strict=True):
        file = folder / configuration / f"{split}-00000-of-00001.parquet"
        rows.select(range(fewer, len(rows))).to_parquet(file)
        listed += f"  - split: {split}\n    path: {configuration}/{split}-*\n"
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{listed}---\n"
    )
