"""Keep of finished runs what the pages of evidence are made from: a small table of answers each.

    python scripts/evidence/keep.py RUN OUT.parquet     # of one run
    python scripts/evidence/keep.py SHARDS OUT.parquet  # of a folder of such tables, 0.parquet, ...
    python scripts/evidence/keep.py RUN OUT.parquet --before xquad.en.json  # what was right then

One row an answer: id, cluster, quality, sequence-level scores, and per token what a score is made
of. No prompt, answer or reference is kept, so the licence of a data set does not matter.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from lm_polygraph.generation_metrics import RougeMetric

from lm_polygraph_asmi.experiments.analysis.heads import permutation_null
from lm_polygraph_asmi.host.context import matched
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
OF_TOKENS = ("asmi_mi_", "asmi_agreement_", "asmi_entropy_of_mean_", "asmi_source_")
"""Statistics kept for every token, whatever depth or source they end in."""
BEFORE = "ReferenceBefore"
"""Whether an answer holds what was right before the passage was changed."""


def answers_of(run: Run, before: Path | None = None) -> pd.DataFrame:
    """A row per answer; statistics of tokens are lists of float32.

    Args:
        before: questions in SQuAD's layout, as they were before their passages were changed.
    """
    rows = run.recorded("rows")
    texts, targets = run.stats["greedy_texts"], run.stats["target_texts"]
    kept: dict[str, Any] = {"id": rows["ids"], "cluster": rows["clusters"]}
    kept |= _labelled(texts, targets, CORRECTNESS_LABELS)
    if before is not None:
        was = {question.id: question.answer for question in read_squad(before)}
        asked = zip(texts, rows["ids"], strict=True)
        kept[BEFORE] = [reference_in_answer(text, was[own]) for text, own in asked]
    kept |= {
        f"quality {name}": run.quality[name]
        for name in run.quality
        if name not in CORRECTNESS_LABELS
    }
    kept["words"] = [len(words(text)) for text in texts]
    kept["prompt_tokens"] = run.stats["asmi_prompt_length"]
    kept["closing"] = run.stats["asmi_closing"]
    kept |= _of_first_sentences(run)
    if regex := run.recorded("config").get("data", {}).get("context_regex"):
        saved = (run.stats[name] for name in ("input_texts", "asmi_tokens", "asmi_token_texts"))
        kept["copied"] = [
            copied([written[token] for token in tokens.tolist()], prompt, regex)
            for prompt, tokens, written in zip(*saved, strict=True)
        ]
    kept |= {f"score {name}": run.scores[name] for name in run.scores}
    for name, values in sorted(run.stats.items()):  # the runner's own order varies
        if name in DEPTH_FREE or name.startswith(OF_TOKENS):
            kept[name] = [np.asarray(own, dtype=np.float32) for own in values]
        elif name.startswith("asmi_top_token"):
            # Share of the masks that agree with most of them on the most likely token.
            kept[name.replace("top_token", "majority")] = [_majority(own) for own in values]
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
        name: [max(correctness(text, wanted) for wanted in accepted) for text, accepted in pairs]
        for name, correctness in correctness_labels.items()
    }


def first_sentence(text: str, tokens: Sequence[str]) -> tuple[str, int]:
    """An answer's first sentence, and how many of its tokens reach into it: all, if it is the only
    one.

    Args:
        tokens: texts of the answer's tokens.
    """
    parts = segment_answer(text)
    if len(parts) < 2:
        return text, len(tokens)
    end = parts[0][1]
    return text[:end], sum(start < end for start in accumulate(map(len, tokens[:-1]), initial=0))


def _of_first_sentences(run: Run) -> dict[str, list[float]]:
    """Their tokens, and what the correctness labels would say of them alone."""
    saved = (run.stats[name] for name in ("greedy_texts", "asmi_tokens", "asmi_token_texts"))
    found = [
        first_sentence(text, [written[token] for token in tokens.tolist()])
        for text, tokens, written in zip(*saved, strict=True)
    ]
    correctness_labels = {"ReferenceInAnswer": reference_in_answer}
    if "Rouge_rougeL" in run.quality:
        correctness_labels["quality Rouge_rougeL"] = _rouge
    qualities = _labelled(
        [text for text, _ in found], run.stats["target_texts"], correctness_labels
    )
    own = {f"{name}, first sentence": values for name, values in qualities.items()}
    return {"first_sentence": [tokens for _, tokens in found], **own}


def _rouge(answer: str, reference: str) -> float:
    """LM-Polygraph's, of texts normalised as the shipped configs do."""
    said, wanted = (" ".join(words(text)) for text in (answer, reference))
    return float(RougeMetric("rougeL")({"greedy_texts": [said]}, [wanted])[0])


def copied(tokens: Sequence[str], prompt: str, regex: str) -> np.ndarray:
    """(T,) whether a token goes on as the passage does: it stands there behind the one before it.

    Of the first token, whether it stands there at all. None of them does where there is no passage.

    Args:
        tokens: texts of the answer's tokens.
        regex: its first group is the passage in the prompt.
    """
    place = matched(regex, prompt)
    passage = prompt[slice(*place)] if place else ""
    pieces = [tokens[0], *map("".join, pairwise(tokens))]
    # A space in front is the tokenizer's, and may be none in the passage.
    return np.array([piece.lstrip() != "" and piece.lstrip() in passage for piece in pieces])


def _majority(top_tokens: np.ndarray) -> np.ndarray:
    counts = [np.unique(own, return_counts=True)[1] for own in np.asarray(top_tokens).T]
    return np.array([found.max() / found.sum() for found in counts], dtype=np.float32)


def _heads_of(run: Run, name: str) -> dict[str, list[np.ndarray]]:
    """Per token, how few heads carry its disagreement; the masks themselves are large."""
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
    about = {
        "settings": {n: v[0] for n, v in run.stats.items() if n.startswith("asmi_settings")},
        "methods": run.described,
        "dataset": run.recorded("dataset").get("name"),
        "data": data,
        "packages": run.recorded("packages"),
    }
    return table.replace_schema_metadata({"run": json.dumps(about, default=str)})


def _joined(tables: Iterable[pa.Table]) -> pa.Table:
    first, *others = tables
    return pa.concat_tables([first, *(table.select(first.column_names) for table in others)])


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--before",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The questions as they were, of a run whose passages say something else.",
)
def main(run: Path, out: Path, before: Path | None) -> None:
    shards = sorted(run.glob("*.parquet"), key=lambda file: int(file.stem))
    table = _joined(map(pq.read_table, shards)) if shards else table_of(load_run(run), before)
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out, compression="zstd", compression_level=19)
    click.echo(f"{out}: {table.num_rows} answers, {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
