"""Time `polygraph_asmi serve` under load, and compare it with direct calls. Uses only loopback.

python scripts/bench_serve.py --model smollm2
python scripts/bench_serve.py --model FOLDER --memory 1000     # resident memory, on a tiny model
"""

import http.client
import json
import os
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


def body(**fields: Any) -> bytes:
    """JSON; lone surrogates are escaped."""
    return json.dumps(fields).encode()


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
    """Start a local server, put load on it, and report times and memory."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from lm_polygraph_asmi.adapters.contract import open_scorer

    name = Path(model).name
    with server(model, "--stop", "\\n", "--max-prompt-tokens", "4096") as (port, process):
        scorer = open_scorer(model, stop="\n", scope="response", seeded_by="prompt",
                             max_new_tokens=max_tokens)  # fmt: skip
        load(port, process, name, scorer, requests, clients, max_tokens)
        if many:
            memory(port, name, process, many)


if __name__ == "__main__":
    main()
