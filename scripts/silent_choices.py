"""What choices that the paper leaves open move, as CSV.

    python scripts/silent_choices.py tables               # the saved answers of docs/evidence
    python scripts/silent_choices.py demo demo.jsonl      # SmolLM2 answers the demo's questions
    python scripts/silent_choices.py gate demo.jsonl      # the token that the gate embeds

`demo` appends a line per question, so that a second start resumes.
docs/reference/open-choices-evidence.csv is what `tables` prints, open-choices-demo.csv what `gate`
prints.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from lm_polygraph.generation_metrics import RougeMetric
from lm_polygraph.ue_metrics import PredictionRejectionArea

from lm_polygraph_asmi.analysis import normalised_prr, rank_correlation
from lm_polygraph_asmi.config import GATE_TOKENS, ASMIConfig
from lm_polygraph_asmi.maths import adaptive_gate
from lm_polygraph_asmi.maths.scores import aggregate

EVIDENCE = Path(__file__).parents[1] / "docs/evidence"


def sem_asmi(answers: pd.DataFrame, closing: bool = True, aggregation: str = "mean") -> np.ndarray:
    """Sem-ASMI of saved answers, nats.

    Args:
        answers: columns `asmi_mi_d60`, `asmi_agreement_d60` (arrays of T) and `closing`.
        closing: whether the closing token counts; never left out if it is the only one.
        aggregation: of `config.AGGREGATIONS`.
    """
    scores = []
    columns = (answers.asmi_mi_d60, answers.asmi_agreement_d60, answers.closing)
    for information, agreement, closes in zip(*columns, strict=True):
        tokens = np.asarray(information) * (1 - np.asarray(agreement))
        leave_out = closes and not closing and len(tokens) > 1
        scores.append(aggregate(tokens[:-1] if leave_out else tokens, aggregation))
    return np.array(scores)


def prr_half(scores: np.ndarray, quality: np.ndarray) -> float:
    """LM-Polygraph's `prr_0.5_normalized`: at most half of the answers are rejected.

    Its random baseline is replaced by the exact one, the mean quality.
    """
    area = PredictionRejectionArea(max_rejection=0.5)
    lowest, highest = quality.min(), quality.max()
    random = (quality.mean() - lowest) / (highest - lowest)
    return float((area(scores, quality) - random) / (area(-quality, quality) - random))


def of_tables(folder: Path = EVIDENCE) -> Iterator[dict[str, Any]]:
    """A row per setting with passages, of the run that saved the tokens of its scores."""
    for file in sorted(folder.glob("*/*.sources.parquet")):
        setting = file.name.removesuffix(".sources.parquet")
        if not setting.startswith(("xquad", "babi")):
            continue
        answers = pd.read_parquet(file)
        quality = answers["quality Rouge_rougeL"].to_numpy(float)
        paper, without, summed = (
            sem_asmi(answers),
            sem_asmi(answers, closing=False),
            sem_asmi(answers, aggregation="sum"),
        )
        lengths = answers.asmi_mi_d60.map(len)
        yield {
            "setting": f"{file.parent.name} {setting}",
            "answers": len(answers),
            "share closed": answers.closing.mean(),
            "mean tokens": lengths.mean(),
            "without closing": (lengths - answers.closing).mean(),
            "PRR": normalised_prr(paper, quality),
            "PRR without closing": normalised_prr(without, quality),
            "PRR of sum": normalised_prr(summed, quality),
            "PRR 0.5": prr_half(paper, quality),
            "rank correlation without closing": rank_correlation(paper, without),
            "rank correlation of sum": rank_correlation(paper, summed),
        }


def answered(rows: Sequence[Any], scored: set[str], num_samples: int) -> Iterator[dict[str, Any]]:
    """One record per question that is not scored: the answer's tokens, and div(x) at both."""
    from lm_polygraph_asmi import Scorer
    from lm_polygraph_asmi.scoring.engine import diversity_of

    config = ASMIConfig(method="asmi", scope="response", stop=("\n",), max_new_tokens=20)
    scorer = Scorer("smollm2", config)
    tokenizer, conditions = scorer.tokenizer, scorer.stop_conditions
    for row in rows:
        if row.id in scored:
            continue
        answer = scorer.score(row.input)
        prompt = tokenizer(row.input, return_tensors="pt")["input_ids"][0]
        samples = scorer.generation.sampled(prompt, config.max_new_tokens, num_samples, config.seed)
        embedded = [
            conditions.embedded(samples, gate_token, config.max_new_tokens)
            for gate_token in GATE_TOKENS
        ]
        yield {
            "id": row.id,
            "answer": answer.answer,
            "gold": row.output,
            "samples": tokenizer.batch_decode(samples),
            "diversity": diversity_of(scorer.model, prompt, *embedded),
            "mi": [token.mi for token in answer.tokens],
            "agreement": [token.agreement for token in answer.tokens],
        }


def of_gate(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """div(x), alpha(x) and PRR by ROUGE-L for each token of the gate; then Sem-ASMI."""
    metric = RougeMetric("rougeL")
    texts = {"greedy_texts": [record["answer"].strip() for record in records]}
    quality = np.array(metric(texts, [record["gold"] for record in records]))

    def scores(alphas: np.ndarray) -> np.ndarray:
        weighted = [
            np.array(record["mi"]) * (1 - alpha * np.array(record["agreement"]))
            for record, alpha in zip(records, alphas, strict=True)
        ]
        return np.array([tokens.mean() for tokens in weighted])

    sem = scores(np.ones(len(records)))
    diversities = np.array([record["diversity"] for record in records]).T
    for gate_token, diversity in zip(GATE_TOKENS, diversities, strict=True):
        alpha = np.array([adaptive_gate(value) for value in diversity])
        yield {
            "score": f"Adapt-ASMI, gate_token={gate_token}",
            "answers": len(records),
            "median div(x)": np.median(diversity),
            "median alpha": np.median(alpha),
            "share of alpha below 0.5": np.mean(alpha < 0.5),
            "PRR": normalised_prr(scores(alpha), quality),
            "rank correlation with Sem-ASMI": rank_correlation(scores(alpha), sem),
        }
    yield {"score": "Sem-ASMI", "answers": len(records), "PRR": normalised_prr(sem, quality)}


def show(rows: Iterator[dict[str, Any]]) -> None:
    pd.DataFrame(rows).to_csv(sys.stdout, index=False, float_format="%.2f")


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
def tables() -> None:
    """Closing token, aggregation and PRR on the saved answers."""
    show(of_tables())


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--limit", type=int, help="Number of questions.")
@click.option("--samples", default=10, show_default=True)
def demo(file: Path, limit: int | None, samples: int) -> None:
    """Score the demo's questions into FILE."""
    from lm_polygraph_asmi.runs.rows import read_data

    rows = read_data(None, "", "", None, prompt_style="demo")[:limit]
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    scored = {json.loads(line)["id"] for line in lines}
    with file.open("a", encoding="utf-8") as out:
        for record in answered(rows, scored, samples):
            print(json.dumps(record), file=out, flush=True)


@main.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
def gate(file: Path) -> None:
    """The gate's token, from the answers in FILE."""
    show(of_gate([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
