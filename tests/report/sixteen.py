"""A benchmark of 16 settings of 1,000 answers with known truths: `python -m tests.report.sixteen
OUT`, which leaves the runs in OUT/runs and their report in OUT/report, and prints the seconds it
took. A second argument takes so many of the settings, a third so many answers of each, a fourth so
many processes.

Four models on four datasets. What masks alone know is strong on grounded settings, nothing on
recall (there the score reads difficulty, as MSP and H do, each with noise of its own: a little
beyond them), weakly reversed on one setting, and silent (no masking response) on another. On one a
baseline ranks nearly as ASMI's best does. Lengths, empty answers and ties are as in real runs.
"""

import sys
import time
from pathlib import Path

import numpy as np

from lm_polygraph_asmi.analysis.coverage import TOP_K
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.report import build_report, load_run_groups
from tests.report.runs import finished, manifest, put_at, put_tokens, save

MODELS = ("planted_a", "planted_b", "planted_c", "planted_d")
DATASETS = ("coqa", "squad", "babi", "triviaqa")
BASELINES = (
    "MaximumSequenceProbability", "Perplexity", "MeanTokenEntropy", "SelfCertainty",
    "MonteCarloSequenceEntropy", "MonteCarloNormalizedSequenceEntropy", "SemanticEntropy", "SAR",
    "SentenceSAR", "LUQ", "KernelLanguageEntropy", "PTrue", "RAUQ", "RAUQ (entropy)",
)  # fmt: skip
DEPTHS = (0.6, 0.8)


def group(seed: int, weight: float, n: int = 1000, rivalled: bool = False) -> dict:
    """A manager file's content: difficulty is read by all methods, fragility by ASMI alone.

    `weight`: of fragility in the errors. `rivalled`: whether RAUQ ranks nearly as Sem-ASMI does.
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
    scores = {
        method: np.exp(0.7 * difficulty + (0.7 + 0.12 * i) * rng.normal(size=n))
        for i, method in enumerate(BASELINES)
    }
    if seed % 5 == 1:  # ties, as of short answers
        first = scores[BASELINES[0]]
        first[first < np.quantile(first, 0.7)] = 0

    def tokens(level: np.ndarray, spread: float) -> list[np.ndarray]:
        """Positive values of every token, around a level of its answer."""
        return [
            np.exp(own + spread * rng.normal(size=t)) for own, t in zip(level, lengths, strict=True)
        ]

    stats = {
        "input_texts": [f"Read.\nPassage:\np{i // 5}\nQuestion: q{i}?\nAnswer:" for i in range(n)],
        "greedy_texts": ["\n" if e else f"answer {i}\n" for i, e in enumerate(empty)],
        "asmi_entropy": tokens(0.6 * difficulty, 0.5),
        "asmi_log_likelihood": [-own for own in tokens(0.5 * difficulty, 1.0)],
        "asmi_tokens": [rng.integers(0, 10, t) for t in lengths],
        "asmi_prompt_length": rng.integers(80, 400, n).tolist(),
    }
    for phase, typical in (
        ("asmi_seconds", 2.0), ("seconds_greedy", 0.8), ("seconds_samples", 5.0),
        ("seconds_nli", 1.5), ("seconds_cross_encoder", 0.5), ("asmi_diversity_seconds", 0.1),
    ):  # fmt: skip
        stats[phase] = (typical * (1 + rng.random(n))).tolist()
    of_metrics = {"AlignScore": quality.tolist(), "Rouge_rougeL": other.tolist()}
    saved = finished({name: s.tolist() for name, s in scores.items()}, of_metrics, stats)
    for depth in DEPTHS:
        level = 0.5 * difficulty + 0.7 * fragility + (100 * depth - 60) / 40 * rng.normal(size=n)
        mi = [0.05 * own for own in tokens(level, 0.8)]
        agreement = [np.clip(0.6 - m + 0.2 * rng.normal(size=len(m)), 0, 1) for m in mi]
        if rivalled and depth == DEPTHS[0]:
            sem = np.array([(m * (1 - a)).mean() for m, a in zip(mi, agreement, strict=True)])
            rival = (sem * np.exp(0.02 * rng.normal(size=n))).tolist()
            saved["estimations"]["sequence", "RAUQ"] = rival
        entropy = tokens(0.6 * difficulty, 0.5)
        shares = [np.minimum(m, 1)[:, None] * rng.random((len(m), len(TOP_K))) for m in mi]
        put_tokens(
            saved, ASMIConfig(depth=depth), mi, agreement, rng, entropy=entropy,
            coverage=[np.sort(1 - share, axis=1) for share in shares],
            used={"num_masks": 40, "mask_rate": 0.15}, place=(20, 36, 32),
        )  # fmt: skip
    return saved


def benchmark(folder: Path, n: int = 1000) -> list[Path]:
    """Folders of the runs, a setting each."""
    folders = []
    for i, model in enumerate(MODELS):
        for j, dataset in enumerate(DATASETS):
            weight = 0.0 if dataset == "triviaqa" else -0.6 if (i, j) == (3, 1) else 0.6
            about = manifest(n, f"asmi_{dataset}")
            about["model"] = {"name": f"asmi_{model}", "path": f"hub/{model}", "revision": "abc"}
            about["rows"]["clusters"] = [f"p{row // 5}" for row in range(n)]
            saved = group(10 * i + j, weight, n, rivalled=(i, j) == (1, 0))
            for depth in DEPTHS if (i, j) == (2, 2) else ():
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
