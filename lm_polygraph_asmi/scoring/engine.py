"""What is computed for one prompt and one response: the masked passes and their statistics.

Joins `maths` and `model`, and keeps what it computes in a result cache. Nothing here knows
LM-Polygraph: its runner reaches this through `stat_calculators.masked_heads`, `score` calls it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.special import entr
from transformers import PreTrainedModel

from lm_polygraph_asmi import maths
from lm_polygraph_asmi.config import ASMIConfig, check_fits
from lm_polygraph_asmi.model import (
    HeadPart,
    Perturbation,
    PrefixCache,
    StreamState,
    Subnetworks,
    UnmaskedPass,
    attention_of,
    check_condition,
    check_scope_runs,
    check_spans,
    check_unmasked,
    head_parts,
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
    together,
    unembedding,
    without_part,
)
from lm_polygraph_asmi.model.memory import default_budget, in_chunks, reduction_bytes
from lm_polygraph_asmi.model.readout import widens
from lm_polygraph_asmi.results.cache import ModelKeys, ResultCache
from lm_polygraph_asmi.results.names import CANDIDATES, COVERAGE_AT, Settings, at_depth, passage
from lm_polygraph_asmi.results.scales import with_scale

log = logging.getLogger("lm_polygraph")

Context = Sequence[tuple[int, int]]
"""Spans of tokens of the prompt, (start, end), that hold what an answer should come from."""

NO_EVIDENCE = 1.0
"""div(x) where fewer than two responses have a token: unrelated responses.

The gate then stays shut (alpha < 0.001) and Adapt-ASMI is plain ASMI. The semantic discount is
granted on evidence that the answers paraphrase each other; without a pair there is none.
"""


class Engine:
    """Scores responses under S head masks at one layer per depth.

    Per response: one unmasked pass that serves all depths, then for each depth the layers from the
    target layer on, under S masks (Algorithm 1 of the paper).

    Args:
        config: settings of the masks, attention and memory; others are of no matter here.
        depths: relative depths of the masked layers, each in (0, 1); None: the config's.
        sources: of the parts of heads that are taken, with the same masks; None: the config's.
        without_context: also run the model on the prompt without the context's tokens.
        details: also return masks, per-mask KL and the top candidates.
        result_cache: folder in which results are kept as they are made, and looked up before any
            pass is run (`result_cache.ResultCache`); None keeps nothing.
        **settings: in place of those of the config.

    Raises:
        ValueError: an argument out of range.
        TypeError: a setting there is not.
    """

    def __init__(
        self,
        config: ASMIConfig | None = None,
        *,
        depths: Sequence[float] | float | None = None,
        sources: Sequence[str] | None = None,
        without_context: bool = False,
        details: bool = False,
        result_cache: str | None = None,
        **settings: Any,
    ) -> None:
        config = (config or ASMIConfig()).replace(**settings)
        own = (config.depth,) if depths is None else depths
        self.depths = tuple(own) if isinstance(own, Sequence) else (own,)
        if not self.depths:
            raise ValueError("depths must name at least one depth, such as [0.6]")
        self.sources = (config.source,) if sources is None else tuple(sources)
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise ValueError(f"sources must name each source once, got {sources!r}")
        for depth in self.depths:
            for source in self.sources:
                config.replace(depth=depth, source=source)  # refuses what is out of range
        self.config = with_scale(config, self.depths)
        self.without_context, self.details = without_context, details
        self.result_cache = ResultCache(result_cache)
        self._keys = ModelKeys()

    def settings(self, model: PreTrainedModel, depth: float, source: str = "all") -> Settings:
        """What it uses on a model, derived values filled in."""
        at, config = layer_at(model, depth), self.config
        heads = num_heads(model, at.layer)
        point = maths.operating_point(heads, config.num_masks, config.mask_rate)
        attention = config.attention or attention_of(model)
        return Settings(
            config.replace(depth=depth, attention=attention, **point._asdict()),
            source=source,
            layer=at.layer,
            num_layers=num_layers(model),
            num_heads=heads,
            requested_layer=None if at.requested == at.layer else at.requested,
        )

    def layers(self, model: PreTrainedModel) -> list[int]:
        """Those it masks."""
        return [layer_at(model, depth).layer for depth in self.depths]

    def _model_key(self, model: PreTrainedModel) -> dict[str, str]:
        """What the result cache knows a model by, as it was when the session was entered."""
        return self._keys.of(model, state_in_session(model)) if self.result_cache.kept else {}

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse at once a model that would fail later; log the settings in force.

        Raises:
            TypeError: a quantised output projection, or a layer without what is to be perturbed.
            ValueError: an attention implementation it cannot use, or one the scope cannot.
        """
        unembedding(model)
        with scoring_session(model, self.config.attention):
            check_scope_runs(model, self.config.scope)
            for depth in self.depths:
                used = self.settings(model, depth)
                log.info("ASMI uses %s", used)
                check_condition(model, used.layer, _change(used))

    def score(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        response: Sequence[int],
        context: Context | None = None,
        passages: bool = False,
        prefix_cache: PrefixCache | None = None,
    ) -> dict[str, Any]:
        """All statistics of one prompt and response, by name (`results.names`).

        What the result cache holds is taken from there, part by part. `asmi_closing` and
        `asmi_token_texts` are not among them: they need a tokenizer.

        Args:
            model: a causal language model whose heads can be masked.
            prompt: (P,) token ids, unpadded.
            response: its T token ids.
            context: for sources other than "all", the spans of tokens that are the context.
            passages: also score each of these spans as a source of its own, "passage0" and so on.
            prefix_cache: keys and values of a sequence that began alike, this answer's own
                generation or the row before; used where `remembers` says so and the result is
                right.

        Raises:
            ValueError: an empty response, or one beyond the context window; no context.
            FloatingPointError: NaN or infinite logits.
        """
        with scoring_session(model, self.config.attention):  # which looks at the model's state once
            if prefix_cache is not None and self.remembers(model) and not passages:
                try:
                    return self._score(model, prompt, response, context, passages, prefix_cache)
                except (torch.OutOfMemoryError, FloatingPointError):
                    raise
                except Exception as error:  # models refuse in any way what they cannot do
                    found = self._score(model, prompt, response, context, passages)
                    PrefixCache.refuse(model)  # now that it is known to be the memory's fault
                    log.warning("%s: known keys are not reused: %s", type(model).__name__, error)
                    return found
            return self._score(model, prompt, response, context, passages)

    def remembers(self, model: PreTrainedModel) -> bool:
        """Whether known keys and values are of use."""
        return self.prompt_is_shared and PrefixCache.serves(model)

    @property
    def prompt_is_shared(self) -> bool:
        """Whether all masks have the prompt's keys and values, and need nothing else of it.

        Not so for sources, which are told apart in it, nor for conditions, which may look at its
        heads.
        """
        in_response = self.config.scope == "response" and self.config.perturbation == "heads"
        return in_response and not self.needs_context

    def _score(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        response: Sequence[int],
        context: Context | None,
        passages: bool,
        prefix_cache: PrefixCache | None = None,
    ) -> dict[str, Any]:
        scored = torch.cat([prompt.cpu(), torch.tensor(response, dtype=prompt.dtype)])
        check_fits(self.config.top_k, model.config.get_text_config().vocab_size)
        sources, spans = self.sources, None
        if passages or self.needs_context:
            spans = check_spans(context, len(scored))
            if passages:
                sources += tuple(map(passage, range(len(spans))))
        parts_of = {
            (depth, source): self.settings(model, depth, source)
            for depth in self.depths
            for source in sources
        }
        answer_key = self._model_key(model) | {
            "input_ids": scored.tolist(),
            "prompt_length": len(prompt),
            "scope": self.config.scope,
            "attention": self.config.attention or attention_of(model),
        }
        keys = {
            part: answer_key
            | used.to_dict()
            | {"details": self.details}
            | ({} if used.source == "all" else {"context": spans})
            for part, used in parts_of.items()
        }
        example = self.result_cache.get(answer_key)
        kept = {part: self.result_cache.get(key) for part, key in keys.items()}
        parts = {part: found for part, found in kept.items() if found is not None}
        missing = [part for part in parts_of if part not in parts]
        shorter_key = answer_key | {"without": spans}
        shorter = self.result_cache.get(shorter_key) if self.without_context else {}
        if example is None or missing or shorter is None:
            layers = [parts_of[part].layer for part in missing or parts_of]
            unmasked, example = self._score_unmasked(
                model, scored, len(prompt), layers, prefix_cache
            )
            if not missing:
                check_unmasked(model, unmasked)
            split: dict[int, list[HeadPart]] = {}
            for part in missing:
                used = parts_of[part]
                parts[part] = self._score_part(model, unmasked, used, spans, split)
                self.result_cache.put(keys[part], parts[part])
            self.result_cache.put(answer_key, example)  # now that it has been checked
            if shorter is None:
                assert spans is not None
                shorter = self._without_context(model, unmasked, spans)
                self.result_cache.put(shorter_key, shorter)
        seconds = example["asmi_seconds"] + sum(part["asmi_seconds"] for part in parts.values())
        for (depth, source), part in parts.items():
            found = {n: v for n, v in part.items() if n != "asmi_seconds"}
            if source != "all" and "all" in sources:
                found["asmi_source_share"] = maths.source_share(
                    *(torch.from_numpy(parts[depth, of]["asmi_mi"]) for of in (source, "all"))
                ).numpy()
            example |= {at_depth(name, depth, source): value for name, value in found.items()}
        again = {depth for depth, _ in missing}
        return (
            example
            | (shorter or {})
            | {
                "asmi_seconds": seconds,
                "asmi_reused_depths": sum(depth not in again for depth in self.depths),
            }
        )

    def _score_unmasked(
        self,
        model: PreTrainedModel,
        scored: Tensor,
        prompt_length: int,
        layers: list[int],
        prefix_cache: PrefixCache | None = None,
    ) -> tuple[UnmaskedPass, dict[str, Any]]:
        """The pass that serves all depths, and what the unmasked model says of the response."""
        start = time.perf_counter()
        unmasked = run_unmasked(
            model, scored, prompt_length, layers, self.config.scope, prefix_cache
        )
        tokens = scored[prompt_length:]
        return unmasked, self._own_statistics(model, unmasked.final_hidden, tokens) | {
            "asmi_tokens": tokens.numpy().astype(np.int64),
            "asmi_prompt_length": prompt_length,
            # Copying results to NumPy has waited for the device.
            "asmi_seconds": time.perf_counter() - start,
        }

    def _own_statistics(
        self, model: PreTrainedModel, hidden: Float[Tensor, "T D"], tokens: Int[Tensor, " T"]
    ) -> dict[str, np.ndarray]:
        """What the unmasked model says of tokens, from its final states."""

        return _joined(
            in_chunks(
                lambda part: _of_tokens(readout(model, hidden[part]), tokens[part]),
                len(tokens),
                self._at_once(model, hidden.device),
            )
        )

    def _score_part(
        self,
        model: PreTrainedModel,
        unmasked: UnmaskedPass,
        used: Settings,
        spans: Context | None,
        split: dict[int, list[HeadPart]],
    ) -> dict[str, Any]:
        """One depth and source.

        Args:
            split: by layer, the parts of its heads; filled in.
        """
        start = time.perf_counter()
        tokens = unmasked.input_ids[: self._seeding(unmasked.prompt_length)].tolist()
        seed, masks = _masks(used, tokens)
        change = _change(used)
        own: dict[str, np.ndarray] = {}
        budget = self.config.memory_budget
        if used.source == "all":
            subnetworks = run_subnetworks(model, unmasked, used.layer, masks, budget, change)
        else:
            assert spans is not None
            if used.layer not in split:
                split[used.layer] = head_parts(model, unmasked, used.layer, spans)
            part = _from_source(split[used.layer], used.source)
            change = replace(change, edit=without_part(part.heads))
            # One row more, without this source in any head.
            drawn = torch.cat([masks, torch.zeros_like(masks[:1])])
            every = run_subnetworks(model, unmasked, used.layer, drawn, budget, change)
            subnetworks = every.first(len(masks))
            own = {
                "asmi_source_attention": _numpy(part.attention.double().mean(0)),
                "asmi_source_kl": self._source_kl(model, unmasked, every.hidden[every.index[-1]]),
            }
        joined = self._reduced(model, subnetworks, used)
        if self.details:
            joined["asmi_masks"] = masks.to(torch.bool).numpy()
        return {
            **joined,
            **own,
            "asmi_mask_seed": seed,
            "asmi_settings": used.to_dict(),
            "asmi_seconds": time.perf_counter() - start - subnetworks.check_seconds,
        }

    def _seeding(self, prompt_length: int) -> int | None:
        """How many of the tokens the masks follow from; None for all."""
        return prompt_length if self.config.seeded_by == "prompt" else None

    def write(self, model: PreTrainedModel, prompt: Int[Tensor, " P"]) -> "AnswerInProgress":
        """Score an answer while it is written, in the scope "response"; depth by the first.

        Call it in `scoring_session`.

        Raises:
            NotImplementedError, RuntimeError: see `steps_of`.
            ValueError: settings that need the finished answer.
        """
        wanted = ("response", "prompt", ("all",))
        if (self.config.scope, self.config.seeded_by, self.sources) != wanted:
            raise ValueError(
                "an answer is scored while it is written in the scope 'response', with masks "
                "seeded by the 'prompt', without a source"
            )
        check_fits(self.config.top_k, model.config.get_text_config().vocab_size)
        used = self.settings(model, self.depths[0])
        start = time.perf_counter()
        seed, masks = _masks(used, prompt.tolist())
        written = steps_of(model, prompt, used.layer, masks, _change(used))
        seconds = time.perf_counter() - start
        return AnswerInProgress(self, model, used, written, seed, prompt.tolist(), seconds)

    def _reduced(
        self,
        model: PreTrainedModel,
        subnetworks: Subnetworks,
        used: Settings,
        log_probs: Float[Tensor, "distinct T V"] | None = None,
    ) -> dict[str, np.ndarray]:
        """Per-token statistics of subnetworks, from their distributions if these are at hand."""

        def read(part: slice) -> Tensor:
            if log_probs is None:
                return readout(model, subnetworks.hidden[:, part])
            return log_probs[:, part]

        # The distributions are (distinct masks, T, V) and the agreement kernel (T, U, U): reduced a
        # few positions at a time.
        weight = unembedding(model)
        distinct, positions = subnetworks.hidden.shape[:2]
        per_position, per_row = reduction_bytes(distinct, used.config.top_k, weight)
        budget = self.config.memory_budget or default_budget(weight.device)
        union = min(distinct * used.config.top_k, len(weight))
        # Where the kernel of a single position is too large, it is made some rows at a time.
        rows = max(1, min(union, int(budget - per_position) // per_row))
        parts = in_chunks(
            lambda part: self._reduce(read(part), weight, subnetworks, rows),
            positions,
            int(budget) // (per_position + rows * per_row),
        )
        return _joined(parts)

    @property
    def needs_context(self) -> bool:
        """Whether `score` must be told the context."""
        return self.without_context or self.sources != ("all",)

    def _without_context(
        self, model: PreTrainedModel, unmasked: UnmaskedPass, spans: Context
    ) -> dict[str, Any]:
        """What the model says to the prompt without the context's tokens."""
        start = time.perf_counter()
        kept = torch.ones(len(unmasked.input_ids), dtype=torch.bool)
        for first, behind in spans:
            kept[first:behind] = False
        kept[unmasked.prompt_length :] = True  # the answer itself stays
        left = int(kept[: unmasked.prompt_length].sum())
        shorter = run_unmasked(model, unmasked.input_ids[kept], left, [])
        return {
            "asmi_without_context_kl": self._source_kl(model, unmasked, shorter.final_hidden),
            "asmi_without_context_seconds": time.perf_counter() - start,
        }

    def _source_kl(
        self, model: PreTrainedModel, unmasked: UnmaskedPass, without: Float[Tensor, "T D"]
    ) -> np.ndarray:
        """KL to the unmasked output of that without a source, (T,), nats."""
        own = unmasked.final_hidden

        def apart(part: slice) -> Tensor:
            return maths.divergence(readout(model, without[part]), readout(model, own[part]))

        return _numpy(torch.cat(in_chunks(apart, len(own), self._at_once(model, own.device))))

    def _at_once(self, model: PreTrainedModel, device: torch.device) -> int:
        """How many distributions to work on together."""
        vocabulary = model.config.get_text_config().vocab_size
        return int(self.config.memory_budget or default_budget(device)) // (32 * vocabulary)

    def _reduce(
        self,
        log_probs: Float[Tensor, "distinct T V"],
        weight: Float[Tensor, "V D"],
        subnetworks: Subnetworks,
        kernel_rows: int,
    ) -> dict[str, np.ndarray]:
        """Per-token statistics of a few positions; nothing of size V leaves the device."""
        device = log_probs.device
        counts, index = subnetworks.counts.to(device), subnetworks.index.to(device)
        share = maths.mask_weights(counts, len(counts)).to(device)
        by_rank = maths.ranked(log_probs, max(self.config.top_k, *COVERAGE_AT))
        support = maths.union_support(log_probs, self.config.top_k, by_rank)
        found = maths.disagreement(support, counts)
        coverage = maths.top_k_coverage(log_probs, COVERAGE_AT, by_rank)
        reduced = {
            "asmi_mi": found.mutual_information,
            "asmi_agreement": maths.agreement_on_support(
                support, weight.to(device), counts, kernel_rows
            ),
            "asmi_entropy_of_mean": found.entropy_of_mean,
            "asmi_mean_entropy": found.mean_entropy,
            "asmi_tail_mass": share @ support.tail,
            "asmi_coverage": torch.einsum("s,stk->tk", share, coverage).float(),
            "asmi_top_token": maths.most_likely(by_rank)[index].int(),
        }
        if self.details:
            mean = torch.einsum("s,stv->tv", share, log_probs.double().exp())
            candidates = mean.topk(min(CANDIDATES, mean.shape[-1]), dim=-1).indices
            reduced |= {
                "asmi_kl": found.divergence_from_mean[index].float(),
                "asmi_candidates": candidates.int(),
                "asmi_candidate_cosines": maths.cosines(weight.to(device)[candidates]),
            }
        return {name: _numpy(value) for name, value in reduced.items()}


class AnswerInProgress:
    """An answer that is scored while it is written, greedily.

    Attributes:
        ids: the answer so far.
        settings: in force.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        used: Settings,
        written: StreamState,
        seed: int,
        prompt: list[int],
        seconds: float,
    ) -> None:
        self.engine, self.model, self.settings = engine, model, used
        self.ids: list[int] = []
        self._written: StreamState | None = written
        self._seed, self._next = seed, prompt
        self._length, self._seconds = len(prompt), seconds
        self._parts: list[dict[str, np.ndarray]] = []

    def step(self, token: int | None = None) -> dict[str, Any]:
        """Write one token more; its statistics, by plain names. Call it in `scoring_session`.

        Args:
            token: another than the model's most likely one.
        """
        start = time.perf_counter()
        assert self._written is not None, "it was let go of"
        model, written = self.model, self._written
        states = written.steps(self._next)
        log_probs = readout(model, states)
        if token is None:  # what the model itself says, rounded as it rounds, as in generation
            own = readout(model, states[0], wide=False) if widens(model) else log_probs[0]
            token = int(own.argmax())
        found = _of_tokens(log_probs[0], torch.tensor([token]))
        subnetworks = Subnetworks(states[written.rows], written.counts, written.index)
        found |= self.engine._reduced(model, subnetworks, self.settings, log_probs[written.rows])
        self.ids.append(token)
        self._next = [token]
        self._parts.append(found)
        self._seconds += time.perf_counter() - start
        return found

    def forget(self) -> None:
        """Let go of keys and values; what was written and its statistics stay."""
        self._written = None

    def statistics(self) -> dict[str, Any]:
        """Those of the answer so far, by name, as `Engine.score` returns them."""
        own = {"asmi_mask_seed": self._seed, "asmi_settings": self.settings.to_dict()}
        plain = ("asmi_entropy", "asmi_log_likelihood")
        found = _joined(self._parts) | own
        depth = self.settings.config.depth
        return {n if n in plain else at_depth(n, depth): v for n, v in found.items()} | {
            "asmi_tokens": np.array(self.ids, dtype=np.int64),
            "asmi_prompt_length": self._length,
            "asmi_seconds": self._seconds,
            "asmi_reused_depths": 0,
        }


def _masks(used: Settings, tokens: list[int]) -> tuple[int, Float[Tensor, "S H"]]:
    """Seed and masks of an example; `tokens` are those that they follow from."""
    drawn = used.config
    assert drawn.num_masks is not None
    assert drawn.mask_rate is not None
    return maths.example_masks(
        drawn.num_masks, used.num_heads, drawn.mask_rate, drawn.mask_sampler, drawn.seed,
        used.layer, tokens,
    )  # fmt: skip


def _change(used: Settings) -> Perturbation:
    """What a mask changes."""
    config = used.config
    assert not isinstance(config.perturbation_scale, str)  # a file, which `with_scale` has read
    return Perturbation(config.perturbation, config.perturbation_scale, config.seed)


def _of_tokens(log_probs: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> dict[str, np.ndarray]:
    """What distributions say of the tokens that were written, and how sure they are."""
    log_probs = log_probs.double()
    of_token = log_probs.gather(-1, tokens[:, None].to(log_probs.device))[:, 0]
    entropy = entr(log_probs.exp()).sum(-1)
    return {"asmi_entropy": _numpy(entropy), "asmi_log_likelihood": _numpy(of_token)}


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Statistics of positions that follow on one another."""
    return {
        name: np.concatenate([part[name] for part in parts], axis=_position_axis(name))
        for name in parts[0]
    }


def _from_source(parts: list[HeadPart], source: str) -> HeadPart:
    """What heads bring from a source; `parts` are those of the context's spans and the rest."""
    *inside, elsewhere = parts
    by_name = {passage(number): part for number, part in enumerate(inside)}
    if source in by_name:
        return by_name[source]
    return together(inside) if source == "context" else elsewhere


def diversity_of(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    responses: Sequence[Sequence[int]],
    attention: str | None = None,
) -> float:
    """div(x) of sampled responses to a prompt; higher = more diverse.

    `NO_EVIDENCE` where fewer than two have a token.

    Args:
        model: makes the embeddings.
        prompt: token ids.
        responses: token ids of each, none of them empty.
        attention: attention implementation; None keeps the model's own.
    """
    if len(responses) < 2:
        return NO_EVIDENCE
    with scoring_session(model, attention):
        return maths.response_diversity(response_embeddings(model, prompt, responses))


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def _position_axis(name: str) -> int:
    """Axis of the T positions: the second where the masks come first."""
    return 1 if name in ("asmi_top_token", "asmi_kl") else 0
