"""Masked passes and their statistics for one prompt and one response.

Combines `maths` and `model`, and stores results in a result cache. Independent of LM-Polygraph,
whose runner calls it through `stat_calculators.masked_heads`; `score` calls it directly.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.special import entr
from transformers import PreTrainedModel

from lm_polygraph_asmi import algorithm, maths
from lm_polygraph_asmi.config import ASMIConfig, check_fits
from lm_polygraph_asmi.host.releases import warn_of_untested
from lm_polygraph_asmi.model import (
    Subnetworks,
    UnmaskedPass,
    attention_of,
    check_unmasked,
    layer_at,
    name_modules,
    num_heads,
    num_layers,
    readout,
    response_embeddings,
    scoring_session,
    target_layer,
)
from lm_polygraph_asmi.model.memory import distributions_at_once, in_chunks
from lm_polygraph_asmi.results.cache import ResultCache, model_key
from lm_polygraph_asmi.results.names import CANDIDATES, Settings
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics, concatenated

NO_EVIDENCE = 1.0
"""div(x) of fewer than two non-empty responses: as of unrelated ones.

Then alpha < 0.001 and Adapt-ASMI equals ASMI: its discount needs evidence that answers paraphrase
each other.
"""


class Engine:
    """Scores responses under S head masks at one layer, or at one after the other.

    Per response: one unmasked pass, then the layers from the target layer on, under S masks.
    `details`: also masks, per-mask KL and log-likelihoods, and the top candidates. `result_cache`:
    folder that stores results and is searched before any pass. Other settings are those of
    `ASMIConfig`; ValueError: one out of range, TypeError: an unknown one.
    """

    def __init__(
        self,
        config: ASMIConfig | None = None,
        *,
        details: bool = False,
        result_cache: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.config = (config or ASMIConfig()).replace(**settings)
        self.details, self.result_cache = details, ResultCache(result_cache)

    @contextmanager
    def session(self, model: PreTrainedModel) -> Iterator[None]:
        """A scoring session with this engine's attention and modules."""
        with scoring_session(model, self.config.attention, self.config.compile):
            name_modules(model, self.config.structure)
            yield

    def settings(self, model: PreTrainedModel, depth: float | None = None) -> Settings:
        """Settings on this model, with derived values; by default at the config's depth."""
        config = self.config if depth is None else self.config.replace(depth=depth)
        name_modules(model, config.structure)
        layer = layer_at(model, config.depth)
        heads, requested = num_heads(model, layer), target_layer(config.depth, num_layers(model))
        operating_point = maths.operating_point(heads, config.num_masks, config.mask_rate)
        attention = config.attention or attention_of(model)
        return Settings(
            config.replace(attention=attention, **operating_point._asdict()),
            layer=layer,
            num_layers=num_layers(model),
            num_heads=heads,
            requested_layer=None if requested == layer else requested,
        )

    def score(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, " P"],
        *responses: Sequence[int],
        depths: Sequence[float] | None = None,
    ) -> list[AnswerStatistics]:
        """All statistics of a prompt and a response of T tokens at each depth, by default the
        config's, from one unmasked pass; stored ones are read.

        Of several `responses`, the one that the model would write is scored: where they differ
        first, it has the most probable token. Raises ValueError: an empty response, or text longer
        than the context window; FloatingPointError: logits that are no distribution, as `readout`.
        """
        warn_of_untested()
        check_fits(self.config.top_k, model.config.get_text_config().vocab_size)
        results, start = self.result_cache, time.perf_counter()
        with self.session(model):
            used = [self.settings(model, depth) for depth in depths or [self.config.depth]]
            answer_key = (model_key(model) if results.folder else {}) | {
                "input_ids": [*prompt.tolist(), *responses[0]],
                "prompt_length": len(prompt),
                "ends": list(map(list, responses)) if len(responses) > 1 else [],
                "compile": self.config.compile,
                "details": self.details,
            }
            keys = [answer_key | settings.to_dict() for settings in used]
            found: list[Any] = [results.get(key) for key in keys]
            missing = [at for at, stored in enumerate(found) if stored is None]
            if missing:
                layers = [used[at].layer for at in missing]
                h_cache = self._unmasked_pass(model, prompt, responses, layers)
                answer = self._unmasked_statistics(model, h_cache) | {
                    "prompt_length": len(prompt),
                    # The copy to NumPy has synchronized with the device.
                    "unmasked_seconds": time.perf_counter() - start,
                }
            for at in missing:
                found[at] = answer | algorithm.token_statistics(
                    model, h_cache, used[at], _details if self.details else None
                )
        for at in missing:  # the session's end tells whether the model was changed meanwhile
            results.put(keys[at], found[at])
        return [
            AnswerStatistics(settings=used[at], reused=at not in missing, **statistics)
            for at, statistics in enumerate(found)
        ]

    def read(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, " P"],
        *responses: Sequence[int],
    ) -> dict[str, np.ndarray]:
        """A response's tokens, their entropy and log-likelihood, (T,), nats; without masked passes.

        Also the model's most likely tokens, (T,), and "hidden", (T, D): states after the masked
        layer at the positions that predict the tokens. Arguments and errors are those of `score`.
        """
        with self.session(model):
            layer = self.settings(model).layer
            unmasked = self._unmasked_pass(model, prompt, responses, [layer])
            check_unmasked(model, unmasked)
            hidden = unmasked.after[layer].double().cpu().numpy()
            return self._unmasked_statistics(model, unmasked) | {"hidden": hidden}

    def _unmasked_pass(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, " P"],
        responses: Sequence[Sequence[int]],
        layers: list[int],
    ) -> UnmaskedPass:
        """Of the response that the model would write, among several.

        It is found as generation would: at the first place where the responses differ, those with
        the most probable token remain, and so on. The last token of a response does not run, so
        those that differ in it alone share a pass.
        """

        def run(response: Sequence[int]) -> UnmaskedPass:
            x_y = torch.cat([prompt.cpu(), torch.tensor(list(response), dtype=prompt.dtype)])
            return algorithm.unmasked_pass(model, x_y, len(prompt), layers, self.config.scope)

        left = sorted(responses, key=len)
        passed, found = left[0], run(left[0])
        while len(left) > 1:
            at = next(
                (n for n, ids in enumerate(zip(*left, strict=False)) if len({*ids}) > 1), None
            )
            if at is None:  # all begin with the shortest, at which generation ends
                left = left[:1]
                break
            if passed[:at] != left[0][:at]:
                passed, found = left[0], run(left[0])
            log_probs = readout(model, found.final_hidden[at])
            token = max({one[at] for one in left}, key=lambda token: log_probs[token].item())
            left = [one for one in left if one[at] == token]
        (response,) = left
        if response[:-1] != passed[:-1]:
            return run(response)
        x_y = found.input_ids.clone()
        x_y[-1] = response[-1]
        return replace(found, input_ids=x_y)

    def _unmasked_statistics(
        self, model: PreTrainedModel, unmasked: UnmaskedPass
    ) -> dict[str, np.ndarray]:
        """The answer's tokens, their entropy and log-likelihood, (T,), nats, and the most likely
        tokens.

        Raises ValueError: a token of probability 0, whose MSP is infinite.
        """
        hidden, tokens = unmasked.final_hidden, unmasked.input_ids[unmasked.prompt_length :]

        def of(at: range) -> dict[str, np.ndarray]:
            log_probs = readout(model, hidden[at.start : at.stop]).double()
            entropy, chosen = entr(log_probs.exp()).sum(-1), log_probs[range(len(at)), tokens[at]]
            likeliest = log_probs.argmax(-1)
            found = {"entropy": entropy, "log_likelihood": chosen, "likeliest": likeliest}
            return {name: values.cpu().numpy() for name, values in found.items()}

        at_once = distributions_at_once(model, hidden.device, self.config.memory_budget)
        found = concatenated(in_chunks(of, range(len(tokens)), at_once))
        found["tokens"] = tokens.numpy().astype(np.int64)
        for at in np.flatnonzero(np.isneginf(found["log_likelihood"]))[:1].tolist():
            raise ValueError(
                f"the answer's token {at + 1} of {len(tokens)} (id {int(tokens[at])}) has "
                "probability 0 under the model, whose logit for it is minus infinity: the model "
                "would never write this answer, and its MSP is infinite. Check the answer, or the "
                "tokenizer"
            )
        return found


def _details(
    log_probs: Float[Tensor, "distinct T V"],
    disagreement: maths.Disagreement,
    weight: Float[Tensor, "V D"],
    subnetworks: Subnetworks,
    tokens: Int[Tensor, " T"],
) -> dict[str, Tensor]:
    """Statistics by mask, and of the most likely candidates, for a run that asks for details."""
    share = maths.mask_weights(subnetworks.counts, len(log_probs)).to(log_probs.device)
    index = subnetworks.index.to(log_probs.device)
    mean = torch.einsum("s,stv->tv", share, log_probs.double().exp())
    candidates = mean.topk(min(CANDIDATES, mean.shape[-1]), dim=-1).indices
    return {
        "kl": disagreement.divergence_from_mean[index].float(),
        "masked_log_likelihood": log_probs[:, range(len(tokens)), tokens][index].float(),
        "candidates": candidates.int(),
        "candidate_cosines": maths.cosines(weight.to(log_probs.device)[candidates]),
    }


def diversity_of(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    *responses: Sequence[Sequence[int]],
    attention: str | None = None,
) -> list[float]:
    """div(x) of each of several lists of N responses to a prompt, up to the tokens that are
    embedded; higher = more diverse. `NO_EVIDENCE` if N < 2."""
    if len(responses[0]) < 2:
        return [NO_EVIDENCE] * len(responses)
    with scoring_session(model, attention):
        embeddings = response_embeddings(model, prompt, [*chain(*responses)])
    return [maths.response_diversity(part) for part in embeddings.split(len(responses[0]))]
