"""Saved runs with planted properties, as LM-Polygraph and the plugin would have left them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm_polygraph_asmi.saved.manifest import write_manifest
from lm_polygraph_asmi.saved.names import COVERAGE_AT

BASELINES = ("MaximumSequenceProbability", "MeanTokenEntropy", "SemanticEntropy", "RAUQ")
MASKS = 6


def content(
    n: int = 60,
    top_k: int = 64,
    mask_seed: int = 0,
    depths: tuple[int, ...] = (60,),
    metric: str = "AlignScore",
    shift: float = 0.0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """What a manager file holds: answers fixed by n and shift, ASMI's scores by the rest too."""
    rng = np.random.default_rng(7)
    wrong = rng.random(n) < 0.4
    quality = np.where(wrong, 0.3, 0.9) + rng.uniform(-0.1, 0.1, n)
    lengths = rng.integers(2, 6, n)
    estimations = {
        ("sequence", name): (wrong + shift + rng.normal(size=n)).tolist() for name in BASELINES
    }
    masks = np.random.default_rng([mask_seed, top_k])
    own = {"asmi_token_texts": [{i: f"word{i}" for i in range(10)}] * n}
    own["asmi_entropy"] = [rng.random(t) for t in lengths]
    own["asmi_log_likelihood"] = [-rng.random(t) for t in lengths]
    own["asmi_tokens"] = [rng.integers(0, 10, t) for t in lengths]
    own["asmi_closing"] = [True] * n
    own["asmi_prompt_length"] = [100] * n
    own["asmi_seconds"] = [50.0] * 10 + [2.0] * (n - 10)
    own["seconds_greedy"] = [50.0] * 10 + [1.0] * (n - 10)
    seeded = f", seed={mask_seed}" if mask_seed else ""
    for depth in depths:
        mi = [
            scale * (0.1 + 0.2 * w + 0.05 * rng.random(t) + 0.02 * masks.random(t))
            for w, t in zip(wrong, lengths, strict=True)
        ]
        agreement = [np.clip(1 - 2 * m + 0.1 * rng.random(len(m)), 0, 1) for m in mi]
        scores = {
            "ASMI": [m.mean() for m in mi],
            "Sem-ASMI": [(m * (1 - a)).mean() for m, a in zip(mi, agreement, strict=True)],
            "Adapt-ASMI": [(m * (1 - a / 2)).mean() for m, a in zip(mi, agreement, strict=True)],
        }
        for symbol, values in scores.items():
            estimations["sequence", f"{symbol} ({depth}%, K={top_k}{seeded})"] = values
        mean_entropy = [rng.random(t) for t in lengths]
        own |= {
            f"asmi_mi_d{depth}": mi,
            f"asmi_agreement_d{depth}": agreement,
            f"asmi_mean_entropy_d{depth}": mean_entropy,
            f"asmi_entropy_of_mean_d{depth}": [
                h + m for h, m in zip(mean_entropy, mi, strict=True)
            ],
            f"asmi_coverage_d{depth}": [
                np.sort(rng.random((t, len(COVERAGE_AT))), axis=1) for t in lengths
            ],
            f"asmi_top_token_d{depth}": [rng.integers(0, 10, (MASKS, t)) for t in lengths],
            f"asmi_settings_d{depth}": [
                {
                    "depth": depth / 100, "layer": 3, "num_layers": 6, "num_heads": 8,
                    "num_masks": MASKS, "mask_rate": 0.1, "top_k": top_k, "scope": "all",
                    "mask_sampler": "bernoulli", "seed": mask_seed, "attention": "sdpa",
                }
            ] * n,
        }  # fmt: skip
    texts = {
        "input_texts": [
            f"Read.\nPassage:\npassage {i // 2} {shift}\nQuestion: q{i}?\nAnswer:" for i in range(n)
        ],
        "greedy_texts": [f"answer {i} {shift}\n" for i in range(n)],
        "target_texts": [f"gold {i}" for i in range(n)],
        "greedy_tokens": [[1] * t for t in lengths],
    }
    return {
        "estimations": estimations,
        "gen_metrics": {("sequence", metric): (quality - shift / 10).tolist()},
        "stats": {**texts, **own},
        "metrics": {},
        "state": "Initialized",
    }


def manifest(n: int, dataset: str = "asmi_squad", closed: bool = False) -> dict[str, Any]:
    return {
        "model": {"name": "asmi_tiny_model", "path": "models/tiny", "revision": "abc"},
        "dataset": {"name": dataset, "source": "squad.json", "closed_book": closed},
        "seeds": {"run": 1, "masks": 0, "samples": 0},
        "rows": {
            "ids": [f"q{i}" for i in range(n)],
            # As in a run: the passage's key, which a closed-book prompt does not show.
            "clusters": [f"passage {i // 2}" for i in range(n)],
        },
        "packages": {"torch": "2"},
        "device": "cpu",
        "peak_memory_bytes": {"main": 2**30},
        "config": {},
    }


def save(
    folder: Path, saved: dict[str, Any] | None = None, about: dict[str, Any] | None = None
) -> Path:
    """A run folder; `about` {} leaves no manifest."""
    folder.mkdir(parents=True)
    saved = content() if saved is None else saved
    file = folder / "ue_manager_seed1"
    torch.save(saved, file)
    n = len(saved["stats"].get("input_texts", ()))
    about = manifest(n) if about is None else about
    if about:
        write_manifest(about, file)
    return file
