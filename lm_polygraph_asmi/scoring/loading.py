"""Load a model by name and prepare it for scoring."""

from typing import Any

from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.scoring.scorer import Scorer


def load(
    model: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    **settings: Any,
) -> Scorer:
    """A `Scorer` for a local path, hub ID or "smollm2", the demo's model.

    Args:
        model, gguf_file, dtype, device_map: as for `host.loading.load_named`.
        **settings: as for `Scorer`.

    Raises:
        OSError: no such model locally, in the cache or on the hub.
        TypeError, ValueError: as `Scorer`; or an unknown dtype.
    """
    loaded, tokenizer = load_named(model, gguf_file, dtype, device_map)
    return Scorer(loaded, tokenizer=tokenizer, **settings)
