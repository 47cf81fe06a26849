"""What is right at the border: a slow second reading of rows, apart from the package's own.

Written from what is promised, it shares no code with the reader it judges: files are read cell by
cell, a template is rendered by jinja2 alone, and a number is one full pass of the model
for each token.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from jinja2 import Template
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.families import tiny_model
from tests.scripted import byte_tokenizer, likeliest

TEMPLATE = (
    "{% for t in tools or [] %}+{{ t['function']['name'] }}{% endfor %}"
    "{% for d in documents or [] %}[{{ d['text'] }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(short){% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}{{ m['name'] or '' }}: "
    "{{ m['reasoning_content'] or m['reasoning'] or m['thinking'] or '' }}{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}@{{ c['function']['name'] }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
COMPILED = Template(TEMPLATE)
REASONING = ("reasoning_content", "reasoning", "thinking")
# Role -> fields of its messages that may hold something.
FIELDS = {
    **{role: {"role", "content", "name"} for role in ("system", "developer", "user")},
    "assistant": {"role", "content", "name", "tool_calls", *REASONING},
    "tool": {"role", "content", "name", "tool_call_id"},
}
# Parts of a message.
TEXTS = ("text", "input_text", "output_text")
NAMES_OF_ANSWERS = (
    "response", "output", "completion", "prediction", "choices", "generated_text",
)  # fmt: skip
VARIABLES = ("tools", "documents", "chat_template_kwargs")
LABELS = ("correct", "quality")
# Fields of a row that mean something; a name that nearly is one of them is none.
MEANT = ("prompt", "messages", "answer", *LABELS, *VARIABLES, "id", "context", "cluster", "samples")
# Tokens of an answer of the model's own.
LIMIT = 4
# How messages begin as JSON, as a Python list, with lost quotes, and as LangChain prints them.
CHAT = re.compile(
    r"[\[{\s\"']*(role|from|type|messages)[\"']?\s*:|"
    r"content=['\"].*additional_kwargs=|\[?(System|Human|AI)Message\("
)


class Refused(Exception):
    """One of `names` must stand in the error. `file`: it may end the whole file."""

    def __init__(self, *names: str, file: bool = False) -> None:
        super().__init__(*names)
        self.names, self.file = names, file

    def is_named_in(self, error: str) -> bool:
        return any(name in error for name in self.names)


def refuse(wrong: object, *names: str, file: bool = False) -> None:
    if wrong:
        raise Refused(*names, file=file)


class Right(NamedTuple):
    """A row that is taken; `answer` None is the model's own.

    `doubt`: what no page decides, so that a refusal is right as well; another number is not.
    """

    prompt: tuple[int, ...]
    answer: str | None
    label: tuple[str, object] | None
    doubt: tuple[str, ...]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """With tokens that hold the end of a text and a stop, or a part of one."""
    found = byte_tokenizer(("Ġ r", "Ġr e", "Ġre d", ". Ċ", "Ġred .Ċ", "t Ċ", "Ċ Ċ"), words=False)
    found.chat_template = TEMPLATE
    return found


@cache
def model() -> PreTrainedModel:
    """A tiny random one whose own answers end now and then."""
    found = tiny_model("llama", vocab_size=len(tokenizer()), max_position_embeddings=1024)
    with torch.no_grad():
        found.lm_head.weight[2] *= 1.5
    return found


def ids_of(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def surprise(prompt: tuple[int, ...], answer: list[int]) -> float:
    """-log p(answer | prompt), nats."""
    with torch.no_grad():
        logits = model()(torch.tensor([[*prompt, *answer]])).logits[0].double()
    table = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return -sum(row[token].item() for row, token in zip(table, answer, strict=True))


@cache
def number(prompt: tuple[int, ...], answer: str | None, stop: str | None) -> tuple[str, float]:
    """An answer's text and its MSP: a text ends as the model would, its own answer as it did."""
    if answer is not None:
        ids = ids_of(answer)
        ways = [[*ids, 2], *([ids_of(answer + stop), ids + ids_of(stop)] if stop else [])]
        return answer, surprise(prompt, likeliest(model(), prompt, ways.__contains__, ways))

    def before_stop(own: list[int]) -> list[str]:
        """The text of an answer; more than one part if it has a stop string."""
        text = tokenizer().decode(own, skip_special_tokens=True)
        return text.split(stop) if stop else [text]

    own = likeliest(
        model(),
        prompt,
        lambda own: len(own) == LIMIT or 2 in own or len(before_stop(own)) > 1,
    )
    return before_stop(own)[0], surprise(prompt, own)


def is_wrong(name: str, value: object) -> bool | None:
    """What a label says; None: nothing that is known."""
    word = str(value).strip().lower().replace(",", ".")
    if name == "quality":
        return float(word) < 0.5
    return {"true": False, "1": False, "wahr": False, "false": True, "0": True}.get(word)


def no(value: object) -> bool:
    """Whether a field says nothing: null, as a data frame or Parquet have it."""
    return value is None or (isinstance(value, float) and value != value)


def clean(text: object, *names: str) -> str:
    """A text that can be tokenized as it stands."""
    refuse(not isinstance(text, str) or re.search("[\ud800-\udfff]", text), *names)
    return str(text)


def content(message: Mapping[str, Any], doubt: list[str]) -> str:
    parts = message.get("content")
    if parts is None and not no(message.get("tool_calls")):
        doubt.append("a call without content")
        return ""
    if not isinstance(parts, list):
        return clean(parts, "content")
    doubt += ["no parts"] * (not parts)
    for part in parts:
        refuse(not isinstance(part, Mapping) or part.get("type") not in TEXTS, "content", "part")
        rest = {name: value for name, value in part.items() if name not in ("type", "text")}
        doubt += [f"a part's {name}" for name, value in rest.items() if not no(value)]
    return "".join(clean(part.get("text"), "text", "content") for part in parts)


def rendered(row: Mapping[str, Any], messages: list[Any], doubt: list[str]) -> str:
    """What the template above makes of messages whose contents are one text each."""
    given = {name: row.get(name) for name in ("tools", "documents")}
    given |= row.get("chat_template_kwargs") or {}
    whole = [message | {"content": content(message, doubt)} for message in messages]
    return COMPILED.render(given, messages=whole, add_generation_prompt=True)


def check_messages(messages: object, name: str, doubt: list[str]) -> None:
    refuse(not isinstance(messages, list) or not messages, name, "chat")
    for message in messages:
        refuse(not isinstance(message, Mapping), name)
        role = message.get("role")
        refuse(role not in list(FIELDS), "role")
        for field, value in message.items():
            if field not in FIELDS[role] and not no(value):
                refuse(value not in ([], "", {}), field)
                doubt.append(f"an empty {field}")


def right(row: object) -> Right:
    """What a row is."""
    refuse(not isinstance(row, Mapping), "object", "expected a text")
    row = {name: value for name, value in row.items() if not no(value)}
    doubt: list[str] = []
    plain = {re.sub(r"\W", "", field).lower(): field for field in row if field not in MEANT}
    refuse(near := plain.keys() & {*MEANT}, *near)
    refuse(("prompt" in row) == ("messages" in row), "prompt", "messages")
    name = "prompt" if "prompt" in row else "messages"
    given, answer = row[name], row.get("answer")
    if isinstance(given, str) and name == "prompt":
        doubt += ["an empty prompt"] * (not given)
        refuse(CHAT.match(clean(given, name)), name)
        refuse(any(row.get(variable) for variable in VARIABLES), *VARIABLES)
        prompt = tuple(tokenizer()(given)["input_ids"])
    else:
        check_messages(given, name, doubt)
        for variable in VARIABLES:
            kind = dict if variable == "chat_template_kwargs" else list
            refuse(not isinstance(row.get(variable, kind()), kind), variable)
        rendered(row, given, doubt)  # raises if any message is none
        if given[-1]["role"] == "assistant":
            *given, last = given
            more = [field for field in ("tool_calls", *REASONING) if last.get(field)]
            refuse(answer is not None or more, "answer", *more)
            answer = content(last, doubt)
            doubt += ["an empty last message"] * (not answer)
        refuse(not given, "chat")
        prompt = tuple(ids_of(rendered(row, given, doubt)))
    if answer is not None:
        refuse(CHAT.match(clean(answer, "answer", "content", name)), "answer", name)
    other = [plain[field] for field in plain if field in NAMES_OF_ANSWERS]
    refuse(answer is None and other, *other)
    label = next(((field, row[field]) for field in LABELS if field in row), None)
    refuse(answer is None and label is not None, "label")
    return Right(prompt, answer, label, tuple(doubt))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def json_lines(data: bytes) -> Iterator[object]:
    for line in decoded(data).split("\n"):
        if line.strip():
            try:
                row = json.loads(line, object_pairs_hook=unique, parse_constant=int)  # NaN
            except ValueError:
                row = None
            yield row if isinstance(row, dict) else Refused("object per line", file=True)


def decoded(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Refused("UTF-8", "utf-8", file=True) from None
    refuse("\0" in text, "UTF-8", "utf-8", "NUL", "\\x00", file=True)
    return text


def records(text: str, separator: str) -> Iterator[tuple[list[str], bool]]:
    """RFC 4180 by hand: each record as its cells, and whether it is well formed.

    `Refused`: a quoted cell does not end, or goes on after its quotes, so that no one knows where
    the record ends. A bare carriage return spoils what follows in its line.
    """
    at, end, number = 0, len(text), 0
    cell = re.compile(f'(?:"((?:[^"]|"")*)")?([^{separator}\r\n]*)')
    while at < end:
        cells, well, start, ended = list[str](), True, at, False
        while not ended:
            quoted, plain = cell.match(text, at).groups()
            goes_on = plain if quoted is not None else text[at : at + 1] == '"'
            refuse(goes_on, f"row {number}", file=True)
            well = well and '"' not in plain
            at = cell.match(text, at).end()
            cells.append((quoted or "").replace('""', '"') + plain)
            if text[at : at + 1] == separator:
                at += 1
                continue
            if text[at : at + 1] == "\r" and text[at : at + 2] != "\r\n" and at + 1 < end:
                line = text[at:].partition("\n")[0]
                refuse(text[start : at + len(line)].count('"') % 2, f"row {number}", file=True)
                cells, well = [] if line.strip("\r") else cells, False
                at += len(line)
            at += text[at : at + 1] == "\r"
            at, ended = at + 1, True
        if text[start:at].strip("\r\n"):
            yield cells, well
            number += 1


def csv_rows(data: bytes) -> Iterator[object]:
    text = decoded(data)
    for separator in ",;\t":
        header = list[str]()
        with suppress(Refused):  # by another separator, quotes may not match
            header = next(records(text, separator), ([], True))[0]
        if {"prompt", "messages"} & {*header}:
            break
    else:
        raise Refused("prompt", "messages", "twice", file=True)
    refuse(len({*header}) < len(header), "twice", file=True)
    for cells, well in list(records(text, separator))[1:]:
        if not well:
            yield Refused("quote", file=True)
        elif len(cells) != len(header):
            yield Refused(f"{len(header)} cells", file=True)
        else:
            yield {name: cell or None for name, cell in zip(header, cells, strict=True)}


def parquet_rows(data: bytes) -> Iterator[object]:
    table = pq.ParquetFile(BytesIO(data)).read()
    names = table.column_names
    refuse(len({*names}) < len(names), "twice", file=True)
    refuse(not {"prompt", "messages"} & {*names}, "prompt", "messages", file=True)
    yield from table.to_pylist()


READERS: dict[str, Callable[[bytes], Iterator[object]]] = {
    "jsonl": json_lines, "csv": csv_rows, "parquet": parquet_rows,
}  # fmt: skip


def verdicts(door: str, given: Any) -> list[Right | Refused]:
    """Of each row of a list (Python, batch) or of a file's bytes; of a file that is none: one."""
    found: list[Right | Refused] = []
    try:
        rows = list(READERS[door](given) if door in READERS else given)
    except Refused as refusal:
        return [refusal]
    if door != "python" and any("score" in row for row in rows if isinstance(row, dict)):
        return [Refused("score", "object per line", file=True)]  # a column of the output
    for row in rows:
        try:
            if isinstance(row, Refused):
                raise row
            row = {"prompt": row} if door == "python" and isinstance(row, str) else row
            found.append(right(row))
        except Refused as refusal:
            unanswered = isinstance(row, dict) and {*LABELS} & {*row} and no(row.get("answer"))
            found.append(Refused(*refusal.names, *["label"] * bool(unanswered), file=refusal.file))
    return found
