"""Score the answers of a finished run under both scopes and both mask samplers, and compare.

    polygraph_eval --config-name asmi_demo estimators=asmi_only data.source=FILE.json data.sample=99
    python scripts/compare_masks.py workdir/output/asmi_demo/DATE/TIME

The answers are unchanged; only masks are sampled again. Each distinct mask of an answer is run once
for all designs. Scores are cached in the run folder (compare_masks), from which a second start
resumes.
"""

import sys
from collections.abc import Iterator, MutableMapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pandas as pd
import torch
from datasets import load_from_disk
from diskcache import Cache
from lm_polygraph.utils.common import load_external_module
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lm_polygraph_asmi import maths
from lm_polygraph_asmi._hydra.resolvers import register_resolvers
from lm_polygraph_asmi.analysis import (
    Labelled,
    cluster_interval,
    normalised_prr,
    rank_correlation,
    rank_correlations,
    seed_stability,
)
from lm_polygraph_asmi.config import MASK_SAMPLERS
from lm_polygraph_asmi.model import (
    num_heads,
    num_layers,
    readout,
    run_subnetworks,
    run_unmasked,
    scoring_session,
    target_layer,
    unembedding,
)
from lm_polygraph_asmi.results.runs import RIGHT, Run, load_run

RATE, TOP_K, DEPTH = 0.15, 64, 0.6
PAPER = ("bernoulli", 40)
NUM_MASKS = (10, 20, 40, 80)
OTHER_SEEDS = 5
SCORES = ("ASMI", "Sem-ASMI")


class Design(NamedTuple):
    """Sampling and scope of the masks of one score."""

    scope: str
    sampler: str
    num_masks: int
    mask_seed: int


def designs(exact_seeds: int) -> list[Design]:
    """All designs of the scope "response"; of the scope "all", only the paper's."""
    return [
        *(Design("all", *PAPER, mask_seed) for mask_seed in range(exact_seeds)),
        *(
            Design("response", sampler, num_masks, mask_seed)
            for sampler in MASK_SAMPLERS
            for num_masks in NUM_MASKS
            for mask_seed in range(OTHER_SEEDS)
        ),
    ]


def load(folder: Path) -> tuple[Any, Any, Run, list[str]]:
    """Model, tokenizer, results and cluster keys of a run made by polygraph_eval."""
    register_resolvers()
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    script = load_external_module(config.model.path_to_load_script)
    model = script.load_model(config.model.path, **config.model.load_model_args)
    tokenizer = script.load_tokenizer(config.model.path, **config.model.load_tokenizer_args)
    run = load_run(folder)
    rows = load_from_disk(config.dataset).to_dict()
    # SQuAD is clustered by passage (the closed-book twin too), anything else by whole input.
    key_of = dict(zip(rows["input"], rows.get("cluster", rows["input"]), strict=True))
    return model, tokenizer, run, [key_of[text] for text in run.stats["input_texts"]]


def score_answer(
    model: Any, prompt: list[int], answer: list[int], requested: list[Design], attention: str
) -> Iterator[tuple[Design, dict[str, np.ndarray]]]:
    """Per-token MI and agreement of one answer under every design."""
    input_ids = torch.tensor([*prompt, *answer])
    layer, weight = target_layer(DEPTH, num_layers(model)), unembedding(model)
    for scope in dict.fromkeys(design.scope for design in requested):
        of_scope = [design for design in requested if design.scope == scope]
        masks = []
        for design in of_scope:
            # Masks of the engine with this seed.
            _, sampled = maths.example_masks(
                design.num_masks,
                num_heads(model),
                RATE,
                design.sampler,
                design.mask_seed,
                layer,
                input_ids.tolist(),
            )
            masks.append(sampled)
        token_scores: dict[Design, list[tuple[np.ndarray, np.ndarray]]] = {d: [] for d in of_scope}
        with scoring_session(model, attention):
            unmasked = run_unmasked(model, input_ids, len(prompt), [layer], scope)
            subnetworks = run_subnetworks(model, unmasked, layer, torch.cat(masks))
            rows_of = subnetworks.index.split([design.num_masks for design in of_scope])
            # One token at a time: with many heads all masks differ, and vocabularies are large.
            for token in range(len(answer)):
                log_probs = readout(model, subnetworks.hidden[:, token : token + 1])
                for design, rows in zip(of_scope, rows_of, strict=True):
                    distinct, counts = rows.unique(return_counts=True)
                    share = counts.float().to(log_probs.device)
                    support = maths.union_support(log_probs[distinct], TOP_K)
                    mi = maths.disagreement(support, share).mutual_information
                    agreement = maths.agreement_on_support(support, weight, share)
                    token_scores[design].append((mi.cpu().numpy(), agreement.cpu().numpy()))
        for design, tokens in token_scores.items():
            mi, agreement = map(np.concatenate, zip(*tokens, strict=True))
            yield design, {"mi": mi, "agreement": agreement}


def score_run(
    model: Any,
    tokenizer: Any,
    run: Run,
    cache: MutableMapping[Any, Any],
    requested: list[Design],
    attention: str,
) -> pd.DataFrame:
    """A row per answer and design; cached ones are not scored again."""
    texts, tokens = run.stats["input_texts"], run.stats["asmi_tokens"]
    rows = []
    for answer, text in enumerate(tqdm(texts, desc="answers")):
        keys = {d: (answer, attention, RATE, TOP_K, DEPTH, *d) for d in requested}
        missing = [design for design, key in keys.items() if key not in cache]
        if missing:
            prompt = tokenizer(text)["input_ids"]
            if len(prompt) != run.stats["asmi_prompt_length"][answer]:
                raise click.ClickException(f"prompt {answer} has other tokens than in the run")
            for design, scores in score_answer(
                model, prompt, tokens[answer].tolist(), missing, attention
            ):
                cache[keys[design]] = scores
        rows += [{"answer": answer} | d._asdict() | cache[key] for d, key in keys.items()]
    table = pd.DataFrame(rows)
    table["ASMI"] = table["mi"].map(np.mean)
    table["Sem-ASMI"] = (table["mi"] * (1 - table["agreement"])).map(np.mean)
    return table


class SeedScores:
    """The scores of a run under all designs."""

    def __init__(self, table: pd.DataFrame, quality: np.ndarray, clusters: list[str]) -> None:
        self.by_design = dict(list(table.groupby(["scope", "sampler", "num_masks"])))
        self.answers = Labelled(quality=quality, clusters=clusters)

    def scores(self, score: str, scope: str, sampler: str, num_masks: int) -> np.ndarray:
        """(R, n), one row per mask seed."""
        chosen = self.by_design[scope, sampler, num_masks]
        return chosen.pivot(index="mask_seed", columns="answer", values=score).to_numpy()

    def tokens(self, scope: str) -> np.ndarray:
        """MI of every token of every answer, first seed of the paper's masks."""
        chosen = self.by_design[(scope, *PAPER)].query("mask_seed == 0")
        return np.concatenate(chosen.sort_values("answer")["mi"].tolist())

    def prr(self, draws: np.ndarray, minus: np.ndarray | None = None) -> str:
        """Mean PRR over draws, or the difference of two such means, with a cluster interval."""

        def mean(seeds: np.ndarray, rows: np.ndarray) -> float:
            quality = self.answers.quality[rows]
            return float(np.mean([normalised_prr(s[rows], quality) for s in seeds]))

        def statistic(rows: np.ndarray) -> float:
            return mean(draws, rows) - (0 if minus is None else mean(minus, rows))

        return str(cluster_interval(statistic, self.answers))


def pairs(correlations: np.ndarray) -> str:
    """Mean correlation over pairs of seeds, and the number of pairs."""
    return f"{correlations.mean():.3f} ({correlations.size})"


def compare_scopes(other_seeds: SeedScores, score: str) -> dict[str, str]:
    """Both scopes with the paper's masks; the same seed gives the same masks."""
    exact = other_seeds.scores(score, "all", *PAPER)
    response = other_seeds.scores(score, "response", *PAPER)
    alike = np.array([[rank_correlation(a, b) for b in response] for a in exact])
    same = np.eye(*alike.shape, dtype=bool)
    return {
        "PRR, scope all": other_seeds.prr(exact),
        "PRR, scope response": other_seeds.prr(response[: len(exact)]),
        "difference, response - all": other_seeds.prr(response[: len(exact)], minus=exact),
        "rank correlation of scopes, same masks": pairs(alike[same]),
        "rank correlation of scopes, other masks": pairs(alike[~same]),
        "rank correlation of seeds, scope all": pairs(rank_correlations(exact)),
        "rank correlation of seeds, scope response": pairs(rank_correlations(response)),
    }


def scope_table(other_seeds: SeedScores) -> Table:
    """`compare_scopes` for both scores."""
    columns = [compare_scopes(other_seeds, score) for score in SCORES]
    shown = Table(title=f"Scopes: Bernoulli masks, p = {RATE}, S = {PAPER[1]}")
    shown.add_column(no_wrap=True)
    for score in SCORES:
        shown.add_column(score, justify="right")
    for label in columns[0]:
        shown.add_row(label, *(column[label] for column in columns))
    tokens = rank_correlation(other_seeds.tokens("all"), other_seeds.tokens("response"))
    shown.caption = (
        "PRR: mean of the draws made in both scopes [95 % over clusters]; correlations: mean over "
        "(number of) pairs.\n"
        f"Rank correlation of the scopes' token-level MI, same masks: {tokens:.3f}"
    )
    return shown


def sampler_table(other_seeds: SeedScores) -> Table:
    """Seed stability by sampler and S, response scope."""
    shown = Table(title=f"Samplers: scope response, p = {RATE}, {OTHER_SEEDS} seeds")
    shown.add_column("S", justify="right")
    for sampler, score in product(MASK_SAMPLERS, SCORES):
        shown.add_column(f"{sampler}\n{score}\nPRR ± sd", justify="right")
        shown.add_column("\nrank\ncorr.", justify="right")
    for num_masks in NUM_MASKS:
        values = []
        for sampler, score in product(MASK_SAMPLERS, SCORES):
            scores = other_seeds.scores(score, "response", sampler, num_masks)
            seeds = seed_stability(scores, other_seeds.answers.quality)
            values += [f"{seeds.mean:+.3f} ± {seeds.sd:.3f}", f"{seeds.rank_correlation:.3f}"]
        shown.add_row(str(num_masks), *values)
    return shown


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--exact-seeds", default=2, show_default=True, type=click.IntRange(2, OTHER_SEEDS))
@click.option("--attention", default="sdpa", show_default=True)
def main(folder: Path, exact_seeds: int, attention: str) -> None:
    model, tokenizer, run, clusters = load(folder)
    with Cache(str(folder / "compare_masks")) as cache:
        table = score_run(model, tokenizer, run, cache, designs(exact_seeds), attention)
    metric = run.quality.columns[0]
    finite = run.finite(metric)
    other_seeds = SeedScores(
        table[finite[table["answer"]]],
        run.quality.loc[finite, metric].to_numpy(),
        [cluster for cluster, keep in zip(clusters, finite, strict=True) if keep],
    )
    console = Console(width=None if sys.stdout.isatty() else 120)
    right = (other_seeds.answers.quality >= RIGHT).mean()
    console.print(
        f"\n{run.path}: {finite.sum()} answers, {other_seeds.answers.n_clusters} clusters, "
        f"quality {metric}, {right:.0%} right, p = {RATE}, K = {TOP_K}, depth {DEPTH:.0%}",
        highlight=False,
    )
    console.print(scope_table(other_seeds))
    console.print(sampler_table(other_seeds))


if __name__ == "__main__":
    main()
