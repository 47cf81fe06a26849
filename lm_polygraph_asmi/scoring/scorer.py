"""`Scorer`: a model prepared to score many answers."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
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

from lm_polygraph_asmi.algorithm import sequence_uncertainty
from lm_polygraph_asmi.analysis.features import free_features
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.host.model import causal_model, is_host_model
from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.host.stopping import StopConditions
from lm_polygraph_asmi.maths import adaptive_gate
from lm_polygraph_asmi.model import (
    attention_of,
    name_modules,
    plain_model,
    scoring_session,
    structure_of,
)
from lm_polygraph_asmi.results.cache import ResultCache, model_key, tokenizer_key
from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
from lm_polygraph_asmi.scoring.control_tokens import (
    rendered_warnings,
    special_warnings,
    template_warnings,
)
from lm_polygraph_asmi.scoring.ending import with_ends
from lm_polygraph_asmi.scoring.engine import Engine, diversity_of
from lm_polygraph_asmi.scoring.generation import Generation, restored_config
from lm_polygraph_asmi.scoring.many import FIELDS, OUTPUT, Outcome, one_by_one, run_batch
from lm_polygraph_asmi.scoring.own_tokenizer import check_tokenizer
from lm_polygraph_asmi.scoring.result import DERIVED, Score
from lm_polygraph_asmi.scoring.signals import unmasked_signals
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics
from lm_polygraph_asmi.scoring.text import (
    Answer,
    Prompt,
    Request,
    answer_tokens,
    border_warning,
    parse_request,
    prompt_tokens,
    prompt_warning,
    repeated_end,
    repeated_prompt,
    row_request,
    spans,
    stop_warning,
    token_ids,
    unknown_warning,
)
from lm_polygraph_asmi.scoring.tokens import tokens_of
from lm_polygraph_asmi.validation import check_one_of

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model

log = logging.getLogger("lm_polygraph")


def _usable_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, instruct: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer; raises unless the model can generate with it, if `instruct` from a chat."""
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
    if instruct and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "instruct=True puts each prompt into a chat, but the tokenizer has no chat "
            "template: load the model with instruct=False"
        )
    return tokenizer


class Scorer:
    """A model prepared to score many answers.

    The self-check (masked passes against full forward passes) runs once.

    Args:
        model, config, tokenizer: as for `score`.
        result_cache: folder in which `score_batch` and files of rows store each finished batch, so
            that a killed run resumes with the same scores; None: no cache.
        gguf_file, dtype, device_map: of a model passed by name, as for `host.loading.load_named`.
        **settings: as for `score`.

    Raises:
        OSError, TypeError, ValueError: as `score`, except errors of an answer; options of loading
            with a loaded model.

    Example:
        >>> scorer = Scorer("smollm2", scope="response")
        >>> for answer in (" Edda Holm", " Brask"):
        ...     result = scorer.score(prompt, answer)
        ...     assert 0 <= result.score <= result.highest  # nats
    """

    columns = OUTPUT
    fields = frozenset({*(field.name for field in fields(Score)), *DERIVED})

    def __init__(
        self,
        model: "PreTrainedModel | Model | str | Path",
        config: ASMIConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        result_cache: str | Path | None = None,
        gguf_file: str | None = None,
        dtype: str = "auto",
        device_map: str | None = None,
        **settings: Any,
    ) -> None:
        self.result_cache = ResultCache(result_cache)
        if "calibration" in settings:
            raise TypeError(
                "a score needs no calibration: decide(model, prompt, answer, calibration=...) or a "
                "Decider says what one tells of an answer"
            )
        self.config = (config or ASMIConfig()).replace(**settings)
        self.engine = Engine(self.config)
        # Settings are checked before a model is loaded.
        self.instruct = False
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise ValueError("a model name loads its tokenizer: leave `tokenizer` out")
            model, tokenizer = load_named(str(model), gguf_file, dtype, device_map)
        elif (gguf_file, dtype, device_map) != (None, "auto", None):
            raise ValueError(
                "gguf_file, dtype and device_map load a model by its name, got a loaded "
                f"{type(model).__name__}: leave them out"
            )
        if is_host_model(model):
            tokenizer = tokenizer or model.tokenizer
            if self.config.stop is None:
                stops = model.generation_parameters.stop_strings or ()
                self.config = self.config.replace(stop=stops)
            self.instruct = bool(getattr(model, "instruct", False))
            model = causal_model(model, self.config.structure)
        model = plain_model(model)
        name_modules(model, self.config.structure)
        tokenizer = _usable_tokenizer(model, tokenizer, self.instruct)
        structure_of(model)  # raises if heads cannot be masked
        self.tokenizer_warnings = check_tokenizer(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.stop = list(self.config.stop or ())
        self.stop_conditions = StopConditions(model, tokenizer, self.stop)
        self.generation = Generation(model, tokenizer, self.stop_conditions)

    def score(
        self,
        prompt: Prompt,
        answer: Answer | None = None,
        samples: Sequence[Answer] | None = None,
    ) -> Score:
        """Score one answer; see `lm_polygraph_asmi.score`.

        Example:
            >>> scorer.score(prompt, " Edda Holm").answer
            ' Edda Holm'
        """
        return self.score_request(parse_request(prompt, answer, samples))

    def score_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Score rows one by one as they arrive; none is stored.

        Args:
            rows: texts, or mappings with `prompt` and optionally `answer` and `samples`, as for
                `score`. They are not changed.
            on_error: "return": a bad row gives an outcome with an error; "raise": it raises.
            id_field: name of the field with a row's id.

        Yields:
            An `Outcome` for each row, in order.

        Example:
            >>> rows = [{"id": "q1", "prompt": prompt, "answer": " Edda Holm"}, {"id": "q2"}]
            >>> for outcome in scorer.score_many(rows):
            ...     print(outcome.id, outcome.result is not None, outcome.error)
            q1 True None
            q2 False expected a text, or an object with a "prompt", got the fields id
        """
        check_one_of("on_error", on_error, ("return", "raise"))
        return one_by_one(self.score_request, rows, on_error, id_field)

    def run_batch(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
        """Outcomes of a batch of rows, from the result cache if it has the batch."""
        return run_batch(self.score_request, rows, self.result_cache, self.batch_key(rows))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a score depends on, except prompt, answer and samples."""
        return {
            "model": self.model.config.name_or_path,
            "dtype": str(self.model.dtype),
            "instruct": self.instruct,
            "end_tokens": sorted(self.stop_conditions.end_ids),
            "end_of_texts": "likeliest",
            **self.config.to_dict(),
            "attention": self.config.attention or attention_of(self.model),
            "memory_budget": None,  # does not change scores
        }

    def score_request(self, request: Request) -> Score:
        """`score` of a request."""
        request, prompt_ids = self.prepared(request)
        with restored_config(self.model):
            answer = self._answer(request, prompt_ids)
            (stats,) = self.engine.score(self.model, prompt_ids, *answer)
            gate = self.gate_of(request, prompt_ids)
        return self.result(request, prompt_ids, stats, gate)

    def read(self, prompt: Prompt, answer: Answer | None = None) -> UnmaskedAnswer:
        """An answer under the unmasked model alone, at the cost of one unmasked pass.

        Example:
            >>> scorer.read(prompt, " Edda Holm").answered
            True
        """
        return self.read_request(parse_request(prompt, answer))

    def read_request(self, request: Request, states: bool = False) -> UnmaskedAnswer:
        """`read` of a request.

        Args:
            states: also `features`, which need hidden states.

        Raises:
            ValueError: as `score`.
        """
        request, prompt_ids = self.prepared(request)
        # One session: the model's state is read once, which takes longer than a short answer's
        # last layer.
        with scoring_session(self.model), restored_config(self.model):
            stats = self.engine.read(self.model, prompt_ids, *self._answer(request, prompt_ids))
            settings = self.engine.settings(self.model).to_dict()
        ids = stats.pop("tokens").tolist()
        counted = self._counted(ids)
        described, _ = self._described(request, prompt_ids, ids, settings)
        tokens = {name: values[:counted] for name, values in stats.items()}
        hidden, features = tokens.pop("hidden"), {}
        if states:
            features = {
                "free": free_features(**tokens, prompt_tokens=len(prompt_ids)),
                "hidden mean": hidden.mean(0),
                "hidden last": hidden[-1],
            }
            described["settings"]["hidden_width"] = hidden.shape[1]
        return UnmaskedAnswer(
            signals=unmasked_signals(**tokens),
            ids=tuple(ids),
            counted=counted,
            features=features,
            **described,
        )

    def prepared(self, request: Request) -> tuple[Request, Int[Tensor, " P"]]:
        """The request as the model gets it, with warnings about its texts; the prompt's ids."""
        request = request._replace(prompt=self.as_messages(request.prompt))
        request = request.noted(self.notes_of(request))
        return request, prompt_tokens(self.tokenizer, request.prompt)

    def notes_of(self, request: Request) -> tuple[str, ...]:
        """Warnings about special tokens in the texts of a request, and about chat templates."""
        template = template_warnings(self._special_tokens, request.prompt)
        ends = self.stop_conditions.end_ids
        notes = special_warnings(
            self._special_tokens, ends, request.prompt, request.answer, request.samples
        )
        return (*template, *notes, *rendered_warnings(self._special_tokens, request.prompt))

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    def as_messages(self, prompt: Prompt) -> Prompt:
        """A text prompt as a user message for instruction-tuned host models, as LM-Polygraph."""
        if self.instruct and isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return prompt

    def batch_key(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Key of the scores of a batch of rows in the result cache; empty without one.

        Weights that cannot be read switch the cache off, with a warning.
        """
        if not self.result_cache.kept:
            return {}
        try:
            key = model_key(self.model)
        except TypeError as error:
            log.warning("Scoring without a result cache: %s", error)
            self.result_cache = ResultCache(None)
            return {}
        fields = [{name: row.get(name) for name in FIELDS} for row in rows]
        return key | {
            "tokenizer": self._tokenizer_fingerprint,
            "scorer": self.identity,
            "batch": json.dumps(fields, default=_described),
            "prompts": [self._prompt_ids(row) for row in rows],
        }

    def _prompt_ids(self, row: Mapping[str, Any]) -> list[int] | None:
        """Token ids of a row's prompt, which a template may make of the date; None: it has none."""
        with suppress(ValueError):
            prompt = self.as_messages(row_request(row).prompt)
            return cast("list[int]", prompt_tokens(self.tokenizer, prompt).tolist())
        return None

    def result(
        self,
        request: Request,
        prompt_ids: Int[Tensor, " P"],
        stats: AnswerStatistics,
        gate_and_diversity: tuple[float, float | None, int],
    ) -> Score:
        """The `Score` from the engine's statistics."""
        gate, diversity, responses = gate_and_diversity
        ids, adapt = stats.tokens.tolist(), self.config.method == "adapt"
        if request.samples is not None and not adapt:
            request = request.noted(
                ['Samples are used by the method "adapt" only; '
                 f'"{self.config.method}" ignores them.']
            )  # fmt: skip
        if adapt and responses < 2:
            request = request.noted(
                ["Fewer than two sampled answers are non-empty: no semantic discount (alpha near "
                 "0)."]
            )  # fmt: skip
        described, offsets = self._described(request, prompt_ids, ids, stats.settings.to_dict())
        tokens = tokens_of(stats, described["scored_text"], offsets, gate, self.tokenizer)
        counted = self._counted(ids)
        return Score(
            score=sequence_uncertainty([t.u for t in tokens[:counted]], self.config.aggregation),
            tokens=tuple(tokens),
            counted=counted,
            msp=-float(np.sum(stats.log_likelihood[:counted])),
            diversity=diversity,
            gate=gate if adapt else None,
            seconds=stats.unmasked_seconds + stats.masked_seconds,
            **described,
        )

    def _counted(self, ids: Sequence[int]) -> int:
        """Number of tokens, from the first, that count: all, or all but the closing one."""
        drops = not self.config.closing_token and len(ids) > 1 and self.stop_conditions.closes(ids)
        return len(ids) - drops

    def _described(
        self,
        request: Request,
        prompt_ids: Int[Tensor, " P"],
        ids: Sequence[int],
        settings: Mapping[str, Any],
    ) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """Texts, warnings and settings of an answer, and the characters of each token.

        Args:
            ids: tokens of the answer.
            settings: of the masks.
        """
        prompt, answer, _, notes = request
        text, offsets = spans(self.tokenizer, prompt_ids.tolist(), ids)
        content = self.stop_conditions.without(text, offsets, ids)
        warnings = [*notes, *self.tokenizer_warnings]
        if isinstance(prompt, str) and not prompt.strip():
            warnings.append("The prompt is blank: the answer depends on no question.")
        if isinstance(prompt, str) and (
            warning := prompt_warning(self.tokenizer, prompt_ids.tolist())
        ):
            warnings.append(warning)
        if warning := unknown_warning(self.tokenizer, prompt_ids.tolist()):
            warnings.append(warning)
        if answer is None and not self.stop_conditions.closes(ids):
            stop = "" if self.stop else ", or pass a `stop` such as '\\n'"
            warnings.append(
                f"The model's answer was cut off after {len(ids)} tokens without an end: increase "
                f"max_new_tokens{stop}."
            )
        elif answer is not None and (
            warning := repeated_prompt(prompt, prompt_ids.tolist(), answer, ids)
            or repeated_end(self.tokenizer, prompt_ids.tolist(), text)
        ):
            warnings.append(warning)
        if isinstance(answer, str):
            if not text.startswith(answer):
                warnings.append(
                    f"The tokenizer decodes the answer as {text!r}: offsets refer to that text."
                )
            if isinstance(prompt, str) and (
                warning := border_warning(self.tokenizer, prompt, answer)
            ):
                warnings.append(warning)
            if warning := stop_warning(answer, self.stop):
                warnings.append(warning)
        settings = {**settings, **self._score_settings(request)}
        return {
            "prompt": prompt if isinstance(prompt, str) else [dict(m) for m in prompt],
            "answer": content if answer is None
            else answer if isinstance(answer, str) else list(ids),
            "scored_text": text,
            "settings": {
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in settings.items()
            },
            "model": str(self.model.config.name_or_path or ""),
            "warnings": tuple(warnings),
            "content_end": len(content),
            "ending": text[len(content) :],
            "answered": bool(content.strip()),
            "prompt_tokens": len(prompt_ids),
        }, offsets  # fmt: skip

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the current weights; and of tokenizer, chat template and end tokens.

        Reads all weights on first use, and again if they change.

        Raises:
            ValueError: the model has foreign hooks, which cannot be hashed.
        """
        weights = model_key(self.model)["revision"]
        if weights is None:
            raise ValueError(
                "the model has forward hooks or a replaced forward method, so a calibration "
                "cannot identify it. Remove them"
            )
        return {"weights": weights[:16], "tokenizer": self._tokenizer_fingerprint}

    @cached_property
    def _tokenizer_key(self) -> str:
        """Hash of the tokenizer; cached, since it reads the whole vocabulary."""
        return tokenizer_key(self.tokenizer)

    @property
    def _tokenizer_fingerprint(self) -> str:
        template = str(getattr(self.tokenizer, "chat_template", None))
        ends = sorted(self.stop_conditions.end_ids)
        described = f"{self._tokenizer_key} {template} {ends}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _score_settings(self, request: Request) -> dict[str, Any]:
        """Settings of this score besides those of the masks."""
        answer, samples = request.answer, request.samples
        settings = self.config.besides_masks()
        settings["attention_in_use"] = self.config.attention or attention_of(self.model)
        if self.config.method == "adapt":
            settings["samples"] = "generated" if samples is None else "passed"
        if self.result_cache.kept:  # which has hashed the weights
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
        self, request: Request, prompt_ids: Int[Tensor, " P"]
    ) -> tuple[list[int], list[list[int]]]:
        """Token ids of the answer, and of the ends that one passed as text may have."""
        answer = request.answer
        if answer is None:
            return self.generation.greedy(prompt_ids, self.config.max_new_tokens), []
        if not isinstance(answer, str):
            return token_ids(answer), []
        conditions = self.stop_conditions
        return with_ends(self.tokenizer, conditions, request.prompt, prompt_ids, answer)

    def gate_of(
        self, request: Request, prompt_ids: Int[Tensor, " P"]
    ) -> tuple[float, float | None, int]:
        """alpha(x) (0 for ASMI, 1 for Sem-ASMI), div(x), and the number of sampled responses."""
        samples = request.samples
        if self.config.method != "adapt":
            return float(self.config.method == "sem"), None, 0
        if samples is None:
            sampled = self.generation.sampled(
                prompt_ids, self.config.max_new_tokens, self.config.num_samples, self.config.seed
            )
        else:
            sampled = [
                answer_tokens(self.tokenizer, request.prompt, sample)
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
