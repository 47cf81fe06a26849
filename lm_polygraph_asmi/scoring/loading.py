"""A model by name, made ready to score."""

from typing import Any

from lm_polygraph_asmi.host.loading import load_model, load_tokenizer
from lm_polygraph_asmi.host.smollm2 import GGUF_FILE, weights_folder
from lm_polygraph_asmi.scoring.call import Scorer

SMOLLM2 = "smollm2"


def load(
    model: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    **settings: Any,
) -> Scorer:
    """A `Scorer` for a model in a folder, on a hub, or "smollm2", the demo's.

    Args:
        model: folder or name.
        gguf_file: weights in this file of the folder.
        dtype: "auto", or the name of one of torch.
        device_map: as for transformers' `from_pretrained`.
        **settings: of `Scorer`.

    Raises:
        OSError: no such model here, in the cache or on the hub.
        TypeError, ValueError: as `Scorer`; or no such dtype.
    """
    if model == SMOLLM2:
        model, gguf_file, dtype = str(weights_folder()), GGUF_FILE, "float32"
    file: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    loaded = load_model(model, dtype, device_map, attn_implementation=None, **file)
    return Scorer(loaded, load_tokenizer(model, **file), **settings)
