"""A model prepared for scoring: one answer with all it depends on."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Int
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lm_polygraph_asmi.config import STREAMED, ASMIConfig
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.host.model import causal_model, is_host_model
from lm_polygraph_asmi.host.special_tokens import PlainTokenizer, SpecialTokens
from lm_polygraph_asmi.host.stopping import StopConditions
from lm_polygraph_asmi.maths import adaptive_gate
from lm_polygraph_asmi.maths.scores import aggregate
from lm_polygraph_asmi.model import (
    PrefixCache,
    attention_of,
    model_state,
    plain_model,
    structure_of,
)
from lm_polygraph_asmi.results.cache import (
    ModelKeys,
    ResultCache,
    tokenizer_key,
)
from lm_polygraph_asmi.scoring.calibration import CalibrationLike, settled
from lm_polygraph_asmi.scoring.control_tokens import rendered_warnings, special_warnings
from lm_polygraph_asmi.scoring.ending import EndedAnswer, TextAnswer
from lm_polygraph_asmi.scoring.engine import Engine, diversity_of
from lm_polygraph_asmi.scoring.generation import Generation, restored_config
from lm_polygraph_asmi.scoring.own_tokenizer import check_tokenizer
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics
from lm_polygraph_asmi.scoring.text import (
    Answer,
    Prompt,
    Query,
    answer_tokens,
    border_warning,
    parse_request,
    prompt_tokens,
    prompt_warning,
    repeated_prompt,
    spans,
    stop_warning,
    token_ids,
)
from lm_polygraph_asmi.scoring.tokens import tokens_of

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model

log = logging.getLogger("lm_polygraph")


class PreparedModel:
    """Model, tokenizer, settings and engines of a `Scorer`, which documents the arguments."""

    def __init__(
        self,
        model: "PreTrainedModel | Model | str | Path",
        config: ASMIConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        calibration: CalibrationLike = None,
        result_cache: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.result_cache = ResultCache(result_cache)
        self.config, self.calibration, self.span_calibration = settled(
            calibration, config, settings
        )
        self.engine = Engine(self.config)
        # Settings are checked before a model is loaded.
        self.instruct = False
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise ValueError("a model name loads its tokenizer: leave `tokenizer` out")
            model, tokenizer = load_named(str(model))
        if is_host_model(model):
            tokenizer = tokenizer or model.tokenizer
            if self.config.stop is None:
                stops = model.generation_parameters.stop_strings or ()
                self.config = self.config.replace(stop=stops)
            self.instruct = bool(getattr(model, "instruct", False))
            model = causal_model(model)
        model = plain_model(model)
        structure_of(model)  # raises if heads cannot be masked
        if not hasattr(model, "generation_config"):
            raise TypeError(
                "expected a decoder-only model, as AutoModelForCausalLM loads it, got "
                f"{type(model).__name__}"
            )
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            raise ValueError(
                "expected the model's tokenizer, as in score(model, prompt, answer, "
                f"tokenizer=tokenizer), got {tokenizer!r:.60}"
            )
        if self.instruct and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "instruct=True puts each prompt into a chat, but the tokenizer has no chat "
                "template: load the model with instruct=False"
            )
        self.tokenizer_warnings = check_tokenizer(model, tokenizer)
        if self.config.special_tokens == "plain":
            tokenizer = cast("PreTrainedTokenizerBase", PlainTokenizer(tokenizer))
        self.model, self.tokenizer = model, tokenizer
        self.stop = list(self.config.stop or ())
        self._keys = ModelKeys()
        self.stop_conditions = StopConditions(model, tokenizer, self.stop)
        self.generation = Generation(model, tokenizer, self.stop_conditions)

    @cached_property
    def stream_engine(self) -> Engine:
        """Engine of `stream`."""
        return Engine(self.config.replace(**STREAMED))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a score depends on, except prompt, answer and samples."""
        calibrations = (self.calibration, self.span_calibration)
        return {
            "model": self.model.config.name_or_path,
            "dtype": str(self.model.dtype),
            "calibration": [run.identity for run in calibrations if run] or None,
            "instruct": self.instruct,
            "end_tokens": sorted(self.stop_conditions.end_ids),
            "end_of_texts": "likeliest",
            **self.config.to_dict(),
            "attention": self.config.attention or attention_of(self.model),
            "memory_budget": None,  # does not change scores
        }

    def score_answer(
        self,
        prompt: Prompt,
        answer: Answer | None,
        samples: Sequence[Answer] | None,
        prefix_cache: PrefixCache,
    ) -> Score:
        """`score`, with the keys and values of the row before."""
        prompt, target, notes = parse_request(self.as_messages(prompt), answer, samples)
        notes += self.notes_of(prompt, target, samples)
        prompt_ids = prompt_tokens(self.tokenizer, prompt)
        with restored_config(self.model):
            ids, draft, differences = self._answer(prompt, prompt_ids, target, prefix_cache)
            stats = self.engine.score(self.model, prompt_ids, ids, prefix_cache, draft)
            gate = self.gate_of(prompt, prompt_ids, samples)
        query = Query(prompt, target, notes + differences, prompt_ids, answer, samples)
        return self.result(query, stats, gate)

    def notes_of(
        self, prompt: Prompt, answer: Answer | None, samples: Sequence[Answer] | None = None
    ) -> tuple[str, ...]:
        """Warnings about special tokens in the texts of a request, and about rendered chats."""
        if self.config.special_tokens == "plain":
            return ()
        ends = self.stop_conditions.end_ids
        notes = special_warnings(self._special_tokens, ends, prompt, answer, samples)
        return (*notes, *rendered_warnings(self._special_tokens, prompt))

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    def as_messages(self, prompt: Prompt) -> Prompt:
        """A text prompt as a user message for instruction-tuned host models, as LM-Polygraph."""
        if self.instruct and isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return prompt

    def batch_key(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Key of a batch of rows in the result cache; empty without one.

        Weights that cannot be read switch the cache off, with a warning.
        """
        if not self.result_cache.kept:
            return {}
        try:
            model_key = self._keys.of(self.model, model_state(self.model))
        except TypeError as error:
            log.warning("Scoring without a result cache: %s", error)
            self.result_cache = ResultCache(None)
            return {}
        return model_key | {
            "tokenizer": self._tokenizer_fingerprint,
            "scorer": self.identity,
            "batch": json.dumps(rows, default=_described),
        }

    def result(
        self,
        query: Query,
        stats: AnswerStatistics,
        gate_and_diversity: tuple[float, float | None, int],
    ) -> Score:
        """The `Score` from the engine's statistics."""
        prompt, target, notes, prompt_ids, answer, samples = query
        gate, diversity, responses = gate_and_diversity
        ids = stats.tokens.tolist()
        text, offsets = spans(self.tokenizer, prompt_ids.tolist(), ids)
        closed = self.stop_conditions.closes(ids)
        counted = slice(
            None, -1 if closed and not self.config.closing_token and len(ids) > 1 else None
        )
        tokens = tokens_of(stats, text, offsets, gate, self.tokenizer)
        settings = stats.settings.to_dict()
        content = self.stop_conditions.without(text, offsets, ids)
        warnings = [*notes, *self.tokenizer_warnings]
        if isinstance(prompt, str) and not prompt.strip():
            warnings.append("The prompt is blank: the answer depends on no question.")
        if isinstance(prompt, str) and (
            warning := prompt_warning(self.tokenizer, prompt_ids.tolist())
        ):
            warnings.append(warning)
        if target is None and not closed:
            stop = "" if self.stop else ", or pass a `stop` such as '\\n'"
            warnings.append(
                f"The model's answer was cut off after {len(ids)} tokens without an end: increase "
                f"max_new_tokens{stop}."
            )
        elif target is not None and (
            warning := repeated_prompt(prompt, prompt_ids.tolist(), target, ids)
        ):
            warnings.append(warning)
        if isinstance(target, str):
            if not text.startswith(target):
                warnings.append(
                    f"The tokenizer decodes the answer as {text!r}: offsets refer to that text."
                )
            if isinstance(prompt, str) and (
                warning := border_warning(self.tokenizer, prompt, target)
            ):
                warnings.append(warning)
            if warning := stop_warning(target, self.stop):
                warnings.append(warning)
        if samples is not None and self.config.method != "adapt":
            warnings.append(
                f'Samples are used by the method "adapt" only; "{self.config.method}" ignores them.'
            )
        if self.config.method == "adapt" and responses < 2:
            warnings.append(
                "Fewer than two sampled answers are non-empty: no semantic discount (alpha near 0)."
            )
        return Score(
            score=aggregate([token.u for token in tokens[counted]], self.config.aggregation),
            prompt=prompt if isinstance(prompt, str) else [dict(m) for m in prompt],
            answer=content if target is None else target if isinstance(target, str) else list(ids),
            scored_text=text,
            tokens=tuple(tokens),
            counted=len(tokens[counted]),
            msp=-float(np.sum(stats.log_likelihood[counted])),
            diversity=diversity,
            gate=gate if self.config.method == "adapt" else None,
            settings={
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in (settings | self._score_settings(answer, samples)).items()
            },
            model=str(self.model.config.name_or_path or ""),
            seconds=stats.seconds,
            warnings=tuple(warnings),
            calibration=self.calibration,
            content_end=len(content),
            ending=text[len(content) :],
            answered=bool(content.strip()),
            prompt_tokens=len(prompt_ids),
            span_calibration=self.span_calibration,
        )

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the current weights, and of tokenizer and chat template.

        Reads all weights on first use, and again if they change.

        Raises:
            ValueError: the model has foreign hooks, which cannot be hashed.
        """
        weights = self._keys.of(self.model, model_state(self.model))["model"]
        if weights is None:
            raise ValueError(
                "the model has forward hooks or a replaced forward method, so a calibration "
                "cannot identify it. Remove them"
            )
        return {"weights": weights[:16], "tokenizer": self._tokenizer_fingerprint}

    @cached_property
    def _tokenizer_key(self) -> str:
        """Hash of the tokenizer; cached, since it reads the whole vocabulary."""
        return tokenizer_key(self.tokenizer)["tokenizer"]

    @property
    def _tokenizer_fingerprint(self) -> str:
        template = str(getattr(self.tokenizer, "chat_template", None))
        described = f"{self._tokenizer_key} {template}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _score_settings(
        self, answer: Answer | None, samples: Sequence[Answer] | None
    ) -> dict[str, Any]:
        """Settings of this score besides those of the masks."""
        settings = self.config.besides_masks()
        settings["attention_in_use"] = self.config.attention or attention_of(self.model)
        if self.config.method == "adapt":
            settings["samples"] = "generated" if samples is None else "passed"
        if self.calibration is not None and "weights" in self.calibration.settings:
            settings |= self.fingerprints()
        elif self.result_cache.kept:  # which has hashed the weights
            with suppress(ValueError, TypeError):
                settings |= self.fingerprints()
        if not (answer is None or isinstance(answer, str)):  # token ids are scored unchanged
            del settings["stop"]
        else:
            settings["stop"] = list(self.stop)
        if samples is not None and "num_samples" in settings:
            settings["num_samples"] = len(samples)
        return settings

    def _answer(
        self,
        prompt: Prompt,
        prompt_ids: Int[Tensor, " P"],
        answer: Answer | None,
        prefix_cache: PrefixCache,
    ) -> EndedAnswer:
        if answer is None:
            return EndedAnswer(
                self.generation.greedy(
                    prompt_ids, self.config.max_new_tokens, [self.engine], prefix_cache
                )
            )
        if not isinstance(answer, str):
            return EndedAnswer(token_ids(answer))
        limit = self.config.max_new_tokens
        return TextAnswer(
            self.engine, self.generation, prompt, prompt_ids, answer, limit, prefix_cache
        ).ended()

    def gate_of(
        self,
        prompt: Prompt,
        prompt_ids: Int[Tensor, " P"],
        samples: Sequence[Answer] | None,
    ) -> tuple[float, float | None, int]:
        """alpha(x) (0 for ASMI, 1 for Sem-ASMI), div(x), and the number of sampled responses."""
        if self.config.method != "adapt":
            return float(self.config.method == "sem"), None, 0
        if samples is None:
            sampled = self.generation.sampled(
                prompt_ids, self.config.max_new_tokens, self.config.num_samples, self.config.seed
            )
        else:
            sampled = [
                answer_tokens(self.tokenizer, prompt, sample)
                if isinstance(sample, str)
                else token_ids(sample)
                for sample in samples
            ]
        config = self.config
        responses = self.stop_conditions.embedded(sampled, config.gate_token, config.max_new_tokens)
        (diversity,) = diversity_of(self.model, prompt_ids, responses, attention=config.attention)
        return (
            adaptive_gate(diversity, self.config.tau, self.config.beta),
            diversity,
            len(responses),
        )


def _described(value: Any) -> Any:
    """A value of a row, for JSON, with its type."""
    listed = value.tolist() if hasattr(value, "tolist") else str(value)
    return {type(value).__name__: listed}
