"""From a prompt to the text and the token ids that a model gets, as LM-Polygraph makes them."""

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
    """The prompt as one text; messages as the chat template writes them.

    Args:
        tokenizer: with the chat template.
        prompt: a text, or messages.
        template: what the chat template gets beside the messages, as of `Request`.
        add_generation_prompt: whether what begins an answer follows the messages.

    Raises:
        ValueError: no chat template; one that raises, or does not read what it gets.
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
    except Exception as error:  # a template may raise any
        raise ValueError(f"the chat template does not support these messages: {error}") from error


def template_names(tokenizer: Any, tools: Any = None) -> set[str]:
    """Names that the chat template uses, but for those that it sets itself."""
    tokens = Environment().lex(tokenizer.get_chat_template(tools=tools))
    names = [value for _, kind, value in tokens if kind == "name"]
    return {*names} - {name for before, name in pairwise(names) if before == "set"}


def prompt_token_ids(tokenizer: Any, prompt: Prompt, text: str | None = None) -> list[int]:
    """Token ids of a prompt; a chat template writes the special tokens of messages itself.

    `text`: of messages, if they are `rendered` already. Raises ValueError: as `rendered`.
    """
    is_text = isinstance(prompt, str)
    text = rendered(tokenizer, prompt) if text is None else text
    return list(tokenizer(text, add_special_tokens=is_text)["input_ids"])
