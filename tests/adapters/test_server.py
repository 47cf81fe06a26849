"""The server, asked by OpenAI's client and by raw requests."""

import http.client
import inspect
import json
import logging
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import bench_serve
import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.adapters.contract import Assessment, open_scorer, scorer_of
from lm_polygraph_asmi.calibration import Calibration, Decider, calibrate_rows
from lm_polygraph_asmi.commands import main
from tests.adapters.bad_requests import bad_requests
from tests.adapters.conftest import SETTINGS, serving
from tests.calibration.conftest import labelled, limited

openai = pytest.importorskip("openai")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
serving_module = pytest.importorskip("lm_polygraph_asmi.adapters.server")
guard = pytest.importorskip("lm_polygraph_asmi.adapters.guard")
requests = pytest.importorskip("lm_polygraph_asmi.adapters.requests")
wire = pytest.importorskip("lm_polygraph_asmi.adapters.wire")

PROMPT = "Who built the ferry?"
CHAT = [{"role": "user", "content": PROMPT}]
LIMITS = {"queue": 3, "prompt": 200}


@pytest.fixture(scope="module")
def address(scorer):
    with serving(scorer, key=bench_serve.KEY, **LIMITS) as found:
        yield found


@pytest.fixture
def port(address):
    return int(address.split(":")[1])


@pytest.fixture
def client(address):
    made = openai.OpenAI(
        base_url=f"http://{address}/v1", api_key=bench_serve.KEY, max_retries=0, timeout=60
    )
    with made:
        yield made


def pending(port):
    return json.loads(bench_serve.send(port, "GET", "/health", {}, b"")[1])["pending"]


def idle(port):
    while pending(port):
        time.sleep(0.01)


def same(asmi, result):
    """What a reply says is what a direct call says."""
    expected = Assessment.of(result).to_dict()
    for name in ("value", "score", "msp", "perplexity", "entropy"):
        known = expected[name]
        assert asmi[name] == (None if known is None else pytest.approx(known, abs=1e-5))
    for name in ("key", "decision", "signal", "unit", "error_probability", "reason"):
        assert asmi[name] == expected[name]
    tokens = getattr(result, "tokens", ())  # a decision without masked passes has none
    assert [token["text"] for token in asmi["tokens"]] == [token.text for token in tokens]
    assert [token["u"] for token in asmi["tokens"]] == pytest.approx(
        [token.u for token in tokens], abs=1e-5
    )


def test_a_completion(client, scorer):
    assert [model.id for model in client.models.list().data] == ["tiny"]
    found = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, seed=5)
    score = scorer.score(PROMPT)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (score.answer, "length")
    assert found.choices[0].logprobs is None
    assert found.usage.completion_tokens == len(score.tokens)
    same(found.asmi, score)


def test_a_chat(client, scorer):
    found = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=4)
    direct = open_scorer(
        scorer.model, tokenizer=scorer.tokenizer, **SETTINGS | {"max_new_tokens": 4}
    )
    score = direct.score(CHAT)
    assert found.choices[0].message.content == score.answer
    assert found.choices[0].message.role == "assistant"
    same(found.asmi, score)


def texts(chunks):
    return [chunk.choices[0].text for chunk in chunks if chunk.choices]


@pytest.mark.parametrize("stop", [None, 0, 2, 5])
def test_a_stream_says_the_same(client, scorer, stop):
    """Also where it ends in a stop string of several tokens, none of which is shown."""
    if stop is not None:
        text = scorer.score(PROMPT).answer
        stop = [text[stop : stop + 2], "never"]
    asked = {"model": "tiny", "prompt": PROMPT, "stop": stop}
    chunks = list(client.completions.create(**asked, stream=True))
    whole = client.completions.create(**asked)
    assert "".join(texts(chunks)) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].finish_reason == ("length" if stop is None else "stop")
    parts = [
        t for c in chunks[:-1] for t in (c.model_extra.get("asmi") or {"tokens": []})["tokens"]
    ]
    last = chunks[-1].asmi
    assert parts == last["tokens"][: len(parts)]
    assert len(parts) >= len(last["tokens"]) - 3  # what a stop string held back
    for name in ("score", "msp", "entropy"):
        assert last[name] == pytest.approx(whole.asmi[name], abs=1e-5)
    assert last["key"] == whole.asmi["key"]
    assert all("asmi" not in chunk.choices[0].model_extra for chunk in chunks)


def test_a_streamed_chat_with_usage(client):
    asked = {"model": "tiny", "messages": CHAT}
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage = client.chat.completions.create(**asked, stream=True, **options)
    whole = client.chat.completions.create(**asked)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert usage.usage == whole.usage
    assert not usage.choices


def test_an_answer_whose_score_draws_others(scorer):
    """Adapt-ASMI: samples end in the request's own stop, each by itself."""
    how = {"method": "adapt", "num_samples": 3, "max_new_tokens": 4}
    own = open_scorer(scorer.model, tokenizer=scorer.tokenizer, **SETTINGS | how)
    stop = scorer.score(PROMPT).answer[2:4]
    direct = open_scorer(scorer.model, tokenizer=scorer.tokenizer, **SETTINGS | how, stop=stop)
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    with serving(own) as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
        whole = client.completions.create(**asked, stop=stop)
        *_, last = client.completions.create(**asked, stop=stop, stream=True)
        given = bench_serve.ask(int(address.split(":")[1]), "/score", prompt=PROMPT, answer=" I")
    same(whole.asmi, direct.score(PROMPT))
    same(last.asmi, direct.score(PROMPT))
    same(given["asmi"], own.score(PROMPT, " I"))
    assert whole.asmi["signal"] == "Adapt-ASMI"


def test_a_stream_of_another_scope_ends_in_the_score_of_that_scope(scorer):
    own = open_scorer(scorer.model, tokenizer=scorer.tokenizer, scope="all", stop=".")
    with serving(own) as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5}
        *_, last = client.completions.create(**asked, stream=True)
        whole = client.completions.create(**asked)
    assert last.asmi["key"] == whole.asmi["key"]
    assert last.asmi["score"] == pytest.approx(whole.asmi["score"], abs=1e-6)


def test_given_answers(port, scorer):
    one = bench_serve.ask(port, "/score", prompt=PROMPT, answer=" Brask")
    same(one["asmi"], scorer.score(PROMPT, " Brask"))
    chat = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    many = bench_serve.ask(port, "/score", messages=chat, answer=["Brask", "Ondine"])
    for found, answer in zip(many["data"], ["Brask", "Ondine"], strict=True):
        same(found["asmi"], scorer.score(CHAT, answer))
    assert "asmi" not in many


def test_clients_side_by_side_get_what_a_direct_call_says(address, scorer):
    asked = [f"Who was captain {number}? " * (1 + number % 3) for number in range(5)]

    def one(prompt):
        # More clients than places in the queue: OpenAI's client tries again after a 429.
        url = f"http://{address}/v1"
        with openai.OpenAI(base_url=url, api_key=bench_serve.KEY, max_retries=20) as client:
            return client.completions.create(model="tiny", prompt=prompt, max_tokens=3)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(one, asked))
    direct = open_scorer(
        scorer.model, tokenizer=scorer.tokenizer, **SETTINGS | {"max_new_tokens": 3}
    )
    for reply, prompt in zip(found, asked, strict=True):
        score = direct.score(prompt)
        assert reply.choices[0].text == score.answer
        same(reply.asmi, score)


def test_a_bad_request_is_told_what_was_expected(port, caplog):
    caplog.set_level("INFO")
    for name, method, path, headers, content, expected in bad_requests("tiny", max_tokens=8):
        status, reply = bench_serve.send(port, method, path, headers, content)
        assert status == expected, (name, reply)
        error = json.loads(reply)["error"]
        assert error["message"], name
        said = reply.decode() + caplog.text
        assert not [sign for sign in ("Who?", "word word", "Traceback", "/site-packages", "passwd")
                    if sign in said], name  # fmt: skip
        assert pending(port) == 0, name
    good = bench_serve.ask(port, "/score", prompt=PROMPT, answer=" Brask")
    assert good["asmi"]["score"] > 0


def test_messages_name_the_field_and_what_was_expected(client):
    def token_records(**changed):
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(**{"model": "tiny", "prompt": PROMPT} | changed)
        return error.value.status_code, error.value.body["param"], error.value.body["message"]

    assert token_records(temperature=0.7) == (
        422,
        "temperature",
        "temperature: expected 0, got 0.7; answers are greedy",
    )
    message = "max_tokens: expected at most 8 tokens, got 9"
    assert token_records(max_tokens=9) == (422, "max_tokens", message)
    status, field, message = token_records(prompt="word " * 300)
    assert (status, field) == (422, "prompt")
    assert message.startswith("prompt: the prompt is too long: expected at most 200 tokens, got ")
    assert token_records(extra_body={"promt": 1})[2] == "promt: there is no such field"
    message = "model: expected 'tiny', the one model of this server"
    assert token_records(model="other") == (404, "model", message)


@pytest.mark.parametrize("kind", ["Completion", "ChatCompletion"])
def test_every_field_of_openais_client_is_taken_or_refused_by_name(client, kind):
    chat = kind == "ChatCompletion"
    create = (client.chat if chat else client).completions.create
    asked = {"model": "tiny", **({"messages": CHAT} if chat else {"prompt": PROMPT})}
    sent_otherwise = {"extra_headers", "extra_query", "extra_body", "timeout"}
    prompt = "messages" if chat else "prompt"
    taken = {prompt, *requests.COMMON, *requests.WITHOUT_EFFECT, *sent_otherwise}
    others = inspect.signature(create).parameters.keys() - taken
    assert {"temperature", "top_p", "n", "logit_bias", "presence_penalty"} <= others
    for name in others:
        with pytest.raises(openai.UnprocessableEntityError) as error:
            create(**asked, **{name: 7})
        assert error.value.body["message"].startswith(f"{name}: "), name


def test_a_prompt_beyond_the_context_window_is_told_so(scorer):
    """The limit of the options may be above what the model can read."""
    with serving(scorer, prompt=10_000) as address:
        port = int(address.split(":")[1])
        asked = bench_serve.body(model="tiny", prompt="word " * 400)
        status, reply = bench_serve.send(
            port, "POST", "/v1/completions", bench_serve.AUTHORIZED, asked
        )
        assert (status, b"at most 255 tokens" in reply) == (422, True)


def test_without_a_chat_template(scorer):
    from tests.tiny_lm import tokenizer

    with serving(open_scorer(scorer.model, tokenizer=tokenizer(), **SETTINGS)) as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.UnprocessableEntityError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=CHAT)


def test_the_key_and_the_host(port):
    asked = bench_serve.body(prompt=PROMPT, answer=" I")
    for given in ("Bearer", "bench-key", "Bearer bench-key2", "Bearer bench-ke", "Basic x"):
        headers = bench_serve.AUTHORIZED | {"Authorization": given}
        status = bench_serve.send(port, "POST", "/score", headers, asked)[0]
        assert status == (200 if given == "bench-key" else 401), given
    assert bench_serve.send(port, "GET", "/metrics", {}, b"")[0] == 401
    assert bench_serve.send(port, "GET", "/health", {}, b"")[0] == 200


def test_without_a_key_only_this_machines_names_are_answered(scorer):
    with serving(scorer) as address:
        port = int(address.split(":")[1])

        def status(host):
            return bench_serve.send(port, "GET", "/v1/models", {"Host": host}, b"")[0]

        for host in ("localhost", f"localhost:{port}", "[::1]:80", "[::1]", "127.0.0.1"):
            assert status(host) == 200, host
        for host in ("evil.example", "localhost.evil", "127.0.0.1.evil:80", "", "::1"):
            assert status(host) == 400, host


@pytest.fixture(scope="module")
def calibrated(folder, tmp_path_factory):
    """A file of a calibration whose threshold accepts some answers and not others."""
    file = tmp_path_factory.mktemp("calibrated") / "calibration.json"
    own = open_scorer(str(folder), scope="response", stop=".", num_masks=8, mask_rate=0.2)
    rows = labelled(24)
    free = [own.read(row["prompt"], row["answer"]).signals["perplexity"] for row in rows]
    reference_range = sorted(free)[len(free) * 2 // 3]
    rows = [row | {"correct": one < reference_range, "cluster": row["id"]} for row, one in zip(
        rows, free, strict=True)]  # fmt: skip
    found = calibrate_rows(rows, own, 0.2, 0.8, signal="perplexity", resamples=20)
    assert found.guarantee.threshold is not None
    found.save(file)
    return file


def test_decisions_of_a_calibration_run(folder, calibrated):
    answers = [row["answer"] for row in labelled(10)]
    prompt = labelled(1)[0]["prompt"]
    # Scope and stop are those of the calibration.
    own = open_scorer(
        str(folder), calibration=str(calibrated), seeded_by="prompt", max_new_tokens=8
    )
    with serving(own) as address:
        port = int(address.split(":")[1])
        found = bench_serve.ask(port, "/score", prompt=prompt, answer=answers)["data"]
        for one, answer in zip(found, answers, strict=True):
            same(one["asmi"], own.decide(prompt, answer))
        written = bench_serve.ask(port, "/v1/completions", model="tiny", prompt=prompt)["asmi"]
        other = {"model": "tiny", "prompt": prompt, "stop": "never"}
        undecided = bench_serve.ask(port, "/v1/completions", **other)["asmi"]
    assert {one["asmi"]["decision"] for one in found} == {"accept", "abstain"}
    assert (written["decision"], undecided["decision"]) == (None, None)
    assert "answers complete there, cut off after 8 tokens here" in written["reason"]
    assert "differs from the calibration's (stop" in undecided["reason"]


def test_a_stream_ends_in_the_decision_of_a_learned_score(folder, calibrated):
    learned = limited(Calibration.load(calibrated), 1e9, "learned")
    own = open_scorer(str(folder), calibration=learned, seeded_by="prompt", max_new_tokens=4)
    with serving(own) as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
        *_, last = client.completions.create(**asked, stream=True)
        whole = client.completions.create(**asked)
    assert whole.asmi["signal"] == "learned score"
    for name in ("decision", "reason", "signal"):
        assert last.asmi[name] == whole.asmi[name]
    assert last.asmi["value"] == pytest.approx(whole.asmi["value"], rel=1e-3)


@pytest.mark.parametrize("with_run", [True, False])
def test_settings_of_the_command(folder, calibrated, with_run, monkeypatch):
    """Those that are given, else the calibration's, else those of a stream."""
    served = []
    monkeypatch.setattr(serving_module, "serve", lambda scorer, *_: served.append(scorer))
    more = ["--calibration", str(calibrated)] if with_run else ["--method", "adapt", "--tau", "0.4"]
    call = ["serve", "--model", str(folder), "--max-new-tokens", "5", *more]
    CliRunner().invoke(main, call, catch_exceptions=False)
    (own,) = served
    expected = {"scope": "response", "seeded_by": "prompt", "max_new_tokens": 5} | (
        {"stop": (".",)} if with_run else {"method": "adapt", "tau": 0.4}
    )
    config = scorer_of(own).config
    assert {name: getattr(config, name) for name in expected} == expected
    assert isinstance(own, Decider) == with_run


def test_a_calibration_run_of_other_settings_is_refused_at_the_start(folder, calibrated):
    """Of a decision by perplexity, the scope of masks is no matter."""
    arguments = ["--model", str(folder), "--calibration", str(calibrated), "--stop", "!"]
    done = CliRunner().invoke(main, ["serve", *arguments, "--scope", "all", "--port", "0"])
    assert done.exit_code
    assert "(stop ['.'] there, ['!'] here)" in done.output


@pytest.fixture
def slow(scorer):
    """A server whose answers take their time, 40 tokens of them; its port."""
    with serving(scorer, answer=200, queue=1) as address:
        yield int(address.split(":")[1])


LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200}


def opened(port, **fields):
    """A request that nobody reads the reply of."""
    content = bench_serve.body(**LONG | fields)
    connection = socket.create_connection(("127.0.0.1", port))
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            f"\r\nContent-Length: {len(content)}\r\n\r\n")  # fmt: skip
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_answer(slow, stream, monkeypatch):
    written = []
    own = serving_module.Service._reported
    monkeypatch.setattr(
        serving_module.Service, "_reported",
        lambda *given: written.append(given) or own(*given),
    )  # fmt: skip
    running, waiting = opened(slow, stream=stream), opened(slow, stream=stream)
    while pending(slow) < 2:
        time.sleep(0.005)
    running.close()
    waiting.close()
    idle(slow)
    assert not written  # neither came to its end
    assert bench_serve.ask(slow, "/score", prompt=PROMPT, answer=" I")["asmi"]["score"] > 0


def test_a_full_queue_says_when_to_come_again(slow):
    first, second = opened(slow), opened(slow)
    while pending(slow) < 2:
        time.sleep(0.005)
    connection = http.client.HTTPConnection("127.0.0.1", slow)
    connection.request("POST", "/v1/completions", bench_serve.body(**LONG),
                       {"Content-Type": "application/json"})  # fmt: skip
    reply = connection.getresponse()
    assert reply.status == 429
    assert int(reply.headers["Retry-After"]) >= 1
    assert "the queue is full (1 requests)" in reply.read().decode()
    for one in (first, second):
        one.close()
    idle(slow)


def test_an_error_inside_is_no_ones_business(client, port, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError(f"secret of {PROMPT}")

    monkeypatch.setattr(serving_module.Service, "_reported", broken)
    with pytest.raises(openai.InternalServerError, match="internal error") as error:
        client.completions.create(model="tiny", prompt=PROMPT)
    assert "secret" not in str(error.value)
    with pytest.raises(openai.APIError, match="internal error"):  # after the first tokens
        list(client.completions.create(model="tiny", prompt=PROMPT, stream=True))
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text
    monkeypatch.undo()
    assert client.completions.create(model="tiny", prompt=PROMPT).asmi["score"] > 0
    assert pending(port) == 0


def test_a_body_that_does_not_come(port, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
                           b"bench-key\r\nContent-Length: 100\r\n\r\n{")  # fmt: skip
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_metrics(port):
    def counts():
        lines = bench_serve.send(port, "GET", "/metrics", bench_serve.AUTHORIZED, b"")[1].decode()
        rows = (line.rsplit(" ", 1) for line in lines.splitlines() if line[0] != "#")
        return Counter({name: float(value) for name, value in rows})

    before = counts()
    bench_serve.ask(port, "/score", prompt=PROMPT, answer=[" Brask", " I"])
    bench_serve.send(port, "GET", "/../etc/passwd", bench_serve.AUTHORIZED, b"")
    more = counts() - before
    assert more['asmi_requests_total{route="/score",status="200"}'] == 1
    assert more['asmi_requests_total{route="other",status="404"}'] == 1
    assert more['asmi_decisions_total{decision="none"}'] == 2
    assert more['asmi_tokens_total{kind="prompt"}'] > 10


def test_shown_text_is_never_taken_back():
    stops = ["\nQ:", "END"]
    for text in ("a\nQ: b", "EEND", "ENEND", "\n\nQ:", "the END\nQ:", "no stop"):
        until = min((text.find(stop) for stop in stops if stop in text), default=len(text))
        shown = 0
        for length in range(1, len(text) + 1):
            sure = wire.sendable_length(text[:length], stops)
            assert shown <= sure <= until
            shown = sure
        assert shown == until


def models(port):
    try:
        return bench_serve.send(port, "GET", "/v1/models", {}, b"")[1]
    except ConnectionRefusedError:
        return b""


def test_the_command_stops_gently(folder, tmp_path):
    """SIGTERM in the middle of a stream: it is finished, new requests fail, nothing leaks."""
    log, port = tmp_path / "log", bench_serve.free_port()
    command = ["serve", "--model", str(folder), "--port", str(port), "--stop", "never"]

    def run():
        logging.root.handlers.clear()  # pytest's
        with log.open("w", buffering=1) as sys.stderr:
            main([*command, "--max-answer-tokens", "30"])

    process = get_context("fork").Process(target=run)  # torch is imported already
    process.start()
    try:
        while b"tiny" not in models(port):
            assert process.is_alive(), log.read_text()
            time.sleep(0.05)
        stream = bench_serve.events(port, model="tiny", prompt=PROMPT, max_tokens=30)
        next(stream)
        process.terminate()  # SIGTERM
        *_, last = stream
        assert last["asmi"]["score"] > 0
        process.join(30)
        assert not process.is_alive()
        assert not models(port)
    finally:
        process.kill()
    text = log.read_text()
    assert "serving tiny at http://127.0.0.1" in text
    assert not [sign for sign in ("Traceback", "Who", str(folder)) if sign in text]


@pytest.mark.slow
def test_the_load_script(folder):
    arguments = ["--model", str(folder), "--requests", "24", "--memory", "200"]
    done = CliRunner().invoke(bench_serve.main, arguments, catch_exceptions=False)
    assert "none lost; other texts than a direct call: 0" in done.output
    assert "MiB after 200 requests" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "is not in the range"),
        (["--queue", "-1"], "--queue and --drain >= 0"),
        (["--method", "raw"], "'raw' is not one of"),
        (["--source", "context"], "no such option"),
        (["--depth", "2"], "depth must lie in (0, 1)"),
        (["--api-key-file", "EMPTY"], "expected a token, got an empty line"),
        (["--host", "0.0.0.0"], "WARNING: anyone who reaches 0.0.0.0:8000 can use this model"),
        (["--otel"], "opentelemetry"),
    ],
)
def test_what_the_command_refuses_or_warns_of(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").touch()
    done = CliRunner().invoke(main, ["serve", "--model", str(tmp_path / "nowhere"), *options])
    assert done.exit_code
    assert said.lower() in done.output.lower()
