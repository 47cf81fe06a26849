"""Token ids of an answer passed as text: how it ends, and in which tokens the model writes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from lm_polygraph_asmi.scoring.text import UNFINISHED, Prompt, answer_tokens, decoded, spans

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.engine import Engine
    from lm_polygraph_asmi.scoring.generation import Generation


class EndedAnswer(NamedTuple):
    """Token ids of an answer with its end.

    Attributes:
        ids: (T,) token ids.
        notes: where the model's own answer would differ.
    """

    ids: list[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextAnswer:
    """An answer passed as text, after a prompt.

    It may end with an end token, with the tokens of a stop string, or with the model's most likely
    token if that completes a stop string and holds more. Of these, greedy decoding restricted to
    them chooses: the first token in which they differ decides.

    Args:
        engine, generation: with model, tokenizer, settings and stop conditions.
        prompt: text or messages.
        prompt_ids: (P,) its tokens.
        text: the answer.
        limit: largest number of tokens of the model's own answer.
    """

    engine: "Engine"
    generation: "Generation"
    prompt: Prompt
    prompt_ids: Int[Tensor, " P"]
    text: str
    limit: int

    def ended(self) -> EndedAnswer:
        """The answer as the model would end it, in the model's tokens if it writes this very text.

        Raises:
            ValueError: as `Engine.score`.
        """
        ids = answer_tokens(self.generation.tokenizer, self.prompt, self.text)
        if not ids:
            return EndedAnswer(ids)
        ids, top_tokens = self._with_end(ids)
        limit = self.limit
        at, notes = _first_difference(top_tokens, ids), []
        if at is not None and self._consistent([*ids[:at], top_tokens[at]]):
            written = self.generation.spelling(self.prompt_ids, limit, self._consistent)
            if self._is_this_text(written) and written != ids[: len(written)]:
                notes.append(self._other_tokens(ids, written))
                ids, top_tokens = self._with_end(written)
                at = _first_difference(top_tokens, ids)
        if at is None or self._decoded(ids[:at]).startswith(self.text):
            notes += self._other_end(ids, top_tokens, at)
        if UNFINISHED in self.text and not notes:
            notes.append(
                f"The answer has {UNFINISHED!r} at character {self.text.index(UNFINISHED)}, which "
                "decoders write for an incomplete character: if a model generated it, pass its "
                "token ids."
            )
        return EndedAnswer(ids, tuple(notes))

    def _other_end(self, ids: list[int], top_tokens: list[int], at: int | None) -> list[str]:
        """How the model's own answer, which begins with this text, ends otherwise than `ids`.

        Args:
            top_tokens: the model's most likely token at each position.
            at: index of the first token of `ids` that the model would not write.
        """
        if len(ids) > self.limit and (at is None or at >= self.limit):
            return [
                "The model's own answer is this text and would be cut off after "
                f"{self.limit} tokens (max_new_tokens): it was scored as if it ended with "
                f"{self._quoted(ids[self.limit :])}."
            ]
        if at is None:
            return []
        start = next(n for n in range(at + 1) if self._decoded(ids[:n]).startswith(self.text))
        following = self._quoted([*ids[start:at], top_tokens[at]])
        return [
            f"The model's own answer begins with this text and goes on with {following}: it was "
            f"scored as if it ended with {self._quoted(ids[start:])}."
        ]

    def _with_end(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """The ids with the likeliest end, if they have none, and the model's likeliest tokens."""
        if self.generation.stop_conditions.closes(ids):
            return ids, self._likeliest(ids)[0]
        candidates = self._candidates(ids) or [ids]
        path, position = candidates[0], 0
        top_tokens, states = self._likeliest(path)
        by_model = [*ids, top_tokens[len(ids)]] if path[:-1] == ids else path
        if by_model not in candidates and self._is_this_text(by_model):
            candidates.append(by_model)  # a token that holds a stop string and more
        while len(candidates) > 1:
            if shortest := [ended for ended in candidates if len(ended) == position]:
                candidates = shortest
                break
            tokens = sorted({candidate[position] for candidate in candidates})
            if len(tokens) > 1:
                if path[:position] != candidates[0][:position]:
                    path = candidates[0]
                    top_tokens, states = self._likeliest(path)
                log_probs = self.engine.log_probs(self.generation.model, states[position], tokens)
                likeliest = tokens[log_probs.index(max(log_probs))]
                candidates = [each for each in candidates if each[position] == likeliest]
            position += 1
        (ended,) = candidates
        if path[:-1] != ended[:-1]:
            top_tokens, _ = self._likeliest(ended)
        return ended, top_tokens

    def _candidates(self, ids: list[int]) -> list[list[int]]:
        """The ids with each end: end tokens, and stop strings in the tokenizer's tokens."""
        tokenizer, conditions = self.generation.tokenizer, self.generation.stop_conditions
        candidates = [[*ids, token] for token in sorted(conditions.end_ids)]
        text = self._decoded(ids)
        for stop in conditions.stop_strings:
            merged = answer_tokens(tokenizer, self.prompt, self.text + stop)
            separate = [*ids, *tokenizer(stop, add_special_tokens=False)["input_ids"]]
            for with_stop in (merged, separate):
                if with_stop not in candidates and self._decoded(with_stop) == text + stop:
                    candidates.append(with_stop)
        return candidates

    def _consistent(self, ids: Sequence[int]) -> bool:
        """Whether an answer that begins with these tokens may be this text with its end."""
        text = self._decoded(ids).rstrip(UNFINISHED)
        if self.text.startswith(text):
            return True
        rest = text.removeprefix(self.text)
        stops = self.generation.stop_conditions.stop_strings
        return rest != text and any(
            stop.startswith(rest) or rest.startswith(stop) for stop in stops
        )

    def _is_this_text(self, ids: list[int]) -> bool:
        """Whether an answer of the model is this text, with or without its end."""
        conditions = self.generation.stop_conditions
        text, offsets = spans(self.generation.tokenizer, self.prompt_ids.tolist(), ids)
        ended = conditions.closes(ids) or len(ids) == self.limit
        return ended and self.text in (text, conditions.without(text, offsets, ids))

    def _other_tokens(self, ids: list[int], written: list[int]) -> str:
        at = _first_difference(written, ids) or 0
        place = len(self._decoded(ids[:at]))
        return (
            f"The model's own answer has this text in other tokens, which were scored: from "
            f"character {place} on {self._quoted(written[at:])}, where the tokenizer has "
            f"{self._quoted(ids[at:])}."
        )

    def _quoted(self, ids: Sequence[int]) -> str:
        """Up to three tokens in quotation marks."""
        tokenizer, shown = self.generation.tokenizer, []
        for token in ids[:3]:
            text = str(tokenizer.decode([token]))
            shown.append(tokenizer.convert_ids_to_tokens(token) if UNFINISHED in text else text)
        return ", ".join(map(repr, shown)) + (", …" if len(ids) > 3 else "")

    def _decoded(self, ids: Sequence[int]) -> str:
        return decoded(self.generation.tokenizer, self.prompt_ids.tolist(), ids)

    def _likeliest(self, ids: list[int]) -> tuple[list[int], Float[Tensor, "T D"]]:
        return self.engine.likeliest(self.generation.model, self.prompt_ids, ids)


def _first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if there is none in the shorter one."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (first, second) in pairs if first != second), None)
