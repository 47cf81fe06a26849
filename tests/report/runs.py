"""Saved runs with planted properties, as LM-Polygraph and the plugin would have left them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_polygraph_asmi.analysis.coverage import TOP_K
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.statistics import Settings
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.heads.analysis import heads
from lm_polygraph_asmi.results.manifest import write_manifest
from lm_polygraph_asmi.results.paper import BENCHMARKS, GENERATION, MODELS
from lm_polygraph_asmi.results.run_groups import RunGroup, load_run_groups

METHODS = "methods"  # beside what a manager file holds: what its manifest says of the scores
BASELINES = ("MaximumSequenceProbability", "MeanTokenEntropy", "SemanticEntropy", "RAUQ")


def content(
    n: int = 60, top_k: int = 64, mask_seed: int = 0, depths: tuple[int, ...] = (60,),
    shift: float = 0.0, seed: int = 7,
) -> dict[str, Any]:  # fmt: skip
    """What a manager file holds: answers fixed by n, shift and seed, ASMI's scores by the rest too.

    The gate of the adaptive one is a half.
    """
    rng, masks = np.random.default_rng(seed), np.random.default_rng([mask_seed, top_k])
    wrong = rng.random(n) < 0.4
    quality = np.where(wrong, 0.3, 0.9) + rng.uniform(-0.1, 0.1, n) - shift / 10
    lengths = rng.integers(2, 6, n)
    scores = {name: (wrong + shift + rng.normal(size=n)).tolist() for name in BASELINES}
    stats = {
        "input_texts": [
            f"Read.\nPassage:\npassage {i // 2} {shift}\nQuestion: q{i}?\nAnswer:" for i in range(n)
        ],
        "greedy_texts": [f"answer {i} {shift}\n" for i in range(n)],
        "target_texts": [f"gold {i}" for i in range(n)],
        "greedy_tokens": [[1] * t for t in lengths],
        "asmi_entropy": [rng.random(t) for t in lengths],
        "asmi_log_likelihood": [-rng.random(t) for t in lengths],
        "asmi_tokens": [rng.integers(0, 10, t) for t in lengths],
        "asmi_token_texts": [{i: f"word{i}" for i in range(10)}] * n,
        "asmi_prompt_length": [100] * n,
        "asmi_closing": [True] * n,
        "asmi_seconds": [50.0] * 10 + [2.0] * (n - 10),
        "seconds_greedy": [50.0] * 10 + [1.0] * (n - 10),
    }
    saved = {
        "estimations": {("sequence", name): values for name, values in scores.items()},
        METHODS: {}, "metrics": {}, "state": "Initialized", "stats": stats,
        "gen_metrics": {("sequence", "AlignScore"): quality.tolist()},
    }  # fmt: skip
    for depth in depths:
        mi = [
            0.1 + 0.2 * w + 0.05 * rng.random(t) + 0.02 * masks.random(t)
            for w, t in zip(wrong, lengths, strict=True)
        ]
        agreement = [np.clip(1 - 2 * m + 0.1 * rng.random(len(m)), 0, 1) for m in mi]
        entropy = [rng.random(t) for t in lengths]
        config = ASMIConfig(depth=depth / 100, top_k=top_k, seed=mask_seed)
        pairs = list(zip(mi, agreement, strict=True))
        put(saved, config.replace(method="asmi"), [m.mean() for m in mi])
        put(saved, config.replace(method="sem"), [(m * (1 - a)).mean() for m, a in pairs])
        put(saved, config.replace(method="adapt"), [(m * (1 - a / 2)).mean() for m, a in pairs])
        used = config.replace(num_masks=40, mask_rate=0.15, attention="sdpa")
        put_at(
            stats, config.depth, mi=mi, agreement=agreement, mean_entropy=entropy,
            entropy_of_mean=[h + m for h, m in zip(entropy, mi, strict=True)],
            coverage=[np.sort(rng.random((t, len(TOP_K))), axis=1) for t in lengths],
            top_token=[rng.integers(0, 10, (6, t)) for t in lengths],
            settings=[Settings(used, 3, 6, 8).to_dict() for _ in mi],
        )  # fmt: skip
    return saved


def put_at(stats: dict[str, Any], depth: float, **columns: list[Any]) -> None:
    """Add or replace fields of `asmi` at a depth, each a list with one entry per row."""
    values = list(zip(*columns.values(), strict=True))
    rows = stats.setdefault("asmi", [{} for _ in values])
    for row, of_row in zip(rows, values, strict=True):
        row.setdefault(depth, {}).update(zip(columns, of_row, strict=True))


def put(saved: dict[str, Any], config: ASMIConfig, values: Any) -> None:
    """Add a score to a run."""
    saved["estimations"]["sequence", str(config)] = values
    saved[METHODS] = saved[METHODS] | {str(config): config.to_dict() | {"symbol": config.symbol}}


def exchanged(saved: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The same run whose scores of ASMI have other settings, which it also says of its masks."""
    kept = {key: of for key, of in saved["estimations"].items() if key[1] in BASELINES}
    found = {**deepcopy(saved), "estimations": kept, METHODS: {}}
    for name, of in saved[METHODS].items():
        config = ASMIConfig.from_dict(of).replace(**changed)
        put(found, config, saved["estimations"]["sequence", name])
    for own in (at for row in found["stats"]["asmi"] for at in row.values()):
        own["settings"] |= {name: changed[name] for name in own["settings"].keys() & changed}
    return found


def some_rows(saved: dict[str, Any], rows: Iterable[int]) -> dict[str, Any]:
    """The run over some of its rows, in their order."""
    parts = {
        part: {name: [values[i] for i in rows] for name, values in saved[part].items()}
        for part in ("estimations", "gen_metrics", "stats")
    }
    return {**saved, **parts}


def manifest(n: int, dataset: str = "asmi_squad", closed: bool = False) -> dict[str, Any]:
    """Of n rows, two a passage; the passage's key is there also where the prompt has none."""
    grounded = not closed and any(name in dataset for name in ("coqa", "squad", "babi"))
    return {
        "model": {"name": "asmi_tiny_model", "path": "models/tiny", "revision": "abc"},
        "dataset": {
            "name": dataset, "source": "squad.json", "closed_book": closed, "grounded": grounded,
        },
        "seeds": {"run": 1, "masks": 0, "samples": 0},
        "rows": {
            "ids": [f"q{i}" for i in range(n)],
            "clusters": [f"passage {i // 2}" for i in range(n)],
        },
        "packages": {"torch": "2"}, "device": "cpu", "peak_memory_bytes": {"main": 2**30},
        "config": {},
    }  # fmt: skip


def papers_manifest(n: int = 1000, dataset: str = "BabiQA") -> dict[str, Any]:
    """What a run of the paper's protocol records, with the model Qwen3-4B."""
    about, recorded = manifest(n, f"asmi_{dataset.lower()}"), BENCHMARKS[dataset]
    about["model"]["path"] = f"hub/{MODELS['Qwen3-4B']}"
    about["dataset"] |= recorded.recorded
    about["config"] = {
        "generation_params": dict(GENERATION), "max_new_tokens": recorded.max_new_tokens,
        "instruct": False, "n_shot": 0, "asmi": {"num_samples": 10},
    }  # fmt: skip
    return about


def dissect(saved: dict[str, Any], masks: int = 100) -> None:
    """Let a run have kept its masks and divergences; in tokens of high MI one head has them all."""
    rng = np.random.default_rng(3)
    used = {"num_masks": masks, "num_heads": 8, "mask_rate": 0.15}
    for depth in saved["stats"]["asmi"][0]:
        for row, own in enumerate(at_depth(saved["stats"], depth)):
            mask = rng.random((masks, 8)) >= 0.15
            # In standard deviations of what knows nothing of heads.
            level = (10 if depth == 0.6 else 20) * own["mi"]
            kl = rng.exponential(size=(masks, len(own["mi"]))) + level * ~mask[:, :1]
            own |= {"masks": mask, "kl": (kl / kl.mean(0) * own["mi"]).astype(np.float32)}
            own |= {"mask_seed": 1000 + row, "settings": own["settings"] | used}


SHUFFLES = 50  # permutations that `few_permutations` leaves


@contextmanager
def few_permutations() -> Iterator[None]:
    """The null of the head tables, the smallest that can have a p-value below .05 twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "SHUFFLES", SHUFFLES)
        yield


def probe(n: int = 60) -> dict[str, Any]:
    """What the causal probe writes: on high tokens the critical head decides, on low ones none."""
    rng, k = np.random.default_rng(4), [1, 2, 4, 8]
    decided = np.r_[rng.random(n) < 0.4, np.zeros(n, dtype=bool)]
    critical = np.repeat(decided[:, None], len(k), axis=1).astype(int)
    hit = rng.random((2 * n, len(k), 4)) < np.array(k)[None, :, None] / 8
    random = (decided[:, None, None] & hit).astype(int)
    random[n:] = rng.random((n, len(k), 4)) < 0.02
    return {
        "run": "run", "model": "tiny",
        "settings": {"layer": 3, "scope": "all", "num_masks": 100, "mask_rate": 0.15},
        "k": k, "draws": 4, "seed": 0,
        "tokens": {
            "row": [i % n for i in range(2 * n)], "position": [i // n for i in range(2 * n)],
            "token": [0] * (2 * n - 1) + [5], "mi": [0.5] * n + [0.001] * n,
            "entropy": [1.0] * 2 * n, "log_likelihood": [-0.05] * 2 * n,
            # On the first token rounding tells the unmasked pass from those that ablate.
            "argmax": [7] + [0] * (2 * n - 1), "probability": [0.95] * 2 * n,
            "replayed": [0] * 2 * n, "positive": [4] * 2 * n,
            "own_flips": (0.1 * decided).tolist(),
        },
        "criticality": [[0.1] * 7 + [None]] * 2 * n,
        "groups": {"high": list(range(n)), "low": list(range(n, 2 * n))},
        "predicted": {"critical": critical.tolist(), "random": random.tolist()},
    }  # fmt: skip


def save(
    folder: Path, saved: dict[str, Any] | None = None, about: dict[str, Any] | None = None
) -> Path:
    """A run folder; `about` {} leaves no manifest."""
    folder.mkdir(parents=True)
    saved = content() if saved is None else saved
    torch.save(saved, file := folder / "ue_manager_seed1")
    about = manifest(len(saved["stats"].get("input_texts", ()))) if about is None else about
    if about:
        write_manifest({"methods": saved.get(METHODS, {}), **about}, file)
    return file


def loaded(folder: Path, *run: Any, **also: Any) -> list[RunGroup]:
    """The setting of a run that is saved below the folder, as by `save`."""
    return load_run_groups([save(folder / "run", *run, **also)])
