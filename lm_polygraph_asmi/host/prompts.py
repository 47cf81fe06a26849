"""Turn a prompt into the text and the token ids that a model gets, as LM-Polygraph does."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from jinja2 import Environment

from lm_polygraph_asmi.inputs import Prompt


def rendered(
    tokenizer: Any,
    prompt: Prompt,
    template: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt as one text. Messages are rendered by the chat template.

    Args:
        tokenizer: has the chat template.
        prompt: a text, or messages.
        template: variables of the chat template besides the messages; see `Request`.
        add_generation_prompt: whether to end with the header of an answer.

    Raises:
        ValueError: there is no chat template; it raises an error, or does not read a variable.
    """
    if isinstance(prompt, str):
        return prompt
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt is a list of messages, but this tokenizer has no chat template: pass the "
            "prompt as text"
        )
    options = dict(template or {})
    options |= options.pop("chat_template_kwargs", {})
    try:
        names = template_names(tokenizer, options.get("tools"))
        if unread := [name for name in options if name not in names]:
            raise ValueError(
                f"it does not read {unread[0]!r}, so the model would not see it. Leave it out, or "
                "use the chat template of the system that wrote the answer"
            )
        messages = [dict(message) for message in prompt]
        options |= {"add_generation_prompt": add_generation_prompt, "tokenize": False}
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a template can raise anything
        raise ValueError(f"the chat template does not support these messages: {error}") from error


def template_names(tokenizer: Any, tools: Any = None) -> set[str]:
    """Names that the chat template reads, without those that it sets itself."""
    tokens = Environment().lex(tokenizer.get_chat_template(tools=tools))
    names = [value for _, kind, value in tokens if kind == "name"]
    return {*names} - {name for before, name in pairwise(names) if before == "set"}


def prompt_token_ids(tokenizer: Any, prompt: Prompt, text: str | None = None) -> list[int]:
    """Token ids of a prompt. For messages, the chat template itself writes the special tokens.

    `text`: the prompt, if it was already `rendered`. Raises ValueError as `rendered` does.
    """
    text = rendered(tokenizer, prompt) if text is None else text
    return list(tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])
