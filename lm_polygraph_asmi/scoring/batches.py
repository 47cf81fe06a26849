"""Batches of data engines: columns, or tables of Arrow."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.scoring.many import FIELDS, Rows, output_of, with_output, without_nan
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.validation import TOKENS, check_one_of

if TYPE_CHECKING:
    import pyarrow as pa


def score_batch(
    columns: Mapping[str, Sequence[Any]], scorer: Rows, tokens: str = "compact"
) -> dict[str, Any]:
    """Score a batch of rows passed as columns, as data engines do.

    Without global state: batches may be scored on any machine, in any order, and repeatedly. A
    batch that the scorer's `result_cache` holds is not scored again.

    Args:
        columns: name -> array or list, all of one length: `prompt`, optionally `answer` and
            `samples`, as for `Scorer.score`; None or NaN: the row has none. Other columns are
            passed through.
        scorer: a `Scorer`, or a `Decider`, whose decisions are columns, too.
        tokens: fields of each token, as JSON: "none", "compact" or "full".

    Returns:
        The input's columns as they are, and `scorer.columns` as object arrays; None: no value.
        `asmi_score` in nats, higher = more fragile; `asmi_answer`: the model's greedy answer, if
        the row has none; `asmi_error`: why a row has no score.

    Raises:
        ValueError: no column `prompt`, columns of different lengths, or with a name of the output.

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
    clashing = sorted(scorer.columns.keys() & columns.keys())
    if clashing:
        raise ValueError(f"columns {clashing} would be overwritten by the scores: rename them")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {lengths}")
    names = [name for name in FIELDS if name in columns]
    values = zip(*(columns[name] for name in names), strict=True)
    rows = [dict(zip(names, map(without_nan, row), strict=True)) for row in values]
    scored = [
        output_of(outcome, row, scorer.columns, tokens)
        for row, outcome in zip(rows, scorer.run_batch(rows), strict=True)
    ]
    return {**columns, **{n: _objects([row[n] for row in scored]) for n in scorer.columns}}


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
        self.tokens = tokens
        self.scorer = self._open(model, **settings)

    def _open(self, model: str, **settings: Any) -> Rows:
        return Scorer(model, **settings)

    def __call__(self, table: "pa.Table") -> "pa.Table":
        """The table with the columns of the output."""
        output = self.scorer.columns
        names = [name for name in table.column_names if name in (*FIELDS, *output)]
        columns = {name: table[name].to_pylist() for name in names}
        scored = score_batch(columns, self.scorer, self.tokens)
        values = zip(*(scored[name] for name in output), strict=True)
        rows = [dict(zip(output, row, strict=True)) for row in values]
        return with_output(table, output, rows)


def _objects(values: Iterable[Any]) -> np.ndarray:
    values = list(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
