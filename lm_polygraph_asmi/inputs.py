"""The accepted forms of prompts, chats, answers and rows, declared once for all interfaces.

Input in a declared form is used unchanged. Anything else raises an error that names the field, its
place, and what to write instead. If an input can be read in two ways, a warning says which one was
chosen. This module imports nothing heavy, so bad input raises before a model is loaded.
"""

import html
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lm_polygraph_asmi.validation import check_text, describe_fields

TEMPLATE = ("tools", "documents", "chat_template_kwargs")
"""Variables that a chat template gets besides the messages."""
REASONING = {"reasoning_content", "reasoning", "thinking"}
LABELS = ("correct", "quality")
ROW = (
    "prompt", "messages", "answer", "samples", *TEMPLATE, "id", "context", "cluster", *LABELS,
)  # fmt: skip
"""Fields of a row that have a meaning. Other fields are copied."""
ANSWER_NAMES = re.compile(
    "answer|response|resps|output|completion|predict|pred$|generat|choices|^message$|reply|^result$|"
    "^assistant|^bot$|^chosen$|hypothesis|^candidate|^greedytext"
)
"""Names, without case and marks, of a model's answer in other programs. If a row has such a field
but no `answer`, it raises an error."""
GOLD_NAMES = re.compile("gold|reference|correct|expected|target|truth|ideal|label|accepted")
"""Names of gold answers. Such fields are copied."""
ELSEWHERE = {
    "system", "systemprompt", "systemmessage", "instruction", "instructions", "functions",
    "history", "chathistory", "enablethinking", "toolcalls", "reasoning", "reasoningcontent",
    "thinking",
}  # fmt: skip
"""Names, without case and marks, of fields whose content belongs into the messages or answer."""

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
Answer = str | Sequence[int]

CURLY = str.maketrans("“”„‘’", '"""\'\'')
_SPEAKER = (
    r"\b_?(?:role|from|type|sender|author|speaker)[\\\"']*\s*[:=]\s*[\\\"'<\w.]*"
    r"\b(?:system|developer|user|human|assistant|ai|gpt|model|tool|function|chatbot|bot|text)\b"
    r"(?=[\\\"']*\s*(?:[,:}\])>\n]|\Z))"
)
"""Matches the name of a speaker, as a field of a message or a part."""
_PAIR = r"[\"'](?:system|developer|user|human|assistant|ai|placeholder)[\"']\s*,"
_OPEN = r"[\\\"'\s]*(?:(?:\w+:\s*)?-\s+|[A-Za-z_.]*[\[{(])[\[{(\s\\\"']*"
_BEGINS = re.compile(
    rf"(?i){_OPEN}(?:{_SPEAKER}|{_PAIR})|\s*(?:role|from)\s*[:=]\s*['\"]?\w+['\"]?\s*\w+\s*[:=]"
)
_SAYS = re.compile(rf"(?i){_SPEAKER}")
_SAID = re.compile(r"(?i)\b(?:content|value|text|parts|data|message)[\\\"']*\s*[:=]")
_PRINTED = re.compile(
    r"(?is)[\s\[(]*(?:\w*\(?messages=\s*\[)?\s*(?:\w*Message(?:Chunk)?\(\s*content=|"
    r"content=[\"'].*\b(?:additional_kwargs|response_metadata)=|=+ *\w+ Message *=+)"
)
"""Matches the form in which LangChain prints its messages."""


class Form(BaseModel):
    """An object with only the declared fields. No value is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Part(Form):
    """One part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class Function(Form):
    """The function of a tool call. Arguments that are text are passed on unchanged."""

    name: str
    arguments: dict[str, Any] | str = {}


class ToolCall(Form):
    """A tool call in an earlier message of the assistant."""

    function: Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0


Content = str | list[Part]


class Message(Form):
    """What messages of all roles have; `name` is that of the speaker or the tool."""

    content: Content
    name: str = ""


class Said(Message):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]


class Assistant(Message):
    """A message of the assistant. If it has tool calls, it needs no content."""

    role: Literal["assistant"]
    content: Content = ""
    tool_calls: list[ToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""
    thinking: str = ""


class Tool(Message):
    """The message that a tool returned."""

    role: Literal["tool"]
    tool_call_id: str = ""


class Beside(Form):
    """Variables of a chat template besides the messages."""

    tools: list[dict[str, Any]] = []
    documents: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


MESSAGE: TypeAdapter[Any] = TypeAdapter(
    Annotated[Said | Assistant | Tool, Field(discriminator="role")]
)
BRANCHES = {
    "str",
    "list[Part]",
    "dict[str,any]",
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
}
"""Names in the places of pydantic's errors that are not fields."""
OTHER_ROLES = {"ai": "assistant", "model": "assistant", "bot": "assistant", "human": "user"}
RESERVED = (
    "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "return_tensors", "return_dict", "padding", "truncation", "max_length", *TEMPLATE,
)  # fmt: skip
"""Names that `chat_template_kwargs` may not contain, since this package sets them."""


class Request(NamedTuple):
    """One answer to score, separated from its prompt."""

    prompt: Prompt  # text, or messages with text content, up to the answer
    answer: Answer | None = None  # None: the model generates the answer, and any samples
    samples: Sequence[Answer] | None = None
    notes: tuple[str, ...] = ()  # warnings on how the input was interpreted
    template: Mapping[str, Any] = {}  # variables of the chat template, with names of `TEMPLATE`

    def texts(self) -> Iterator[tuple[str, str]]:
        """All texts with names: those of `texts_of`, then "answer", "sample 1" and so on."""
        yield from texts_of(self.prompt)
        samples = ((f"sample {n}", text) for n, text in enumerate(self.samples or (), start=1))
        yield from (
            (n, text) for n, text in (("answer", self.answer), *samples) if isinstance(text, str)
        )


def as_chat(text: str) -> list[dict[str, Any]]:
    """A text as a user's message, which LM-Polygraph makes of prompts for instruct models."""
    return [{"role": "user", "content": text}]


def parse_row(row: Any) -> dict[str, Any]:
    """Arguments for `parse_request` from a row, which is a text or an object with fields of `ROW`.

    Raises ValueError: there is no prompt; a field's name is almost that of a field in `ROW`; the
    answer has another name; or there is a label, but not the answer it belongs to.
    """
    if isinstance(row, str):
        return {"prompt": row}
    fields = row.items() if isinstance(row, Mapping) else ()
    given = {name: value for name, value in fields if value is not None}
    for name in given:
        if (meant := meant_field(name)) is not None:
            raise ValueError(
                f"unknown field {name!r}: write {meant!r} if it is meant, or rename the field"
            )
    if "prompt" not in given and "messages" not in given:
        raise ValueError(
            f'expected a text, or an object with a "prompt", got {describe_fields(row)}'
        )
    if "prompt" in given and "messages" in given:
        raise ValueError('expected one prompt, got two: "prompt" and "messages". Leave one out')
    if isinstance(messages := given.get("messages"), str):
        raise ValueError(f'"messages": expected a list of messages, got a text: {messages!r:.60}')
    prompt: Any = given.get("prompt", messages)
    for name in given:
        if _plain(name) in ELSEWHERE and name not in ROW:
            raise ValueError(
                f"the field {name!r} would not reach the model: move it into the messages, the "
                "answer or chat_template_kwargs, as your server does, or rename it"
            )
    if "answer" not in given:
        for name in given:
            if _is_answer(name, given[name]):
                raise ValueError(
                    f'expected a field "answer", got {name!r}: if this is the answer to score, '
                    'rename it "answer"; if not, give it another name, and the model\'s own '
                    "answer is scored"
                )
        labels = [name for name in LABELS if name in given]
        if labels and parse_request(prompt).answer is None:  # an error in the prompt comes first
            raise ValueError(
                f'"{labels[0]}" is the label of an answer, but the row has no "answer": add the '
                "answer that was labelled, or leave the label out"
            )
    arguments = {name: given[name] for name in ("answer", "samples", *TEMPLATE) if name in given}
    return {"prompt": prompt, **arguments}


def _plain(name: Any) -> str:
    return re.sub(r"[\W_]+", "", str(name)).lower()


def _is_answer(name: Any, value: Any) -> bool:
    """Whether a field is named like a model's answer; `answers` are gold answers unless a text."""
    plain = _plain(name)
    gold = GOLD_NAMES.search(plain) or (plain == "answers" and not isinstance(value, str))
    return not (name in ROW or gold) and ANSWER_NAMES.search(plain) is not None


def meant_field(name: Any) -> str | None:
    """The field of `ROW` whose name almost equals this name, such as "Answer "; None if none."""
    if name in (*ROW, "ID", "Id"):
        return None
    plain = _plain(name)
    return next((field for field in ROW if field.replace("_", "") == plain), None)


def parse_request(
    prompt: Prompt,
    answer: Answer | None = None,
    samples: Sequence[Answer] | None = None,
    **template: Any,
) -> Request:
    """Separate prompt and answer. If a chat ends with the assistant's message, it is the answer.

    No model is needed, so that errors are raised before one is loaded.

    Args:
        prompt: a text, or messages with the roles system, developer, user, assistant and tool.
        answer: a text or token ids. None: the chat's last message if it is the assistant's;
            otherwise the model generates an answer.
        samples: sampled answers, each a text or token ids.
        **template: variables of the chat template: `tools`, `documents`, `chat_template_kwargs`.

    Raises:
        ValueError: the input has another form, which is named with its place; a chat is passed as
            text; an answer is passed twice; a text has half of a surrogate pair.
        TypeError: an argument is unknown; it may be a setting of the `Scorer`.
    """
    if unknown := sorted(template.keys() - {*TEMPLATE}):
        raise TypeError(
            f"unknown arguments {', '.join(unknown)}: settings such as stop, scope and depth "
            f"belong to the Scorer, as in Scorer(model, {unknown[0]}=...)"
        )
    samples = _checked_samples(samples)
    answer = None if answer is None else _answer(answer, "an answer")
    if isinstance(answer, list) and not answer:
        raise ValueError(
            "the answer is empty: expected at least one token id. To score the model's own "
            "answer, leave `answer` out"
        )
    notes: tuple[str, ...] = ()
    if not isinstance(prompt, str):
        prompt, answer, notes = _from_chat(prompt, answer)
    request = Request(prompt, answer, samples, notes, _beside(prompt, template))
    for name, text in request.texts():
        check_text(f"the {name}: ", text)
        if (" of message " not in name or name.startswith("content")) and chat_as_text(text):
            raise ValueError(
                f"the {name} is a chat written as text, {text[:40]!r}: pass the chat itself as a "
                "list of messages (in a file: as a list in JSON lines, not in quotes). If the "
                "text itself is meant, pass its token ids"
            )
    return request


def chat_as_text(text: str) -> bool:
    """Whether a text is a chat or a message as another program writes it.

    Such forms are JSON, a printed Python list or object, YAML, and LangChain's print.

    Example:
        >>> chat_as_text("[{'role': 'user', 'content': 'Who?'}]"), chat_as_text("Who is [x]?")
        (True, False)
    """
    text = html.unescape(re.sub("^\ufeff|^b(?=['\"])", "", text)).translate(CURLY)
    if _PRINTED.match(text) or (_BEGINS.match(text) and _SAID.search(text)):
        return True
    if _BEGINS.match(text):  # pairs of a role and a text
        return re.match(rf"(?i){_OPEN}{_PAIR}", text) is not None
    end = text.rstrip(" \t\r\n\\\"',;")[-1:]
    closed = re.match(_OPEN, text) is not None and end in ("]", "}", ")")
    return closed and _SAYS.search(text) is not None and _SAID.search(text) is not None


def _from_chat(
    chat: Any, answer: Answer | None
) -> tuple[list[dict[str, Any]], Answer | None, tuple[str, ...]]:
    """Messages before the answer, the answer, and warnings on how they were read."""
    if not (isinstance(chat, Sequence) and all(isinstance(part, Mapping) for part in chat)):
        raise ValueError(
            "expected a prompt as text, or as a list of chat messages such as {'role': 'user', "
            f"'content': '...'}}; got {chat!r:.80}. For many prompts use `Scorer.score_many`"
        )
    notes: list[str] = []
    messages = [_message(message, number, notes) for number, message in enumerate(chat, start=1)]
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        if answer is not None:
            raise ValueError(
                "expected one answer, got two: the chat's last message, from the assistant, and "
                "`answer`. Leave one out"
            )
        if beside := [n for n, value in last.items() if value and n not in ("role", "content")]:
            raise ValueError(
                f"the chat's last message, from the assistant, has a field {beside[0]!r}, which "
                "may be part of what the model wrote. If it is, pass the whole answer as one "
                "text, as the model wrote it; if not, remove the field"
            )
        if not last["content"]:
            raise ValueError(
                "the chat's last message, from the assistant, has no text. To score the model's "
                "own answer, leave this message out"
            )
        answer = last["content"]
        notes.append("The chat's last message, the assistant's, was scored.")
    if not messages:
        raise ValueError("the chat is empty: expected at least the user's message before an answer")
    return messages, answer, tuple(notes)


def _message(message: Mapping[str, Any], number: int, notes: list[str]) -> dict[str, Any]:
    """A message with its content joined into one text, since not every template reads parts.

    Fields that are null or an empty list count as missing, since servers write such fields.
    """
    given = _filled(message)
    if isinstance(given.get("content"), list | tuple):
        given["content"] = [_filled(p) if isinstance(p, Mapping) else p for p in given["content"]]
    form = _read(MESSAGE.validate_python, given, f"message {number}")
    if not isinstance(form.content, str):
        given["content"] = "".join(part.text for part in form.content)
        if len(form.content) > 1:
            notes.append(
                f"The {len(form.content)} text parts of message {number} were joined without "
                "anything between them. If your server joins them in another way, such as with "
                "line breaks, pass one text."
            )
    if "content" not in given and not given.keys() & {"tool_calls", *REASONING}:
        raise ValueError(f"message {number}: expected a text as content, got none")
    return {**given, "content": given.get("content", "")}


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != []}


def _read(read: Callable[[Any], Any], value: Any, place: str) -> Any:
    """A value read in its declared form. ValueError names the first wrong field and its place."""
    try:
        return read(value)
    except ValidationError as error:
        # If a field has alternative forms, report the error in the one that fits best.
        deepest = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        path = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}"
            for part in deepest["loc"]
            if part not in BRANCHES
        ).strip(".")
        problem, got = deepest["msg"].replace("Input should be", "expected"), deepest["input"]
        if deepest["type"] == "extra_forbidden":
            problem = "this field is unknown: remove it, or write what it says into the content"
        elif deepest["type"].startswith("union_tag"):
            role = got.get("role")
            problem = "expected a role of system, developer, user, assistant or tool"
            path, got, meant = "role", role, str(role).lower()
            if (meant := OTHER_ROLES.get(meant, meant)) in BRANCHES:
                problem += f" (write {meant!r})"
        raise ValueError(f"{place}: {path}: {problem}, got {got!r:.80}") from error


def _beside(prompt: Prompt, template: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template, checked against their declared form."""
    given = {name: value for name, value in template.items() if value is not None}
    if given and isinstance(prompt, str):
        raise ValueError(
            f"{', '.join(map(repr, given))}: only a chat template reads this, but the prompt is a "
            "text: pass the prompt as messages, or write the content into the prompt"
        )
    form = _read(Beside.model_validate, given, "the row")
    if taken := sorted(form.chat_template_kwargs.keys() & {*RESERVED}):
        raise ValueError(f"chat_template_kwargs: {taken[0]!r} is set otherwise: leave it out")
    return given


def _checked_samples(samples: Any) -> list[str | list[int]] | None:
    if samples is None:
        return None
    scalar = not hasattr(samples, "__len__") or getattr(samples, "ndim", 1) == 0
    if scalar or isinstance(samples, str | bytes | Mapping):
        raise ValueError(f"expected samples as a list of answers, got {samples!r:.60}")
    return [_answer(sample, f"sample {number}") for number, sample in enumerate(samples, start=1)]


def _answer(answer: Any, name: str) -> str | list[int]:
    """An answer as text, or as token ids (T,) of any library, which become integers.

    Raises ValueError with the answer's name: it is neither, or an id exceeds 64 bits.
    """
    if isinstance(answer, str):
        return answer
    try:
        other = getattr(answer, "ndim", 1) != 1 or isinstance(answer, Mapping | bytes | bytearray)
        # Booleans of NumPy, too, would count as integers for `operator.index`.
        if other or any(isinstance(getattr(t, "tolist", lambda t=t: t)(), bool) for t in answer):
            raise TypeError("expected integers, got an object, bytes, booleans or several rows")
        ids = [operator.index(token) for token in answer]
    except TypeError as error:
        raise ValueError(
            f"expected {name} as text or a list of token ids, got {answer!r:.60}"
        ) from error
    if any(abs(token) >= 2**63 for token in ids):
        raise ValueError(f"expected token ids of {name} that fit into 64 bits, got {ids!r:.60}")
    return ids


def text_of(content: Any) -> str:
    """A prompt, an answer or passages as one text, made of the texts of messages and documents.

    Raises ValueError: an object has no text.
    """
    if isinstance(content, Mapping):
        named = [content[name] for name in ("content", "text", "page_content") if name in content]
        if not named:
            raise ValueError(
                "expected a text, or objects with a text as content, text or page_content, got "
                f"{content!r:.60}"
            )
        content = named[0]
    if isinstance(content, list | tuple):
        return "\n".join(map(text_of, content))
    return "" if content is None else str(content)


def texts_of(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """The texts of a prompt with names: "prompt", "content of message 1", "name of message 2".

    A message has texts in all its fields, such as names and arguments of tool calls.
    """
    if isinstance(prompt, str):
        yield "prompt", prompt
        return
    for number, message in enumerate(prompt, start=1):
        for field, value in message.items():
            for path, text in _texts(value, str(field)):
                yield f"{path} of message {number}", text


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield f"name in {path}", str(name)
            yield from _texts(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _texts(part, f"{path}[{index}]")
