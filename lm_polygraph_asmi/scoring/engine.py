"""Masked passes and their statistics for one prompt and one response.

Combines `maths` and `model`, and stores results in a result cache. Independent of LM-Polygraph,
whose runner calls it through `stat_calculators.masked_heads`; `score` calls it directly.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.special import entr
from transformers import PreTrainedModel

from lm_polygraph_asmi import maths
from lm_polygraph_asmi.config import ASMIConfig, check_fits
from lm_polygraph_asmi.model import (
    Perturbation,
    PrefixCache,
    StreamState,
    Subnetworks,
    UnmaskedPass,
    attention_of,
    check_condition,
    check_scope_runs,
    check_unmasked,
    layer_at,
    num_heads,
    num_layers,
    readout,
    response_embeddings,
    run_subnetworks,
    run_unmasked,
    scoring_session,
    state_in_session,
    steps_of,
    unembedding,
)
from lm_polygraph_asmi.model.memory import default_budget, in_chunks, reduction_bytes
from lm_polygraph_asmi.model.readout import widens
from lm_polygraph_asmi.results.cache import ModelKeys, ResultCache
from lm_polygraph_asmi.results.names import CANDIDATES, COVERAGE_AT, Settings, at_depth
from lm_polygraph_asmi.results.scales import with_scale

log = logging.getLogger("lm_polygraph")
T = TypeVar("T")

NO_EVIDENCE = 1.0
"""div(x) if fewer than two responses are non-empty: as for unrelated responses.

Then alpha < 0.001 and Adapt-ASMI equals ASMI. The semantic discount needs evidence that answers
paraphrase each other; without a pair there is none.
"""


@dataclass(frozen=True)
class Draft:
    """An unmasked pass over an answer whose last token may still be replaced.

    Attributes:
        top_tokens: (T,) the model's most likely token at each position of the answer.
        unmasked: the pass.
        seconds: it took.
    """

    top_tokens: list[int]
    unmasked: UnmaskedPass
    seconds: float

    def with_response(self, scored: Int[Tensor, " tokens"]) -> UnmaskedPass | None:
        """The pass for these tokens of prompt and answer; None if more than the last differ."""
        if not self.unmasked.input_ids[:-1].equal(scored[:-1]):
            return None
        return replace(self.unmasked, input_ids=scored)


class Engine:
    """Scores responses under S head masks at one layer per depth.

    Per response: one unmasked pass for all depths, then per depth the layers from the target layer
    on, under S masks (Algorithm 1 of the paper).

    Args:
        config: settings of masks, attention and memory; others are ignored.
        depths: relative depths of the masked layers, each in (0, 1); None: the config's.
        details: also return masks, per-mask KL and the top candidates.
        result_cache: folder that stores results and is searched before any pass
            (`results.cache.ResultCache`); None: no cache.
        **settings: override those of the config.

    Raises:
        ValueError: an argument out of range.
        TypeError: an unknown setting.
    """

    def __init__(
        self,
        config: ASMIConfig | None = None,
        *,
        depths: Sequence[float] | float | None = None,
        details: bool = False,
        result_cache: str | None = None,
        **settings: Any,
    ) -> None:
        config = (config or ASMIConfig()).replace(**settings)
        several = (config.depth,) if depths is None else depths
        self.depths = tuple(several) if isinstance(several, Sequence) else (several,)
        if not self.depths:
            raise ValueError("expected at least one depth, such as [0.6], got none")
        for depth in self.depths:
            config.replace(depth=depth)  # raises if out of range
        self.config = with_scale(config, self.depths)
        self.details = details
        self.result_cache = ResultCache(result_cache)
        self._keys = ModelKeys()

    def settings(self, model: PreTrainedModel, depth: float) -> Settings:
        """Settings on this model, with derived values."""
        target, config = layer_at(model, depth), self.config
        heads = num_heads(model, target.layer)
        operating_point = maths.operating_point(heads, config.num_masks, config.mask_rate)
        attention = config.attention or attention_of(model)
        return Settings(
            config.replace(depth=depth, attention=attention, **operating_point._asdict()),
            layer=target.layer,
            num_layers=num_layers(model),
            num_heads=heads,
            requested_layer=None if target.requested == target.layer else target.requested,
        )

    def layers(self, model: PreTrainedModel) -> list[int]:
        """Indices of the masked layers."""
        return [layer_at(model, depth).layer for depth in self.depths]

    def _model_key(self, model: PreTrainedModel) -> dict[str, str]:
        """Key of the model in the result cache, at the start of the session."""
        return self._keys.of(model, state_in_session(model)) if self.result_cache.kept else {}

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise early on a model that would fail later; log the settings in force.

        Raises:
            TypeError: quantized output projection, or a layer without the perturbed component.
            ValueError: attention implementation unsupported, by ASMI or by this scope.
        """
        unembedding(model)
        with scoring_session(model, self.config.attention):
            check_scope_runs(model, self.config.scope)
            for depth in self.depths:
                settings = self.settings(model, depth)
                log.info("ASMI uses %s", settings)
                check_condition(model, settings.layer, _perturbation(settings))

    def score(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        response: Sequence[int],
        prefix_cache: PrefixCache | None = None,
        draft: Draft | None = None,
    ) -> dict[str, Any]:
        """All statistics of one prompt and response, by name (`results.names`).

        Cached parts are read from the result cache. `asmi_closing` and `asmi_token_texts` are not
        included, as they need a tokenizer.

        Args:
            model: a causal language model whose heads can be masked.
            prompt: (P,) token ids, unpadded.
            response: (T,) token ids.
            prefix_cache: keys and values of a sequence with the same prefix (the answer's
                generation, or the row before); used if `remembers`.
            draft: unmasked pass of `draft`, used if at most the last token is another.

        Raises:
            ValueError: empty response, or text longer than the context window.
            FloatingPointError: NaN or infinite logits.
        """
        return self._reusing(
            model, prefix_cache, lambda cache: self._score(model, prompt, response, cache, draft)
        )

    def draft(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, " P"],
        response: Sequence[int],
        prefix_cache: PrefixCache | None = None,
    ) -> Draft:
        """The unmasked pass over a response, before its last token is chosen.

        Args:
            response: (T,) token ids; the last one is not read.
            prefix_cache: as for `score`.

        Raises:
            ValueError, FloatingPointError: as `score`.
        """
        scored, start = _joined(prompt, response), time.perf_counter()

        def run(cache: PrefixCache | None) -> UnmaskedPass:
            layers, scope = self.layers(model), self.config.scope
            return run_unmasked(model, scored, len(prompt), layers, scope, cache)

        unmasked = self._reusing(model, prefix_cache, run)
        with scoring_session(model, self.config.attention):
            hidden, narrow = unmasked.final_hidden, widens(model)  # rounded as in generation
            top_tokens = in_chunks(
                lambda part: readout(model, hidden[part], wide=not narrow).argmax(-1),
                len(hidden),
                self._chunk_size(model, hidden.device),
            )
        return Draft(torch.cat(top_tokens).tolist(), unmasked, time.perf_counter() - start)

    def log_probs(
        self, model: PreTrainedModel, draft: Draft, position: int, tokens: Sequence[int]
    ) -> list[float]:
        """Log-probabilities of tokens at a position of the draft's answer, nats."""
        with scoring_session(model, self.config.attention):
            return readout(model, draft.unmasked.final_hidden[position])[list(tokens)].tolist()

    def _reusing(
        self,
        model: PreTrainedModel,
        prefix_cache: PrefixCache | None,
        run: Callable[[PrefixCache | None], T],
    ) -> T:
        """What `run` returns with the prefix cache, or without it if that fails."""
        with scoring_session(model, self.config.attention):  # reads the model's state once
            if prefix_cache is None or not self.remembers(model):
                return run(None)
            try:
                return run(prefix_cache)
            except (torch.OutOfMemoryError, FloatingPointError):
                raise
            except Exception as error:  # models raise different errors
                result = run(None)
                PrefixCache.disable(model)  # the same call works without the cache
                log.warning("%s: known keys are not reused: %s", type(model).__name__, error)
                return result

    def remembers(self, model: PreTrainedModel) -> bool:
        """Whether a prefix cache can be used."""
        return self.prompt_is_shared and PrefixCache.serves(model)

    @property
    def prompt_is_shared(self) -> bool:
        """Whether all masks share the prompt's keys and values and need nothing else of it.

        False for perturbation controls, which may read the prompt's heads.
        """
        return self.config.scope == "response" and self.config.perturbation == "heads"

    def _score(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        response: Sequence[int],
        prefix_cache: PrefixCache | None = None,
        draft: Draft | None = None,
    ) -> dict[str, Any]:
        scored = _joined(prompt, response)
        check_fits(self.config.top_k, model.config.get_text_config().vocab_size)
        parts_of = {depth: self.settings(model, depth) for depth in self.depths}
        answer_key = self._model_key(model) | {
            "input_ids": scored.tolist(),
            "prompt_length": len(prompt),
            "scope": self.config.scope,
            "attention": self.config.attention or attention_of(model),
        }
        keys = {
            depth: answer_key | part_settings.to_dict() | {"details": self.details}
            for depth, part_settings in parts_of.items()
        }
        example = self.result_cache.get(answer_key)
        cached = {depth: self.result_cache.get(key) for depth, key in keys.items()}
        parts = {depth: stats for depth, stats in cached.items() if stats is not None}
        missing = [depth for depth in parts_of if depth not in parts]
        if example is None or missing:
            layers = [parts_of[depth].layer for depth in missing or parts_of]
            unmasked, example = self._score_unmasked(
                model, scored, len(prompt), layers, prefix_cache, draft
            )
            if not missing:
                check_unmasked(model, unmasked)
            for depth in missing:
                parts[depth] = self._score_part(model, unmasked, parts_of[depth])
                self.result_cache.put(keys[depth], parts[depth])
            self.result_cache.put(answer_key, example)  # after its check
        seconds = example["asmi_seconds"] + sum(part["asmi_seconds"] for part in parts.values())
        for depth, part in parts.items():
            stats = {n: v for n, v in part.items() if n != "asmi_seconds"}
            example |= {at_depth(name, depth): value for name, value in stats.items()}
        return example | {
            "asmi_seconds": seconds,
            "asmi_reused_depths": len(self.depths) - len(missing),
        }

    def _score_unmasked(
        self,
        model: PreTrainedModel,
        scored: Tensor,
        prompt_length: int,
        layers: list[int],
        prefix_cache: PrefixCache | None = None,
        draft: Draft | None = None,
    ) -> tuple[UnmaskedPass, dict[str, Any]]:
        """The unmasked pass for all depths, and its statistics of the response."""
        start = time.perf_counter()
        unmasked = None if draft is None else draft.with_response(scored)
        if unmasked is not None and draft is not None:
            start -= draft.seconds
        else:
            unmasked = run_unmasked(
                model, scored, prompt_length, layers, self.config.scope, prefix_cache
            )
        tokens = scored[prompt_length:]
        return unmasked, self._unmasked_statistics(model, unmasked.final_hidden, tokens) | {
            "asmi_tokens": tokens.numpy().astype(np.int64),
            "asmi_prompt_length": prompt_length,
            # The copy to NumPy has synchronized with the device.
            "asmi_seconds": time.perf_counter() - start,
        }

    def _unmasked_statistics(
        self, model: PreTrainedModel, hidden: Float[Tensor, "T D"], tokens: Int[Tensor, " T"]
    ) -> dict[str, np.ndarray]:
        """Entropy and log-likelihood of tokens, from the unmasked final states."""
        return _concatenate(
            in_chunks(
                lambda part: _per_token(readout(model, hidden[part]), tokens[part]),
                len(tokens),
                self._chunk_size(model, hidden.device),
            )
        )

    def _score_part(
        self, model: PreTrainedModel, unmasked: UnmaskedPass, settings: Settings
    ) -> dict[str, Any]:
        """Statistics of one depth."""
        start = time.perf_counter()
        tokens = unmasked.input_ids[: self._seed_length(unmasked.prompt_length)].tolist()
        seed, masks = _masks(settings, tokens)
        subnetworks = run_subnetworks(
            model, unmasked, settings.layer, masks, self.config.memory_budget,
            _perturbation(settings),
        )  # fmt: skip
        stats = self._reduced(model, subnetworks, settings)
        if self.details:
            stats["asmi_masks"] = masks.to(torch.bool).numpy()
        return {
            **stats,
            "asmi_mask_seed": seed,
            "asmi_settings": settings.to_dict(),
            "asmi_seconds": time.perf_counter() - start - subnetworks.check_seconds,
        }

    def _seed_length(self, prompt_length: int) -> int | None:
        """Number of tokens that seed the masks; None for all."""
        return prompt_length if self.config.seeded_by == "prompt" else None

    def write(self, model: PreTrainedModel, prompt: Int[Tensor, " P"]) -> "AnswerInProgress":
        """Start scoring an answer during generation: scope "response", first depth only.

        Call it in `scoring_session`.

        Raises:
            NotImplementedError, RuntimeError: see `steps_of`.
            ValueError: settings that need the finished answer.
        """
        actual = (self.config.scope, self.config.seeded_by)
        if actual != ("response", "prompt"):
            raise ValueError(
                f"streaming: expected scope 'response' and seeded_by 'prompt', got {actual}"
            )
        check_fits(self.config.top_k, model.config.get_text_config().vocab_size)
        settings = self.settings(model, self.depths[0])
        start = time.perf_counter()
        seed, masks = _masks(settings, prompt.tolist())
        state = steps_of(model, prompt, settings.layer, masks, _perturbation(settings))
        seconds = time.perf_counter() - start
        return AnswerInProgress(self, model, settings, state, seed, prompt.tolist(), seconds)

    def _reduced(
        self,
        model: PreTrainedModel,
        subnetworks: Subnetworks,
        settings: Settings,
        log_probs: Float[Tensor, "distinct T V"] | None = None,
    ) -> dict[str, np.ndarray]:
        """Per-token statistics of subnetworks; `log_probs`: their distributions, if known."""

        def read(part: slice) -> Tensor:
            if log_probs is None:
                return readout(model, subnetworks.hidden[:, part])
            return log_probs[:, part]

        # Distributions are (distinct masks, T, V), the agreement kernel is (T, U, U): reduce a few
        # positions at a time.
        weight = unembedding(model)
        distinct, positions = subnetworks.hidden.shape[:2]
        per_position, per_row = reduction_bytes(distinct, settings.config.top_k, weight)
        budget = self.config.memory_budget or default_budget(weight.device)
        union = min(distinct * settings.config.top_k, len(weight))
        # If the kernel of one position is too large, compute it a few rows at a time.
        rows = max(1, min(union, int(budget - per_position) // per_row))
        parts = in_chunks(
            lambda part: self._reduce(read(part), weight, subnetworks, rows),
            positions,
            int(budget) // (per_position + rows * per_row),
        )
        return _concatenate(parts)

    def _chunk_size(self, model: PreTrainedModel, device: torch.device) -> int:
        """Number of distributions that fit the memory budget."""
        vocabulary = model.config.get_text_config().vocab_size
        return int(self.config.memory_budget or default_budget(device)) // (32 * vocabulary)

    def _reduce(
        self,
        log_probs: Float[Tensor, "distinct T V"],
        weight: Float[Tensor, "V D"],
        subnetworks: Subnetworks,
        kernel_rows: int,
    ) -> dict[str, np.ndarray]:
        """Per-token statistics of a few positions; no array of size V leaves the device."""
        device = log_probs.device
        counts, index = subnetworks.counts.to(device), subnetworks.index.to(device)
        share = maths.mask_weights(counts, len(counts)).to(device)
        by_rank = maths.ranked(log_probs, max(self.config.top_k, *COVERAGE_AT))
        support = maths.union_support(log_probs, self.config.top_k, by_rank)
        disagreement = maths.disagreement(support, counts)
        coverage = maths.top_k_coverage(log_probs, COVERAGE_AT, by_rank)
        reduced = {
            "asmi_mi": disagreement.mutual_information,
            "asmi_agreement": maths.agreement_on_support(
                support, weight.to(device), counts, kernel_rows
            ),
            "asmi_entropy_of_mean": disagreement.entropy_of_mean,
            "asmi_mean_entropy": disagreement.mean_entropy,
            "asmi_tail_mass": share @ support.tail,
            "asmi_coverage": torch.einsum("s,stk->tk", share, coverage).float(),
            "asmi_top_token": maths.most_likely(by_rank)[index].int(),
        }
        if self.details:
            mean = torch.einsum("s,stv->tv", share, log_probs.double().exp())
            candidates = mean.topk(min(CANDIDATES, mean.shape[-1]), dim=-1).indices
            reduced |= {
                "asmi_kl": disagreement.divergence_from_mean[index].float(),
                "asmi_candidates": candidates.int(),
                "asmi_candidate_cosines": maths.cosines(weight.to(device)[candidates]),
            }
        return {name: _numpy(value) for name, value in reduced.items()}


class AnswerInProgress:
    """An answer scored during greedy generation.

    Attributes:
        ids: token ids so far.
        settings: in force.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        settings: Settings,
        state: StreamState,
        seed: int,
        prompt: list[int],
        seconds: float,
    ) -> None:
        self.engine, self.model, self.settings = engine, model, settings
        self.ids: list[int] = []
        self._state: StreamState | None = state
        self._seed, self._next = seed, prompt
        self._length, self._seconds = len(prompt), seconds
        self._parts: list[dict[str, np.ndarray]] = []

    def step(self, token: int | None = None) -> dict[str, Any]:
        """Generate one token; return its statistics by name without depth.

        Call it in `scoring_session`.

        Args:
            token: token to use; None: the model's most likely one.
        """
        start = time.perf_counter()
        assert self._state is not None, "the stream is closed"
        model, state = self.model, self._state
        states = state.steps(self._next)
        log_probs = readout(model, states)
        if token is None:  # rounded as the model rounds in generation
            logits = readout(model, states[0], wide=False) if widens(model) else log_probs[0]
            token = int(logits.argmax())
        stats = _per_token(log_probs[0], torch.tensor([token]))
        subnetworks = Subnetworks(states[state.rows], state.counts, state.index)
        stats |= self.engine._reduced(model, subnetworks, self.settings, log_probs[state.rows])
        self.ids.append(token)
        self._next = [token]
        self._parts.append(stats)
        self._seconds += time.perf_counter() - start
        return stats

    def forget(self) -> None:
        """Free keys and values; tokens and statistics stay."""
        self._state = None

    def statistics(self) -> dict[str, Any]:
        """Statistics of the answer so far, by name, as `Engine.score` returns them."""
        answer_stats = {"asmi_mask_seed": self._seed, "asmi_settings": self.settings.to_dict()}
        of_every_depth = ("asmi_entropy", "asmi_log_likelihood")
        stats = _concatenate(self._parts) | answer_stats
        depth = self.settings.config.depth
        return {n if n in of_every_depth else at_depth(n, depth): v for n, v in stats.items()} | {
            "asmi_tokens": np.array(self.ids, dtype=np.int64),
            "asmi_prompt_length": self._length,
            "asmi_seconds": self._seconds,
            "asmi_reused_depths": 0,
        }


def _joined(prompt: Tensor, response: Sequence[int]) -> Int[Tensor, " tokens"]:
    """Token ids of prompt and response."""
    return torch.cat([prompt.cpu(), torch.tensor(response, dtype=prompt.dtype)])


def _masks(settings: Settings, tokens: list[int]) -> tuple[int, Float[Tensor, "S H"]]:
    """Seed and masks of an example; `tokens` seed them."""
    config = settings.config
    assert config.num_masks is not None
    assert config.mask_rate is not None
    return maths.example_masks(
        config.num_masks, settings.num_heads, config.mask_rate, config.mask_sampler, config.seed,
        settings.layer, tokens,
    )  # fmt: skip


def _perturbation(settings: Settings) -> Perturbation:
    """What a mask perturbs, and how."""
    config = settings.config
    assert not isinstance(config.perturbation_scale, str)  # a file path: `with_scale` has read it
    return Perturbation(config.perturbation, config.perturbation_scale, config.seed)


def _per_token(log_probs: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> dict[str, np.ndarray]:
    """Log-likelihood of the tokens and entropy of the distributions, (T,), nats."""
    log_probs = log_probs.double()
    likelihoods = log_probs.gather(-1, tokens[:, None].to(log_probs.device))[:, 0]
    entropy = entr(log_probs.exp()).sum(-1)
    return {"asmi_entropy": _numpy(entropy), "asmi_log_likelihood": _numpy(likelihoods)}


def _concatenate(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Concatenate statistics of consecutive positions."""
    return {
        name: np.concatenate([part[name] for part in parts], axis=_position_axis(name))
        for name in parts[0]
    }


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


def _position_axis(name: str) -> int:
    """Axis of the T positions: 1 if masks are axis 0."""
    return 1 if name in ("asmi_top_token", "asmi_kl") else 0
