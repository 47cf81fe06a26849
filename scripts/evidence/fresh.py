"""Collect the rows of docs/evidence/fresh-plan.md.

    cd scripts/evidence
    python fresh.py collect MODEL FILE OUT.jsonl --rows 300            # scope response
    python fresh.py collect MODEL FILE OUT.all.jsonl --rows 300 --scope all
    python fresh.py keep OUT.jsonl OUT.all.jsonl ../../docs/evidence/fresh/MODEL/SETTING

MODEL is a folder, or `smollm2`; FILE is bAbI task 1's test file, with its train file beside it, or
questions in SQuAD's layout. Each answer appends a line; rows that OUT or the kept tables hold are
not scored again. `keep` writes SETTING.parquet, and SETTING.states.parquet with hidden states. No
prompt, answer or gold answer is kept.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import torch
from build_babi import read_babi
from keep import LABEL, contains
from lm_polygraph.generation_metrics import RougeMetric
from rich.progress import track

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.host.quality import words
from lm_polygraph_asmi.model import PrefixCache, scoring_session
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.runs.rows import DataRow, cluster_key
from lm_polygraph_asmi.runs.squad import Question, prompt_of
from lm_polygraph_asmi.scoring import Scorer
from lm_polygraph_asmi.scoring.engine import Engine, score_depths
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics
from lm_polygraph_asmi.scoring.text import prompt_tokens, spans
from lm_polygraph_asmi.stat_calculators.masked_heads import by_name

EVIDENCE = Path(__file__).parents[2] / "docs/evidence"
SEED = 20261125
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
"""Of bAbI task 1."""
DEPTHS = (0.6, 0.9)
STRATA = 5
"""Questions of a story of bAbI task 1: after 2, 4, 6, 8 and 10 facts."""


def babi_rows(file: Path) -> list[DataRow]:
    """The questions of the plan, in its order."""
    scored = {
        row_id
        for table in EVIDENCE.glob("*/babi*.parquet")
        for row_id in pd.read_parquet(table, columns=["id"])["id"]
    }
    earlier = {prompt for prompt, _ in read_babi(file.with_name("babi_qa1_train.txt"))}
    strata: list[list[DataRow]] = [[] for _ in range(STRATA)]
    for index, (prompt, answer) in enumerate(read_babi(file)):
        row = DataRow(f"test:{index}", f"story {index // STRATA}", prompt, answer)
        if prompt not in earlier and row.id not in scored:
            strata[index % STRATA].append(row)
        earlier.add(prompt)
    rng = np.random.default_rng(SEED)
    drawn = [[rows[i] for i in rng.permutation(len(rows))] for rows in strata]
    return [
        drawn[stratum][block]
        for block in range(min(map(len, drawn)))
        for stratum in rng.permutation(STRATA)
    ]


def squad_rows(file: Path, few_shot: bool) -> list[DataRow]:
    """One question a passage, passages in random order."""
    rng = np.random.default_rng(SEED)
    prompt = prompt_of("demo" if few_shot else "paper", False)
    rows = []
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            question = paragraph["qas"][rng.integers(len(paragraph["qas"]))]
            gold = [answer["text"] for answer in question["answers"]]
            text = prompt(Question("", paragraph["context"], question["question"], gold[0]))
            key = cluster_key(paragraph["context"])
            rows.append(DataRow(str(question["id"]), key, text, gold))
    return [rows[i] for i in rng.permutation(len(rows))]


def states(
    scorer: Scorer, ids: torch.Tensor, prompt: int, prefix_cache: PrefixCache
) -> dict[str, Any]:
    """State after the masked layer where the answer's tokens are predicted: mean and last."""
    model: Any = scorer.model
    layer = scorer.engine.layer(model)
    with torch.no_grad(), scoring_session(model):
        cache = prefix_cache.cache(prompt - 1) if prefix_cache.layers else None
        start = prompt - 1 if cache is not None else 0
        out = model(ids[None, start:-1], past_key_values=cache, output_hidden_states=True)
        hidden = out.hidden_states[layer + 1][0, prompt - 1 - start :].double()
    return {
        "hidden_mean": hidden.mean(0).half().tolist(),
        "hidden_last": hidden[-1].half().tolist(),
    }


def kept_statistics(depths: Sequence[AnswerStatistics]) -> dict[str, Any]:
    """Of an answer, with masks and the answer's log-likelihood under each if there are details."""
    named = by_name(depths)
    parts = ("asmi_mi_", "asmi_agreement_")
    kept = {name: value for name, value in named.items() if name.startswith(parts)}
    kept |= {name: named[name] for name in ("asmi_entropy", "asmi_log_likelihood")}
    for each in depths:
        of_depth = {"asmi_settings": each.settings.to_dict()}
        if each.masks is not None and each.masked_log_likelihood is not None:
            of_depth["asmi_kept"] = np.packbits(each.masks.ravel())
            likelihood = each.masked_log_likelihood.astype(np.float64)
            of_depth["asmi_masked_log_likelihood"] = likelihood.sum(1)
        kept |= {at_depth(n, each.settings.config.depth): v for n, v in of_depth.items()}
    listed = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in kept.items()}
    return listed | {"seconds": named["asmi_seconds"]}


def score_row(
    scorer: Scorer, engines: Sequence[Engine], row: DataRow, babi: bool, prefix_cache: PrefixCache
) -> dict[str, Any]:
    prompt = prompt_tokens(scorer.tokenizer, row.input)
    response = scorer.generation.greedy(prompt, scorer.config.max_new_tokens, engines, prefix_cache)
    stats = score_depths(engines, scorer.model, prompt, response, prefix_cache)
    text, places = spans(scorer.tokenizer, prompt.tolist(), response)
    answer = scorer.stop_conditions.without(text, places, response)
    accepted = [row.output] if isinstance(row.output, str) else row.output
    kept = {"id": row.id, "cluster": row.cluster, LABEL: contains(answer, accepted)}
    prediction, gold = (t if babi else " ".join(words(t)) for t in (answer, accepted[0]))
    kept["Rouge_rougeL"] = float(RougeMetric("rougeL")({"greedy_texts": [prediction]}, [gold])[0])
    kept |= {"words": len(words(answer)), "prompt_tokens": len(prompt)}
    if babi:
        kept["place"] = [*PLACES, answer.strip()].index(answer.strip())
    if scorer.config.scope == "response":
        ids = torch.cat([prompt, torch.tensor(response)])
        kept |= states(scorer, ids, len(prompt), prefix_cache)
    return kept | kept_statistics(stats)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("model")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--rows", type=int, required=True, help="Rows, from the first of the plan's order.")
@click.option("--few-shot", is_flag=True, help="The demo's 4-shot prompt.")
@click.option("--scope", type=click.Choice(["response", "all"]), default="response")
@click.option("--have", type=click.Path(path_type=Path), help="Kept table; its rows are left out.")
def collect(
    model: str,
    file: Path,
    out: Path,
    rows: int,
    few_shot: bool,
    scope: str,
    have: Path | None,
) -> None:
    """Answer and score rows."""
    babi = file.suffix == ".txt"
    drawn = (babi_rows(file) if babi else squad_rows(file, few_shot))[:rows]
    finished = {json.loads(line)["id"] for line in out.open()} if out.exists() else set()
    if have is not None and have.exists():
        table = pd.read_parquet(have)
        column = "asmi_mi_d60" if scope == "response" else "all asmi_mi_d60"
        finished |= set(table["id"][table[column].notna()]) if column in table else set()
    scorer = Scorer(model, scope=scope, stop="\n", max_new_tokens=3 if babi else 20)
    config = ASMIConfig(scope=scope, attention="sdpa")
    details = scope == "response"
    depths = DEPTHS if details else DEPTHS[:1]
    engines = [Engine(at, details=details) for at in config.at_depths(depths)]
    scorer.engine = engines[0]
    prefix_cache = PrefixCache()
    with out.open("a") as lines:
        for row in track([row for row in drawn if row.id not in finished]):
            lines.write(json.dumps(score_row(scorer, engines, row, babi, prefix_cache)) + "\n")
            lines.flush()


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):  # the last one may be cut off
                yield json.loads(line)


@main.command()
@click.argument("response", type=click.Path(path_type=Path))
@click.argument("scope_all", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def keep(response: Path, scope_all: Path, out: Path) -> None:
    """Merge collected rows into the kept tables."""
    rows = {row["id"]: row for row in _lines(response)}
    table, vectors = out.with_suffix(".parquet"), out.with_suffix(".states.parquet")
    if table.exists():
        merged = pd.read_parquet(table).merge(pd.read_parquet(vectors), on="id", how="left")
        earlier = merged.to_dict("records")
        rows = {row["id"]: row for row in earlier} | rows
    for row in _lines(scope_all):
        if row["id"] in rows:
            rows[row["id"]] |= {
                f"all {name}": value
                for name, value in row.items()
                if name.startswith(("asmi_mi_", "asmi_agreement_"))
            }
    frame = pd.DataFrame(list(rows.values()))
    frame = frame.drop(columns=[n for n in frame if "settings" in n])
    for name in frame:
        values = frame[name]
        if values.map(lambda value: isinstance(value, list | np.ndarray)).any():
            kind = np.uint8 if "kept" in name else np.float16 if "hidden" in name else np.float32
            frame[name] = [None if np.ndim(v) == 0 else np.asarray(v, dtype=kind) for v in values]
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = ["hidden_mean", "hidden_last"]
    for file, part in ((table, frame.drop(columns=hidden)), (vectors, frame[["id", *hidden]])):
        part.to_parquet(file, compression="zstd", compression_level=19, index=False)
        click.echo(f"{file}: {len(part)} answers, {file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
