"""What is refused, in one table each: settings, rows, models that do not fit, their tokenizers."""

import json
import re
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
    return Scorer(model, tokenizer=chat, num_masks=2, max_new_tokens=2, method="adapt")


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
    ({"prompt": "x" * 5000}, "expected a prompt shorter than"),
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
    rows = [row for row, _ in OF_A_MODEL]
    *found, last = scorer.score_many([*rows, {"prompt": PROMPT, "answer": " Brask"}])
    assert last.error is None
    for one, (_, message) in zip(found, OF_A_MODEL, strict=True):
        assert re.search(message, one.error)
    assert [one.error for one in scorer.score_many(["", PROMPT])] == [None, None]
    with pytest.raises(ValueError, match="on_error must be one of"):
        list(scorer.score_many([], on_error="ignore"))


@pytest.mark.parametrize("bug", [TypeError, KeyError, RuntimeError])
def test_a_bug_of_ours_is_no_bad_row(scorer, monkeypatch, bug):
    monkeypatch.setattr("lm_polygraph_asmi.scoring.scorer.spans", Mock(side_effect=bug("ours")))
    with pytest.raises(bug, match="ours"):
        list(scorer.score_many([PROMPT]))


def test_models_and_tokenizers(model, tokenizer):
    bert = BertConfig(vocab_size=len(tokenizer), hidden_size=8, num_attention_heads=2)
    own, most = {"tokenizer": tokenizer}, len(tokenizer)
    for message, arguments, settings in (
        ("expected the model's tokenizer, as in score", (model, PROMPT, " Brask"), {}),
        ("expected the model's tokenizer, as in score", (model, PROMPT), {"tokenizer": "x"}),
        ("expected a prompt as text, or as a list of chat", (model, tokenizer), {}),
        ("load a model by its name, got a loaded", (model, PROMPT), own | {"dtype": "float32"}),
        ("BertForMaskedLM is not among the classes", (BertForMaskedLM(bert).eval(), PROMPT), own),
        ("this tokenizer has no chat template", (model, MESSAGES), own),
        (f"at most {most}, the size of .*, got {most + 1}", (model, PROMPT, " Brask"),
         own | {"top_k": most + 1}),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            score(*arguments, **settings)
    assert score(model, PROMPT, " Brask", tokenizer=tokenizer, top_k=most)
    other = templated(tokenizer, CHAT)
    assert Scorer(whitebox(), tokenizer=other).tokenizer is other  # not LM-Polygraph's own


def test_a_tokenizer_of_another_vocabulary(tokenizer):
    """Padded embeddings and added tokens are no matter."""
    own = len(tokenizer)
    for size in (own - 30, own + 30):
        assert Scorer(whitebox(vocab_size=size).model, tokenizer=tokenizer)
    for size in (200, 3000):
        with pytest.raises(ValueError, match=f"it has {own} tokens, the model {size}"):
            Scorer(whitebox(vocab_size=size).model, tokenizer=tokenizer)
    model = whitebox().model
    model.config.bos_token_id, model.config.eos_token_id = 70, [71, 72]
    model.generation_config.eos_token_id = 73
    with pytest.raises(ValueError, match=r"\[70, 71, 72, 73\].*ordinary"):
        Scorer(model, tokenizer=tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id  # one that is its own
    assert Scorer(model, tokenizer=tokenizer)


def test_a_tokenizer_of_other_words_with_the_same_size_and_ends(tiny, tmp_path):
    """As of Llama 2 and Mistral: seen by the tokenizer that is saved with the model."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    assert Scorer(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    ids = saved["model"]["vocab"]
    last = max(ids.values()) + 3
    for words in (
        {token if number <= 2 else f"{token}~": number for token, number in ids.items()},
        {token: number if number <= 2 else last - number for token, number in ids.items()},
    ):
        saved["model"] |= {"vocab": words, "merges": []}
        file.write_text(json.dumps(saved))
        other = AutoTokenizer.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"3\d\d tokens of the one saved in"):
            Scorer(model, tokenizer=other)
    model.config.name_or_path = "nobody/none"  # nothing to compare with
    assert Scorer(model, tokenizer=other)
