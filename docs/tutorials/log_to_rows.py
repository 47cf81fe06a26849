"""Make rows for `polygraph_asmi score` of a log of an OpenAI-compatible server.

python docs/tutorials/log_to_rows.py LOG.jsonl ROWS.jsonl
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import click


def request_and_response(line: dict[str, Any]) -> tuple[Any, Any]:
    """EDIT HERE, if need be: where a line of your log has the request and its response."""
    request = line.get("request") or line.get("input") or line  # or `messages` are in the line
    names = [name for name in ("response", "output") if name in line]
    return request, line[names[0]] if names else line  # or `choices` are


def plain(part: Any) -> Any:
    """A request or response without a wrapping: JSON as text, events as text, or a `body`."""
    if isinstance(part, str) and part.lstrip().startswith("data:"):
        events = [line[5:].strip() for line in part.splitlines() if line.startswith("data:")]
        part = [json.loads(event) for event in events if event != "[DONE]"]
    if isinstance(part, str):
        part = json.loads(part)
    return plain(part["body"]) if isinstance(part, dict) and "body" in part else part


def text_of(content: Any) -> str:
    """The text of a message, which may be in parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part.get("text") or "" for part in parts)


def choices_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a response, or of the chunks of a stream; of errors, none."""
    sound = [c for c in chunks if c and not c.get("error") and c.get("object") != "error"]
    if sound and not any("choices" in chunk for chunk in sound):
        raise KeyError("choices")
    return [choice for chunk in sound for choice in chunk.get("choices") or []]


def answer_of(chunks: list[dict[str, Any]]) -> tuple[str, str]:
    """The answer in a response, or in the chunks of a stream; and why it is left out, or ""."""
    choices = choices_of(chunks)
    parts = [choice.get("message") or choice.get("delta") or {} for choice in choices]
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    answer = "".join(text_of(part.get("content")) for part in parts)
    reasons = {
        "an error, no answer": not choices,
        "several answers": any(choice.get("index") for choice in choices),
        "cut off by max_tokens, or unfinished": not ends or ends[-1] == "length",
        "a tool call": any(part.get("tool_calls") for part in parts),
        "reasoning apart": any(p.get("reasoning_content") or p.get("reasoning") for p in parts),
        "no text": not answer.strip(),
        f"finish_reason {ends[-1:]}": ends[-1:] not in (["stop"], ["eos_token"]),
    }
    return answer, next((reason for reason, holds in reasons.items() if holds), "")


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
            request, response = map(plain, request_and_response(entry))
            request = entry | {"messages": request} if isinstance(request, list) else request
            chunks = response if response and isinstance(response, list) else [response or {}]
            answer, reason = answer_of(chunks)
            talk = [m for m in request["messages"] if m["role"] not in ("system", "developer")]
            name, question = str(chunks[0].get("id") or f"line {number}"), json.dumps(talk)
            answered_by = str(chunks[0].get("model") or request.get("model"))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            left[f"not understood ({type(error).__name__}: {error})"].append(number)
            strange = f"Line {number} is not understood: {line[:150]} ...\n"
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
        given = ("messages", "tools", "documents", "chat_template_kwargs")
        rows += [{"id": name, "answer": answer} | {n: request[n] for n in given if n in request}]
    for reason, numbers in left.items():
        shown = [*map(str, numbers[:5]), *["..."][: len(numbers) > 5]]
        print(f"left out, {reason}: {len(numbers)} (line {', '.join(shown)})")
    if strange:
        print(f"{strange}If its fields have other names, edit `request_and_response` in {__file__}")
    if len(models) > 1:
        known = ", ".join(f"{name} ({count})" for name, count in models.items())
        raise SystemExit(f"{log}: no row is written, since several models answered: {known}. "
                         "A threshold is of one: name it with --model")  # fmt: skip
    if not rows:
        raise SystemExit(f"{log}: no row was made.")
    if Path(out).exists() and Path(out).samefile(log):
        raise SystemExit(f"{out} is the log: name another file")
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{log}: {len(rows)} rows, in {out}")


if __name__ == "__main__":
    main()
