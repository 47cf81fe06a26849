"""Sources of an answer: statistics by source, and the passages of a call."""

import json

import numpy as np
import pytest
import torch

from lm_polygraph_asmi import maths, score
from lm_polygraph_asmi.maths.information import NO_INFORMATION
from lm_polygraph_asmi.model import run_unmasked, scoring_session, subnetwork_log_probs
from lm_polygraph_asmi.model.sources import head_parts
from lm_polygraph_asmi.results.names import masked_head_stats
from lm_polygraph_asmi.scoring.context import passages_of
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import brute_force
from tests.rounding import allowed
from tests.tiny_lm import tokenizer, whitebox

FACTS = ["The ferry Ondine was built in Brask in 1931.", "The blue kites start in the passage."]
PROMPT = f"{FACTS[0]} {FACTS[1]}\nQuestion: Who built it?\nAnswer:"
ANSWER = " Brask in 1931"
SPANS = [(3, 9), (10, 15)]
TOP_K = 8
FEW = {"num_masks": 6, "mask_rate": 0.4, "top_k": TOP_K}


@pytest.fixture(scope="module")
def host():
    return whitebox()


@pytest.fixture(scope="module")
def example(host):
    prompt = tokenizer()(PROMPT, return_tensors="pt")["input_ids"][0]
    return host.model, prompt, tokenizer()(ANSWER, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def by_source(example):
    engine = Engine(scope="response", sources=["all", "context", "elsewhere"], details=True, **FEW)
    return engine.score(*example, SPANS, passages=True)


def divergence(log_p, log_q):
    found = []
    for p, q in zip(log_p.double(), log_q.double(), strict=True):
        pairs = zip(p.exp().tolist(), p.tolist(), q.tolist(), strict=True)
        found.append(sum(mass * (a - b) for mass, a, b in pairs))
    return found


@pytest.mark.parametrize(
    ("source", "of", "context"),
    [
        ("context", "context", SPANS),
        ("elsewhere", "elsewhere", SPANS),
        ("passage0", "context", SPANS[:1]),
        ("passage1", "context", SPANS[1:]),
    ],
)
def test_statistics_follow_from_the_log_probs(example, by_source, source, of, context):
    model, prompt, response = example
    ids = torch.cat([prompt, torch.tensor(response)])
    found = {name: by_source[f"asmi_{name}_d60_{source}"]
             for name in ("mi", "agreement", "kl", "masks", "source_kl", "source_attention",
                          "source_share", "settings")}  # fmt: skip
    masks = torch.from_numpy(found["masks"]).float()
    assert torch.equal(masks, torch.from_numpy(by_source["asmi_masks_d60"]).float())
    log_probs = subnetwork_log_probs(
        model, ids, len(prompt), 2, torch.cat([masks, torch.zeros(1, 4), torch.ones(1, 4)]),
        scope="response", source=of, context=context,
    )  # fmt: skip
    *rows, without, own = log_probs
    rows = torch.stack(rows)
    information = brute_force.mutual_information(rows, TOP_K)
    np.testing.assert_allclose(found["mi"], information, atol=1e-5)
    mean = maths.disagreement(maths.union_support(rows, TOP_K)).divergence_from_mean
    np.testing.assert_allclose(found["kl"], mean, atol=1e-5)
    np.testing.assert_allclose(found["source_kl"], divergence(without, own), atol=1e-5)
    assert found["source_kl"].min() > 1e-4
    np.testing.assert_allclose(found["source_share"], found["mi"] / by_source["asmi_mi_d60"])
    with scoring_session(model):
        unmasked = run_unmasked(model, ids, len(prompt), [2], "response")
        inside = head_parts(model, unmasked, 2, context[:1])[0]
    if len(context) == 1:
        expected = inside.attention.mean(0)
        np.testing.assert_allclose(found["source_attention"], expected, atol=1e-6)
    assert found["settings"]["source"] == source


def test_attention_adds_up_and_passages_too(by_source):
    of = {source: by_source[f"asmi_source_attention_d60_{source}"]
          for source in ("context", "elsewhere", "passage0", "passage1")}  # fmt: skip
    np.testing.assert_allclose(of["context"], of["passage0"] + of["passage1"], atol=1e-6)
    np.testing.assert_allclose(of["context"] + of["elsewhere"], 1, atol=1e-6)


def test_all_is_what_it_is_alone(example, by_source):
    alone = Engine(scope="response", details=True, **FEW).score(*example)
    assert not [name for name in alone if "source" in name]
    most = allowed(example[0], torch.cat([example[1], torch.tensor(example[2])]))
    for name in set(alone) - {"asmi_seconds", "asmi_reused_depths"}:
        own, plain = by_source[name], alone[name]
        if np.asarray(plain).dtype.kind == "f":
            np.testing.assert_allclose(own, plain, rtol=0, atol=most, err_msg=name)
        else:
            np.testing.assert_array_equal(own, plain, err_msg=name)


def test_every_listed_statistic_is_written_and_no_other(example):
    for sources in (["all"], ["context"], ["all", "context"]):
        found = Engine(scope="response", sources=sources, **FEW).score(*example, SPANS)
        ours = {"asmi_closing", "asmi_token_texts"}  # of the calculator
        assert set(found) == set(masked_head_stats(sources=sources)) - ours


def test_the_prompt_without_the_context(example, tmp_path):
    """As a full forward pass over what is left of it says; kept like everything else."""
    model, prompt, response = example
    given = {"scope": "response", "without_context": True, **FEW}
    result_cache = str(tmp_path / "result_cache")
    found = Engine(result_cache=result_cache, **given).score(*example, SPANS)
    ids = torch.cat([prompt, torch.tensor(response)]).tolist()
    inside = {place for span in SPANS for place in range(*span)}
    left = [token for place, token in enumerate(ids) if place not in inside]
    with torch.no_grad():
        rows = [
            model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
            for tokens in (left, ids)
        ]
    answer = slice(-len(response) - 1, -1)
    expected = divergence(rows[0][answer], rows[1][answer])
    np.testing.assert_allclose(found["asmi_without_context_kl"], expected, atol=1e-5)
    assert min(expected) > 1e-3
    again = Engine(result_cache=result_cache, **given).score(*example, SPANS)
    for name in ("asmi_without_context_kl", "asmi_without_context_seconds"):
        np.testing.assert_array_equal(again[name], found[name])
    ours = {"asmi_closing", "asmi_token_texts"}
    assert set(found) == set(masked_head_stats(without_context=True)) - ours
    with pytest.raises(ValueError, match="the prompt must have at least one token"):
        Engine(**given).score(*example, [(0, len(prompt))])


def test_journal(example, tmp_path):
    """What was scored without sources serves a run with them; another context is another entry."""
    result_cache = str(tmp_path / "result_cache")
    Engine(scope="response", result_cache=result_cache, **FEW).score(*example)
    both = Engine(scope="response", sources=["all", "context"], result_cache=result_cache, **FEW)
    first = both.score(*example, SPANS[:1])
    assert first["asmi_reused_depths"] == 0  # not all of the depth
    again = both.score(*example, SPANS[:1])
    assert again["asmi_reused_depths"] == 1
    np.testing.assert_array_equal(again["asmi_mi_d60_context"], first["asmi_mi_d60_context"])
    np.testing.assert_array_equal(
        again["asmi_source_share_d60_context"], first["asmi_source_share_d60_context"]
    )
    other = both.score(*example, SPANS[1:])
    assert other["asmi_reused_depths"] == 0
    assert (other["asmi_mi_d60_context"] != first["asmi_mi_d60_context"]).all()
    only = Engine(scope="response", result_cache=result_cache, **FEW).score(*example)
    assert only["asmi_reused_depths"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "context"}, "needs scope 'response'"),
        ({"sources": ["all", "all"], "scope": "response"}, "expected each source once"),
        ({"sources": [], "scope": "response"}, "expected each source once"),
        ({"source": "passage", "scope": "response"}, "source must be one of"),
        (
            {"source": "context", "scope": "response", "perturbation": "pseudo_heads"},
            "needs perturbation 'heads'",
        ),
    ],
)
def test_sources_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        Engine(**settings)


def test_a_source_needs_a_context(example):
    with pytest.raises(ValueError, match="needs to know the context"):
        Engine(scope="response", source="context").score(*example)


def test_no_information_has_no_shares():
    part, whole = torch.tensor([0.2, 0.0, 1e-9]), torch.tensor([0.4, 0.0, 1e-9])
    assert maths.source_share(part, whole).tolist() == pytest.approx([0.5, 0, 0])


def test_divergence_with_impossible_tokens():
    log_p, log_q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert maths.divergence(log_p, log_q).tolist() == pytest.approx([0.5 * np.log(2)])


@pytest.fixture(scope="module")
def found(host):
    return score(host, PROMPT, ANSWER, context=FACTS, num_masks=6, mask_rate=0.4)


def test_a_score_names_what_it_hangs_on(host, found):
    assert list(found.sources) == ["passage 1", "passage 2", "context", "elsewhere"]
    assert [source.text for source in found.sources.values()] == [*FACTS, None, None]
    engine = Engine(scope="response", sources=["all", "context", "elsewhere"], num_masks=6,
                    mask_rate=0.4)  # fmt: skip
    prompt = tokenizer()(PROMPT, return_tensors="pt")["input_ids"][0]
    spans = [p.tokens for p in passages_of(tokenizer(), PROMPT, PROMPT, prompt.tolist(), FACTS)]
    ids = [token.id for token in found.tokens]
    stats = engine.score(host.model, prompt, ids, spans, passages=True)
    whole = stats["asmi_mi_d60"].mean()
    for source, name in zip(found.sources.values(),
                            ("passage0", "passage1", "context", "elsewhere"),
                            strict=True):  # fmt: skip
        own = stats[f"asmi_mi_d60_{name}"].mean()
        assert source.mi == pytest.approx(own, abs=NO_INFORMATION)
        assert (
            source.share
            == float(source)
            == pytest.approx(source.mi / whole, abs=NO_INFORMATION / whole)
        )
        assert source.kl == pytest.approx(stats[f"asmi_source_kl_d60_{name}"].mean())
    assert [token.context_share for token in found.tokens] == pytest.approx(
        stats["asmi_source_share_d60_context"].tolist(), abs=NO_INFORMATION / whole
    )
    assert json.loads(json.dumps(found.to_dict()))["sources"]["passage 2"]["text"] == FACTS[1]


def test_the_score_itself_is_what_it_is_without_a_context(host, found):
    plain = score(host, PROMPT, ANSWER, num_masks=6, mask_rate=0.4)
    assert plain.score == pytest.approx(found.score, abs=NO_INFORMATION)
    assert plain.sources is None
    assert plain.tokens[0].context_share is None
    assert plain.settings == found.settings
    assert "Sources of the answer" not in plain.to_html()


def test_the_score_of_a_source(host, found):
    given = {"num_masks": 6, "mask_rate": 0.4, "scope": "response"}
    of = score(host, PROMPT, ANSWER, context=FACTS, source="context", method="asmi", **given)
    assert of.settings["source"] == "context"
    assert of.score == pytest.approx(found.sources["context"].mi, rel=1e-5)
    with pytest.raises(ValueError, match="source 'context' needs the context: pass"):
        score(host, PROMPT, ANSWER, source="context", **given)
    with pytest.raises(ValueError, match="source must be one of 'all', 'context'"):
        Scorer(host, source=["all", "context"], scope="response")
    plain, named = (Scorer(host, scope="response", **own).identity
                    for own in ({}, {"source": "context"}))  # fmt: skip
    assert named == plain | {"source": "context"}


def test_page_and_terminal_say_it(found):
    from rich.console import Console

    page = found.to_html()
    assert page.count(" sourced") == len(found.tokens)
    assert "from the context:" in page
    assert f"<td>{found.sources['passage 2'].share:.0%}"[:-1] in page
    console = Console(record=True, width=120)
    console.print(found)
    assert "passage 2" in console.export_text()


def places(context, prompt=PROMPT, given=None):
    ids = tokenizer()(prompt)["input_ids"]
    return [p.text for p in passages_of(tokenizer(), given or prompt, prompt, ids, context)]


def test_passages_in_every_form():
    start = PROMPT.index(FACTS[1])
    pair = start, start + len(FACTS[1])
    assert places(FACTS[1]) == places(pair) == places([pair]) == places(list(pair)) == [FACTS[1]]
    assert places([pair, FACTS[0]]) == [FACTS[1], FACTS[0]]


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("A barge", "found it nowhere"),
        ("built", "in several places"),
        ((5, 5), r"the prompt; got \(5, 5\)"),
        ((0, 900), "0 <= start < end <= "),
        ([], "expected at least one passage"),
        (7, "expected a passage as a text of the prompt"),
        ([FACTS[0], "built in Brask"], "overlap: each token needs one source"),
    ],
)
def test_passages_that_are_none(context, message):
    with pytest.raises(ValueError, match=message):
        places(context)


def test_passages_of_a_chat(host):
    chat = type(tokenizer())(tokenizer_object=tokenizer().backend_tokenizer, eos_token="</s>")
    chat.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}assistant:"
    )
    parts = [{"type": "text", "text": FACTS[0]}, {"type": "text", "text": f" {FACTS[1]} "}]
    messages = [
        {"role": "system", "content": parts},
        {"role": "user", "content": "Who built it? "},
    ]
    few = {"num_masks": 3, "mask_rate": 0.4}

    def texts(context):
        result = score(host.model, messages, ANSWER, tokenizer=chat, context=context, **few)
        return [s.text for s in result.sources.values() if s.text is not None]

    assert texts((0, 1)) == [FACTS[1]]
    assert texts([(0, 0), (0, 1)]) == FACTS
    assert texts([0, 1]) == ["".join(p["text"] for p in parts).strip(), "Who built it?"]
    assert texts("Who built it?") == ["Who built it?"]
    for wrong in (5, (0, 7), (0, 1, 2)):
        with pytest.raises(ValueError, match=r"no message or part|expected a passage of a chat"):
            texts([wrong])


def test_messages_may_say_what_others_say():
    """A document that stands twice is named by its message."""
    words = tokenizer()
    chat = type(words)(tokenizer_object=words.backend_tokenizer, eos_token="</s>")
    chat.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}assistant:"
    )
    twice = [{"type": "text", "text": f"{FACTS[0]} "}, {"type": "text", "text": f" {FACTS[0]} "}]
    given = [
        {"role": "system", "content": FACTS[0]},
        {"role": "user", "content": twice},
        {"role": "assistant", "content": FACTS[0]},
    ]
    prompt = [given[0], {"role": "user", "content": "".join(part["text"] for part in twice)}]
    whole = chat.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = chat(whole)["input_ids"]

    def starts(context):
        found = passages_of(chat, given, prompt, ids, context)
        assert {passage.text for passage in found} == {FACTS[0]}
        return [passage.tokens[0] for passage in found]

    first, second, third = starts([0, (1, 0), (1, 1)])
    assert first < second < third
    assert starts([(-2, 1)]) == [third]
    assert starts((0, 0)) == [first]
    with pytest.raises(ValueError, match=r"in several places.*name the message, by its number"):
        starts(FACTS[0])
    with pytest.raises(ValueError, match="got 2, the answer"):
        starts(2)
