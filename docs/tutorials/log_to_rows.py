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

# EDIT HERE if your log has other names.
REQUEST, RESPONSE = ("messages", "input"), "choices"  # what has the messages, and the answer
BESIDE = ("extra_body", "model_parameters", "optional_params")  # where options of a request are

OPTIONS = ("tools", "documents", "chat_template_kwargs")  # what the chat template gets
UNKNOWN = ("chat_template", "functions", "reasoning_effort", "continue_final_message")  # changes it
REASONING = (
    "reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks",
)  # fmt: skip
DATE = (
    r"\d{4}-\d\d-\d\d\S{,30}|\b\d{1,2}:\d\d\S{,20}|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,?|"
    r"(?:\b\d{1,2}(?:st|nd|rd|th)?,? )?\b(?:January|February|March|April|May|June|July|August|"
    r"September|October|November|December)\b(?: \d{1,2}(?:st|nd|rd|th)?\b)?(?:,? \d{4}\b)?"
)
START = 100  # characters of a system message in which the date of a call may stand


def read(part: Any) -> Any:
    """A part of a line; if it is text that holds JSON or the events of a stream, what it holds."""
    if not isinstance(part, str):
        return part
    events = [line[5:].strip() for line in re.split("\r?\n", part) if line.startswith("data:")]
    try:
        return [json.loads(e) for e in events if e != "[DONE]"] if events else json.loads(part)
    except ValueError:
        return part


def parts(of: Any) -> Iterator[dict[str, Any]]:
    """All objects in a line, but for those in what was asked and answered."""
    inner = read(of)
    if isinstance(inner, dict):
        yield inner
        content = (*REQUEST, RESPONSE, *OPTIONS)
        inner = [v for k, v in inner.items() if not (k in content and isinstance(read(v), list))]
    for each in inner if isinstance(inner, list) else []:
        yield from parts(each)


def objects(value: Any, *names: str) -> list[dict[str, Any]]:
    """A list of objects with one of these fields each; empty if it is anything else."""
    each = read(value)
    sound = isinstance(each, list) and all(
        isinstance(one, dict) and any(name in one for name in names) for one in each
    )
    return each if sound else []


def request_of(line: list[dict[str, Any]]) -> dict[str, Any]:
    """The messages of the only request in a line's parts, and what else the chat template gets."""
    known = [(part, objects(part.get(n), "role")) for part in line for n in REQUEST]
    asked = [(part, messages) for part, messages in known if messages]
    if not asked:
        raise ValueError(f"no chat: it has no `{REQUEST[0]}`")
    if any(messages != asked[0][1] for _, messages in asked):
        raise ValueError("several requests")
    places = [p for part, _ in asked for p in (part, *(read(part.get(name)) for name in BESIDE))]
    given = [
        (name, read(place[name]))
        for place in places if isinstance(place, dict)
        for name in ("tools", "documents") if place.get(name)
    ]  # fmt: skip
    for part in line:  # anywhere else, these may have changed the prompt, too
        given.append(("tools", objects(part.get("tools"), "function")))
        given += [
            (name, read(part[name])) for name in ("chat_template_kwargs", *UNKNOWN) if name in part
        ]
    options = {name: value for name, value in given[::-1] if value}
    for name, value in given:
        if value and (name in UNKNOWN or value != options[name]):
            raise ValueError(f"`{name}` of a kind that is not taken")
    messages = [  # a store of chats names each message, and writes all fields that it might have
        {k: v for k, v in m.items() if k == "content" or not (v is None or k == "id")}
        for m in asked[0][1]
    ]
    return {"messages": messages, **options}


def text_of(content: Any) -> str:
    """The text of a message, which may be in parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part.get("text") or "" for part in parts)


def responses_of(line: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """All copies of the only response in a line's parts, each whole or the chunks of a stream."""
    answers = [part for part in line if isinstance(part.get(RESPONSE), list)]
    if not answers:
        raise ValueError(f"no answer: it has no `{RESPONSE}`, as after an error")
    whole = [part for part in answers if objects(part[RESPONSE], "message")]
    chunks = [part for part in answers if objects(part[RESPONSE], "delta")]
    told = [[choice["message"].get("content") for choice in part[RESPONSE]] for part in whole]
    streamed = "".join(
        text_of((choice["delta"] or {}).get("content")) for c in chunks for choice in c[RESPONSE]
    )
    if chunks:
        told.append([streamed])
    ids = {chunk["id"] for chunk in chunks if chunk.get("id")}
    if len(ids) > 1 or any(each != told[0] for each in told):
        raise ValueError("several answers")
    copies = [[part] for part in whole]
    if chunks:
        copies.append(chunks)
    return copies or [answers]


def answer_of(response: list[dict[str, Any]]) -> tuple[str, str]:
    """The answer, and why it is left out, or ""."""
    choices = [choice for part in response for choice in part[RESPONSE]]
    messages = [choice.get("message") or choice.get("delta") or {} for choice in choices]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    contents = [message.get("content") for message in messages]
    usages = [(part.get("usage") or {}).get("completion_tokens_details") for part in response]
    kinds = {part.get("type") for each in contents if isinstance(each, list) for part in each}
    answer = "".join(map(text_of, contents))
    several = len(response) == 1 and len(choices) > 1
    reasons = {
        "no answer": not choices,
        "several answers": several or len(ends) > 1 or any(c.get("index") for c in choices),
        "cut off by max_tokens, or unfinished": not ends or ends[-1] == "length",
        "a tool call": any(m.get("tool_calls") or m.get("function_call") for m in messages),
        "a refusal": any(message.get("refusal") for message in messages),
        "reasoning apart": any(message.get(name) for message in messages for name in REASONING)
        or any(used and used.get("reasoning_tokens") for used in usages),
        "not only text": not kinds <= {"text"},
        "no text": not answer.strip(),
        f"finish_reason {ends[-1:]}": ends[-1:] not in (["stop"], ["eos_token"]),
    }
    return answer, next((reason for reason, holds in reasons.items() if holds), "")


def question_of(request: dict[str, Any]) -> str:
    """What is equal if a question is asked again, even if a system message begins with a date."""
    talk = []
    for message in request["messages"]:
        text = text_of(message.get("content"))
        if message["role"] in ("system", "developer"):
            text = re.sub(DATE, "", text[:START]) + text[START:]
        talk.append({**message, "content": text})
    return json.dumps(request | {"messages": talk})


@click.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--model", help="Keep answers of this model, if the log has several.")
def main(log: str, out: str, model: str | None) -> None:
    """Write to OUT a row for each whole answer to a new question in LOG; print what is left out."""
    left, seen, strange = defaultdict[str, list[int]](list), set[str](), list[str]()
    rows, models = list[dict[str, Any]](), Counter[str]()
    try:
        lines = Path(log).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise SystemExit(f"{log}: expected text in UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = [*parts(json.loads(line))]
            if "litellm_truncated" in line or "redacted-by-litellm" in line:
                raise ValueError("texts were shortened or redacted")
            request, responses = request_of(found), responses_of(found)
            read_answers = [answer_of(response) for response in responses]
            answer, reason = next(((a, r) for a, r in read_answers if r), read_answers[0])
            first = responses[0][0]
            name, question = str(first.get("id") or f"line {number}"), question_of(request)
            named = [part.get("model") for part in (first, *found)]
            answered_by = str(next(filter(None, named), "an unnamed model"))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            known = type(error) is ValueError  # one of this file, not of a library
            left[f"{error}" if known else f"not understood, {error}"].append(number)
            strange.append(line)
            continue
        if not reason and model not in (None, answered_by):
            reason = f"answered by {answered_by}"
        if not reason and not {name, question}.isdisjoint(seen):
            reason = "logged or asked before"
        if reason:
            left[reason].append(number)
            continue
        seen |= {name, question}
        models[answered_by] += 1
        rows.append({"id": name, "answer": answer, **request})
    for reason, numbers in left.items():
        shown = [*map(str, numbers[:5]), *["..."][: len(numbers) > 5]]
        print(f"left out, {reason}: {len(numbers)} (line {', '.join(shown)})")
    if len(strange) > len(rows):
        print(f"If fields have other names, edit the first lines of {__file__}: {strange[0]:.300}")
    if len(models) > 1:
        known = ", ".join(f"{name} ({count})" for name, count in models.items())
        raise SystemExit(f"{log}: no row is written, since several models answered: {known}. "
                         "A threshold is of one: name it with --model")  # fmt: skip
    if not rows:
        raise SystemExit(f"{log}: no row was made.")
    if Path(out).exists() and Path(out).samefile(log):
        raise SystemExit(f"{out} is the log: name another file")
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{log}: {len(rows)} rows of {', '.join(models)}, in {out}")


if __name__ == "__main__":
    main()
