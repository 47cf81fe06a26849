"""Runs the algorithm on a model, for one prompt and its response, with a store of results.

Independent of LM-Polygraph, whose runner calls it through `stat_calculators.masked_heads`; `Scorer`
calls it directly.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.special import entr
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import ASMIConfig, check_fits, target_layer
from lm_polygraph_asmi.core import algorithm
from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.maths import response_diversity
from lm_polygraph_asmi.core.model import (
    MaskedModel,
    UnmaskedPass,
    attention_of,
    masked_model,
    readout,
    response_embeddings,
    structure_of,
)
from lm_polygraph_asmi.core.model.memory import distributions_at_once, in_chunks
from lm_polygraph_asmi.core.statistics import AnswerStatistics, Settings, concatenated

NO_EVIDENCE = 1.0
"""Stands for div(x) if fewer than two sampled responses have a token. Unrelated responses have the
same value.

The discount of Adapt-ASMI needs evidence that answers paraphrase each other. With the paper's tau
and beta, this value gives an alpha below 0.001, so Adapt-ASMI is nearly ASMI.
"""


@runtime_checkable
class Store(Protocol):
    """Keeps statistics under keys that hold all they depend on; `results.cache.ResultCache` is one.

    Nothing may be kept under a key whose "revision" is None, which does not identify the model.
    """

    def get(self, key: dict[str, Any]) -> Any | None:
        """The result under a key; None if there is none."""

    def put(self, key: dict[str, Any], result: Any) -> None:
        """Keep a result under a key."""


class Engine:
    """Scores responses under S head masks at one layer, or at several layers one by one.

    A response takes one unmasked pass, and S masked passes that begin at the masked layer.

    Args:
        details: whether statistics of each mask are returned: the mask, its KL divergence and
            log-likelihoods; and the most likely tokens.
        store: is searched before any pass, and gets what is computed.
        config, **settings: those of `ASMIConfig`.

    Raises:
        TypeError: an unknown setting.
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        config: ASMIConfig | None = None,
        *,
        details: bool = False,
        store: Store | None = None,
        **settings: Any,
    ) -> None:
        self.config = (config or ASMIConfig()).replace(**settings)
        self.details, self.store = details, store

    def session(self, model: PreTrainedModel) -> AbstractContextManager[MaskedModel]:
        """A session in which a model is scored with this engine's settings."""
        config = self.config
        return masked_model(model, config.attention, config.structure, config.compile)

    def settings(self, model: PreTrainedModel, depth: float | None = None) -> Settings:
        """Settings on this model; by default at the config's depth."""
        config = self.config if depth is None else self.config.replace(depth=depth)
        structure = structure_of(model, config.structure)
        layer, layers = structure.layer_at(config.depth), structure.num_layers
        heads, requested = structure.heads[layer], target_layer(config.depth, layers)
        return Settings(
            config.replace(attention=config.attention or attention_of(model)),
            layer=layer,
            num_layers=layers,
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
        """The statistics of a response at each depth, from one unmasked pass, or from the store.

        Args:
            responses: token ids of the response; several if it is unknown which tokens end it, such
                as a stop string or an end token. Of several, the one that the model would write is
                scored, see `_unmasked_pass`.
            depths: by default, the config's.

        Raises:
            ValueError: an empty response, a token of probability 0, or text longer than the context
                window; a model that was changed meanwhile (`ModelChanged`).
            TypeError: a model whose heads cannot be masked, see `structure_of`.
            RuntimeError: the final states do not give the model's logits, see `check_unmasked`.
            FloatingPointError: logits that are no distribution, see `readout`.
        """
        check_fits(self.config.top_k, model.config.get_text_config().vocab_size)
        start = time.perf_counter()
        with self.session(model) as f:
            at_depths = [self.settings(model, depth) for depth in depths or [self.config.depth]]
            keys = self._keys(model, prompt, responses, at_depths)
            results: list[Any] = [None if self.store is None else self.store.get(k) for k in keys]
            missing = [at for at, result in enumerate(results) if result is None]
            if missing:
                layers = [at_depths[at].layer for at in missing]
                unmasked = self._unmasked_pass(f, prompt, responses, layers)
                shared = self._unmasked_statistics(f, unmasked) | {
                    "prompt_length": len(prompt),
                    # The copy to NumPy has synchronized with the device.
                    "unmasked_seconds": time.perf_counter() - start,
                }
            for at in missing:
                start = time.perf_counter()
                masked = algorithm.token_statistics(f, unmasked, at_depths[at], self.details)
                results[at] = shared | masked | {"masked_seconds": time.perf_counter() - start}
        # After the session, which ends in an error if the model was changed.
        if self.store is not None:
            for at in missing:
                self.store.put(keys[at], results[at])
        return [
            AnswerStatistics(settings=at_depths[at], reused=at not in missing, **result)
            for at, result in enumerate(results)
        ]

    def read(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, " P"],
        *responses: Sequence[int],
    ) -> dict[str, np.ndarray]:
        """Statistics of the unmasked model only, as `_unmasked_statistics`, and "hidden".

        "hidden", (T, D): states after the masked layer, at the positions that predict the tokens.
        Arguments and errors are those of `score`, for the config's depth.
        """
        with self.session(model) as f:
            layer = self.settings(model).layer
            unmasked = self._unmasked_pass(f, prompt, responses, [layer])
            hidden = unmasked.leaving[layer].double().cpu().numpy()
            return self._unmasked_statistics(f, unmasked) | {"hidden": hidden}

    def _keys(
        self,
        model: PreTrainedModel,
        prompt: Int[Tensor, " P"],
        responses: Sequence[Sequence[int]],
        at_depths: list[Settings],
    ) -> list[dict[str, Any]]:
        """All that the statistics depend on, at each depth. Without a store, the model is left out,
        since its hash reads every weight."""
        answer = {
            **({} if self.store is None else model_key(model)),
            "input_ids": [*prompt.tolist(), *responses[0]],
            "prompt_length": len(prompt),
            "ends": list(map(list, responses)) if len(responses) > 1 else [],
            "compile": self.config.compile,
            "details": self.details,
        }
        return [answer | settings.to_dict() for settings in at_depths]

    def _unmasked_pass(
        self,
        f: MaskedModel,
        prompt: Int[Tensor, " P"],
        responses: Sequence[Sequence[int]],
        layers: list[int],
    ) -> UnmaskedPass:
        """The pass of the response that the model would write, among several.

        A text does not say which tokens end it (an end token, a stop string), and each end makes
        another response, with another T and another score. The model chooses as in generation: at
        the first place where the responses differ, those with the most probable token remain, and
        so on until one is left, or all begin with the shortest, at which generation ends. The last
        token of a response does not run, so responses that differ in it alone share a pass.
        """

        def run(response: Sequence[int]) -> UnmaskedPass:
            x_y = torch.cat([prompt.cpu(), torch.tensor(list(response), dtype=prompt.dtype)])
            return algorithm.unmasked_pass(f, x_y, len(prompt), layers, self.config.scope)

        if len(responses) == 1:
            return run(responses[0])
        # Sorted, so the first is the shortest, and has a state at each place where they differ.
        left = sorted(responses, key=len)
        that_ran, unmasked = left[0], run(left[0])
        while (place := first_difference(left)) is not None:
            if that_ran not in left:  # its states at `place` saw other tokens
                that_ran, unmasked = left[0], run(left[0])
            log_probs = readout(f, unmasked.final_hidden[place])
            # Of equally probable tokens, the first by its id, as generation takes.
            tokens = sorted({ids[place] for ids in left})
            token = max(tokens, key=lambda token: log_probs[token].item())
            left = [ids for ids in left if ids[place] == token]
        chosen = left[0]  # others, if any, begin with it
        if chosen[:-1] != that_ran[:-1]:
            return run(chosen)
        # The last token does not run, so these are the states of the one that ran.
        x_y = unmasked.input_ids.clone()
        x_y[-1] = chosen[-1]
        return replace(unmasked, input_ids=x_y)

    def _unmasked_statistics(self, f: MaskedModel, unmasked: UnmaskedPass) -> dict[str, np.ndarray]:
        """(T,) each: "tokens", their "log_likelihood" and the "entropy" of their distributions, in
        nats, and "likeliest", the most likely tokens.

        Raises ValueError: a token of probability 0, whose MSP is infinite.
        """
        hidden, tokens = unmasked.final_hidden, unmasked.input_ids[unmasked.prompt_length :]

        def of(at: range) -> dict[str, np.ndarray]:
            log_probs = readout(f, hidden[at.start : at.stop]).double()
            statistics = {
                "entropy": entr(log_probs.exp()).sum(-1),
                "log_likelihood": log_probs[range(len(at)), tokens[at]],
                "likeliest": log_probs.argmax(-1),
            }
            return {name: values.cpu().numpy() for name, values in statistics.items()}

        at_once = distributions_at_once(f.model, hidden.device, self.config.memory_budget)
        statistics = concatenated(in_chunks(of, range(len(tokens)), at_once))
        impossible = np.flatnonzero(np.isneginf(statistics["log_likelihood"]))
        if len(impossible):
            at = int(impossible[0])
            raise ValueError(
                f"the answer's token {at + 1} of {len(tokens)} (id {int(tokens[at])}) has "
                "probability 0 under the model, whose logit for it is minus infinity: the model "
                "would never write this answer, and its MSP is infinite. Check the answer, or the "
                "tokenizer"
            )
        return statistics | {"tokens": tokens.numpy().astype(np.int64)}


def first_difference(sequences: Sequence[Sequence[int]]) -> int | None:
    """The first place at which token sequences differ, where none has ended; or None."""
    places = enumerate(zip(*sequences, strict=False))
    return next((place for place, tokens in places if len({*tokens}) > 1), None)


def diversity_of(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    *samples: Sequence[Sequence[int]],
    attention: str | None = None,
    structure: str | None = None,
) -> list[float]:
    """div(x) of each of several lists of N sampled responses to a prompt; higher = more diverse.

    All lists have the same N; if N < 2, `NO_EVIDENCE` is returned. Callers leave out samples
    without tokens, and cut the others behind the token that is to be embedded (`gate_token`). A
    sample of one token may then be empty, see `response_embeddings`.
    """
    if len(samples[0]) < 2:
        return [NO_EVIDENCE] * len(samples)
    with masked_model(model, attention, structure) as f:
        embeddings = response_embeddings(f, prompt, [*chain(*samples)])
    return [response_diversity(part) for part in embeddings.split(len(samples[0]))]
