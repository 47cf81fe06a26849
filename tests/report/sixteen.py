"""A benchmark of 16 settings of 1,000 answers with known truths: `python -m tests.report.sixteen
OUT`.

Four models on four datasets. What masks alone know is strong on grounded settings, nothing on
recall (there the score reads difficulty, as MSP and H do, each with noise of its own: a little
beyond them), weakly reversed on one setting, and silent (no masking response) on another; lengths,
empty answers and ties are as in real runs; on another a baseline ranks nearly as ASMI's best does,
so that "equivalent" can come up. Leaves the runs in OUT/runs and their report in OUT/report, and
prints the seconds it took. A second argument takes so many of the settings, a third so many answers
of each, a fourth so many processes.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.coverage import TOP_K
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.report import build_report, load_run_groups
from tests.report.runs import FINISHED, manifest, put_at, put_scores, put_tokens, save

MODELS = ("planted_a", "planted_b", "planted_c", "planted_d")
DATASETS = ("coqa", "squad", "babi", "triviaqa")
METHODS = (
    "MaximumSequenceProbability", "Perplexity", "MeanTokenEntropy", "SelfCertainty",
    "MonteCarloSequenceEntropy", "MonteCarloNormalizedSequenceEntropy", "SemanticEntropy", "SAR",
    "SentenceSAR", "LUQ", "KernelLanguageEntropy", "PTrue", "RAUQ", "RAUQ (entropy)",
)  # fmt: skip


def group(
    seed: int,
    weight: float,
    n: int = 1000,
    depths: tuple[int, ...] = (60, 80),
    rivalled: bool = False,
) -> dict:
    """A manager file's content: difficulty is read by all methods, fragility by ASMI alone.

    Args:
        weight: of fragility in the errors.
        rivalled: whether RAUQ ranks nearly as Sem-ASMI at the first depth does.
    """
    rng = np.random.default_rng(seed)
    passage = np.repeat(rng.normal(size=n // 5), 5)
    difficulty = 0.5 * passage + 0.87 * rng.normal(size=n)
    fragility = rng.normal(size=n)
    lengths = np.clip(rng.poisson(3 + np.exp(0.5 * rng.normal(size=n))), 1, 12)
    chance = 1 / (1 + np.exp(1 - difficulty - weight * fragility - 0.15 * (lengths - 4)))
    wrong = rng.random(n) < chance
    quality = np.clip(np.where(wrong, 0.2, 0.85) + 0.12 * rng.normal(size=n), 0, 1)
    other = np.clip(quality + 0.2 * rng.normal(size=n), 0, 1)
    empty = rng.random(n) < (0.2 if seed % 5 == 0 else 0.02)
    estimations: dict[tuple[str, str], Any] = {}
    for i, method in enumerate(METHODS):
        noise = 0.7 + 0.12 * i
        score = np.exp(0.7 * difficulty + noise * rng.normal(size=n))
        if i == 0 and seed % 5 == 1:
            score = np.where(
                score < np.quantile(score, 0.7), 0.0, score
            )  # ties, as of short answers
        estimations["sequence", method] = score.tolist()

    def tokens(level: np.ndarray, spread: float) -> list[np.ndarray]:
        """Positive values of every token, around a level of its answer."""
        return [
            np.exp(own + spread * rng.normal(size=t)) for own, t in zip(level, lengths, strict=True)
        ]

    def seconds(typical: float) -> list[float]:
        return (typical * (1 + rng.random(n))).tolist()

    stats: dict[str, list[Any]] = {
        "input_texts": [f"Read.\nPassage:\np{i // 5}\nQuestion: q{i}?\nAnswer:" for i in range(n)],
        "greedy_texts": ["\n" if e else f"answer {i}\n" for i, e in enumerate(empty)],
        "target_texts": [f"gold {i}" for i in range(n)],
        "greedy_tokens": [[1] * t for t in lengths],
        "asmi_entropy": tokens(0.6 * difficulty, 0.5),
        "asmi_log_likelihood": [-own for own in tokens(0.5 * difficulty, 1.0)],
        "asmi_tokens": [rng.integers(0, 10, t) for t in lengths],
        "asmi_token_texts": [{i: f"word{i}" for i in range(10)}] * n,
        "asmi_closing": [True] * n,
        "asmi_prompt_length": rng.integers(80, 400, n).tolist(),
        "asmi_seconds": seconds(2.0),
        "seconds_greedy": seconds(0.8),
        "seconds_samples": seconds(5.0),
        "seconds_nli": seconds(1.5),
        "seconds_cross_encoder": seconds(0.5),
        "asmi_diversity_seconds": seconds(0.1),
    }
    saved: dict[str, Any] = {"estimations": estimations, "methods": {}}
    for depth in depths:
        level = 0.5 * difficulty + 0.7 * fragility + (depth - 60) / 40 * rng.normal(size=n)
        mi = [0.05 * own for own in tokens(level, 0.8)]
        agreement = [np.clip(0.6 - m + 0.2 * rng.normal(size=len(m)), 0, 1) for m in mi]
        config = ASMIConfig(depth=depth / 100)
        put_scores(saved, config, mi, agreement)
        if rivalled and depth == depths[0]:
            sem = [(m * (1 - a)).mean() for m, a in zip(mi, agreement, strict=True)]
            nearly = np.array(sem) * np.exp(0.02 * rng.normal(size=n))
            estimations["sequence", "RAUQ"] = nearly.tolist()
        entropy = tokens(0.6 * difficulty, 0.5)
        share = [rng.random((t, len(TOP_K))) for t in lengths]
        coverage = [
            np.sort(1 - np.minimum(m, 1)[:, None] * part, axis=1)
            for m, part in zip(mi, share, strict=True)
        ]
        used = {"num_masks": 40, "mask_rate": 0.15}, 20, 36, 32
        put_tokens(stats, config, mi, agreement, entropy, coverage, rng, *used)
    metrics = {
        ("sequence", "AlignScore"): quality.tolist(), ("sequence", "Rouge_rougeL"): other.tolist(),
    }  # fmt: skip
    return saved | FINISHED | {"gen_metrics": metrics, "stats": stats}


def benchmark(folder: Path, n: int = 1000, models: tuple[str, ...] = MODELS) -> list[Path]:
    """Folders of the runs, a setting each."""
    folders = []
    for i, model in enumerate(models):
        for j, dataset in enumerate(DATASETS):
            weight = 0.0 if dataset == "triviaqa" else -0.6 if (i, j) == (3, 1) else 0.6
            about = manifest(n, f"asmi_{dataset}")
            about["model"] = {"name": f"asmi_{model}", "path": f"hub/{model}", "revision": "abc"}
            about["rows"]["clusters"] = [f"p{row // 5}" for row in range(n)]
            saved = group(10 * i + j, weight, n, rivalled=(i, j) == (1, 0))
            if (i, j) == (2, 2):
                for depth in (0.6, 0.8):
                    weaker = [own["mi"] / 100 for own in at_depth(saved["stats"], depth)]
                    put_at(saved["stats"], depth, mi=weaker)
            folders.append(folder / f"{model}_{dataset}")
            save(folders[-1], saved, about)
    return folders


if __name__ == "__main__":
    root, *sizes = Path(sys.argv[1]), *map(int, sys.argv[2:])
    number, answers, jobs = (*sizes, *(16, 1000, 1)[len(sizes) :])
    paths = benchmark(root / "runs", answers)[:number]
    start = time.perf_counter()
    file, said = build_report(
        load_run_groups(paths), root / "report", jobs=jobs, full=True, formats=("csv", "tex")
    )
    print("\n".join(said))
    print(f"{file}: {len(paths)} settings, {time.perf_counter() - start:.0f} seconds")
