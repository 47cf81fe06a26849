"""Load a model by name and prepare it for scoring."""

from typing import TYPE_CHECKING, Any

from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.scoring.many import FIELDS, OUTPUT, score_batch, with_output
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.validation import TOKENS, check_one_of

if TYPE_CHECKING:
    import pyarrow as pa


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


class BatchScorer:
    """`score_batch` for tables of Arrow; loads its model when created.

    What Ray Data's `map_batches` expects, with batch_format="pyarrow": each actor creates one.

    Args:
        model: local path, hub ID or "smollm2".
        tokens: as for `score_batch`.
        **settings: `gguf_file`, `dtype`, `device_map`, and those of `Scorer`.

    Raises:
        OSError, TypeError, ValueError: as `Scorer`; of a table, as `score_batch`.

    Example:
        >>> import pyarrow as pa
        >>> score_table = BatchScorer("smollm2", scope="response")
        >>> table = score_table(pa.table({"prompt": [prompt], "answer": [" Edda Holm"]}))
        >>> table["asmi_score"][0].as_py() >= 0, table["asmi_error"][0].as_py()
        (True, None)
    """

    def __init__(self, model: str, tokens: str = "compact", **settings: Any) -> None:
        check_one_of("tokens", tokens, TOKENS)
        self.scorer, self.tokens = load(model, **settings), tokens

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """The table with the columns of `OUTPUT`."""
        names = [name for name in table.column_names if name in (*FIELDS, *OUTPUT)]
        columns = {name: table[name].to_pylist() for name in names}
        scored = score_batch(columns, self.scorer, self.tokens)
        values = zip(*(scored[name] for name in OUTPUT), strict=True)
        return with_output(table, [dict(zip(OUTPUT, row, strict=True)) for row in values])
