"""Keep of a finished run the small table of answers that the results pages are made from.

    python scripts/evidence/keep.py RUN docs/evidence/MODEL/SETTING.RUN.parquet

RUN is a folder of `polygraph_eval`, or of `polygraph_asmi merge`. One row per answer: id, cluster,
correctness labels, sequence-level scores and per-token statistics. No prompt, answer or gold answer
is kept, so the licence of a data set does not matter.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lm_polygraph_asmi.host.quality import reference_in_answer, words
from lm_polygraph_asmi.results.runs import Run, load_run

LABEL = "ReferenceInAnswer"
DEPTH_FREE = ("asmi_entropy", "asmi_log_likelihood")
TOKEN_STATISTICS = ("asmi_mi_", "asmi_agreement_", "asmi_entropy_of_mean_")
"""Prefixes of the statistics kept for every token, at every depth."""


def contains(answer: str, gold: str | Iterable[str]) -> float:
    """1 if the answer contains one of the gold answers, otherwise 0."""
    accepted = [gold] if isinstance(gold, str) else gold
    return max(reference_in_answer(answer, each) for each in accepted)


def answers_of(run: Run) -> pd.DataFrame:
    """A row per answer; statistics of tokens are lists of float32."""
    rows = run.recorded("rows")
    texts, targets = run.stats["greedy_texts"], run.stats["target_texts"]
    kept: dict[str, Any] = {"id": rows["ids"], "cluster": rows["clusters"]}
    kept[LABEL] = list(map(contains, texts, targets))
    kept |= {f"quality {name}": run.quality[name] for name in run.quality if name != LABEL}
    kept["words"] = [len(words(text)) for text in texts]
    kept["prompt_tokens"] = run.stats["asmi_prompt_length"]
    kept["closing"] = run.stats["asmi_closing"]
    kept |= {f"score {name}": run.scores[name] for name in run.scores}
    for name, values in sorted(run.stats.items()):  # their order varies between runs
        if name in DEPTH_FREE or name.startswith(TOKEN_STATISTICS):
            kept[name] = [np.asarray(tokens, dtype=np.float32) for tokens in values]
        elif name.startswith("seconds_") or name == "asmi_seconds":
            kept[name] = values
    return pd.DataFrame(kept)


def table_of(run: Run) -> pa.Table:
    """The answers, with the settings in the metadata."""
    table = pa.Table.from_pandas(answers_of(run), preserve_index=False)
    data = {k: v for k, v in run.recorded("config").get("data", {}).items() if k != "source"}
    metadata = {
        "settings": {n: v[0] for n, v in run.stats.items() if n.startswith("asmi_settings")},
        "methods": run.described,
        "dataset": run.recorded("dataset").get("name"),
        "data": data,
        "packages": run.recorded("packages"),
    }
    return table.replace_schema_metadata({"run": json.dumps(metadata, default=str)})


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def main(run: Path, out: Path) -> None:
    table = table_of(load_run(run))
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out, compression="zstd", compression_level=19)
    click.echo(f"{out}: {table.num_rows} answers, {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
