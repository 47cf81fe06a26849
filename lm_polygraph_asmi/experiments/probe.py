"""The causal probe: do predictions depend on their critical heads?

Ablates the critical heads of tokens of a finished run, keeps all others, and compares the most
likely token with and without the ablation. High-MI tokens flip under random masks by construction,
so random heads are ablated too.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.experiments.analysis.heads import head_criticality
from lm_polygraph_asmi.experiments.analysis.probe import (
    COUNT,
    NUMBERS,
    ablations,
    critical_first,
    extremes,
)
from lm_polygraph_asmi.experiments.answers import Answer, answers_of, settings_of
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.maths import example_seed
from lm_polygraph_asmi.model import (
    UnmaskedPass,
    num_heads,
    readout,
    run_subnetworks,
    run_unmasked,
    scoring_session,
)
from lm_polygraph_asmi.model.memory import default_budget, in_chunks
from lm_polygraph_asmi.results.cache import ResultCache, model_key
from lm_polygraph_asmi.results.runs import Run, load_run
from lm_polygraph_asmi.validation import check_at_least_one, check_whole

DRAWS = 10
"""Draws of random heads, per token and number of heads."""
SIDES = ("high", "low")
"""By MI_t."""
STATES = 2**28
"""Bytes of final states in memory at once."""


@dataclass(frozen=True)
class Tokens:
    """All tokens of a run, with statistics from its masks; n tokens.

    Attributes:
        row, position: index of the example in the run, and of the token in its answer.
        columns: (n,) each, see `experiments.probe_file.Probe`.
        criticality: (n, H).
    """

    row: np.ndarray
    position: np.ndarray
    columns: dict[str, np.ndarray]
    criticality: np.ndarray

    @classmethod
    def of(cls, run: Run, depth: float) -> "Tokens":
        """Load them from a run that saved masks and their divergences, or ValueError."""
        names = ("asmi_entropy", "asmi_log_likelihood", "asmi_tokens")
        saved = run.at(depth, "masks", "kl")
        missing = run.lacks(names) + ([] if saved else [f"masks at depth {depth:g}"])
        if not saved or missing:
            raise ValueError(
                f"{run.path} lacks {', '.join(missing)}: the probe needs a run of the config "
                "asmi_heads (asmi.details=true)"
            )
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        unmasked = zip(*(run.stats[name] for name in names), strict=True)
        for row, (masked, own) in enumerate(zip(saved, unmasked, strict=True)):
            entropy, likelihood, tokens = map(np.asarray, own)
            masks, kl, mi, top = (
                np.asarray(masked[name]) for name in ("masks", "kl", "mi", "top_token")
            )
            for name, column in {
                "row": np.full(len(mi), row), "position": np.arange(len(mi)), "token": tokens,
                "mi": mi, "entropy": entropy, "log_likelihood": likelihood, "top": top.T,
            }.items():  # fmt: skip
                parts[name].append(column)
            parts["criticality"].append(head_criticality(kl, masks))
        joined = {name: np.concatenate(columns) for name, columns in parts.items()}
        columns = ("token", "mi", "entropy", "log_likelihood", "top")
        return cls(
            joined["row"], joined["position"], {name: joined[name] for name in columns},
            joined["criticality"],
        )  # fmt: skip

    def groups(self, count: int = COUNT) -> dict[str, np.ndarray]:
        """Tokens to probe, by name of the group; see `experiments.probe_file`."""
        return dict(zip(SIDES, extremes(self.columns["mi"], count), strict=True))


RULES = ("critical", "random")
"""How the ablated heads are chosen."""


class Ablation(NamedTuple):
    """Masks for one token, by its place among the tokens of an example: (K, H) or (draws, K, H)."""

    token: int
    rule: str
    masks: np.ndarray


class CausalProbe:
    """Ablates heads for tokens of a run and records the model's most likely tokens.

    Args:
        model: the run's.
        used: settings of ASMI in the run; the ablation changes what its masks changed.
        tokens: of the run.
        count, numbers, draws: tokens per group; heads ablated together; draws of random heads.
        seed: of random heads.
        memory_budget: bytes, see `ASMIConfig`.
        result_cache: folder that stores finished examples.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        used: Mapping[str, Any],
        tokens: Tokens,
        count: int = COUNT,
        numbers: Iterable[int] = NUMBERS,
        draws: int = DRAWS,
        seed: int = 0,
        memory_budget: int | None = None,
        result_cache: str | Path | None = None,
    ) -> None:
        for name, number in (("tokens", count), ("draws", draws)):
            check_whole(name, number)
            check_at_least_one(name, number)
        self.model, self.used, self.tokens = model, used, tokens
        self.numbers = [k for k in numbers if k <= used["num_heads"]]
        self.draws, self.seed, self.memory_budget = draws, seed, memory_budget
        self.groups = tokens.groups(count)
        self.result_cache = ResultCache(result_cache)
        self.chosen = np.unique(np.concatenate(list(self.groups.values())))
        if not len(self.chosen):
            raise ValueError("the run has no two tokens with different MI_t")

    @property
    def rows(self) -> np.ndarray:
        """Examples with a chosen token."""
        return np.unique(self.tokens.row[self.chosen])

    def run(
        self, answers: Mapping[int, Answer], after_example: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Content of a probe's file (`experiments.probe_file`); answers by row.

        `after_example` is called after each. ValueError if it is not the run's model.
        """
        parts = []
        for row in self.rows.tolist():
            parts.append(self._example(answers[row]))
            after_example()
        predicted = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns = self.tokens.columns
        top = columns["top"][self.chosen]
        place = {token: i for i, token in enumerate(self.chosen.tolist())}
        criticality = self.tokens.criticality[self.chosen]
        table = {
            "row": self.tokens.row[self.chosen],
            "position": self.tokens.position[self.chosen],
            **{name: columns[name][self.chosen] for name in columns if name != "top"},
            **{name: predicted.pop(name) for name in ("argmax", "probability", "replayed")},
            "positive": (criticality > 0).sum(1),
        }
        table["own_flips"] = (top != table["argmax"][:, None]).mean(1)
        return {
            "settings": dict(self.used),
            "k": self.numbers,
            "draws": self.draws,
            "seed": self.seed,
            "tokens": {name: column.tolist() for name, column in table.items()},
            "criticality": [
                [None if np.isnan(b) else b for b in heads] for heads in criticality.tolist()
            ],
            "groups": {
                name: [place[token] for token in tokens.tolist()]
                for name, tokens in self.groups.items()
            },
            "predicted": {rule: ids.tolist() for rule, ids in predicted.items()},
        }

    def _masks(self, place: int, answer: Answer) -> dict[str, np.ndarray]:
        """By rule, the masks (..., H) of one chosen token."""
        token, layer = self.chosen[place], self.used["layer"]
        ids = [layer, *answer.input_ids.tolist(), int(self.tokens.position[token])]
        drawn = np.random.default_rng(example_seed(self.seed, ids))
        heads = np.arange(num_heads(self.model, layer))
        shuffled = drawn.permuted(np.tile(heads, (self.draws, 1)), axis=1)
        orders = {"critical": critical_first(self.tokens.criticality[token]), "random": shuffled}
        return {rule: ablations(order, self.numbers) for rule, order in orders.items()}

    def _example(self, answer: Answer) -> dict[str, np.ndarray]:
        """Columns of the chosen tokens of one example, in order."""
        places = np.flatnonzero(self.tokens.row[self.chosen] == answer.row)
        positions = self.tokens.position[self.chosen[places]]
        layer = self.used["layer"]
        ablated = [
            Ablation(i, rule, masks)
            for i, place in enumerate(places.tolist())
            for rule, masks in self._masks(place, answer).items()
        ]
        key = self._key(answer, positions, ablated)
        cached = self.result_cache.get(key) if key else None
        if cached is not None:
            return dict(cached)
        with scoring_session(self.model, self.used["attention"]):
            unmasked = run_unmasked(
                self.model, answer.input_ids, answer.prompt_length, [layer], self.used["scope"]
            )
            answer.check_model(self.model, unmasked)
            best = readout(self.model, unmasked.final_hidden[positions]).max(-1)
            columns = {
                "argmax": best.indices.cpu().numpy(),
                "probability": best.values.exp().double().cpu().numpy(),
            }
            # The same passes also run without ablation; flips are counted against these, so that
            # rounding causes none.
            all_kept = np.ones((len(places), num_heads(self.model, layer)))
            flat = [all_kept, *(a.masks.reshape(-1, a.masks.shape[-1]) for a in ablated)]
            times = [len(masks) for masks in flat]
            ablated_at = np.repeat([positions[a.token] for a in ablated], times[1:])
            at = np.concatenate([positions, ablated_at])
            ids = self._predict(unmasked, at, np.concatenate(flat))
            columns["replayed"], *parts = np.split(ids, np.cumsum(times)[:-1])
            for rule in RULES:
                columns[rule] = np.stack([
                    tokens.reshape(a.masks.shape[:-1]).T
                    for a, tokens in zip(ablated, parts, strict=True)
                    if a.rule == rule
                ])  # fmt: skip
        if key:
            self.result_cache.put(key, columns)
        return columns

    def _predict(
        self, unmasked: UnmaskedPass, positions: np.ndarray, masks: np.ndarray
    ) -> np.ndarray:
        """(M,) most likely tokens at M positions of the answer, each with its own mask."""
        states = unmasked.final_hidden
        at_once = max(1, STATES // (states.numel() * states.element_size()))

        def predict(at: range) -> Tensor:
            part = slice(at.start, at.stop)
            subnetworks = run_subnetworks(
                self.model, unmasked, self.used["layer"], torch.from_numpy(masks[part]).float(),
                self.memory_budget, shortcut=False,
            )  # fmt: skip
            rows = subnetworks.hidden[subnetworks.index, torch.from_numpy(positions[part])]
            vocabulary = self.model.config.get_text_config().vocab_size
            budget = self.memory_budget or default_budget(rows.device)
            chunk = int(budget) // (16 * vocabulary)
            ids = in_chunks(lambda some: readout(self.model, some).argmax(-1), rows, chunk)
            return torch.cat(ids).cpu()

        return torch.cat(in_chunks(predict, range(len(masks)), at_once)).numpy()

    def _key(
        self, answer: Answer, positions: np.ndarray, ablated: Sequence[Ablation]
    ) -> dict[str, Any]:
        """What an example's part of the probe depends on; empty without a result cache."""
        if not self.result_cache.kept:
            return {}
        probe = hashlib.sha256()
        for i, rule, masks in ablated:
            probe.update(f"{i} {rule} {masks.shape} ".encode() + masks.tobytes())
        return model_key(self.model) | {
            "probe": probe.hexdigest(),
            "input_ids": answer.input_ids.tolist(),
            "prompt_length": answer.prompt_length,
            "positions": positions.tolist(),
            "numbers": self.numbers,
            "settings": dict(self.used),
        }


def probe_of(
    run: str | Path,
    model: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    depth: float = ASMIConfig.depth,
    **settings: Any,
) -> tuple[CausalProbe, dict[int, Answer]]:
    """A probe of a finished run, and the answers it is to be run on.

    Args:
        run: run folder or manager file, of the config asmi_heads.
        model, gguf_file, dtype, device_map: as for `host.loading.load_named`.
        depth: relative depth of the masked layer.
        **settings: of `CausalProbe`.
    """
    finished = load_run(run)
    used, tokens = settings_of(finished, depth), Tokens.of(finished, depth)
    loaded, tokenizer = load_named(model, gguf_file, dtype, device_map)
    answers = {answer.row: answer for answer in answers_of(finished, tokenizer)}
    return CausalProbe(loaded, used, tokens, **settings), answers
