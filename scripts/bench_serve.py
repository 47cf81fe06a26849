"""Test `polygraph_asmi serve` under load, faults and bad input. Uses only loopback.

python scripts/bench_serve.py --model smollm2                  # load and faults
python scripts/bench_serve.py --model FOLDER --memory 1000     # resident memory, on a tiny model
"""

import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil

KEY = "bench-key"
PASSAGE = "The ferry Ondine was built in Brask in 1931, and her first captain was Edda Holm. "
ROUTES = ("/v1/completions", "/v1/chat/completions", "/score")
AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
BadRequest = tuple[str, str, str, dict[str, str], bytes, int]


def body(**fields: Any) -> bytes:
    """JSON; lone surrogates are escaped."""
    return json.dumps(fields).encode()


def bad_requests(model: str, max_tokens: int = 256) -> list[BadRequest]:
    """Name, method, path, headers, body and expected status of every bad request."""
    completion = {"model": model, "prompt": "Who?"}
    user = {"role": "user", "content": "Who?"}
    chat = {"model": model, "messages": [user]}
    requests: list[BadRequest] = []

    def add(name: str, status: int, content: bytes, path: str = ROUTES[0], **headers: str) -> None:
        sent = AUTHORIZED | {key.replace("_", "-"): value for key, value in headers.items()}
        requests.append((name, "POST", path, sent, content, status))

    for name, content in {
        "no JSON": b"prompt=Who", "cut JSON": body(**completion)[:-3], "nothing": b"",
        "bytes that are no UTF-8": b'{"model": "\xff\xfe"}', "two values": body(**completion) * 2,
        "half of a pair": body(**completion | {"prompt": "\ud800"}),
        "not a number": body(**completion, temperature=float("nan")),
    }.items():  # fmt: skip
        add(name, 400, content)
    add("deep nesting", 400, b"[" * 100_000)
    for name, content in {"a list": b"[]", "a text": b'"prompt"', "null": b"null"}.items():
        add(name, 422, content)
    for field, values in {
        "prompt": (None, 5, "", ["Who?"] * 2, {"text": "Who?"}, [1, 2]),
        "max_tokens": (0, -1, "5", 2.5, True, max_tokens + 1, 1e30, 10**30),
        "stop": ("", 5, [""], ["a"] * 5, ["a" * 65]),
        "stream": ("yes", 1),
        "stream_options": ({"usage": True}, []),
        "temperature": (0.7, "0"),
        "n": (2,), "logprobs": (5,), "echo": (True,), "top_p": (0.5,),
        "tools": ([{}],), "promt": ("Who?",), "response_format": ({"type": "json_object"},),
    }.items():  # fmt: skip
        for value in values:
            add(f"{field} {value!r:.20}", 422, body(**completion | {field: value}))
    for name in ("other", "../../etc/passwd", "/etc/passwd", f"{model}/../x", "\0", "a" * 9999):
        add(f"model {name!r:.20}", 404, body(**completion | {"model": name}))
    for name, messages in {
        "no message": [], "no role": [{"content": "Who?"}], "a role": [user | {"role": "root"}],
        "an image": [user | {"content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}],
        "the assistant last": [user, {"role": "assistant", "content": "I"}], "a text": "Who?",
    }.items():  # fmt: skip
        add(f"chat: {name}", 422, body(**chat | {"messages": messages}), ROUTES[1])
    for name, fields in {
        "no answer": {"prompt": "Who?"}, "no prompt": {"answer": "I"},
        "no list": {"prompt": "Who?", "answer": []}, "ids": {"prompt": "Who?", "answer": [5]},
        "both": {"prompt": "Who?", "messages": [user], "answer": "I"},
        "a long answer": {"prompt": "Who?", "answer": "word " * 9000},
        "65 answers": {"prompt": "Who?", "answer": ["I"] * 65},
    }.items():  # fmt: skip
        add(f"score: {name}", 422, body(**fields), ROUTES[2])
    add("a prompt beyond the tokens", 422, body(**completion | {"prompt": "word " * 20_000}))
    add("a body of 1 MB", 413, body(**completion | {"prompt": "w" * 1_000_000}))
    add("form data", 400, b"model=tiny&prompt=x", Content_Type="application/x-www-form-urlencoded")
    add("a compressed body", 415, body(**completion), Content_Encoding="gzip")
    add("another key", 401, body(**completion), Authorization="Bearer no")
    add("no key", 401, body(**completion), Authorization="")
    for method, path, status in (
        ("GET", ROUTES[0], 405), ("DELETE", "/v1/models", 405), ("GET", "/v1/models/..%2f..", 404),
        ("GET", "/../../etc/passwd", 404), ("GET", "/docs", 404), ("POST", "/", 404),
    ):  # fmt: skip
        requests.append((f"{method} {path}", method, path, AUTHORIZED, b"", status))
    return requests


def send(
    port: int, method: str, path: str, headers: dict[str, str], content: bytes, timeout: float = 120
) -> tuple[int, bytes]:
    """Status and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, content, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def ask(port: int, path: str, **fields: Any) -> Any:
    """The reply to a good request."""
    status, content = send(port, "POST", path, AUTHORIZED, body(**fields))
    assert status == 200, (status, content)
    return json.loads(content)


def free_port() -> int:
    """A port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(model: str, *options: str, log: Any = None) -> Iterator[tuple[int, subprocess.Popen]]:
    """A server on a free port; killed at the end if it is still running."""
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".key") as key:
        key.write(KEY)
        key.flush()
        program = "from lm_polygraph_asmi.commands import main; main()"
        command = [sys.executable, "-c", program, "serve", "--model", model, "--port", str(port),
                   "--api-key-file", key.name, *options]  # fmt: skip
        process = subprocess.Popen(command, stderr=log or subprocess.DEVNULL)
        try:
            for _ in range(1200):
                assert process.poll() is None, "the server did not start"
                try:
                    if send(port, "GET", "/health", {}, b"")[0] == 200:
                        break
                except OSError:
                    time.sleep(0.1)
            yield port, process
        finally:
            process.kill()
            process.wait()


def events(port: int, **fields: Any) -> Iterator[Any]:
    """Events of a streamed answer; ConnectionError if the stream ends early."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", ROUTES[0], body(stream=True, **fields), AUTHORIZED)
        for line in connection.getresponse():
            if line.startswith(b"data: ") and line[6:12] != b"[DONE]":
                yield json.loads(line[6:])
            if line.startswith(b"data: [DONE]"):
                return
        raise ConnectionError("the stream broke off")
    finally:
        connection.close()


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def prompts(number: int) -> list[str]:
    """Distinct prompts of mixed lengths."""
    return [
        f"{PASSAGE * (1 + index % 4)}\nQ: Who was captain {index}?\nA:" for index in range(number)
    ]


def load(
    port: int, process: Any, name: str, scorer: Any, number: int, clients: int, tokens: int
) -> None:
    """Concurrent requests; compares each answer with that of a direct call."""
    from lm_polygraph_asmi.adapters.contract import Assessment, assess

    sent_prompts = prompts(number)

    def score_one(index: int) -> tuple[str, float]:
        fields = {"model": name, "prompt": sent_prompts[index]}
        if index % 3 == 0:
            reply = ask(port, ROUTES[2], answer=" Edda Holm", **fields)
            return " Edda Holm", reply["asmi"]["score"]
        if index % 3 == 1:
            *parts, last = events(port, max_tokens=tokens, **fields)
            text = "".join(part["choices"][0]["text"] for part in [*parts, last])
            return text, last["asmi"]["score"]
        reply = ask(port, ROUTES[0], max_tokens=tokens, **fields)
        return reply["choices"][0]["text"], reply["asmi"]["score"]

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        got = list(pool.map(score_one, range(number)))
    seconds = time.perf_counter() - start
    largest, changed = 0.0, 0
    for index, (text, value) in enumerate(got):
        score = scorer.score(sent_prompts[index], " Edda Holm" if index % 3 == 0 else None)
        largest = max(largest, abs(value - Assessment.of(score).score))
        changed += text != score.answer
    click.echo(
        f"load: {number} requests by {clients} clients in {seconds:.1f} s, none lost; other texts "
        f"than a direct call: {changed}; scores differ by at most {largest:.1e} nats"
    )
    pairs = []
    for prompt in sent_prompts[:40]:
        used = []
        for call, user in (
            (lambda prompt=prompt: assess(scorer, prompt, " Edda Holm"), os.getpid()),
            (lambda prompt=prompt: ask(port, ROUTES[2], prompt=prompt, answer=" Edda Holm"),
             process.pid),
        ):  # fmt: skip
            begin = time.perf_counter(), cpu(user)
            call()
            used += [time.perf_counter() - begin[0], cpu(user) - begin[1]]
        pairs.append(used)
    direct, served = (sum(pair[i] for pair in pairs) / len(pairs) for i in (1, 3))
    low, middle, high = statistics.quantiles([pair[2] / pair[0] for pair in pairs], n=4)
    click.echo(f"cost: {served:.3f} s of CPU in the server, {direct:.3f} s in a direct call, ratio "
               f"{served / direct:.2f}, mean of {len(pairs)} pairs; wall clock: median ratio "
               f"{middle:.2f}, quartiles {low:.2f} to {high:.2f}")  # fmt: skip


def faults(model: str, name: str, log: Any, *options: str) -> None:
    """A client that disconnects, a kill during a stream and a restart, SIGTERM during a stream."""
    long = {"model": name, "prompt": prompts(1)[0], "max_tokens": 200, "stop": ["~~~~"]}
    with server(model, *options, log=log) as (port, process):
        stream = events(port, **long)
        next(stream), next(stream)
        stream.close()
        begin = time.perf_counter()
        while json.loads(send(port, "GET", "/health", {}, b"")[1])["pending"]:
            time.sleep(0.01)
        click.echo(f"client gone: its answer ended {time.perf_counter() - begin:.2f} s later")
        stream = events(port, **long)
        next(stream), next(stream)
        process.kill()
        try:
            list(stream)
            raise SystemExit("killed: the client was told nothing")
        except (OSError, http.client.HTTPException) as error:
            click.echo(f"killed in a stream: the client gets {type(error).__name__}")
    with server(model, *options, log=log) as (port, process):
        assert ask(port, ROUTES[0], model=name, prompt="Who?", max_tokens=2)["asmi"]
        click.echo("restarted: it serves")
        stream = events(port, **long | {"max_tokens": 40})
        next(stream)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        try:
            send(port, "GET", "/health", {}, b"", timeout=5)
            raise SystemExit("SIGTERM: a new request was taken")
        except OSError:
            *_, last = stream
            assert last["asmi"]["score"] >= 0
        process.wait(60)
        click.echo("SIGTERM in a stream: it finishes, a new request is rejected, the server ends")


def memory(port: int, name: str, process: subprocess.Popen, number: int) -> None:
    """Resident memory after a hundred requests and after many more."""
    resident = {}
    for index, prompt in enumerate(prompts(number), start=1):
        ask(port, ROUTES[index % 3 and 2], model=name, prompt=prompt,
            **({"answer": " Edda Holm"} if index % 3 else {"max_tokens": 4}))  # fmt: skip
        if index in (100, number):
            resident[index] = psutil.Process(process.pid).memory_info().rss / 2**20
    texts = (f"{mib:.0f} MiB after {n} requests" for n, mib in resident.items())
    click.echo(f"memory: {', '.join(texts)}")


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--requests", default=200, show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option("--max-tokens", default=8, show_default=True, help="Tokens of a generated answer.")
@click.option(
    "--memory", "many", default=0, show_default=True, help="Requests for the memory test."
)
def main(model: str, requests: int, clients: int, max_tokens: int, many: int) -> None:
    """Start a local server, test it under load and faults, and report the results."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lm_polygraph_asmi.adapters.contract import open_scorer

    name = Path(model).name
    options = ("--stop", "\\n", "--max-prompt-tokens", "4096")
    with tempfile.TemporaryFile("w+") as log:
        with server(model, *options, log=log) as (port, process):
            if requests:
                scorer = open_scorer(model, stop="\n", scope="response", seeded_by="prompt",
                                     max_new_tokens=max_tokens)  # fmt: skip
                load(port, process, name, scorer, requests, clients, max_tokens)
            wrong = 0
            for case, *request, expected in (bad := bad_requests(name)):
                status, reply = send(port, *request)
                if status != expected or b"error" not in reply:
                    wrong += 1
                    click.echo(f"bad: {case}: expected {expected}, got {status}: {reply[:200]!r}")
                good = ask(port, ROUTES[2], prompt="Who?", answer=" I")
                assert good["asmi"]["score"] >= 0
            click.echo(f"bad: {len(bad)} requests, {wrong} not answered as expected; the next good "
                       "request worked after each")  # fmt: skip
            if many:
                memory(port, name, process, many)
        if requests:
            faults(model, name, log, *options)
        log.seek(0)
        text = log.read()
        assert not any(word in text for word in ("Traceback", "Who", "Edda")), text[-2000:]
        click.echo("log: no prompt, no stack trace")


if __name__ == "__main__":
    main()
