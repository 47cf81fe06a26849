"""`Scorer` prepares a model once and scores many answers; `score` does both for one answer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.analysis.features import free_features
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.engine import Engine, diversity_of
from lm_polygraph_asmi.core.identity import model_key, tokenizer_key
from lm_polygraph_asmi.core.model import plain_model, scoring_session, structure_of
from lm_polygraph_asmi.core.scores import aggregate, discount
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.host.model import causal_model, is_host_model
from lm_polygraph_asmi.host.prompts import rendered
from lm_polygraph_asmi.host.releases import warn_of_untested
from lm_polygraph_asmi.host.special_tokens import SpecialTokens
from lm_polygraph_asmi.host.stopping import UNFINISHED, StopConditions
from lm_polygraph_asmi.inputs import TEMPLATE, Answer, Prompt, Request, as_chat, parse_request
from lm_polygraph_asmi.scoring.advice import (
    answer_warnings,
    border_warnings,
    special_warnings,
    template_warnings,
)
from lm_polygraph_asmi.scoring.generation import TEMPERATURE, Generation
from lm_polygraph_asmi.scoring.own_tokenizer import (
    check_tokenizer,
    found_of,
    unchanged,
    unshared,
)
from lm_polygraph_asmi.scoring.provenance import HASHES, names_that_count, short_hash
from lm_polygraph_asmi.scoring.result import Score, ScoredAnswer, UnmaskedAnswer, tokens_of
from lm_polygraph_asmi.scoring.rows import Outcome, outcomes
from lm_polygraph_asmi.scoring.signals import unmasked_signals
from lm_polygraph_asmi.scoring.text import (
    answer_tokens,
    decoded,
    possible_answers,
    prompt_tokens,
    spans,
)

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


class Scorer:
    """A model prepared to score many answers.

    Arguments and errors are those of `score`. `gguf_file`, `dtype` and `device_map` apply only to a
    model that is loaded by its name. The self-check, which compares masked passes with full forward
    passes, runs once.

    Example:
        >>> scorer = Scorer("smollm2", scope="response")
        >>> for answer in (" Edda Holm", " Brask"):
        ...     result = scorer.score(prompt, answer)
        ...     assert 0 <= result.score <= result.highest  # nats
    """

    result_type: ClassVar[type] = Score

    def __init__(
        self,
        model: "PreTrainedModel | Model | str | Path",
        config: ASMIConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        gguf_file: str | None = None,
        dtype: str = "auto",
        device_map: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = (config or ASMIConfig()).replace(**settings)  # fails before a model is loaded
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise ValueError("a model name loads its tokenizer: leave `tokenizer` out")
            model, tokenizer = load_named(str(model), gguf_file, dtype, device_map)
        elif (gguf_file, dtype, device_map) != (None, "auto", None):
            raise ValueError(
                "gguf_file, dtype and device_map apply only to a model that is loaded by its name. "
                f"Got a loaded {type(model).__name__}: leave them out"
            )
        self._instruct = False
        if is_host_model(model):
            tokenizer = tokenizer or model.tokenizer
            if self.config.stop is None:
                stops = model.generation_parameters.stop_strings or ()
                self.config = self.config.replace(stop=stops)
            self._instruct = bool(getattr(model, "instruct", False))
            model = causal_model(model)
        self.model = plain_model(model)
        structure_of(self.model, self.config.structure)  # raises if heads cannot be masked
        warn_of_untested()
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            raise ValueError(
                "expected the model's tokenizer, as in score(model, prompt, answer, "
                f"tokenizer=tokenizer), got {tokenizer!r:.60}"
            )
        check_tokenizer(self.model, tokenizer)
        self.tokenizer = tokenizer
        self._engine = Engine(self.config)
        self._conditions = StopConditions(self.model, self.tokenizer, self.config.stop)
        self._generation = Generation(self.model, self._conditions)

    def score(
        self,
        prompt: Prompt,
        answer: Answer | None = None,
        samples: Sequence[Answer] | None = None,
        **template: Any,
    ) -> Score:
        """Score one answer; see `lm_polygraph_asmi.score`."""
        request, config = parse_request(prompt, answer, samples, **template), self.config
        # One session, in which the model's state is read once.
        with scoring_session(self.model), unchanged(self.tokenizer):
            request, prompt_ids, answers = self._prepare(request)
            (stats,) = self._engine.score(self.model, prompt_ids, *answers)
            request, alpha, diversity = self._discount_of(request, prompt_ids)
            scored, offsets = self._scored_answer(
                request, prompt_ids, stats.tokens.tolist(), stats.likeliest
            )
            tokens = tokens_of(stats, scored.scored_text, offsets, alpha, self.tokenizer)
        return Score(
            score=aggregate([t.u for t in tokens[: scored.counted]], config.aggregation),
            tokens=tuple(tokens),
            msp=-float(np.sum(stats.log_likelihood[: scored.counted])),
            diversity=diversity,
            gate=alpha if config.method == "adapt" else None,
            seconds=stats.unmasked_seconds + stats.masked_seconds,
            **vars(scored),
        )

    def score_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Score rows as they arrive, and yield an `Outcome` for each. None is kept in memory.

        Args:
            rows: each row is a text; a mapping with `prompt`, and optionally `answer` and
                `samples`; or a `Row` of a file.
            on_error: with "return", a row that cannot be scored yields an outcome with its error;
                with "raise", the error is raised.
            id_field: name of the field that holds a row's id.

        Example:
            >>> rows = [{"id": "q1", "prompt": prompt, "answer": " Edda Holm"}, {"id": "q2"}]
            >>> for outcome in scorer.score_many(rows):
            ...     print(outcome.id, outcome.result is not None, outcome.error)
            q1 True None
            q2 False expected a text, or an object with a "prompt", got the fields id
        """
        return outcomes(self.score, rows, on_error, id_field)

    def read(
        self,
        prompt: Prompt,
        answer: Answer | None = None,
        states: bool = False,
        **template: Any,
    ) -> UnmaskedAnswer:
        """Read an answer with the unmasked model only, which costs one forward pass.

        Other arguments and errors are those of `score`.

        Args:
            states: whether to fill `features`, too, for which the hidden states must be read.

        Example:
            >>> scorer.read(prompt, " Edda Holm").answered
            True
        """
        request = parse_request(prompt, answer, **template)
        # One session, in which the model's state is read once.
        with scoring_session(self.model), unchanged(self.tokenizer):
            request, prompt_ids, answers = self._prepare(request)
            stats = self._engine.read(self.model, prompt_ids, *answers)
            ids, likeliest = stats.pop("tokens").tolist(), stats.pop("likeliest")
            read, _ = self._scored_answer(request, prompt_ids, ids, likeliest)
        tokens = {name: values[: read.counted] for name, values in stats.items()}
        hidden, features = tokens.pop("hidden"), {}
        if states:
            features = {
                "free": free_features(**tokens, prompt_tokens=len(prompt_ids)),
                "hidden mean": hidden.mean(0),
                "hidden last": hidden[-1],
            }
        return UnmaskedAnswer(signals=unmasked_signals(**tokens), features=features, **vars(read))

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the weights, and of the tokenizer with its chat template and end tokens.

        The first call reads all weights. Later calls read them again only if they have changed.
        Raises ValueError: the model has forward hooks or a replaced forward method, so its weights
        alone do not determine its outputs.
        """
        weights = model_key(self.model)["revision"]
        if weights is None:
            raise ValueError(
                "the model has forward hooks or a replaced forward method, so a calibration cannot "
                "identify it. Remove them"
            )
        key = found_of(tokenizer_key, self.tokenizer)
        template = getattr(self.tokenizer, "chat_template", None)
        ends = sorted(self._conditions.end_ids)
        return {
            "weights": weights[:16],
            "tokenizer": short_hash(f"{key} {template} {ends}"),
        }

    def known_fingerprints(self) -> dict[str, str]:
        """`fingerprints`, or an empty dictionary for a model that cannot be identified."""
        with suppress(ValueError, TypeError):
            return self.fingerprints()
        return {}

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """How a row that `score_file` wrote ("there") differs from this scorer ("here")."""
        if self._instruct and isinstance(row["prompt"], str):
            return ["the prompt is a text there, a chat here"]
        settings = self._settings(Request("")) | self.known_fingerprints()
        names = ("layer", "attention_in_use", *HASHES)
        here, there = (
            ASMIConfig.key_of(each) | {name: each.get(name) for name in names}
            for each in (settings, row["settings"])
        )
        if names_that_count(there, here):
            here["model"], there["model"] = str(self.model.config.name_or_path or ""), row["model"]
        return [
            f"{name} {value!r} there, {here.get(name)!r} here"
            for name, value in there.items()
            if value != here.get(name)
        ]

    def _prepare(self, request: Request) -> tuple[Request, Int[Tensor, " P"], list[list[int]]]:
        """Prepare a request: add its warnings, and find the token ids of prompt and answer.

        An answer that is text has several lists of token ids, one for each way in which it may end
        (`possible_answers`). If there is no answer, the model generates one.
        """
        conditions, tokenizer = self._conditions, unshared(self.tokenizer)
        if self._instruct and isinstance(request.prompt, str):  # as LM-Polygraph does
            request = request._replace(prompt=as_chat(request.prompt))
        prompt, answer = request.prompt, request.answer
        written = rendered(tokenizer, prompt, request.template)
        prompt_ids = prompt_tokens(tokenizer, prompt, written)
        special = found_of(SpecialTokens, self.tokenizer)
        notes = [
            *request.notes,
            *template_warnings(tokenizer, request, written),
            *special_warnings(special, conditions.end_ids, request, written),
        ]
        if answer is None:
            answers = [self._generation.greedy(prompt_ids, self.config.max_new_tokens)]
        elif isinstance(answer, str):
            before = prompt_ids.tolist()
            answers, follows = possible_answers(tokenizer, conditions, prompt, before, answer)
            notes += border_warnings(prompt, answer, follows)
        else:
            answers = [list(answer)]
        if not answers[0]:
            raise ValueError(
                "the answer is empty, and the model has no end token to score: pass an answer, "
                "or set `stop`"
            )
        return request._replace(notes=tuple(notes)), prompt_ids, answers

    def _scored_answer(
        self,
        request: Request,
        prompt_ids: Int[Tensor, " P"],
        ids: Sequence[int],
        likeliest: Int[np.ndarray, " T"] | None,
    ) -> tuple[ScoredAnswer, list[tuple[int, int]]]:
        """The scored answer with the tokens `ids`, and the characters (start, end) of each token.

        `likeliest`: the model's most likely token at each position; None if unknown.
        """
        prompt, answer, before = request.prompt, request.answer, prompt_ids.tolist()
        text, offsets = spans(self.tokenizer, before, ids)
        content = self._conditions.without(text, offsets, ids)
        notes = [*request.notes, *answer_warnings(self._conditions, request, before, ids, text)]
        if isinstance(answer, str) and likeliest is not None:
            notes += self._warn_of_other_tokens(prompt_ids, ids, likeliest.tolist(), content)
        if answer is None:
            answer = content
        scored = ScoredAnswer(
            prompt=prompt if isinstance(prompt, str) else [dict(m) for m in prompt],
            answer=answer if isinstance(answer, str) else list(ids),
            scored_text=text,
            ids=tuple(ids),
            counted=self.config.counted(len(ids), self._conditions.closes(ids)),
            settings=self._settings(request),
            model=str(self.model.config.name_or_path or ""),
            warnings=tuple(notes),
            content_end=len(content),
            ending=text[len(content) :],
            answered=bool(content.strip()),
            prompt_tokens=len(before),
        )
        return scored, offsets

    def _warn_of_other_tokens(
        self, prompt_ids: Tensor, ids: Sequence[int], likeliest: Sequence[int], content: str
    ) -> list[str]:
        """Warn if the model itself would write the same answer in other tokens, with another score.

        At the first position where the model's most likely token is not the scored one, the model
        leaves the scored tokens. Its token there must be the beginning of the remaining text, or of
        an end after it; otherwise the model writes another text. If it fits, the model continues
        greedily from there, and the two texts are compared.
        """
        differ = (n for n, pair in enumerate(zip(ids, likeliest, strict=True)) if len({*pair}) > 1)
        first = next(differ, len(ids))
        if first == len(ids):
            return []
        conditions, before, start = self._conditions, prompt_ids.tolist(), list(ids[:first])
        begins = decoded(self.tokenizer, before, [*start, likeliest[first]])[1].rstrip(UNFINISHED)
        beyond = begins.removeprefix(content)  # the beginning of a stop string, or more text
        ends = conditions.closes([*start, likeliest[first]]) or any(
            stop.startswith(beyond) for stop in conditions.stop_strings
        )
        if not (content.startswith(begins) or (begins.startswith(content) and ends)):
            return []
        # At most one token for each remaining byte, and one for the end.
        bytes_left = len(content.encode()) - len(decoded(self.tokenizer, before, start)[1].encode())
        longest_stop = max((len(stop.encode()) for stop in conditions.stop_strings), default=0)
        limit = max(1, min(bytes_left + longest_stop + 1, self.config.max_new_tokens - first))
        more = self._generation.greedy(torch.cat([prompt_ids, prompt_ids.new_tensor(start)]), limit)
        # A stop string may begin in `start`, so look for the end in all tokens.
        generated = conditions.response([*start, *more], batch_size=2)
        text, offsets = spans(self.tokenizer, before, generated)
        if conditions.without(text, offsets, generated) != content:
            return []
        written, given = (self.tokenizer.decode([tokens[first]]) for tokens in (generated, ids))
        return [
            f"The model itself writes this answer in other tokens: {written!r} where the tokenizer "
            f"writes {given!r}, at character {offsets[first][0]}. The score is that of the "
            "tokenizer's tokens. To score the model's own, pass the token ids that it generated."
        ]

    def _settings(self, request: Request) -> dict[str, Any]:
        """The settings that a scored answer records, with values derived from the model."""
        answer, samples = request.answer, request.samples
        settings = self._engine.settings(self.model).to_dict() | self.config.besides_masks()
        settings["stop"] = list(self.config.stop or ())
        settings["attention_in_use"] = settings["attention"]
        if not (answer is None or isinstance(answer, str)):  # token ids are scored unchanged
            del settings["stop"]
        if request.template:
            settings["template"] = dict(request.template)
        if self.config.method == "adapt" and samples is None:
            settings |= {"samples": "drawn", "temperature": TEMPERATURE}
        elif self.config.method == "adapt":
            settings |= {"samples": "passed", "num_samples": len(samples or ())}
        return settings

    def _discount_of(
        self, request: Request, prompt_ids: Int[Tensor, " P"]
    ) -> tuple[Request, float, float | None]:
        """The request, alpha and div(x).

        Alpha is the weight of the semantic discount: 0 for ASMI, 1 for Sem-ASMI. div(x) is None
        unless the method is Adapt-ASMI. If there are too few samples, the request gets a warning.
        """
        config, samples = self.config, request.samples
        if config.method != "adapt":
            return request, discount(config), None
        if samples is None:
            sampled = self._generation.sampled(
                prompt_ids, config.max_new_tokens, config.num_samples, config.seed
            )
        else:
            tokenizer, before = unshared(self.tokenizer), prompt_ids.tolist()
            sampled = [
                answer_tokens(tokenizer, request.prompt, before, sample)[0]
                if isinstance(sample, str)
                else list(sample)
                for sample in samples
            ]
        responses = self._conditions.embedded(sampled, config.gate_token, config.max_new_tokens)
        (diversity,) = diversity_of(
            self.model,
            prompt_ids,
            responses,
            attention=config.attention,
            structure=config.structure,
        )
        if len(responses) < 2:
            request = request._replace(
                notes=(
                    *request.notes,
                    "Fewer than two sampled answers are non-empty: no semantic discount (alpha "
                    "near 0).",
                )
            )
        return request, discount(config, diversity), diversity


def score(
    model: "PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    answer: Answer | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    samples: Sequence[Answer] | None = None,
    **settings: Any,
) -> Score:
    """Score how fragile an answer is under random attention-head masking.

    A benchmark run with the same token ids and settings gives the same score. To score many rows,
    use `Scorer.score_many` or `score_file`.

    Args:
        model: decoder-only transformers model, LM-Polygraph `WhiteboxModel`, or a local path, hub
            ID or "smollm2" (loaded on CPU). Its state is restored.
        prompt: a text, or chat messages for the chat template. If the last message is the
            assistant's, it is the answer.
        answer: a text with its leading space, or token ids. To a text, the most probable of the end
            tokens and stop strings is added; token ids are scored unchanged. None: the model's
            greedy answer.
        tokenizer: required with a transformers model; not allowed with a model's name.
        config: the settings.
        **settings: fields of `ASMIConfig`, which override `config`; other arguments of `Scorer`;
            and variables of the chat template (`tools`, `documents`, `chat_template_kwargs`).
        samples: sampled answers, for method "adapt" only. None: they are drawn as in a benchmark
            run at temperature 0.5, and depend only on the prompt and `seed`.

    Source: the paper's Sem-ASMI by default; `method` selects ASMI or Adapt-ASMI.

    Example:
        >>> prompt = "The ferry was built by Edda Holm. Question: Who built it? Answer:"
        >>> result = score("smollm2", prompt, " Edda Holm")
        >>> 0 <= result.score <= result.highest  # nats, 0 to ln S, higher = more fragile
        True
    """
    template = {name: settings.pop(name) for name in TEMPLATE if name in settings}
    parse_request(prompt, answer, samples, **template)  # raises before a model is loaded
    scorer = Scorer(model, config, tokenizer=tokenizer, **settings)
    return scorer.score(prompt, answer, samples, **template)
