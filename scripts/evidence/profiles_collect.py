"""Answer and score the fresh questions of docs/evidence/profile-plan.md.

    PYTHONPATH=scripts python scripts/evidence/profiles_collect.py MODEL DATA OUT.jsonl --limit 300

MODEL is a folder, or `smollm2`; DATA a bAbI task file (.txt) or questions in SQuAD's layout
(.json). Each answer appends a line; an existing file is resumed. `profiles.py keep` makes a
small table of it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from build_babi import read_babi
from keep import CORRECTNESS_LABELS
from keep import _majority as majority
from lm_polygraph.generation_metrics import RougeMetric
from rich.progress import track

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.experiments.perturbations import load_perturbation
from lm_polygraph_asmi.host.quality import words
from lm_polygraph_asmi.model import PrefixCache, readout, scoring_session
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.runs.rows import DataRow, cluster_key, read_data, spread
from lm_polygraph_asmi.scoring import Scorer
from lm_polygraph_asmi.scoring.engine import Engine, score_depths
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics
from lm_polygraph_asmi.scoring.text import prompt_tokens, spans
from lm_polygraph_asmi.stat_calculators.masked_heads import by_name

DEPTHS = (0.6, 0.7, 0.9)
QUESTIONS = 5
"""Per story of bAbI task 1."""
RIDGE = 1.0
"""Penalty in the regression of the answer's log-probability on the masked heads."""


def read_questions(file: Path, few_shot: bool, skip: int) -> list[DataRow]:
    """All questions of a file; those of one story or passage share a cluster."""
    if file.suffix == ".json":
        return read_data(str(file), "", "", None, "demo" if few_shot else "paper")[skip:]
    split = file.stem.rpartition("_")[2]
    rows = [
        DataRow(f"{split}:{index}", cluster_key(f"story {index // QUESTIONS}"), prompt, answer)
        for index, (prompt, answer) in enumerate(read_babi(file))
    ]
    return rows[skip:]


def head_effects(statistics: AnswerStatistics) -> np.ndarray:
    """(H,) effect of masking each head on the answer's log-likelihood, by ridge regression."""
    assert statistics.masks is not None
    assert statistics.masked_log_likelihood is not None
    change = statistics.masked_log_likelihood.astype(np.float64).sum(1)
    masked = 1 - statistics.masks.astype(np.float64)
    masked, change = masked - masked.mean(0), change - change.mean()
    gram = masked.T @ masked + RIDGE * np.eye(masked.shape[1])
    return np.linalg.solve(gram, masked.T @ change)


def unmasked_features(
    scorer: Scorer,
    engines: Sequence[Engine],
    ids: torch.Tensor,
    prompt: int,
    prefix_cache: PrefixCache,
) -> dict:
    """Hidden states after the masked layers, and next-token distributions read out from them."""
    model: Any = scorer.model
    features: dict[str, Any] = {}
    with torch.no_grad(), scoring_session(model):
        # The cache holds the prompt but its last token; the rest runs again.
        cache = prefix_cache.cache(prompt - 1) if prefix_cache.layers else None
        start = prompt - 1 if cache is not None else 0
        out = model(ids[None, start:], past_key_values=cache, output_hidden_states=True)
        hidden = [state[0, prompt - 1 - start :] for state in out.hidden_states]
        norm = model.model.norm  # Llama, Qwen and Gemma alike
        tokens = ids[prompt:]
        for engine in engines:
            depth, states = engine.config.depth, hidden[engine.layer(model) + 1]
            features[at_depth("hidden_mean", depth)] = states[1:].mean(0).tolist()
            features[at_depth("hidden_last", depth)] = states[-1].tolist()
            early = readout(model, norm(states[:-1])).double()
            chosen = early.gather(-1, tokens[:, None])[:, 0]
            features[at_depth("early_log_likelihood", depth)] = chosen.tolist()
            features[at_depth("early_entropy", depth)] = (-(early.exp() * early).sum(-1)).tolist()
    return features


def score_answer(
    scorer: Scorer,
    engines: Sequence[Engine],
    row: DataRow,
    mlp: Sequence[Engine],
    raw: bool,
    prefix_cache: PrefixCache,
) -> dict[str, Any]:
    """Generate and score an answer; returns lists and numbers to save."""
    prompt = prompt_tokens(scorer.tokenizer, row.input)
    response = scorer.generation.greedy(prompt, scorer.config.max_new_tokens, engines, prefix_cache)
    ids = torch.cat([prompt, torch.tensor(response)])
    features = unmasked_features(scorer, engines, ids, len(prompt), prefix_cache)
    depths = score_depths(engines, scorer.model, prompt, response, prefix_cache)
    stats = by_name(depths)
    for each in depths:
        stats[at_depth("asmi_head_effects", each.settings.config.depth)] = head_effects(each)
    if mlp:
        mlp_stats = by_name(score_depths(mlp, scorer.model, prompt, response))
        stats |= {f"mlp {name}": value for name, value in mlp_stats.items() if "_d" in name}
    text, places = spans(scorer.tokenizer, prompt.tolist(), response)
    answer = scorer.stop_conditions.without(text, places, response)
    accepted = [row.output] if isinstance(row.output, str) else row.output
    kept: dict[str, Any] = {"id": row.id, "cluster": row.cluster, "answer": answer.strip()}
    kept["ReferenceInAnswer"] = max(
        CORRECTNESS_LABELS["ReferenceInAnswer"](answer, gold) for gold in accepted
    )
    prediction, gold = (t if raw else " ".join(words(t)) for t in (answer, accepted[0]))
    kept["Rouge_rougeL"] = float(RougeMetric("rougeL")({"greedy_texts": [prediction]}, [gold])[0])
    kept |= {"words": len(words(answer)), "prompt_tokens": len(prompt)} | features
    for name, value in stats.items():
        if "asmi_top_token" in name:
            kept[name.replace("top_token", "majority")] = majority(value).tolist()
        elif name.endswith(("_entropy", "log_likelihood")) or any(
            part in name for part in ("asmi_mi_", "asmi_agreement_", "asmi_head_effects")
        ):
            kept[name] = np.asarray(value, dtype=np.float32).tolist()
        elif "asmi_settings" in name:
            kept[name] = value
    return kept


@click.command(help=__doc__)
@click.argument("model")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--limit", type=int, required=True, help="Questions, evenly spaced over the file.")
@click.option("--few-shot", is_flag=True, help="The demo's 4-shot prompt.")
@click.option("--skip", default=0, help="Leave out the file's first questions.")
@click.option("--mlp/--no-mlp", default=True, help="Also mask inputs of the MLP (control c).")
@click.option("--depth", "depths", type=float, multiple=True, default=DEPTHS, show_default=True)
def main(
    model: str,
    file: Path,
    out: Path,
    limit: int,
    few_shot: bool,
    skip: int,
    mlp: bool,
    depths: tuple[float, ...],
) -> None:
    rows = spread(read_questions(file, few_shot, skip), limit)
    finished = {json.loads(line)["id"] for line in out.open()} if out.exists() else set()
    babi = file.suffix == ".txt"
    scorer = Scorer(model, scope="response", stop="\n", max_new_tokens=3 if babi else 20)
    config = ASMIConfig(scope="response", attention="sdpa")
    engines = [Engine(at, details=True) for at in config.at_depths(depths)]
    mlp_engines = (
        [Engine(e.config, change=load_perturbation("mlp")) for e in engines] if mlp else []
    )
    prefix_cache = PrefixCache()  # prompts share a prefix
    in_thirds = [row for part in range(3) for row in rows[part::3]]  # each evenly spaced
    with out.open("a") as lines:
        for row in track([row for row in in_thirds if row.id not in finished]):
            kept = score_answer(scorer, engines, row, mlp_engines, babi, prefix_cache)
            lines.write(json.dumps(kept) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
