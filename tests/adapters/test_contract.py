"""Prompt and answer in, score, free baselines and decision out."""

import dataclasses
import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_polygraph_asmi.adapters.contract import (
    Assessment,
    Halted,
    assess,
    chat_messages,
    config_key,
    extra,
    for_request,
    halting,
    open_scorer,
    twin_of,
)
from tests.adapters.conftest import SETTINGS
from tests.scoring.test_result import decided

PROMPT = "Who built the ferry?"


def test_the_numbers_are_those_of_the_score(scorer):
    score, found = scorer.score(PROMPT, " Brask"), assess(scorer, PROMPT, " Brask")
    assert found.score == pytest.approx(score.score, abs=1e-6)
    for name in ("msp", "perplexity", "entropy"):
        assert getattr(found, name) == pytest.approx(score.signals[name], abs=1e-5)
    assert (found.error_probability, found.decision) == (None, None)
    assert (found.signal, found.value) == (score.symbol, found.score)
    assert found.reason == "No decision: there is no calibration."
    assert json.loads(json.dumps(found.to_dict()))["unit"] == "nats"


def test_messages_of_openais_clients_are_read_as_the_server_reads_them(scorer):
    parts = [{"type": "text", "text": "Who built "}, {"type": "text", "text": "the ferry?"}]
    sent = [
        {"role": "developer", "content": "Be brief.", "name": "Ada", "type": "text"},
        {"role": "user", "content": parts, "id": None},
        {"role": "assistant", "content": None, "tool_calls": [], "audio": None},
        {"role": "user", "content": PROMPT},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": PROMPT},
    ]
    assert assess(scorer, sent, "Brask") == assess(scorer, plain, "Brask")
    assert sent[2]["content"] is None  # the caller's are not changed
    for prompt in (PROMPT, None, 5, ["Who?"], [{"content": "Who?"}, "and?"]):
        assert chat_messages(prompt) is prompt
    called = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert chat_messages(called) == called
    with pytest.raises(ValueError, match="message 1 of the chat: expected"):
        assess(scorer, [{"role": "user", "content": None}], "Brask")


@pytest.mark.parametrize(
    ("accept", "decision"), [(True, "accept"), (False, "abstain"), (None, None)]
)
def test_a_decision_is_passed_on(scorer, accept, decision):
    score = scorer.score(PROMPT, " Brask")
    one = replace(decided(score), accept=accept, reason="why it is so")
    found = Assessment.of(one)
    assert (found.decision, found.error_probability) == (decision, 0.25)
    assert (found.signal, found.value, found.score) == ("MSP", 1.0, score.score)
    assert (found.reason, found.key) == ("why it is so", config_key(score))
    assert Assessment.of(replace(one, score=None)).score is None


def test_the_key_tells_settings_apart_and_nothing_else(folder, scorer):
    key = config_key(scorer.score(PROMPT, " Brask"))
    assert key == config_key(scorer.score("Where?", " True or False"))
    assert key == config_key(scorer.score(PROMPT))  # the model's own answer
    assert len(key) == 12
    for other in ({"depth": 0.3}, {"scope": "all"}, {"stop": "."}, {"method": "asmi"}):
        own = open_scorer(str(folder), **SETTINGS | other)
        assert config_key(own.score(PROMPT, " Brask")) != key, other


def test_a_request_has_an_ending_and_a_length_of_its_own(folder, scorer):
    text = scorer.score(PROMPT).answer
    for stop in (text[2:4], text[3:5]):
        own = for_request(scorer, [stop], 6).score(PROMPT)
        direct = open_scorer(str(folder), **SETTINGS | {"stop": stop, "max_new_tokens": 6})
        direct = direct.score(PROMPT)
        assert (own.answer, own.scored_text) == (direct.answer, direct.scored_text)
        assert own.score == pytest.approx(direct.score, abs=1e-6)
        assert own.settings == direct.settings
    assert scorer.score(PROMPT).answer == text  # and the scorer itself is as it was
    assert len(for_request(scorer, None, 2).score(PROMPT).tokens) == 2


def test_a_request_without_values_of_its_own_takes_the_scorer_as_it_is(scorer):
    length = scorer.config.max_new_tokens
    assert for_request(scorer, None, length) is scorer
    assert for_request(scorer, scorer.stop, length) is scorer
    scorer.score(PROMPT, " Brask")
    other = for_request(scorer, [";"], length)
    assert (other.stop, other.config.stop) == ([";"], (";",))
    for name in ("model", "tokenizer", "engine", "_special_tokens"):  # built once
        assert vars(other)[name] is vars(scorer)[name]


def test_drawn_answers_end_each_by_itself(folder):
    """As in a direct call: none is cut off where another one ends."""
    how = SETTINGS | {"method": "adapt", "num_samples": 8, "seed": 3}
    plain = open_scorer(str(folder), **how)
    for stop in (">", "e"):  # the first of them holds ">" early on, "e" others
        direct = open_scorer(str(folder), **how, stop=stop).score(PROMPT, " Brask")
        own = for_request(plain, [stop], 8).score(PROMPT, " Brask")
        assert own.diversity == pytest.approx(direct.diversity, abs=1e-6)
        assert config_key(own) == config_key(direct)


def test_generation_is_halted_before_the_next_token(scorer):
    asked = []

    def check():
        asked.append(True)
        if len(asked) > 3:
            raise Halted

    with pytest.raises(Halted):  # also with the length of a request
        for_request(halting(scorer, check), None, 8).score(PROMPT)
    assert len(asked) == 4
    assert scorer.score(PROMPT).score > 0


def test_a_twin_shares_weights_and_no_module(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    twin = twin_of(model)
    assert {*map(id, twin.parameters())} == {*map(id, model.parameters())}
    assert not {*map(id, twin.modules())} & {*map(id, model.modules())}


def test_scoring_leaves_another_threads_generation_alone(folder):
    """Without the twin, hooks of the one would be met by the other."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scorer = open_scorer(model, tokenizer=tokenizer, **SETTINGS)
    expected = scorer.score(PROMPT, " Brask").score
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    how = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    before, written, done = model.generate(ids, **how), [], threading.Event()
    second = threading.Event()

    def write():
        while not done.is_set():
            if written:
                second.set()
            written.append(model.generate(ids, **how))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        scores = [scorer.score(PROMPT, " Brask").score]
        while len(scores) < 8 or (not second.is_set() and thread.is_alive()):
            scores.append(scorer.score(PROMPT, " Brask").score)
    finally:
        done.set()
        thread.join()
    assert scores == pytest.approx([expected] * len(scores), abs=1e-6)
    assert len(written) > 1
    assert all(torch.equal(one, before) for one in written)


def test_a_missing_extra_is_named():
    with pytest.raises(ImportError, match=r"no_such is not installed: .*\[serve\]"), extra("serve"):
        import no_such  # noqa: F401


@pytest.mark.parametrize(
    ("module", "blocked", "named"),
    [("server", "starlette", "serve"), ("inspect", "inspect_ai", "inspect")],
)
def test_an_adapter_without_its_library_says_what_to_install(module, blocked, named):
    code = f"""
import sys
sys.modules[{blocked!r}] = None
try:
    import lm_polygraph_asmi.adapters.{module}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'lm-polygraph-asmi[{named}]'" in done.stdout


def test_an_assessment_is_frozen():
    assert dataclasses.fields(Assessment)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Assessment("m", 0, 0, 0, 0, 0, None, None, "", "").score = 1
