"""Extract from finished runs the small tables of answers that the results pages are made from.

    python scripts/evidence/keep.py RUN OUT.parquet     # of one run
    python scripts/evidence/keep.py SHARDS OUT.parquet  # of a folder of such tables, 0.parquet, ...
    python scripts/evidence/keep.py RUN OUT.parquet --before xquad.en.json  # if passages changed

One row per answer: id, cluster, correctness labels, sequence-level scores and per-token statistics.
No prompt, answer or gold answer is kept, so the licence of a data set does not matter.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from lm_polygraph.generation_metrics import RougeMetric

from lm_polygraph_asmi.experiments.analysis.heads import permutation_null
from lm_polygraph_asmi.host.quality import reference_in_answer, token_f1, token_recall, words
from lm_polygraph_asmi.results.runs import Run, load_run
from lm_polygraph_asmi.runs.squad import read_squad
from lm_polygraph_asmi.scoring.segments import segment_answer

Labelling = Callable[[str, str], float]
CORRECTNESS_LABELS: dict[str, Labelling] = {
    "ReferenceInAnswer": reference_in_answer,
    "TokenF1": token_f1,
    "TokenRecall": token_recall,
}
DEPTH_FREE = ("asmi_entropy", "asmi_log_likelihood")
TOKEN_STATISTICS = ("asmi_mi_", "asmi_agreement_", "asmi_entropy_of_mean_")
"""Prefixes of the statistics kept for every token, at every depth."""
BEFORE = "ReferenceBefore"
"""Column: whether an answer contains the gold answer of the original passage."""


def answers_of(run: Run, before: Path | None = None) -> pd.DataFrame:
    """A row per answer; statistics of tokens are lists of float32.

    Args:
        before: SQuAD-format file of the questions with their original passages.
    """
    rows = run.recorded("rows")
    texts, targets = run.stats["greedy_texts"], run.stats["target_texts"]
    kept: dict[str, Any] = {"id": rows["ids"], "cluster": rows["clusters"]}
    kept |= _labelled(texts, targets, CORRECTNESS_LABELS)
    if before is not None:
        originals = {question.id: question.answer for question in read_squad(before)}
        pairs = zip(texts, rows["ids"], strict=True)
        kept[BEFORE] = [reference_in_answer(text, originals[row_id]) for text, row_id in pairs]
    kept |= {
        f"quality {name}": run.quality[name]
        for name in run.quality
        if name not in CORRECTNESS_LABELS
    }
    kept["words"] = [len(words(text)) for text in texts]
    kept["prompt_tokens"] = run.stats["asmi_prompt_length"]
    kept["closing"] = run.stats["asmi_closing"]
    kept |= _first_sentences(run)
    kept |= {f"score {name}": run.scores[name] for name in run.scores}
    for name, values in sorted(run.stats.items()):  # their order varies between runs
        if name in DEPTH_FREE or name.startswith(TOKEN_STATISTICS):
            kept[name] = [np.asarray(tokens, dtype=np.float32) for tokens in values]
        elif name.startswith("asmi_top_token"):
            # Share of the masks that agree with most of them on the most likely token.
            kept[name.replace("top_token", "majority")] = [_majority(top) for top in values]
        elif name.startswith("asmi_kl"):
            kept |= _heads_of(run, name)
        elif name.startswith("seconds_") or name == "asmi_seconds":
            kept[name] = values
    return pd.DataFrame(kept)


def _labelled(
    texts: Iterable[str],
    targets: Iterable[str | list[str]],
    correctness_labels: dict[str, Labelling],
) -> dict[str, list[float]]:
    pairs = [
        (text, [t] if isinstance(t, str) else t) for text, t in zip(texts, targets, strict=True)
    ]
    return {
        name: [max(correctness(text, gold) for gold in accepted) for text, accepted in pairs]
        for name, correctness in correctness_labels.items()
    }


def first_sentence(text: str, tokens: Sequence[str]) -> tuple[str, int]:
    """An answer's first sentence, and how many of its tokens overlap it.

    Args:
        tokens: texts of the answer's tokens.
    """
    parts = segment_answer(text)
    if len(parts) < 2:
        return text, len(tokens)
    end = parts[0][1]
    return text[:end], sum(start < end for start in accumulate(map(len, tokens[:-1]), initial=0))


def _first_sentences(run: Run) -> dict[str, list[float]]:
    """Token counts and correctness labels of the first sentences."""
    columns = (run.stats[name] for name in ("greedy_texts", "asmi_tokens", "asmi_token_texts"))
    sentences = [
        first_sentence(text, [written[token] for token in tokens.tolist()])
        for text, tokens, written in zip(*columns, strict=True)
    ]
    correctness_labels = {"ReferenceInAnswer": reference_in_answer}
    if "Rouge_rougeL" in run.quality:
        correctness_labels["quality Rouge_rougeL"] = _rouge
    qualities = _labelled(
        [text for text, _ in sentences], run.stats["target_texts"], correctness_labels
    )
    labels = {f"{name}, first sentence": values for name, values in qualities.items()}
    return {"first_sentence": [tokens for _, tokens in sentences], **labels}


def _rouge(answer: str, reference: str) -> float:
    """LM-Polygraph's ROUGE-L of texts that are normalised as in the shipped configs."""
    prediction, gold = (" ".join(words(text)) for text in (answer, reference))
    return float(RougeMetric("rougeL")({"greedy_texts": [prediction]}, [gold])[0])


def _majority(top_tokens: np.ndarray) -> np.ndarray:
    counts = [np.unique(tokens, return_counts=True)[1] for tokens in np.asarray(top_tokens).T]
    return np.array([count.max() / count.sum() for count in counts], dtype=np.float32)


def _heads_of(run: Run, name: str) -> dict[str, list[np.ndarray]]:
    """Per token, how concentrated its disagreement is on few heads; masks are too large to keep."""
    depth = name.removeprefix("asmi_kl")
    saved = (run.stats[stat + depth] for stat in ("asmi_kl", "asmi_masks", "asmi_mask_seed"))
    nulls = [
        permutation_null(kl, masks, seed=int(seed)) for kl, masks, seed in zip(*saved, strict=True)
    ]
    return {
        part + depth: [np.asarray(getattr(null, part), dtype=np.float32) for null in nulls]
        for part in ("z", "p", "effective_heads", "null_effective_heads")
    }


def table_of(run: Run, before: Path | None = None) -> pa.Table:
    """The answers, with the settings in the metadata."""
    table = pa.Table.from_pandas(answers_of(run, before), preserve_index=False)
    data = {k: v for k, v in run.recorded("config").get("data", {}).items() if k != "source"}
    metadata = {
        "settings": {n: v[0] for n, v in run.stats.items() if n.startswith("asmi_settings")},
        "methods": run.described,
        "dataset": run.recorded("dataset").get("name"),
        "data": data,
        "packages": run.recorded("packages"),
    }
    return table.replace_schema_metadata({"run": json.dumps(metadata, default=str)})


def _joined(tables: Iterable[pa.Table]) -> pa.Table:
    first, *others = tables
    return pa.concat_tables([first, *(table.select(first.column_names) for table in others)])


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--before",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="SQuAD-format file of the original questions, if the run's passages were changed.",
)
def main(run: Path, out: Path, before: Path | None) -> None:
    shards = sorted(run.glob("*.parquet"), key=lambda file: int(file.stem))
    table = _joined(map(pq.read_table, shards)) if shards else table_of(load_run(run), before)
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out, compression="zstd", compression_level=19)
    click.echo(f"{out}: {table.num_rows} answers, {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
