"""`score`: the masked passes of the benchmark, on one answer."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from lm_polygraph_asmi.config import SOURCES, ASMIConfig
from lm_polygraph_asmi.host.endings import Endings
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.host.model import causal_model, is_host_model
from lm_polygraph_asmi.maths import adaptive_gate, example_seed
from lm_polygraph_asmi.model import (
    Memory,
    model_lock,
    model_state,
    plain_model,
    scoring_session,
    states_seen,
    structure_of,
)
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layers import context_window
from lm_polygraph_asmi.saved.aggregation import aggregate
from lm_polygraph_asmi.saved.doses import with_dose
from lm_polygraph_asmi.saved.journal import ModelKeys, tokenizer_key
from lm_polygraph_asmi.saved.names import at_depth
from lm_polygraph_asmi.scoring.context import Passage, passages_of
from lm_polygraph_asmi.scoring.engine import Engine, Writing, diversity_of
from lm_polygraph_asmi.scoring.many import Outcome, outcome
from lm_polygraph_asmi.scoring.own_tokenizer import check_tokenizer
from lm_polygraph_asmi.scoring.reference import Given, settled
from lm_polygraph_asmi.scoring.result import Score, Token, sources_from, tokens_of, with_context
from lm_polygraph_asmi.scoring.text import (
    UNFINISHED,
    Answer,
    Prompt,
    answer_tokens,
    asked,
    behind_answer,
    border_warning,
    prompt_tokens,
    prompt_warning,
    repeated_prompt,
    spans,
    stop_warning,
    token_ids,
)
from lm_polygraph_asmi.validation import check_one_of

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


class _Query(NamedTuple):
    """What was asked to be scored."""

    prompt: Prompt
    said: Answer | None
    notes: tuple[str, ...]
    prompt_ids: Tensor
    answer: Answer | None = None
    samples: Sequence[Answer] | None = None


class Scorer:
    """A model made ready to score many answers; arguments as for `score`.

    The check that the model's layers can be replayed runs once.

    Raises:
        OSError, TypeError, ValueError: as `score`, but for what is wrong with an answer.

    Example:
        >>> scorer = Scorer("smollm2", scope="response")
        >>> for answer in (" Edda Holm", " Brask"):
        ...     found = scorer.score(prompt, answer)
        ...     assert 0 <= found.score <= found.highest  # nats
    """

    def __init__(
        self,
        model: "PreTrainedModel | Model | str | Path",
        config: ASMIConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: Given = None,
        **settings: Any,
    ) -> None:
        self._asked, self.reference, self.span_reference = settled(reference, config, settings)
        self.config = with_dose(self._asked)
        sourced = {"scope": "response", "source": "all", "perturbation": "heads", "dose": None}
        self.engine = Engine(self.config)
        self.by_source = Engine(self.config.replace(**sourced), sources=SOURCES)
        # So far nothing heavy: what is refused is refused at once.
        self.instruct = False
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise ValueError("a model given by name brings its tokenizer: leave it out")
            model, tokenizer = load_named(str(model))
        if is_host_model(model):
            tokenizer = tokenizer or model.tokenizer
            if self.config.stop is None:
                stops = model.generation_parameters.stop_strings or ()
                self.config = self.config.replace(stop=stops)
            self.instruct = bool(getattr(model, "instruct", False))
            model = causal_model(model)
        model = plain_model(model)
        structure_of(model)  # refuses what cannot be masked
        if not hasattr(model, "generation_config"):
            raise TypeError(
                f"{type(model).__name__} writes no answers: ASMI scores decoder-only models, as "
                "AutoModelForCausalLM loads them"
            )
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            got = "" if tokenizer is None else f", got {tokenizer!r:.60}"
            raise ValueError(
                f"a transformers model needs its tokenizer: score(model, prompt, answer, "
                f"tokenizer=tokenizer){got}"
            )
        self.model, self.tokenizer = model, tokenizer
        self.stop = list(self.config.stop or ())
        self._keys = ModelKeys()
        self._tokenizer_key: str | None = None
        self.notes = check_tokenizer(model, tokenizer)
        self.endings = Endings(model, tokenizer, self.stop)

    @cached_property
    def while_written(self) -> Engine:
        """Scores an answer that is not there yet; made when it is wanted, since a dose matched in
        another scope is refused."""
        return Engine(self._asked.replace(scope="response", seeded_by="prompt", source="all"))

    @property
    def identity(self) -> dict[str, Any]:
        """All that a score depends on but prompt, answer and samples."""
        references = (self.reference, self.span_reference)
        return {
            "model": self.model.config.name_or_path,
            "dtype": str(self.model.dtype),
            "reference": [run.identity for run in references if run] or None,
            **self.config.to_dict(),
            "memory_budget": None,  # of no matter
        }

    def score(
        self,
        prompt: Prompt,
        answer: Answer | None = None,
        samples: Sequence[Answer] | None = None,
        context: Any = None,
    ) -> Score:
        """Score one answer; see `lm_polygraph_asmi.score`.

        Example:
            >>> scorer.score(prompt, " Edda Holm").answer
            ' Edda Holm'
        """
        return self._score(prompt, answer, samples, context, Memory())

    def _score(
        self,
        prompt: Prompt,
        answer: Answer | None,
        samples: Sequence[Answer] | None,
        context: Any,
        memory: Memory,
    ) -> Score:
        """`score`, over what is known of the row before."""
        given = self._given(prompt)
        before, said, notes = asked(given, answer)
        prompt_ids = prompt_tokens(self.tokenizer, before)
        passages = None
        if context is not None:
            passages = passages_of(self.tokenizer, given, before, prompt_ids.tolist(), context)
        elif self.config.source != "all":
            raise ValueError(
                f"source {self.config.source!r} needs to know the context: give context="
            )
        with _undisturbed(self.model):
            ids = self._answer(before, prompt_ids, said, memory)
            stats, sourced = self._stats(prompt_ids, ids, passages, memory)
            gate = self._gate(before, prompt_ids, samples)
        query = _Query(before, said, notes, prompt_ids, answer, samples)
        return self._result(query, ids, stats, gate, passages, sourced, self.config.source)

    def _given(self, prompt: Prompt) -> Prompt:
        if self.instruct and isinstance(prompt, str):  # as LM-Polygraph does
            return [{"role": "user", "content": prompt}]
        return prompt

    def stream(self, prompt: Prompt) -> "Stream":
        """Score the model's own answer while it is written; see `lm_polygraph_asmi.stream`.

        Whatever the scorer's own settings, this is the scope "response", with masks that follow
        from the prompt alone.

        Example:
            >>> with scorer.stream(prompt) as tokens:
            ...     first = next(tokens)
            >>> tokens.result.tokens == (first,)
            True
        """
        return Stream(self, prompt)

    def score_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Score rows as they come, one after the other; none is kept.

        In the scope "response" the tokens that a row has in common with the one before, from the
        first on, are not run again: put questions on one passage, and answers to one prompt, next
        to each other. Scores differ from those of single calls by rounding alone.

        Args:
            rows: texts, or mappings with `prompt` and, if wanted, `answer`, `samples`, `context`
                and `offsets`, as `score` and `Score.with_spans` take them. They are not changed.
            on_error: "return" has a bad row be an outcome with an error; "raise" stops at it.
            id_field: name of the field that holds a row's own id.

        Yields:
            An `Outcome` for each row, in order.

        Example:
            >>> rows = [{"id": "q1", "prompt": prompt, "answer": " Edda Holm"}, {"id": "q2"}]
            >>> for outcome in scorer.score_many(rows):
            ...     print(outcome.id, outcome.score is not None, outcome.error)
            q1 True None
            q2 False wanted a text, or an object with a "prompt", got the fields id
        """
        check_one_of("on_error", on_error, ("return", "raise"))
        return self._outcomes(rows, on_error, id_field)

    def _outcomes(self, rows: Iterable[Any], on_error: str, id_field: str) -> Iterator[Outcome]:
        memory = Memory()
        for index, row in enumerate(rows):
            yield outcome(self, index, row, memory, on_error, id_field)

    def _result(
        self,
        query: "_Query",
        ids: list[int],
        stats: Mapping[str, Any],
        gated: tuple[float, float | None, int],
        passages: Sequence[Passage] | None = None,
        sourced: Mapping[str, Any] | None = None,
        source: str = "all",
    ) -> Score:
        """What statistics mean."""
        before, said, notes, prompt_ids, answer, samples = query
        gate, diversity, responses = gated
        text, places = spans(self.tokenizer, prompt_ids.tolist(), ids)
        closes = self.endings.closes(ids)
        counted = slice(
            None, -1 if closes and not self.config.closing_token and len(ids) > 1 else None
        )
        tokens = tokens_of(self._at_depth(stats, source), ids, text, places, gate, self.tokenizer)
        sources = None
        if passages is not None and sourced is not None:
            tokens = with_context(tokens, sourced, self.config.depth)
            texts = [passage.text for passage in passages]
            sources = sources_from(sourced, self.config.depth, texts, counted)
        used = stats[at_depth("asmi_settings", self.config.depth, source)]
        content = self.endings.without(text, places, ids)
        warnings = [*notes, *self.notes]
        if isinstance(before, str) and not before.strip():
            warnings.append("The prompt is blank: the answer hangs on nothing that was asked.")
        if isinstance(before, str) and (odd := prompt_warning(self.tokenizer, prompt_ids.tolist())):
            warnings.append(odd)
        if said is None and not closes:
            stop = "" if self.stop else ", or name a `stop` such as '\\n' if it goes on without end"
            warnings.append(
                f"The model's answer was cut off after {len(ids)} tokens, since nothing ended it: "
                f"raise max_new_tokens{stop}."
            )
        elif said is not None and (odd := repeated_prompt(before, prompt_ids.tolist(), said, ids)):
            warnings.append(odd)
        if isinstance(said, str):
            if not text.startswith(said):
                warnings.append(
                    f"The tokenizer reads the answer as {text!r}: offsets are those of that text."
                )
            if isinstance(before, str) and (odd := border_warning(self.tokenizer, before, said)):
                warnings.append(odd)
            if odd := stop_warning(said, self.stop):
                warnings.append(odd)
        if samples is not None and self.config.method != "adapt":
            warnings.append(
                f'Samples are for the method "adapt": "{self.config.method}" needs none.'
            )
        if self.config.method == "adapt" and responses < 2:
            warnings.append(
                "Fewer than two sampled answers have a token: the semantic discount is left out."
            )
        return Score(
            score=aggregate([token.u for token in tokens[counted]], self.config.aggregation),
            prompt=before if isinstance(before, str) else [dict(m) for m in before],
            answer=content if said is None else said if isinstance(said, str) else list(ids),
            scored_text=text,
            tokens=tuple(tokens),
            counted=len(tokens[counted]),
            msp=-float(np.sum(stats["asmi_log_likelihood"][counted])),
            diversity=diversity,
            gate=gate if self.config.method == "adapt" else None,
            settings={
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in (used | self._own_settings(answer, samples)).items()
            },
            model=str(self.model.config.name_or_path or ""),
            seconds=float(stats["asmi_seconds"]),
            warnings=tuple(warnings),
            reference=self.reference,
            content_end=len(content),
            answered=bool(content.strip()),
            prompt_tokens=len(prompt_ids),
            span_reference=self.span_reference,
            sources=sources,
        )

    def fingerprints(self) -> dict[str, str]:
        """What tells weights and tokenizer from others, as they are now.

        All weights are read, once and again when they change. The template of chats counts as part
        of the tokenizer.

        Raises:
            ValueError: a model with hooks of others, which cannot be told.
        """
        weights = self._keys.of(self.model, model_state(self.model))["model"]
        if weights is None:
            raise ValueError(
                "the model has forward hooks, or a forward method set on a module: what they "
                "compute cannot be told, so neither can what a reference is of. Remove them"
            )
        if self._tokenizer_key is None:
            template = str(getattr(self.tokenizer, "chat_template", None))
            own = f"{tokenizer_key(self.tokenizer)['tokenizer']} {template}"
            self._tokenizer_key = hashlib.sha256(own.encode()).hexdigest()[:16]
        return {"weights": weights[:16], "tokenizer": self._tokenizer_key}

    def _stats(
        self,
        prompt_ids: Int[Tensor, " P"],
        ids: list[int],
        passages: Sequence[Passage] | None,
        memory: Memory,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Statistics of the score, and those by source, which there are with a context alone.

        Sources are told apart in the scope "response", whatever the score's own.
        """
        if passages is None:
            return self.engine.score(self.model, prompt_ids, ids, memory=memory), {}
        spans = [passage.tokens for passage in passages]
        by_source = self.by_source.score(
            self.model, prompt_ids, ids, spans, passages=len(spans) > 1
        )
        if not self.config.is_control and self.config.scope == "response":
            return by_source, by_source
        own = self.engine.score(self.model, prompt_ids, ids)
        seconds = own["asmi_seconds"] + by_source["asmi_seconds"]
        return own | {"asmi_seconds": seconds}, by_source

    def _own_settings(
        self, answer: Answer | None, samples: Sequence[Answer] | None
    ) -> dict[str, Any]:
        """What made this score besides the masks."""
        found = self.config.besides_masks()
        if self.reference is not None and "weights" in self.reference.settings:
            found |= self.fingerprints()
        if not (answer is None or isinstance(answer, str)):  # token ids are scored as they are
            del found["stop"]
        else:
            found["stop"] = list(self.stop)
        if samples is not None and "num_samples" in found:
            found["num_samples"] = len(samples)
        return found

    def _at_depth(self, stats: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Token-level statistics under their plain names."""
        names = ("asmi_mi", "asmi_agreement", "asmi_top_token")
        plain = ("asmi_entropy", "asmi_log_likelihood")
        found = {name: stats[at_depth(name, self.config.depth, source)] for name in names}
        return found | {name: stats[name] for name in plain}

    def _answer(
        self,
        prompt: Prompt,
        prompt_ids: Int[Tensor, " P"],
        answer: Answer | None,
        memory: Memory,
    ) -> list[int]:
        if answer is None:
            return self._greedy(prompt_ids, memory)
        if not isinstance(answer, str):
            return token_ids(answer)
        ids = answer_tokens(self.tokenizer, prompt, answer)
        if not self.config.closing_token or (ids and self.endings.closes(ids)):
            return ids
        if self.stop:
            return answer_tokens(self.tokenizer, prompt, answer + self.stop[0])
        return [*ids, *self._end_token(prompt)]

    def _end_token(self, prompt: Prompt) -> list[int]:
        """What ends an answer without a stop string: a template's end of turn, else EOS; or none.

        Models of chats often name several end tokens, and the tokenizer's may not be the one that
        ends their turns.
        """
        ends = self.endings.end_ids
        if not isinstance(prompt, str):
            turn = next((i for i in behind_answer(self.tokenizer, prompt) if i in ends), None)
            if turn is not None:
                return [turn]
        own = self.tokenizer.eos_token_id
        return sorted(ends)[:1] if own is None else [own]

    def _gate(
        self,
        prompt: Prompt,
        prompt_ids: Int[Tensor, " P"],
        samples: Sequence[Answer] | None,
    ) -> tuple[float, float | None, int]:
        """alpha(x) (0 for ASMI, 1 for Sem-ASMI), div(x), and how many responses it is from."""
        if samples is not None and (
            isinstance(samples, str | bytes | Mapping) or not hasattr(samples, "__len__")
        ):
            raise ValueError(f"samples are a list of answers, got {samples!r:.60}")
        if self.config.method != "adapt":
            return float(self.config.method == "sem"), None, 0
        if samples is None:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(example_seed(self.config.seed, prompt_ids.tolist()))
                drawn = self._generate(
                    prompt_ids, self.config.max_new_tokens, do_sample=True, temperature=0.5,
                    top_k=50, top_p=1.0, num_return_sequences=self.config.num_samples,
                )  # fmt: skip
        else:
            drawn = [
                answer_tokens(self.tokenizer, prompt, sample)
                if isinstance(sample, str)
                else token_ids(sample)
                for sample in samples
            ]
        # As in a benchmark, where sampled answers come without their end token.
        ends = self.endings.end_ids
        drawn = [ids[:-1] if ids and ids[-1] in ends else ids for ids in drawn]
        responses = [ids for ids in drawn if ids]
        diversity = diversity_of(self.model, prompt_ids, responses, self.config.attention)
        return (
            adaptive_gate(diversity, self.config.tau, self.config.beta),
            diversity,
            len(responses),
        )

    def _greedy(self, prompt_ids: Int[Tensor, " P"], memory: Memory) -> list[int]:
        """The model's own answer; what its generation knows then is remembered."""
        if not self.engine.remembers(self.model):
            return self._generate(prompt_ids, self.config.max_new_tokens, do_sample=False)[0]
        with scoring_session(self.model):
            common = memory.common(self.model, prompt_ids[:-1].tolist())
            cache = memory.cache(common)
            layers = self.engine.layers(self.model)
        try:
            with states_seen(self.model, layers) as seen:
                (ids,) = self._generate(
                    prompt_ids, self.config.max_new_tokens, do_sample=False, past_key_values=cache
                )
        except (torch.OutOfMemoryError, ValueError):
            raise
        except Exception:  # a model without a cache refuses one in any way
            (ids,) = self._generate(prompt_ids, self.config.max_new_tokens, do_sample=False)
            Memory.refuse(self.model)
            return ids
        memory.take(self.model, [*prompt_ids.tolist(), *ids], cache, seen(), common)
        return ids

    @cached_property
    def _stopping(self) -> StoppingCriteriaList:
        """Made once: it reads the whole vocabulary, which takes longer than a short answer."""
        if not self.stop:
            return StoppingCriteriaList()
        return StoppingCriteriaList([StopStringCriteria(self.tokenizer, self.stop)])

    def _room(self, prompt_ids: Int[Tensor, " P"], max_new_tokens: int) -> int:
        """How many tokens an answer may have."""
        window = context_window(self.model)
        if window is None:
            return max_new_tokens
        if window <= len(prompt_ids):
            raise ValueError(
                f"the prompt is {len(prompt_ids)} tokens long and the model's context window "
                f"{window}: there is no room for an answer"
            )
        return min(max_new_tokens, window - len(prompt_ids))

    def _generate(
        self,
        prompt_ids: Int[Tensor, " P"],
        max_new_tokens: int,
        past_key_values: Cache | None = None,
        **how: Any,
    ) -> list[list[int]]:
        """Answers of the model, each up to and with what ended it."""
        max_new_tokens = self._room(prompt_ids, max_new_tokens)
        ends = sorted(self.endings.end_ids)
        pad = self.tokenizer.pad_token_id
        # All that governs generation is said here; what a model ships may sample.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=ends or None,
            pad_token_id=pad if pad is not None else (ends or [0])[0],
            **how,
        )
        known = {} if past_key_values is None else {"past_key_values": past_key_values}
        model: Any = self.model
        model.generation_config = config  # else transformers takes what is unset from the model's
        ids = prompt_ids[None].to(execution_device(self.model.get_input_embeddings()))
        with scoring_session(self.model):
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=self._stopping,
                **known,
            )
        rows = found[:, len(prompt_ids) :].tolist()
        return [self.endings.response(row, batch_size=2) for row in rows]


class Stream(Iterator[Token]):
    """Tokens of an answer as they are written, each scored; see `lm_polygraph_asmi.stream`.

    Between two tokens the model is as it was found and free for others. Leaving off is enough to
    stop; `close`, or the end of a `with` block, lets go of what is kept of the answer.

    Example:
        >>> tokens = scorer.stream(prompt)
        >>> isinstance(tokens, Stream)
        True
        >>> written = [token.text for token in tokens]
        >>> "".join(written) == tokens.text == tokens.result.scored_text
        True
    """

    def __init__(self, scorer: Scorer, prompt: Prompt, ids: Tensor | None = None) -> None:
        """`ids`: of a prompt that somebody else goes on with; length and end are then theirs."""
        before, said, notes = asked(prompt if ids is not None else scorer._given(prompt))
        if said is not None:
            raise ValueError(
                "the chat ends in the assistant's message, but only an answer that the model "
                "writes can be scored while it is written: leave the message out"
            )
        if scorer.config.source != "all":
            raise ValueError(
                f"source={scorer.config.source!r}: while an answer is written it is scored with "
                "source='all'. Score the finished answer for anything else"
            )
        self.scorer, self._engine = scorer, scorer.while_written
        self._others = ids is not None
        ids = prompt_tokens(scorer.tokenizer, before) if ids is None else ids
        self._query = _Query(before, None, notes, ids)
        self._room = scorer._room(ids, scorer.config.max_new_tokens)
        self._gate: tuple[float, float | None, int] | None = None
        self._writing: Writing | None = None
        self._closed = self._ended = False
        self._place = 0

    def __iter__(self) -> "Stream":
        return self

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write no further; `result` is then the score of what has been written."""
        self._closed = True
        if self._writing is not None:
            self._writing.forget()

    def __next__(self) -> Token:
        return self._written()

    def _written(self, chosen: int | None = None) -> Token:
        if self._closed or self._ended:
            self.close()
            raise StopIteration
        scorer, prompt_ids = self.scorer, self._query.prompt_ids
        try:
            with scoring_session(scorer.model, scorer.config.attention):
                if self._writing is None:
                    with _undisturbed(scorer.model):
                        self._gate = scorer._gate(self._query.prompt, prompt_ids, None)
                    self._writing = self._engine.write(scorer.model, prompt_ids)
                found = self._writing.step(chosen)
        except BaseException:
            self.close()
            raise
        assert self._gate is not None
        ids = self._writing.ids
        if not self._others:
            self._ended = len(ids) == self._room or scorer.endings.closes(ids)
        text, _ = spans(scorer.tokenizer, prompt_ids.tolist(), ids)
        end = len(text)
        if not self._ended:  # a character may still lack bytes
            end = max(self._place, len(text.rstrip(UNFINISHED)))
        place, self._place = (self._place, end), end
        gate = self._gate[0]
        (token,) = tokens_of(found, ids[-1:], text, [place], gate, scorer.tokenizer)
        return token

    @property
    def text(self) -> str:
        """The answer so far."""
        ids = [] if self._writing is None else self._writing.ids
        return spans(self.scorer.tokenizer, self._query.prompt_ids.tolist(), ids)[0] if ids else ""

    @property
    def result(self) -> Score:
        """The `Score` of what has been written so far.

        Raises:
            ValueError: nothing has.
        """
        if self._writing is None or not self._writing.ids or self._gate is None:
            raise ValueError("no token has been written: there is nothing to score")
        found = self._writing
        return self.scorer._result(self._query, found.ids, found.statistics(), self._gate)


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Put back what generation may set: the generation config, the use of a cache.

    Other threads wait meanwhile.
    """
    with model_lock(model):
        generation, use_cache = model.generation_config, getattr(model.config, "use_cache", None)
        try:
            yield
        finally:
            model.generation_config = generation
            if use_cache is not None:
                model.config.use_cache = use_cache


def score(
    model: "PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    answer: Answer | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    samples: Sequence[Answer] | None = None,
    context: Any = None,
    reference: Given = None,
    **settings: Any,
) -> Score:
    """How fragile an answer is: score, tokens, and what the score means.

    Without `answer` the model's greedy answer is scored. The scores are those of a benchmark run on
    the same token ids with the same settings. Many rows: `Scorer.score_many`, `score_batch`.

    Args:
        model: a decoder-only transformers model; or LM-Polygraph's `WhiteboxModel`; or the name of
            a model: a folder, one of a hub's, or "smollm2". It is left as it was found.
        prompt: a text; or chat messages (a list of dictionaries), which go through the tokenizer's
            chat template. The last message of a chat, if it is the assistant's, is the answer.
        answer: text as it follows the prompt, its leading space included, or token ids. Text is
            closed as the model would have: with the first stop string, else what ends a turn of the
            chat template, else the end token. Token ids are scored as they are.
        tokenizer: of a transformers model, its own. LM-Polygraph's models and names bring theirs.
        config: settings; None: those of the reference, or the defaults.
        samples: for the method "adapt", sampled answers (texts or token ids) in place of drawing
            `num_samples` at temperature 0.5, which follow from prompt and `seed`.
        context: what in the prompt the answer should come from: a passage or a list of them; the
            result then says which of them the answer hangs on (`Score.sources`). A passage is a
            text that stands in the prompt once, or its characters (start, end); in a chat also the
            number of a message, or (message, part).
        reference: what gives the number a meaning: a `Reference`, a saved one, or a finished run
            (manager file or folder); or labelled rows, which give one to the numbers of `spans`
            (`Reference.from_spans`); or a list of one and the other. Settings that are not given
            are the reference's.
        **settings: of `ASMIConfig`, in place of those of the config.

    Returns:
        A `Score`.

    Raises:
        OSError: no model of that name.
        TypeError: a model whose heads cannot be masked, or a quantised output projection; a
            setting there is not.
        ValueError: an empty prompt or answer, one beyond the context window, settings out of range,
            or other ones than the reference's; a tokenizer that is not the model's.

    Example:
        >>> prompt = "The ferry was built by Edda Holm. Question: Who built it? Answer:"
        >>> result = score("smollm2", prompt, " Edda Holm")
        >>> 0 <= result.score <= result.highest  # nats, of 0 to ln S
        True
        >>> "".join(token.text for token in result.tokens).startswith(" Edda Holm")
        True
        >>> result.reference is None, result.verdict[1][:11]  # the number has no scale of its own
        (True, 'No verdict:')
    """
    asked(prompt, answer)  # what is wrong is told before a model is loaded
    scorer = Scorer(model, config, tokenizer=tokenizer, reference=reference, **settings)
    return scorer.score(prompt, answer, samples, context)


class Streamer(BaseStreamer):
    """Scores what somebody else's `generate` call writes: `model.generate(..., streamer=this)`.

    For one prompt at a time, greedy or sampled; each token costs one more step of the model than in
    a `stream`. Stop strings, end tokens and length are those of the call.

    Args:
        scorer: with the model that generates.
        shown: called with each `Token` as it comes.

    Raises:
        ValueError: from `put`, several prompts at once; else as `stream`.

    Example:
        >>> words = []
        >>> streamer = Streamer(scorer, shown=lambda token: words.append(token.text))
        >>> ids = scorer.tokenizer(prompt, return_tensors="pt").input_ids
        >>> _ = scorer.model.generate(ids, max_new_tokens=3, do_sample=False, streamer=streamer)
        >>> "".join(words) == streamer.stream.result.scored_text
        True
    """

    def __init__(self, scorer: Scorer, shown: Callable[[Token], None]) -> None:
        self.scorer, self.shown = scorer, shown
        self.stream: Stream | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt's token ids, then one token after the other."""
        ids = value.reshape(-1).tolist()
        if self.stream is None:
            if value.ndim > 1 and len(value) > 1:
                raise ValueError(f"one prompt at a time, got a batch of {len(value)}")
            prompt = str(self.scorer.tokenizer.decode(ids))
            self.stream = Stream(self.scorer, prompt, torch.tensor(ids))
            return
        for token in ids:
            self.shown(self.stream._written(token))

    def end(self) -> None:
        """The answer is finished; `stream.result` is its score."""
        if self.stream is not None:
            self.stream.close()


def stream(
    model: "PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    reference: Given = None,
    **settings: Any,
) -> Stream:
    """Score the model's own answer while it is written: its tokens, one after the other.

        for token in stream(model, prompt, tokenizer=tokenizer):
            print(token.text, token.u, token.alternative)

    At each step the masked subnetworks go on by one position behind the prompt that they share:
    the scope "response". An answer that is not there yet cannot choose its masks, so they follow
    from the prompt: the tokens are those of `score(model, prompt, scope="response",
    seeded_by="prompt", **settings)`.

    Args:
        model, prompt, tokenizer, config, reference, **settings: as for `score`. `scope` and
            `seeded_by` are settled, and there is no `source`, since parts of heads need the
            finished answer.

    Returns:
        A `Stream` of `Token`; its `result` is the `Score` of what has been written.

    Raises:
        RuntimeError: the model cannot be scored step by step.
        TypeError, ValueError, OSError: as `score`.

    Example:
        >>> tokens = stream("smollm2", "The ferry was built by Edda Holm. Who?", max_new_tokens=3)
        >>> for token in tokens:
        ...     assert token.u >= 0  # nats
        >>> tokens.result.settings["seeded_by"]
        'prompt'
    """
    for name, only in {"scope": "response", "seeded_by": "prompt", "source": "all"}.items():
        if config is not None or name in settings:
            given = settings.get(name, getattr(config, name, only))
            if given != only:
                raise ValueError(
                    f"{name}={given!r}: while an answer is written it is scored with "
                    f"{name}={only!r}. Score the finished answer for anything else"
                )
        settings |= {name: only}
    asked(prompt)  # what is wrong is told before a model is loaded
    scorer = Scorer(model, config, tokenizer=tokenizer, reference=reference, **settings)
    return scorer.stream(prompt)
