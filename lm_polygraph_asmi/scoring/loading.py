"""A model by name, made ready to score."""

from typing import Any

from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.scoring.call import Scorer


def load(
    model: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    **settings: Any,
) -> Scorer:
    """A `Scorer` for a model in a folder, on a hub, or "smollm2", the demo's.

    Args:
        model, gguf_file, dtype, device_map: as for `host.loading.load_named`.
        **settings: as for `Scorer`.

    Raises:
        OSError: no such model here, in the cache or on the hub.
        TypeError, ValueError: as `Scorer`; or no such dtype.
    """
    loaded, tokenizer = load_named(model, gguf_file, dtype, device_map)
    return Scorer(loaded, tokenizer=tokenizer, **settings)
