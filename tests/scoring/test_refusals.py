"""What is refused, in one table each: settings, rows, models that do not fit, their tokenizers."""

import json
import re
from contextlib import nullcontext
from copy import deepcopy
from unittest.mock import Mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from lm_polygraph_asmi import Scorer, score
from lm_polygraph_asmi.host import loading
from tests.scoring.conftest import CHAT, MESSAGES, PROMPT, templated
from tests.test_inputs import REQUESTS
from tests.tiny_lm import whitebox


@pytest.fixture
def no_model(monkeypatch):
    """None is loaded: settings and requests are checked first."""
    monkeypatch.setattr(loading, "load_model", None)


@pytest.fixture(scope="module")
def scorer(model, chat):
    return Scorer(
        model, tokenizer=chat, num_masks=2, max_new_tokens=2, method="adapt", num_samples=2
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"depth": "0.6"}, "depth must be a number, got '0.6'"),
        ({"depth": 60}, r"depth must lie in \(0, 1\)"),
        ({"method": "raw"}, "method must be one of 'asmi', 'sem', 'adapt', got 'raw'"),
        ({"aggregation": "median"}, "aggregation must be one of 'mean', 'sum', 'max'"),
        ({"stop": ["\n", 2]}, "stop must be a string such as"),
        ({"stop": [""]}, "stop must not contain an empty string"),
        ({"stop": "\udc00."}, r"stop: .* got '\\udc00' at character 1"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"mask_rate": "0.1"}, r"mask_rate \(p\) must be a number, got '0\.1'"),
        ({"scope": "prompt"}, "scope must be one of"),
        ({"num_samples": 1}, "num_samples must be at least 2"),
        ({"tau": float("nan")}, "tau must be a number, got nan"),
        ({"closing_token": "no"}, "closing_token must be True or False"),
        ({"attention": 3}, "attention must be an attention implementation"),
        ({"memory_budget": "4 GB"}, "memory_budget must be a whole number"),
        ({"num_mask": 4}, r"num_mask \(did you mean num_masks\?\)\. Settings: method, "),
        ({"foo": 4}, r"unknown setting foo\. Settings: method, depth"),
        ({"tokenizer": "mine"}, "loads its tokenizer: leave `tokenizer` out"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_model")
def test_settings(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        score("no such model", PROMPT, " Brask", **settings)


NO_ROWS = [5, None, [], b"Who?", object(), {}, {"prompt": None, "answer": ""}]
OF_A_MODEL = [
    *((row, "prompt") for row in NO_ROWS),
    ({"prompt": PROMPT, "response": " Brask"}, "response"),
    ({"prompt": PROMPT, "correct": True}, "correct"),
    # A wrong role comes before the answer that it hides.
    ({"messages": [*MESSAGES, {"role": "Assistant", "content": "x"}], "correct": True}, "role"),
    *(({"prompt": "<s>" * number}, "prompt shorter than") for number in (255, 5000)),  # one more
    ({"prompt": "x" * 5000, "answer": " Brask"}, "context window"),
    *(
        ({"prompt": PROMPT, "answer": " Brask"} | ids, "use the model's tokenizer")
        for token in (-1, 10**6)
        for ids in ({"answer": [token]}, {"samples": [[5], [token]]})
    ),
    ({"prompt": [{"role": "tool", "content": PROMPT}]}, "does not support these messages: roles!"),
    ({"prompt": MESSAGES, "tools": [{"name": "find"}]}, "does not read 'tools'"),
    ({"prompt": MESSAGES, "chat_template_kwargs": {"thinking": True}}, "does not read 'thinking'"),
]


@pytest.mark.parametrize(("content", "message"), REQUESTS, ids=range(len(REQUESTS)))
@pytest.mark.usefixtures("no_model")
def test_requests(scorer, content, message):
    """By a call before a model is loaded; of a row, the error is its outcome."""
    content = {"prompt": PROMPT} | content
    with pytest.raises(ValueError, match=message):
        score("no such model", **content)
    (outcome,) = scorer.score_many([content])
    assert re.search(message, outcome.error)


def test_rows(scorer):
    """A bad one is no matter to those after it."""
    rows, words = zip(*OF_A_MODEL, ("", ""), (PROMPT, ""), strict=True)
    for found, word in zip(scorer.score_many(rows), words, strict=True):
        assert (found.error is None) == (word == "")
        assert re.search(word, found.error or "")
    with pytest.raises(ValueError, match="on_error"):
        list(scorer.score_many([], on_error="ignore"))


@pytest.mark.parametrize(
    "error", [TypeError, KeyError, RuntimeError, ValueError, FloatingPointError]
)
def test_a_bug_of_ours_is_no_bad_row(scorer, monkeypatch, error):
    """Only bad values and numbers that are none are a row's own."""
    monkeypatch.setattr("lm_polygraph_asmi.scoring.scorer.spans", Mock(side_effect=error("ours")))
    of_a_row = error in (ValueError, FloatingPointError)
    with nullcontext() if of_a_row else pytest.raises(error, match="ours"):
        assert [found.error for found in scorer.score_many([PROMPT] * 2)] == ["ours"] * 2


def test_models_and_tokenizers(model, tokenizer):
    bert = BertConfig(vocab_size=len(tokenizer), hidden_size=8, num_attention_heads=2)
    own, most = {"tokenizer": tokenizer}, len(tokenizer)
    for word, arguments, settings in (
        ("the model's tokenizer", (model, PROMPT, " Brask"), {}),
        ("the model's tokenizer", (model, PROMPT), {"tokenizer": "x"}),
        ("prompt as text", (model, tokenizer), {}),
        ("loaded", (model, PROMPT), own | {"dtype": "float32"}),
        ("empty string", (whitebox(stop_strings=[""]), PROMPT), {}),
        ("BertForMaskedLM", (BertForMaskedLM(bert).eval(), PROMPT), own),
        ("chat template", (model, MESSAGES), own),
        (f"at most {most}, .*, got {most + 1}", (model, PROMPT, "x"), own | {"top_k": most + 1}),
    ):
        with pytest.raises((ValueError, TypeError), match=word):
            score(*arguments, **settings)
    assert score(model, PROMPT, " Brask", tokenizer=tokenizer, top_k=most)
    other = templated(tokenizer, CHAT)
    assert Scorer(whitebox(), tokenizer=other).tokenizer is other  # not LM-Polygraph's own


ALL, ADDED = len(whitebox().tokenizer), len(whitebox().tokenizer) + 1


@pytest.mark.parametrize(
    ("size", "begin", "ends", "shipped", "word"),
    [
        *((ALL + more, 1, 2, 2, None) for more in (-30, 30)),  # padded embeddings, added tokens
        *((size, 1, 2, 2, f"{ALL + 2} tokens, the model {size}") for size in (200, 3000)),
        (ALL, 70, [71, 72], 73, r"\[70, 71, 72, 73\]"),
        (ALL, 70, [71, 72], 2, None),  # one that is its own
        (ALL + 2, 70, [71, ADDED], 73, None),  # or that was added
        (ALL, None, None, None, None),
    ],
)
def test_a_tokenizer_of_another_vocabulary(tokenizer, size, begin, ends, shipped, word):
    model, added = whitebox(vocab_size=size).model, deepcopy(tokenizer)
    added.add_tokens(["<turn>", "</turn>"])
    model.config.bos_token_id, model.config.eos_token_id = begin, ends
    model.generation_config.eos_token_id = shipped
    with nullcontext() if word is None else pytest.raises(ValueError, match=word):
        assert Scorer(model, tokenizer=added)


def test_a_tokenizer_of_other_words_with_the_same_size_and_ends(tiny, tmp_path):
    """As of Llama 2 and Mistral: seen by the tokenizer that is saved with the model."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    ids = saved["model"]["vocab"]
    other = {token if n <= 2 else f"{token}~": n for token, n in ids.items()}
    last = max(ids.values()) + 3
    for words, name, word in (
        (ids, tiny, None),
        (other, tiny, r"3\d\d tokens"),
        ({token: n if n <= 2 else last - n for token, n in ids.items()}, tiny, r"3\d\d tokens"),
        (other, "nobody/none", None),  # nothing to compare with
    ):
        saved["model"] |= {"vocab": words, "merges": saved["model"]["merges"] * (words is ids)}
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
        model.config.name_or_path = str(name)
        with nullcontext() if word is None else pytest.raises(ValueError, match=word):
            assert Scorer(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
