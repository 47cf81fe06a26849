"""Make rows for `polygraph_asmi score` of a log of an OpenAI-compatible server.

python docs/tutorials/log_to_rows.py LOG.jsonl ROWS.jsonl
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

REQUEST, RESPONSE = ("messages", "input"), ("choices",)
"""EDIT HERE, if need be: names of the field with a request's messages, or a response's choices."""

OPTIONS = ("tools", "documents", "chat_template_kwargs")  # what the chat template gets besides
SYSTEM = ("system", "developer")


def read(part: Any) -> Any:
    """A part of a line; if it is text that holds JSON or the events of a stream, what it holds."""
    if not isinstance(part, str):
        return part
    events = [line[5:].strip() for line in part.splitlines() if line.startswith("data:")]
    try:
        return [json.loads(e) for e in events if e != "[DONE]"] if events else json.loads(part)
    except ValueError:
        return part


def parts(of: Any) -> Iterator[dict[str, Any]]:
    """All objects in a line, but for those in the content of a request or response."""
    inner = read(of)
    if isinstance(inner, dict):
        yield inner
        named = (*REQUEST, *RESPONSE, *OPTIONS)
        inner = [v for k, v in inner.items() if not (k in named and isinstance(v, list))]
    for each in inner if isinstance(inner, list) else []:
        yield from parts(each)


def found(line: dict[str, Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The objects in a line that have the content of a request or response; copies count once."""
    having = [part for part in parts(line) if any(isinstance(part.get(n), list) for n in names)]
    if not having:
        raise ValueError(f"no `{names[0]}`")
    return [part for n, part in enumerate(having) if part not in having[:n]]


def options_of(line: dict[str, Any]) -> dict[str, Any]:
    """The options of the chat template, wherever they stand in a line."""
    given = [(name, part[name]) for part in parts(line) for name in OPTIONS if part.get(name)]
    options = dict(given)
    if any(options[name] != value for name, value in given):
        raise ValueError("several requests")
    return options


def text_of(content: Any) -> str:
    """The text of a message, which may be in parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part.get("text") or "" for part in parts)


def answer_of(chunks: list[dict[str, Any]]) -> tuple[str, str]:
    """The answer in a response, or in the chunks of a stream; and why it is left out, or ""."""
    choices = [choice for chunk in chunks for choice in chunk[RESPONSE[0]]]
    messages = [choice.get("message") or choice.get("delta") or {} for choice in choices]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    answer = "".join(text_of(message.get("content")) for message in messages)
    reasons = {
        "no answer": not choices,
        "several answers": len(ends) > 1 or any(choice.get("index") for choice in choices),
        "cut off by max_tokens, or unfinished": not ends or ends[-1] == "length",
        "a tool call": any(message.get("tool_calls") for message in messages),
        "reasoning apart": any(
            message.get("reasoning_content") or message.get("reasoning") for message in messages
        ),
        "no text": not answer.strip(),
        f"finish_reason {ends[-1:]}": ends[-1:] not in (["stop"], ["eos_token"]),
    }
    return answer, next((reason for reason, holds in reasons.items() if holds), "")


def asked(messages: list[dict[str, Any]]) -> str:
    """What is equal if a question is asked again, perhaps on another day."""
    system = [re.sub(r"\d", "", text_of(m["content"])) for m in messages if m["role"] in SYSTEM]
    return json.dumps([system, [m for m in messages if m["role"] not in SYSTEM]])


@click.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--model", help="Keep answers of this model, if the log has several.")
def main(log: str, out: str, model: str | None) -> None:
    """Write to OUT a row for each whole answer to a new question in LOG; print what is left out."""
    left, seen, strange = defaultdict[str, list[int]](list), set[str](), ""
    rows, models = list[dict[str, Any]](), Counter[str]()
    with open(log, encoding="utf-8") as file:
        lines = list(file)
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            chunks, requests = found(entry, RESPONSE), found(entry, REQUEST)
            if len(requests) > 1:
                raise ValueError("several requests")
            messages = next(m for n in REQUEST if isinstance(m := requests[0].get(n), list))
            options = options_of(entry)
            answer, reason = answer_of(chunks)
            name, question = str(chunks[0].get("id") or f"line {number}"), asked(messages)
            answered_by = str(chunks[0].get("model") or requests[0].get("model"))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            told = any(v for part in parts(line) for n, v in part.items() if "error" in n.lower())
            failed = told and str(error) == f"no `{RESPONSE[0]}`"
            left["an error" if failed else f"not understood, {error}"].append(number)
            strange = strange or f"Line {number} is no call: {line[:300]} ...\n" * (not failed)
            continue
        if not reason and model not in (None, answered_by):
            reason = f"of the model {answered_by}"
        if not reason and not {name, question}.isdisjoint(seen):
            reason = "logged or asked before"
        if reason:
            left[reason].append(number)
            continue
        seen |= {name, question}
        models[answered_by] += 1
        rows += [{"id": name, "answer": answer, "messages": messages} | options]
    for reason, numbers in left.items():
        shown = [*map(str, numbers[:5]), *["..."][: len(numbers) > 5]]
        print(f"left out, {reason}: {len(numbers)} (line {', '.join(shown)})")
    if strange:
        print(f"{strange}If it is one, and its fields have other names, edit {__file__}")
    if len(models) > 1:
        known = ", ".join(f"{name} ({count})" for name, count in models.items())
        raise SystemExit(f"{log}: no row is written, since several models answered: {known}. "
                         "A threshold is of one: name it with --model")  # fmt: skip
    if not rows:
        raise SystemExit(f"{log}: no row was made. If fields have other names, edit {__file__}")
    if Path(out).exists() and Path(out).samefile(log):
        raise SystemExit(f"{out} is the log: name another file")
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{log}: {len(rows)} rows, in {out}")


if __name__ == "__main__":
    main()
