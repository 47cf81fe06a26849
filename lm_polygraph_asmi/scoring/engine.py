"""Masked passes and their statistics for one prompt and one response.

Combines `maths` and `model`, and stores results in a result cache. Independent of LM-Polygraph,
whose runner calls it through `stat_calculators.masked_heads`; `score` calls it directly.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    unembedding,
)
from lm_polygraph_asmi.model.memory import default_budget, in_chunks
from lm_polygraph_asmi.model.readout import widens
from lm_polygraph_asmi.results.cache import ResultCache, model_key
from lm_polygraph_asmi.results.names import CANDIDATES, Settings
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics, concatenated

log = logging.getLogger("lm_polygraph")

NO_EVIDENCE = 1.0
"""div(x) if fewer than two responses are non-empty: as for unrelated responses.

Then alpha < 0.001 and Adapt-ASMI equals ASMI. The semantic discount needs evidence that answers
paraphrase each other; without a pair there is none.
"""


class Engine:
    """Scores responses under S head masks at one layer.

    Per response: one unmasked pass, then the layers from the target layer on, under S masks
    (Algorithm 1 of the paper). `score_depths` shares the unmasked pass among engines.

    Args:
        config: settings of masks, depth, attention and memory; others are ignored.
        details: also return masks, per-mask KL and log-likelihoods, and the top candidates.
        result_cache: stores results and is searched before any pass: a folder, or a cache that
            engines share; None: no cache.
        states: `read` also returns the states after the masked layer.
        **settings: override those of the config.

    Raises:
        ValueError: an argument out of range.
        TypeError: an unknown setting.

    Example:
        >>> ids = scorer.tokenizer(prompt, return_tensors="pt").input_ids[0]
        >>> engine = Engine(scope="response", num_masks=5, mask_rate=0.3)
        >>> engine.score(scorer.model, ids[:-2], ids[-2:].tolist()).mi.shape
        (2,)
    """

    def __init__(
        self,
        config: ASMIConfig | None = None,
        *,
        details: bool = False,
        result_cache: str | Path | ResultCache | None = None,
        states: bool = False,
        **settings: Any,
    ) -> None:
        self.config = (config or ASMIConfig()).replace(**settings)
        self.details, self.states = details, states
        if not isinstance(result_cache, ResultCache):
            result_cache = ResultCache(result_cache)
        self.result_cache = result_cache

    def settings(self, model: PreTrainedModel) -> Settings:
        """Settings on this model, with derived values."""
        name_modules(model, self.config.structure)
        layer, config = layer_at(model, self.config.depth), self.config
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

    def layer(self, model: PreTrainedModel) -> int:
        """Index of the masked layer."""
        name_modules(model, self.config.structure)
        return layer_at(model, self.config.depth)

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise early on a model that would fail later; log the settings in force.

        Raises:
            TypeError: heads that cannot be masked.
            ValueError: attention implementation unsupported.
        """
        with scoring_session(model, self.config.attention):
            name_modules(model, self.config.structure)
            unembedding(model)
            settings = self.settings(model)
            log.info("ASMI uses %s", settings)

    def score(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        response: Sequence[int],
    ) -> AnswerStatistics:
        """All statistics of one prompt and response. Stored ones are read from the result cache.

        Args:
            model: a causal language model whose heads can be masked.
            prompt: (P,) token ids, unpadded.
            response: (T,) token ids.

        Raises:
            ValueError: empty response, or text longer than the context window.
            FloatingPointError: logits that are no distribution, as `readout`.
        """
        (statistics,) = score_depths([self], model, prompt, response)
        return statistics

    def final_states(
        self, model: PreTrainedModel, prompt: Int[Tensor, " P"], response: Sequence[int]
    ) -> Float[Tensor, "T D"]:
        """The unmasked model's final states at the positions that predict a response.

        Args:
            response: (T,) token ids; the last one is not read.

        Raises:
            ValueError: as `score`.
        """
        with self._session(model):
            scored = _joined(prompt, response)
            return algorithm.unmasked_pass(model, scored, len(prompt), [], "all").final_hidden

    def top_tokens(self, model: PreTrainedModel, hidden: Float[Tensor, "T D"]) -> list[int]:
        """The model's most likely token at each of these final states, as in generation."""
        with self._session(model):
            wide = not widens(model)  # rounded as in generation
            top_tokens = in_chunks(
                lambda part: readout(model, part, wide=wide).argmax(-1),
                hidden,
                self._chunk_size(model, hidden.device),
            )
        return torch.cat(top_tokens).tolist()

    def log_probs(
        self, model: PreTrainedModel, hidden: Float[Tensor, " D"], tokens: Sequence[int]
    ) -> list[float]:
        """Log-probabilities of tokens at a final state, nats."""
        with self._session(model):
            return readout(model, hidden)[list(tokens)].tolist()

    @contextmanager
    def _session(self, model: PreTrainedModel) -> Iterator[None]:
        """A scoring session with this engine's attention and modules."""
        given = model, self.config.attention, self.config.compile
        with scoring_session(*given):  # reads the model's state once
            name_modules(model, self.config.structure)
            yield

    def read(
        self, model: PreTrainedModel, prompt: Int[Tensor, " P"], response: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Entropy and log-likelihood of a response's tokens, (T,), nats; without masked passes.

        With `states` also "hidden", (T, D): states after the masked layer at the positions that
        predict the tokens.

        Raises:
            ValueError, FloatingPointError: as `score`.
        """
        with self._session(model):
            scored, layer = _joined(prompt, response), self.layer(model)
            unmasked = algorithm.unmasked_pass(
                model, scored, len(prompt), [layer], self.config.scope
            )
            check_unmasked(model, unmasked)
            statistics = self._unmasked_statistics(model, unmasked)
            if not self.states:
                return statistics
            return statistics | {"hidden": unmasked.after[layer].double().cpu().numpy()}

    def _unmasked_statistics(
        self, model: PreTrainedModel, unmasked: UnmaskedPass
    ) -> dict[str, np.ndarray]:
        """Entropy and log-likelihood of the answer's tokens, from the unmasked final states."""
        hidden, tokens = unmasked.final_hidden, unmasked.input_ids[unmasked.prompt_length :]
        found = concatenated(
            in_chunks(
                lambda at: _per_token(readout(model, hidden[at.start : at.stop]), tokens[at]),
                range(len(tokens)),
                self._chunk_size(model, hidden.device),
            )
        )
        _check_possible(found["log_likelihood"], tokens)
        return found

    def _chunk_size(self, model: PreTrainedModel, device: torch.device) -> int:
        """Number of distributions that fit the memory budget."""
        vocabulary = model.config.get_text_config().vocab_size
        return int(self.config.memory_budget or default_budget(device)) // (32 * vocabulary)


def score_depths(
    engines: Sequence[Engine],
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    response: Sequence[int],
) -> list[AnswerStatistics]:
    """What `Engine.score` returns for each engine, from one unmasked pass.

    Args:
        engines: of one scope and attention, usually at several depths; the first one's result
            cache serves all.
        model, prompt, response: as for `Engine.score`.

    Raises:
        ValueError: no engine, or several scopes or attention implementations; else as
            `Engine.score`.
    """
    unmasked_by = {
        (e.config.scope, e.config.attention, e.config.structure, e.config.compile) for e in engines
    }
    if len(unmasked_by) != 1:
        raise ValueError(
            "expected engines of one scope, attention implementation and structure, which share an "
            f"unmasked pass, got {sorted(map(str, unmasked_by)) or 'none'}: score these apart"
        )
    warn_of_untested()
    first, results, start = engines[0], engines[0].result_cache, time.perf_counter()
    for engine in engines:
        check_fits(engine.config.top_k, model.config.get_text_config().vocab_size)
    with first._session(model):
        x_y, prompt_length = _joined(prompt, response), len(prompt)
        used = [engine.settings(model) for engine in engines]
        answer_key = (model_key(model) if results.kept else {}) | {
            "input_ids": x_y.tolist(),
            "prompt_length": prompt_length,
            "scope": first.config.scope,
            "attention": first.config.attention or attention_of(model),
            "compile": first.config.compile,
        }
        keys = [
            answer_key | settings.to_dict() | {"details": engine.details}
            for engine, settings in zip(engines, used, strict=True)
        ]
        answer: Any = results.get(answer_key)
        parts: list[Any] = [results.get(key) for key in keys]
        missing = [at for at, part in enumerate(parts) if part is None]
        if answer is None or missing:
            layers = [used[at].layer for at in missing or range(len(engines))]
            h_cache = algorithm.unmasked_pass(model, x_y, prompt_length, layers, first.config.scope)
            answer = first._unmasked_statistics(model, h_cache) | {
                "tokens": x_y[prompt_length:].numpy().astype(np.int64),
                "prompt_length": prompt_length,
                # The copy to NumPy has synchronized with the device.
                "unmasked_seconds": time.perf_counter() - start,
            }
            if not missing:
                check_unmasked(model, h_cache)
            for at in missing:
                details = _details if engines[at].details else None
                parts[at] = algorithm.token_statistics(model, h_cache, used[at], details)
                results.put(keys[at], parts[at])
            results.put(answer_key, answer)  # after its check
    return [
        AnswerStatistics(settings=settings, reused=at not in missing, **answer, **part)
        for at, (settings, part) in enumerate(zip(used, parts, strict=True))
    ]


def _joined(prompt: Tensor, response: Sequence[int]) -> Int[Tensor, " tokens"]:
    """Token ids of prompt and response."""
    return torch.cat([prompt.cpu(), torch.tensor(response, dtype=prompt.dtype)])


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
        "masked_log_likelihood": _chosen(log_probs, tokens)[index].float(),
        "candidates": candidates.int(),
        "candidate_cosines": maths.cosines(weight.to(log_probs.device)[candidates]),
    }


def _per_token(log_probs: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> dict[str, np.ndarray]:
    """Log-likelihood of the tokens and entropy of the distributions, (T,), nats."""
    log_probs = log_probs.double()
    entropy = entr(log_probs.exp()).sum(-1)
    return {"entropy": _numpy(entropy), "log_likelihood": _numpy(_chosen(log_probs, tokens))}


def _check_possible(log_likelihood: Float[np.ndarray, " T"], tokens: Int[Tensor, " T"]) -> None:
    """Raise ValueError for an answer with a token of probability 0: its MSP is infinite."""
    for at in np.flatnonzero(np.isneginf(log_likelihood))[:1].tolist():
        raise ValueError(
            f"the answer's token {at + 1} of {len(tokens)} (id {int(tokens[at])}) has probability "
            "0 under the model, whose logit for it is minus infinity: the model would never write "
            "this answer, and its MSP is infinite. Check the answer, or the tokenizer"
        )


def _chosen(
    log_probs: Float[Tensor, "*masks T V"], tokens: Int[Tensor, " T"]
) -> Float[Tensor, "*masks T"]:
    """Log-probabilities of the tokens."""
    index = tokens.to(log_probs.device).expand(log_probs.shape[:-1])
    return log_probs.gather(-1, index[..., None])[..., 0]


def diversity_of(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    *responses: Sequence[Sequence[int]],
    attention: str | None = None,
) -> list[float]:
    """div(x) of each of several lists of N responses to a prompt; higher = more diverse.

    `NO_EVIDENCE` for fewer than two responses.

    Args:
        model: computes the embeddings.
        prompt: (P,) token ids.
        *responses: token ids of each response up to the token that is embedded, of
            `StopConditions.embedded`.
        attention: attention implementation; None: the model's.
    """
    number = len(responses[0])
    if number < 2:
        return [NO_EVIDENCE] * len(responses)
    with scoring_session(model, attention):
        embeddings = response_embeddings(model, prompt, [*chain(*responses)])
    return [maths.response_diversity(part) for part in embeddings.split(number)]


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
