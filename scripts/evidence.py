"""Keep of finished runs what the pages of evidence are made from: a small table of answers each.

    python scripts/evidence.py RUN OUT.parquet

One row an answer: id, cluster, quality, sequence-level scores, and per token what a score is made
of. No prompt, answer or reference is kept, so the licence of a data set does not matter.
"""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lm_polygraph_asmi.host.quality import reference_in_answer, token_f1, token_recall, words
from lm_polygraph_asmi.saved.runs import Run, load_run

JUDGES = {
    "ReferenceInAnswer": reference_in_answer,
    "TokenF1": token_f1,
    "TokenRecall": token_recall,
}
DEPTH_FREE = ("asmi_entropy", "asmi_log_likelihood")
OF_TOKENS = ("asmi_mi_", "asmi_agreement_", "asmi_entropy_of_mean_", "asmi_source_")
"""Statistics kept for every token, whatever depth or source they end in."""


def answers_of(run: Run) -> pd.DataFrame:
    """A row per answer; statistics of tokens are lists of float32."""
    rows = run.recorded("rows")
    texts, targets = run.stats["greedy_texts"], run.stats["target_texts"]
    kept: dict[str, Any] = {"id": rows["ids"], "cluster": rows["clusters"]}
    for name, judge in JUDGES.items():
        kept[name] = [
            max(judge(text, wanted) for wanted in ([t] if isinstance(t, str) else t))
            for text, t in zip(texts, targets, strict=True)
        ]
    kept |= {f"quality {name}": run.quality[name] for name in run.quality if name not in JUDGES}
    kept["words"] = [len(words(text)) for text in texts]
    kept["prompt_tokens"] = run.stats["asmi_prompt_length"]
    kept["closing"] = run.stats["asmi_closing"]
    kept |= {f"score {name}": run.scores[name] for name in run.scores}
    for name, values in run.stats.items():
        if name in DEPTH_FREE or name.startswith(OF_TOKENS):
            kept[name] = [np.asarray(own, dtype=np.float32).tolist() for own in values]
        elif name.startswith("asmi_top_token"):
            # How many of the masks leave the most likely token as the most of them have it.
            kept[name.replace("top_token", "majority")] = [
                [
                    float(np.unique(t, return_counts=True)[1].max() / len(t))
                    for t in np.asarray(own).T
                ]
                for own in values
            ]
        elif name.startswith("seconds_") or name == "asmi_seconds":
            kept[name] = values
    return pd.DataFrame(kept)


@click.command(help=__doc__)
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
def main(run: str, out: Path) -> None:
    found = load_run(run)
    table = pa.Table.from_pandas(answers_of(found), preserve_index=False)
    data = {k: v for k, v in found.recorded("config").get("data", {}).items() if k != "source"}
    about = {
        "settings": {n: v[0] for n, v in found.stats.items() if n.startswith("asmi_settings")},
        "dataset": found.recorded("dataset").get("name"),
        "data": data,
        "packages": found.recorded("packages"),
    }
    text = json.dumps(about, default=str)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), b"run": text.encode()})
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out, compression="zstd")
    click.echo(f"{out}: {table.num_rows} answers, {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
