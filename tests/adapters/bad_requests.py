"""Requests that the server must turn down, and the status of each."""

from bench_serve import AUTHORIZED, ROUTES, body

BadRequest = tuple[str, str, str, dict[str, str], bytes, int]


def bad_requests(model: str, max_tokens: int) -> list[BadRequest]:
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
        add(
            f"chat: {name}",
            422,
            body(**chat | {"messages": messages}),
            ROUTES[1],
        )
    for name, fields in {
        "no answer": {"prompt": "Who?"}, "no prompt": {"answer": "I"},
        "no list": {"prompt": "Who?", "answer": []}, "ids": {"prompt": "Who?", "answer": [5]},
        "both": {"prompt": "Who?", "messages": [user], "answer": "I"},
        "a long answer": {"prompt": "Who?", "answer": "word " * 9000},
        "65 answers": {"prompt": "Who?", "answer": ["I"] * 65},
    }.items():  # fmt: skip
        add(f"score: {name}", 422, body(**fields), ROUTES[2])
    add(
        "a prompt beyond the tokens",
        422,
        body(**completion | {"prompt": "word " * 20_000}),
    )
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
