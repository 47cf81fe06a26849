"""Batches of data engines: columns, or tables of Arrow."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.scoring.many import FIELDS, OUTPUT, output_of, with_output, without_nan
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.validation import TOKENS, check_one_of

if TYPE_CHECKING:
    import pyarrow as pa


def score_batch(
    columns: Mapping[str, Sequence[Any]], scorer: Scorer, tokens: str = "compact"
) -> dict[str, Any]:
    """Score a batch of rows passed as columns, as data engines do.

    Without global state: batches may be scored on any machine, in any order, and repeatedly. A
    batch that the scorer's `result_cache` holds is not scored again.

    Args:
        columns: name -> array or list, all of one length: `prompt`, optionally `answer`, `samples`,
            and `offsets` as for `Scorer.score`; None or NaN: the row has none. Other
            columns are passed through.
        scorer: model and settings.
        tokens: fields of each token, as JSON: "none", "compact" or "full".

    Returns:
        The input's columns as they are, and those of `OUTPUT` as object arrays; None: no value.
        `asmi_score` in nats, higher = more fragile; `asmi_answer`: the model's greedy answer, if
        the row has none; `asmi_error`: why a row has no score.

    Raises:
        ValueError: no column `prompt`, columns of different lengths, or named as one of `OUTPUT`.

    Example:
        >>> columns = {"question": [7, 8], "prompt": [prompt, None], "answer": [" Edda Holm", " ?"]}
        >>> scored = score_batch(columns, scorer, tokens="none")
        >>> scored["question"], scored["asmi_score"][0] >= 0, scored["asmi_score"][1]
        ([7, 8], True, None)
    """
    check_one_of("tokens", tokens, TOKENS)
    if "prompt" not in columns:
        raise ValueError(
            f"expected a column 'prompt', got {', '.join(map(repr, columns)) or 'none'}"
        )
    clashing = sorted(OUTPUT.keys() & columns.keys())
    if clashing:
        raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {lengths}")
    names = [name for name in FIELDS if name in columns]
    values = zip(*(columns[name] for name in names), strict=True)
    rows = [dict(zip(names, map(without_nan, row), strict=True)) for row in values]
    scored = [
        output_of(outcome, row, tokens)
        for row, outcome in zip(rows, scorer.score_together(rows), strict=True)
    ]
    return {**columns, **{name: _objects([row[name] for row in scored]) for name in OUTPUT}}


class BatchScorer:
    """`score_batch` for tables of Arrow; loads its model when created.

    What Ray Data's `map_batches` expects, with batch_format="pyarrow": each actor creates one.

    Args:
        model: local path, hub ID or "smollm2".
        tokens: as for `score_batch`.
        **settings: of `Scorer`.

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
        self.scorer, self.tokens = Scorer(model, **settings), tokens

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """The table with the columns of `OUTPUT`."""
        names = [name for name in table.column_names if name in (*FIELDS, *OUTPUT)]
        columns = {name: table[name].to_pylist() for name in names}
        scored = score_batch(columns, self.scorer, self.tokens)
        values = zip(*(scored[name] for name in OUTPUT), strict=True)
        return with_output(table, [dict(zip(OUTPUT, row, strict=True)) for row in values])


def _objects(values: Iterable[Any]) -> np.ndarray:
    values = list(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
