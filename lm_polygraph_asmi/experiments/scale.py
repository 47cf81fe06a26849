"""Perturbation scales at which control conditions match masked heads, in size or in effect.

Matched on answers held out from the evaluation, without labels: one number per condition, model
and dataset. Not one per answer: the effect of masks on an answer is almost its score.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi import maths
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.experiments.answers import Answer, answers_of, settings_of
from lm_polygraph_asmi.experiments.matching import matching_scale, relative_change
from lm_polygraph_asmi.experiments.perturbations import NAMES, load_perturbation
from lm_polygraph_asmi.experiments.scales import FORMAT, other_than
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.model import (
    Perturbation,
    UnmaskedPass,
    check_perturbation,
    perturbed_layer,
    readout,
    run_subnetworks,
    run_unmasked,
    scoring_session,
)
from lm_polygraph_asmi.model.memory import default_budget, in_chunks
from lm_polygraph_asmi.results.runs import load_run

SAME_SCALE = 1e-5
"""Relative difference of scales below which an effect is not computed again."""


@dataclass(frozen=True)
class _Example:
    unmasked: UnmaskedPass
    masks: Tensor
    log_probs: Tensor


class ScaleSearch:
    """Effects of conditions on some answers, with the masks that a run would draw for them.

    Args:
        model: the run's.
        answers: held out from the evaluation.
        used: saved settings of heads (`asmi_settings`).
        memory_budget: bytes, see `ASMIConfig`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        answers: Sequence[Answer],
        used: Mapping[str, Any],
        memory_budget: int | None = None,
    ) -> None:
        self.model, self.used, self.memory_budget = model, used, memory_budget
        self.examples = []
        # The longest first: a check of a sequence (`model.check`) also covers shorter ones.
        longest = sorted(answers, key=lambda answer: len(answer.input_ids), reverse=True)
        with self._session():
            for answer in longest:
                unmasked = run_unmasked(
                    model, answer.input_ids, answer.prompt_length, [used["layer"]], used["scope"]
                )
                answer.check_model(model, unmasked)
                _, masks = maths.example_masks(
                    used["num_masks"], used["num_heads"], used["mask_rate"], used["mask_sampler"],
                    used["seed"], used["layer"], answer.input_ids.tolist(),
                )  # fmt: skip
                log_probs = readout(model, unmasked.final_hidden)
                self.examples.append(_Example(unmasked, masks, log_probs))

    def _session(self) -> Any:
        return scoring_session(self.model, self.used["attention"])

    def effect(self, condition: str, perturbation_scale: float | None = None) -> float:
        """Mean over tokens and masks of KL(p_0 || p_s), nats."""
        change = load_perturbation(condition, perturbation_scale, self.used["seed"])
        with self._session():
            parts = [self._divergences(example, change) for example in self.examples]
        return float(torch.cat(parts).mean())

    def _divergences(self, example: _Example, change: Perturbation) -> Tensor:
        """(T,) means over masks."""
        log_probs = example.log_probs
        subnetworks = run_subnetworks(
            self.model, example.unmasked, self.used["layer"], example.masks, self.memory_budget,
            change,
        )  # fmt: skip
        hidden = subnetworks.hidden
        budget = self.memory_budget or default_budget(log_probs.device)
        parts = in_chunks(
            lambda part: maths.divergence(log_probs, readout(self.model, hidden[part])),
            len(hidden),
            int(budget) // (40 * log_probs.numel()),
        )
        share = maths.mask_weights(subnetworks.counts, len(hidden)).to(log_probs.device)
        return share @ torch.cat(parts)

    def size(self, condition: str) -> float | None:
        """Median over tokens of the unscaled change of the layer's output, relative to that output;
        a scale multiplies it. None if layers are not a plain chain, so that no layer runs alone."""
        layer, sizes = self.used["layer"], []
        change = load_perturbation(condition, None, self.used["seed"])
        with self._session():
            for example in self.examples:
                unmasked, masks = example.unmasked, example.masks
                if not unmasked.targets:
                    return None
                at = unmasked.predicting
                (unperturbed,) = perturbed_layer(
                    self.model, unmasked, layer, torch.ones_like(masks[:1]), at
                )
                changed = perturbed_layer(self.model, unmasked, layer, masks, at, change)
                sizes.append(relative_change(unperturbed, changed))
        return float(np.median(torch.cat(sizes).cpu().numpy()))

    def matched(self, conditions: Iterable[str] = NAMES) -> dict[str, dict[str, Any]]:
        """By condition: scales by "norm" and "effect", size and effect unscaled, effects at these
        scales."""
        size, effect = self.size("heads"), self.effect("heads")
        heads = {"norm": 1.0, "effect": 1.0, "relative_change": size, "kl": effect}
        others = [condition for condition in conditions if condition != "heads"]
        return {"heads": heads, **{name: self._matched(name, size, effect) for name in others}}

    def _matched(self, condition: str, size: float | None, effect: float) -> dict[str, Any]:
        try:
            kept = bool(self.examples[0].unmasked.targets)
            check_perturbation(self.model, self.used["layer"], load_perturbation(condition), kept)
        except TypeError as error:
            return {"unsupported": str(error)}
        unscaled = self.size(condition)
        by_norm = size / unscaled if size and unscaled else None
        effects: dict[float, float] = {}

        def effect_at(scale: float) -> float:
            for tried, kl in effects.items():
                if math.isclose(tried, scale, rel_tol=SAME_SCALE):
                    return kl
            effects[scale] = self.effect(condition, scale)
            return effects[scale]

        kl = effect_at(1.0)
        by_effect = matching_scale(effect_at, effect, by_norm or 1.0)
        return {
            "norm": by_norm,
            "effect": by_effect,
            "relative_change": unscaled,
            "kl": kl,
            "kl_at_norm": None if by_norm is None else effect_at(by_norm),
            "kl_at_effect": None if by_effect is None else effect_at(by_effect),
        }


def scales_for(
    run: str | Path,
    held_out: str | Path,
    model: str,
    depth: float = ASMIConfig.depth,
    rows: int = 20,
    memory_budget: int | None = None,
    **loading: Any,
) -> dict[str, Any]:
    """Content of a file of scales (`experiments.scales`), for a finished run.

    Args:
        run: the run to be evaluated; its settings of ASMI are used.
        held_out: a run of the same model over other rows.
        depth: relative depth of the masked layer.
        rows: number of answers to use, evenly spaced.
        memory_budget: bytes, see `ASMIConfig`.
        model, **loading: as for `host.loading.load_named`.
    """
    evaluated, held_out_run = load_run(run), load_run(held_out)
    used = settings_of(evaluated, depth)
    if ASMIConfig.from_dict(used).is_control:
        raise ValueError(f"{run} is a run of a control condition: name the run of heads")
    origin = {name: evaluated.recorded(name) for name in ("model", "dataset")}
    mismatch = other_than(origin, held_out_run.recorded("model"), held_out_run.recorded("dataset"))
    if mismatch is not None:
        raise ValueError(
            f"{run} has {mismatch} in {held_out}: scales are matched on other rows of the same "
            "model and dataset"
        )
    if shared := set(evaluated.stats["input_texts"]) & set(held_out_run.stats["input_texts"]):
        raise ValueError(
            f"{len(shared)} prompts of {held_out} are also in {run}: scales are matched on rows "
            "that are not evaluated. Use other rows (data.shard)"
        )
    loaded, tokenizer = load_named(model, **loading)
    answers = answers_of(held_out_run, tokenizer)
    number = min(rows, len(answers))
    chosen = [answers[i * len(answers) // number] for i in range(number)]
    if not chosen:
        raise ValueError(f"{held_out} has no answers, or rows is {rows}")
    search = ScaleSearch(loaded, chosen, used, memory_budget)
    return {
        "format": FORMAT,
        "model": evaluated.recorded("model") or {"path": model},
        "dataset": evaluated.recorded("dataset"),
        "evaluation": str(run),
        "held_out": str(held_out),
        "settings": used,
        "rows": len(chosen),
        "tokens": sum(len(answer.log_likelihood) for answer in chosen),
        "conditions": search.matched(),
    }
