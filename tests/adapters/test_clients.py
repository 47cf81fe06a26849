"""What usual clients send: neutral values, odd headers and paths. Plain HTTP, no client library."""

import http.client
import json
import re
from itertools import pairwise

import bench_serve
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_polygraph_asmi.adapters.contract import open_scorer
from tests.adapters.conftest import SETTINGS, serving

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from lm_polygraph_asmi.adapters import server
from lm_polygraph_asmi.adapters.guard import canonical
from lm_polygraph_asmi.adapters.requests import Completion, ScoreRequest
from lm_polygraph_asmi.adapters.wire import RequestError

USER = {"role": "user", "content": "Who built the ferry?"}
TEXT = {"model": "tiny", "prompt": "Who built the ferry?"}
CHAT = {"model": "tiny", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LEAKS = re.compile(
    r"pydantic|Input should|valid (dict|string|list|int)|constrained|NoneType|Union|literal|"
    r"\b(str|dict|bool|float)\b|Traceback|codec|<class",
    re.IGNORECASE,
)
"""Words of libraries that a person need not know."""


def read(content, chat=True):
    return Completion.read(bench_serve.body(**content), chat)


NEUTRAL = {
    "both": [
        {"temperature": 0}, {"temperature": 0.0}, {"temperature": None}, {"top_p": 1},
        {"top_p": 1.0}, {"top_k": -1}, {"min_p": 0.0}, {"n": 1}, {"presence_penalty": 0},
        {"frequency_penalty": 0.0}, {"repetition_penalty": 1.0}, {"logit_bias": {}},
        {"logit_bias": None}, {"user": "someone"}, {"seed": 7}, {"metadata": {"run": "a"}},
        {"stop": None}, {"stop": []}, {"stream": False}, {"stream_options": None},
        {"stream_options": {}}, {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_obfuscation": True}}, {"max_tokens": None},
        {"service_tier": "auto"}, {"no_field_of_ours": None}, {"repeat_penalty": 1.0},
        {"length_penalty": 1.0}, {"typical_p": 1.0}, {"use_beam_search": False},
        {"ignore_eos": False}, {"min_tokens": 0}, {"stop_token_ids": []},
        {"tfs_z": 1.0}, {"bad_words": []}, {"do_sample": False}, {"mirostat": 0},
        {"dry_multiplier": 0.0}, {"xtc_probability": 0.0}, {"dynatemp_range": 0},
        {"cache_prompt": True}, {"id_slot": -1}, {"repeat_last_n": 64}, {"priority": 0},
        {"detokenize": True}, {"return_token_ids": False}, {"skip_special_tokens": True},
        {"spaces_between_special_tokens": True},
        {"include_stop_str_in_output": False}, {"add_generation_prompt": True},
        {"continue_final_message": False},
    ],
    "chat": [
        {"tools": []}, {"tools": None}, {"tool_choice": None}, {"tool_choice": "none"},
        {"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"functions": []},
        {"function_call": "none"}, {"response_format": {"type": "text"}}, {"store": False},
        {"modalities": ["text"]}, {"audio": None}, {"prediction": None}, {"logprobs": False},
        {"top_logprobs": 0}, {"verbosity": "medium"}, {"reasoning_effort": None},
        {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"web_search_options": None},
        {"messages": [USER | {"name": "Ada"}]}, {"messages": [USER | {"type": "text"}]},
        {"messages": [USER | {"type": None}]},
        {"messages": [USER | {"type": "message", "id": "msg_1"}]},
        {"messages": [USER | {"content": [{"type": "text", "text": USER["content"]}]}]},
        {"messages": [USER | {"content": [
            {"type": "text", "text": "Who built ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "the ferry?"}]}]},
    ],
    "text": [
        {"prompt": ["Who built the ferry?"]}, {"suffix": None}, {"suffix": ""}, {"best_of": 1},
        {"echo": False}, {"logprobs": None},
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", NEUTRAL)
def test_neutral_values_ask_for_the_same(kind):
    for chat in {"both": (True, False), "chat": (True,), "text": (False,)}[kind]:
        base = CHAT if chat else TEXT
        for fields in NEUTRAL[kind]:
            assert read(base | fields, chat) == read(base, chat), fields


def test_values_that_are_written_otherwise():
    assert read(CHAT | {"max_tokens": 3.0}).max_tokens == 3
    assert read(CHAT | {"max_completion_tokens": 3, "max_tokens": 3.0}).max_tokens == 3
    assert read(CHAT | {"stop": "\n"}).stop == ["\n"]
    history = [
        {"role": "developer", "content": "Be brief."},
        USER,
        # as openai-python dumps a message of a reply
        {"role": "assistant", "content": None, "annotations": [], "audio": None,
         "function_call": None, "tool_calls": None, "provider_specific_fields": {"a": None}},
        {"role": "assistant"},
        {"role": "system", "content": ""},
        USER,
    ]  # fmt: skip
    assert read(CHAT | {"messages": history}).prompt == [
        {"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""}, {"role": "system", "content": ""}, USER,
    ]  # fmt: skip
    assert Completion.read(b"\xef\xbb\xbf" + bench_serve.body(**CHAT), True) == read(CHAT)


OTHER = {
    "both": [
        ("temperature", 0.7), ("temperature", True), ("temperature", "0"), ("top_p", 0.9),
        ("top_k", 50), ("min_p", 0.1), ("n", 2), ("presence_penalty", 0.5),
        ("frequency_penalty", -1), ("repetition_penalty", 1.2), ("logit_bias", {"50256": -100}),
        ("max_tokens", 0), ("max_tokens", 2.5), ("max_tokens", "5"), ("max_tokens", -1),
        ("stop", ""), ("stop", 5), ("stop", ["a"] * 5), ("stream", 1), ("stream", "true"),
        ("stream_options", True), ("stream_options", {"usage": True}), ("model", None),
        ("model", 5), ("tempertaure", 0), ("guided_json", {"type": "object"}),
        ("do_sample", True), ("mirostat", 2), ("bad_words", ["x"]), ("repeat_penalty", 1.1),
        ("ignore_eos", True), ("min_tokens", 5), ("stop_token_ids", [2]),
        ("skip_special_tokens", False), ("continue_final_message", True),
    ],
    "chat": [
        ("tools", [TOOL]), ("tools", {}), ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "search"}}),
        ("functions", [{}]), ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}), ("store", True),
        ("modalities", ["text", "audio"]), ("audio", {"voice": "alloy"}), ("logprobs", True),
        ("top_logprobs", 5), ("reasoning_effort", "high"), ("verbosity", "low"),
        ("chat_template_kwargs", {"enable_thinking": False}), ("messages", None),
        ("messages", []), ("messages", "Who?"), ("messages", ["Who?"]), ("messages", {}),
        ("messages", [{"content": "Who?"}]), ("messages", [{"role": "tool", "content": "7"}]),
        ("messages", [{"role": ["user"], "content": "7"}]), ("messages", [{"role": "user"}]),
        ("messages", [USER | {"content": None}]), ("messages", [USER | {"content": ""}]),
        ("messages", [USER | {"content": []}]), ("messages", [USER | {"content": 5}]),
        ("messages", [USER | {"content": {"text": "Who?"}}]),
        ("messages", [USER | {"content": ["Who?"]}]),
        ("messages", [USER | {"content": [IMAGE]}]),
        ("messages", [USER | {"content": [{"type": "text"}]}]),
        ("messages", [USER | {"weight": 0.5}]), ("messages", [USER | {"type": "image"}]),
        ("messages", [USER | {"reasoning_content": "It was Brask."}]),
        ("messages", [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL]}, USER]),
        ("messages", [USER, {"role": "assistant", "content": "Brask"}]),
        ("messages", [USER] * 1001),
    ],
    "text": [
        ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", ["a", "b"]),
        ("prompt", [1, 2]), ("prompt", [[1, 2]]), ("prompt", [5]),
        ("prompt", 5), ("prompt", {"text": "Who?"}), ("suffix", "."), ("best_of", 3),
        ("echo", True), ("logprobs", 5), ("logprobs", 0), ("messages", [USER]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER)
def test_what_would_change_the_answer_is_named_in_a_sentence(kind):
    for chat in {"both": (True, False), "chat": (True,), "text": (False,)}[kind]:
        for field, value in OTHER[kind]:
            with pytest.raises(RequestError) as caught:
                read((CHAT if chat else TEXT) | {field: value}, chat)
            error = caught.value.content["error"]
            assert caught.value.status == 422, (field, value)
            name = field.encode("ascii", "backslashreplace").decode()
            assert error["param"].startswith(name), (field, value, error)
            assert error["message"].startswith(f"{error['param']}: "), error
            assert not LEAKS.search(error["message"]), error
            assert "Who" not in error["message"]
            assert len(error["message"].split()) <= 35
            assert {*error} == {"message", "type", "param", "code"}
            assert error["code"] is None or isinstance(error["code"], str)
            caught.value.response()  # can be sent


def test_two_lengths_are_an_error():
    with pytest.raises(RequestError, match=r"^max_tokens: expected the same number"):
        read(CHAT | {"max_tokens": 3, "max_completion_tokens": 4})


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "the body is empty"),
        (b" \n", 400, "the body is empty"),
        (b"model=tiny", 400, "the body: not JSON: Expecting value: line 1 column 1"),
        (b'{"prompt": "a", "prompt": "b"}', 400, "the field 'prompt' occurs twice"),
        (b'{"temperature": NaN}', 400, "the field 'temperature': expected a finite number"),
        (b'{"x": [1e999]}', 400, r"the field 'x\[0\]': expected a finite number"),
        (b'{"prompt": "Who \\ud800?"}', 400, "'prompt': expected text, got .* at character 5"),
        (b'{"model": "\xff"}', 400, "the body is not UTF-8: byte 12"),
        (b"[" * 100_000, 400, "too deep"),
        (b"[" * 900 + b"]" * 900, 4, "nested (too deeply|lists and objects)|got a list"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        (b"[]", 422, "expected a JSON object as body, got a list"),
        (b'"Who?"', 422, "expected a JSON object as body, got a text"),
        (b"null", 422, "expected a JSON object as body, got nothing"),
    ],
)
def test_a_body_that_is_no_object(body, status, said):
    for reader in (lambda: Completion.read(body, True), lambda: ScoreRequest.read(body)):
        with pytest.raises(RequestError, match=said) as caught:
            reader()
        assert caught.value.status // (100 if status < 10 else 1) == status
        caught.value.response()  # can be sent
        assert not LEAKS.search(str(caught.value))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"answer: expected a text, got nothing"),
        ({"answer": []}, r"answer: expected a text or a list of texts, got none"),
        ({"answer": ["a", 5]}, r"answer\[1\]: expected a text, got 5"),
        ({"answer": ["a", ""]}, r"answer\[1\]: expected a text of at least one character"),
        ({"answer": "a", "messages": [USER]}, "prompt: expected either prompt or messages"),
        ({"answer": "a", "anser": "b"}, "anser: there is no such field"),
    ],
)
def test_a_score_request_names_its_field(fields, said):
    with pytest.raises(RequestError, match=said):
        ScoreRequest.read(bench_serve.body(prompt="Who?", **fields))


@pytest.fixture(scope="module")
def port(scorer):
    with serving(scorer, name="org/tiny") as address:
        yield int(address.split(":")[1])


def exchange(port, method, path, content=b"", **headers):
    """Status, headers and body of a request that has these headers only."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


NAMED = TEXT | {"model": "org/tiny", "max_tokens": 2}
KINDS = (
    None, "application/json", "text/plain", "application/x-www-form-urlencoded", "nonsense",
    "application/json; charset=utf-8", "application/octet-stream", "",
)  # fmt: skip


def test_any_content_type(port):
    """curl -d sends a form's, some libraries none."""
    for kind in KINDS:
        headers = {} if kind is None else {"Content_Type": kind}
        status, _, reply = exchange(
            port, "POST", "/v1/completions", bench_serve.body(**NAMED), **headers
        )
        assert (status, json.loads(reply)["object"]) == (200, "text_completion"), kind


def test_a_key_that_nobody_asked_for(port):
    for value in ("Bearer none", "Basic eDp5", "", "nonsense"):
        assert exchange(port, "GET", "/v1/models", Authorization=value)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models", "/v1/models/", "/models", "//v1/models", "/v1//models/", "/v1/v1/models",
        "/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/models/org/tiny/",
    ],
)  # fmt: skip
def test_routes_of_models(port, path):
    status, _, reply = exchange(port, "GET", path)
    content = json.loads(reply)
    model = content if "tiny" in path else content["data"][0]
    assert (status, model["id"], model["object"]) == (200, "org/tiny", "model")
    status, headers, reply = exchange(port, "HEAD", path)
    assert (status, reply, headers["content-type"]) == (200, b"", "application/json")


def test_routes_of_answers_with_and_without_their_prefix(port):
    for path in ("/v1/completions/", "/completions", "//v1/completions", "/v1/v1/completions"):
        assert exchange(port, "POST", path, bench_serve.body(**NAMED))[0] == 200, path
    content = bench_serve.body(prompt="Who?", answer=" I")
    assert exchange(port, "POST", "/v1/score", content)[0] == 200
    assert canonical("/v1") == canonical("") == "/"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/org", 404, "model_not_found"),
        ("GET", "/", 404, None), ("POST", "/v1/embeddings", 404, None),
        ("POST", "/v1/responses", 404, None), ("GET", "/api/tags", 404, None),
        ("GET", "/v1/chat/completions", 405, None), ("PUT", "/score", 405, None),
        ("POST", "/v1/models", 405, None),
    ],
)  # fmt: skip
def test_other_routes_and_methods_are_errors_in_openais_format(port, method, path, status, code):
    received, headers, reply = exchange(port, method, path)
    error = json.loads(reply)["error"]
    assert (received, error["code"], {*error}) == (
        status, code, {"message", "type", "param", "code"},
    )  # fmt: skip
    assert "expected" in error["message"]
    assert not LEAKS.search(error["message"])
    assert ("allow" in headers) == (status == 405)


def test_options_lists_methods(port):
    status, headers, reply = exchange(port, "OPTIONS", "/v1/chat/completions")
    assert (status, headers["allow"], reply) == (204, "POST", b"")
    assert exchange(port, "OPTIONS", "/v1/models")[1]["allow"] in ("GET, HEAD", "HEAD, GET")
    assert "access-control-allow-origin" not in headers  # web pages cannot read a reply


def test_pages_of_other_machines_cannot_send(port):
    """A page may send a text without asking first, but not without its origin."""
    content = bench_serve.body(prompt="Who?", answer=" I")
    for origin, status in {
        "https://evil.example": 403, "null": 403, "https://localhost.evil.example": 403,
        "https://127.0.0.1.evil.example:80": 403, "file://": 403, "": 403,
        "http://localhost:3000": 200, "http://127.0.0.1": 200, "http://[::1]:80": 200,
    }.items():  # fmt: skip
        headers = {"Origin": origin, "Content_Type": "text/plain"}
        assert exchange(port, "POST", "/score", content, **headers)[0] == status, origin


def events(reply):
    """The parsed events of a stream, in lines as `str.splitlines` and some clients see them."""
    lines = [line for line in reply.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream(port, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    content = (CHAT if chat else TEXT) | {"model": "org/tiny", "stream": True}
    content |= {"stream_options": {"include_usage": True}}
    status, headers, reply = exchange(port, "POST", path, bench_serve.body(**content))
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    *parts, usage = events(reply)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 8)
    choices = [part["choices"][0] for part in parts]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    if chat:  # clients join the texts of a field over all parts
        assert "".join(choice["delta"].get("role", "") for choice in choices) == "assistant"
    else:
        assert all(isinstance(choice["text"], str) for choice in choices)


def test_an_error_in_a_stream_is_an_event_and_the_stream_ends(port, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(server.Service, "_reported", broken)
    content = bench_serve.body(**NAMED, stream=True)
    *_, error = events(exchange(port, "POST", "/v1/completions", content)[2])
    assert error["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(error)


def scripted(folder, prompt, answer):
    """A scorer whose greedy answer to any prompt with this end is fixed; tokens occur once."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    chain = [tokenizer(prompt)["input_ids"][-1], *ids, tokenizer.eos_token_id]
    assert len({*chain}) == len(chain)
    with torch.no_grad():
        for axis, (token, following) in enumerate(pairwise(chain)):
            model.get_input_embeddings().weight[token] = 0
            model.get_input_embeddings().weight[token, axis] = 30
            model.get_output_embeddings().weight[following] = 0
            model.get_output_embeddings().weight[following, axis] = 3
    return open_scorer(model, tokenizer=tokenizer, **SETTINGS | {"max_new_tokens": 16})


@pytest.mark.parametrize("characters", ["\u2028\x85\x0b\x1cé", "\u2029🙂"])
def test_line_ends_of_unicode_do_not_break_an_event(folder, characters):
    answer = f"A{characters}B"
    own = scripted(folder, TEXT["prompt"], answer)
    assert own.score(TEXT["prompt"]).answer == answer
    with serving(own, answer=16) as address:
        port = int(address.split(":")[1])
        content = bench_serve.body(**TEXT, stream=True)
        parts = events(exchange(port, "POST", "/v1/completions", content)[2])
        whole = json.loads(exchange(port, "POST", "/v1/completions", bench_serve.body(**TEXT))[2])
    assert "".join(part["choices"][0]["text"] for part in parts) == answer
    assert whole["choices"][0]["text"] == answer
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert parts[-1]["asmi"]["msp"] == pytest.approx(whole["asmi"]["msp"], abs=1e-5)


def test_all_neutral_values_at_once_change_nothing(port):
    plain = CHAT | {"model": "org/tiny", "max_tokens": 4}
    full = dict(plain)
    for fields in NEUTRAL["both"] + NEUTRAL["chat"]:
        full |= fields
    full |= {"max_tokens": 4.0, "stream": False, "user": "Ünïcode \u2028"}
    replies = []
    for content in (plain, full):
        status, _, reply = exchange(port, "POST", "/chat/completions", bench_serve.body(**content))
        assert status == 200, reply
        replies.append(json.loads(reply))
    one, other = replies
    assert one["choices"] == other["choices"]
    assert one["asmi"]["key"] == other["asmi"]["key"]
    assert one["asmi"]["score"] == pytest.approx(other["asmi"]["score"], abs=1e-6)


def test_a_developer_is_the_system(port):
    replies = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief."}, USER]
        content = bench_serve.body(**CHAT | {"model": "org/tiny", "messages": messages})
        replies.append(json.loads(exchange(port, "POST", "/v1/chat/completions", content)[2]))
    assert replies[0]["choices"] == replies[1]["choices"]
    assert replies[0]["usage"] == replies[1]["usage"]
