"""A scorer for Inspect, entry point `lm_polygraph_asmi/asmi`, for `hf/` models."""

import threading
from functools import partial
from itertools import pairwise
from typing import Any

from lm_polygraph_asmi.adapters.contract import Assessment, assess, extra, open_scorer

with extra("inspect"):
    import anyio
    from inspect_ai.model import ChatMessage, get_model
    from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
    from inspect_ai.solver import TaskState


@scorer(metrics=[mean(), stderr()])
def asmi(**settings: Any) -> Scorer:
    """Fragility of each answer, nats; higher = more fragile. Metadata: baselines, decision.

    With a calibration, the value is that of its deciding signal.

    Args:
        **settings: of `ASMIConfig`; and `calibration`, the file of a calibration.

    Raises:
        TypeError, ValueError: per sample: no `hf/` model, tools used, or no text answer last.
    """
    scorers: dict[int, Any] = {}
    lock = threading.Lock()

    def assessed(api: Any, messages: list[ChatMessage], answer: str) -> Assessment:
        with lock:
            if id(api.model) not in scorers:
                model_scorer = open_scorer(api.model, tokenizer=api.tokenizer, **settings)
                scorers[id(api.model)] = model_scorer
        return assess(scorers[id(api.model)], api.hf_chat(messages, []), answer)

    async def score(state: TaskState, target: Target) -> Score:  # noqa: ARG001 - Inspect's signature
        api: Any = get_model().api
        if not all(hasattr(api, name) for name in ("model", "tokenizer", "hf_chat")):
            raise TypeError(f"expected a model of Inspect's provider hf/, got {state.model}")
        messages, answer = _messages_and_answer(state)
        result = await anyio.to_thread.run_sync(partial(assessed, api, messages, answer))
        return Score(
            value=result.value, answer=answer, explanation=result.reason, metadata=result.to_dict()
        )

    return score


def _messages_and_answer(state: TaskState) -> tuple[list[ChatMessage], str]:
    """The messages of the model's last call, and its answer.

    Raises:
        ValueError: they do not determine prompt and answer.
    """
    *messages, last = state.messages
    roles = [message.role for message in messages]
    if state.tools or "tool" in roles:
        raise ValueError("expected an answer without tools")
    content = last.content
    if isinstance(content, list) and all(part.type == "text" for part in content):
        content = "".join(part.text for part in content)
    if last.role != "assistant" or not isinstance(content, str) or not content:
        raise ValueError("expected the last message to be the model's answer as text")
    if ("user", "user") in pairwise(roles):
        raise ValueError("expected no two user messages in a row: Inspect joins them for hf/")
    return messages, content
