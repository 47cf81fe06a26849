"""Answers of a finished run, scored again."""

import copy

import numpy as np
import pytest
import torch
from lm_polygraph.stat_calculators import GreedyProbsCalculator

from lm_polygraph_asmi.results.manifest import write_manifest
from lm_polygraph_asmi.scoring import engine
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from lm_polygraph_asmi.stat_calculators.greedy import (
    PREFIX_CACHES,
    PrefixCachingGreedyCalculator,
    SavedAnswersCalculator,
    _prefix_cache,
    load_stat_calculator,
)
from tests.rounding import allowed
from tests.tiny_lm import UNMASKABLE, unmaskable, whitebox

pytestmark = pytest.mark.usefixtures("unseen")

TEXTS = ["Who built the ferry?", "Where do the blue kites start?"]


@pytest.fixture(scope="module")
def model():
    return whitebox()


@pytest.fixture
def finished(tmp_path, model):
    """A manager file with answers, and what LM-Polygraph said of them."""
    generated = GreedyProbsCalculator(False, False)
    rows = [generated({}, [text], model, 5) for text in TEXTS]
    stats = {name: [row[name][0] for row in rows] for name in ("greedy_tokens", "greedy_texts")}
    scores = {("sequence", "Perplexity"): [1.0, 2.0]}
    quality = {("sequence", "Rouge_rougeL"): [1.0, 0.0]}
    content = {"state": "Initialized", "metrics": {}, "gen_metrics": quality}
    content |= {"estimations": scores, "stats": stats | {"input_texts": TEXTS}}
    torch.save(content, tmp_path / "ue_manager_seed1")
    return tmp_path, rows


def test_saved_answers_are_scored_as_they_are(finished, model):
    folder, rows = finished
    saved = SavedAnswersCalculator(folder)({}, TEXTS[::-1], model)
    for mine, row in zip(range(2), rows[::-1], strict=True):
        assert saved["greedy_tokens"][mine] == row["greedy_tokens"][0]
        assert saved["greedy_texts"][mine] == row["greedy_texts"][0]
        assert saved["input_tokens"][mine] == row["input_tokens"][0]
        ids = torch.tensor([*row["input_tokens"][0], *row["greedy_tokens"][0]])
        most = allowed(model.model, ids)
        # Generation forbids the end token at the first two positions, scoring does not.
        for name in ("greedy_log_probs", "greedy_log_likelihoods"):
            np.testing.assert_allclose(saved[name][mine][2:], row[name][0][2:], rtol=0, atol=most)


def test_a_question_that_was_not_asked(finished, model):
    folder, _ = finished
    with pytest.raises(KeyError, match=r"has no answer to the prompt 'Is it blue\?'"):
        SavedAnswersCalculator(folder)({}, ["Is it blue?"], model)


def test_answers_of_another_model(finished, model):
    folder, _ = finished
    manifest = {"model": {"path": "other", "revision": "abc"}, "rows": {"clusters": []}}
    write_manifest(manifest, folder / "ue_manager_seed1")
    with pytest.raises(ValueError, match=r"expected answers of tiny .*, got those of other"):
        SavedAnswersCalculator(folder)({}, TEXTS, model)
    manifest["model"]["path"] = "tiny"
    write_manifest(manifest, folder / "ue_manager_seed1")
    assert SavedAnswersCalculator(folder)({}, TEXTS, model)["greedy_tokens"]


def test_no_such_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a manager file nor a folder"):
        SavedAnswersCalculator(tmp_path)


def test_the_builder_times_either(finished, model):
    folder, rows = finished
    for answers in (None, str(folder)):
        config = {"answers": answers, "output_attentions": True}
        stats = load_stat_calculator(config, None)({}, TEXTS[:1], model, 5)
        assert stats["greedy_tokens"] == rows[0]["greedy_tokens"]
        assert stats["seconds_greedy"][0] > 0
        assert ("attention_all" in stats) == (answers is None)


@pytest.fixture
def starts(monkeypatch):
    """Of each unmasked pass of the engine, the first position it runs and what else was known."""
    found, run = [], engine.run_unmasked

    def spy(*args):
        unmasked = run(*args)
        found.append((unmasked.start, unmasked.reused))
        return unmasked

    monkeypatch.setattr(engine, "run_unmasked", spy)
    return found


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("scope", ["response", "all"])
def test_masked_passes_start_where_generation_ended(finished, model, starts, scope, saved):
    """In the scope that needs nothing else of the prompt; the numbers are those without."""
    config = {"answers": str(finished[0]) if saved else None, "output_attentions": True}
    greedy = load_stat_calculator(config | {"masks": {"scope": scope}}, None)
    calculator = MaskedHeadsCalculator(scope=scope, top_k=8)
    first = greedy({}, TEXTS[:1], model, 2)
    calculator({"greedy_tokens": first["greedy_tokens"]}, TEXTS[:1], model)
    for text in TEXTS:  # memories are each row's own
        stats = greedy({}, [text], model, 5)
        assert (PREFIX_CACHES in stats) == (scope == "response")
        known = calculator(stats, [text], model)
        plain = calculator({"greedy_tokens": stats["greedy_tokens"]}, [text], model)
        for name in ("asmi_mi_d60", "asmi_agreement_d60", "asmi_entropy", "asmi_log_likelihood"):
            np.testing.assert_allclose(known[name][0], plain[name][0], atol=1e-5, err_msg=name)
        assert max(known["asmi_mi_d60"][0]) > 1e-4
        prompt = known["asmi_prompt_length"][0]
        known = (prompt - 1, "states") if scope == "response" else (0, "nothing")
        assert starts[-2:] == [known, (0, "nothing")]


def test_an_answer_that_was_cut(starts):
    """LM-Polygraph cuts it at the tokenizer's end token, of which generation need not know; what
    generation knew is then longer than the answer."""
    model, texts = whitebox(), ["Where do the blue kites start? The answer is", "Yes or No."]
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.model.generation_config.eos_token_id = None
    greedy, calculator = PrefixCachingGreedyCalculator(False, [0.6]), MaskedHeadsCalculator(
        scope="response", top_k=8
    )  # fmt: skip
    whole = {text: greedy({}, [text], model, 12)["greedy_tokens"][0] for text in texts}
    end = next(token for token in whole[texts[1]][2:8] if token not in whole[texts[0]])
    model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(end)
    for text in [texts[0], texts[0], texts[1]]:
        stats = greedy({}, [text], model, 12)
        known = calculator(stats, [text], model)
        plain = calculator({"greedy_tokens": stats["greedy_tokens"]}, [text], model)
        for name in ("asmi_mi_d60", "asmi_entropy", "asmi_log_likelihood"):
            np.testing.assert_allclose(known[name][0], plain[name][0], atol=1e-5, err_msg=name)
    assert len(stats["greedy_tokens"][0]) < 12
    assert [remembered for _, remembered in starts[::2]] == ["keys", "states", "states"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_batch_is_not_remembered(finished, model, starts, saved):
    """It is padded where it is generated, and several rows' keys are much to hold."""
    config = {"answers": str(finished[0]) if saved else None, "output_attentions": False}
    greedy = load_stat_calculator(config | {"masks": {"scope": "response"}}, None)
    stats = greedy({}, TEXTS, model, 5)
    assert PREFIX_CACHES not in stats
    MaskedHeadsCalculator(scope="response", top_k=8)(stats, TEXTS, model)
    assert starts == [(0, "nothing")] * 2


@pytest.mark.parametrize("lacks", UNMASKABLE)
def test_models_whose_heads_cannot_be_masked(finished, lacks):
    """They answer as LM-Polygraph has them answer, and the masked passes refuse them by name."""
    model = unmaskable(lacks)
    config = {"output_attentions": False, "masks": {"scope": "response"}}
    stats = load_stat_calculator(config | {"answers": None}, None)({}, TEXTS[:1], model, 3)
    plain = GreedyProbsCalculator(False, False)({}, TEXTS[:1], model, 3)
    assert stats[PREFIX_CACHES] == [None]
    assert stats["greedy_tokens"] == plain["greedy_tokens"]
    saved = load_stat_calculator(config | {"answers": str(finished[0])}, None)
    for refused in (saved, MaskedHeadsCalculator(scope="response", top_k=8)):
        with pytest.raises(TypeError, match=f"{type(model.model).__name__}.* {UNMASKABLE[lacks]}"):
            refused(stats, TEXTS[:1], model)


def test_weights_that_change_after_generation(starts):
    model = whitebox()
    greedy = load_stat_calculator(
        {"answers": None, "output_attentions": False, "masks": {"scope": "response"}}, None
    )
    stats = greedy({}, TEXTS[:1], model, 5)
    with torch.no_grad():
        model.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    MaskedHeadsCalculator(scope="response", top_k=8)(stats, TEXTS[:1], model)
    assert starts == [(0, "nothing")]


@pytest.mark.parametrize("saved", [False, True])
def test_windows_are_not_mistaken_for_the_start(saved):
    """At a sliding window's edge a cache of the model's own holds the last positions alone.

    Rows below it come first: they are checked against full forward passes, and those after them
        trusted.
    """
    written = (
        "Who built the ferry Ondine in Brask in 1931 ? Where do the blue kites start ? "
        "The answer is in the passage Ondine start"
    )
    words = written.split()
    model = whitebox("mistral-window", sliding_window=24)
    by_length = {}
    for end in range(1, len(words) + 1):
        for start in range(end):
            text = " ".join(words[start:end])
            by_length[len(model.tokenize([text])["input_ids"][0])] = text
    calculator = MaskedHeadsCalculator(scope="response", top_k=8)
    assert by_length.keys() >= {18, 19, 20, 21}
    for length, text in sorted(by_length.items()):
        if not 17 <= length <= 22:
            continue
        stats = PrefixCachingGreedyCalculator(False, [0.6])({}, [text], model, 5)
        (tokens,) = stats["greedy_tokens"]
        if saved:
            ids = torch.cat([model.tokenize([text])["input_ids"][0], torch.tensor(tokens)])
            cache = model.model(ids[None], use_cache=True).past_key_values
            stats[PREFIX_CACHES] = [_prefix_cache(model, ids.tolist(), cache, {})]
        known = calculator(stats, [text], model)
        plain = calculator({"greedy_tokens": [tokens]}, [text], model)
        for name in ("asmi_mi_d60", "asmi_entropy", "asmi_log_likelihood"):
            np.testing.assert_allclose(known[name][0], plain[name][0], atol=1e-5, err_msg=name)


def test_dropout_leaves_nothing():
    model = whitebox()
    stats = PrefixCachingGreedyCalculator(False, [0.6])({}, TEXTS[:1], model, 3)
    assert stats[PREFIX_CACHES][0].input_ids
    model.model.train()
    stats = PrefixCachingGreedyCalculator(False, [0.6])({}, TEXTS[:1], model, 3)
    assert stats[PREFIX_CACHES] == [None]
