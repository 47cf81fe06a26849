"""A call scores an answer as a benchmark run does, and leaves the model as it was."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from itertools import count
from threading import current_thread
from unittest.mock import Mock, patch

import numpy as np
import pandas as pd
import pytest
import torch
from lm_polygraph.utils.model import WhiteboxModel
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lm_polygraph_asmi import AdaptASMI, Scorer, score
from lm_polygraph_asmi.analysis.mechanism import votes
from lm_polygraph_asmi.core.model import attention_of
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.results.names import SAVED
from lm_polygraph_asmi.scoring.text import prompt_tokens
from lm_polygraph_asmi.stat_calculators.sampling import SeededSamplingCalculator
from tests.scoring.conftest import CHAT, MESSAGES, PROMPT, ending_model, greedy, templated
from tests.test_manager import TEXTS, manager
from tests.tiny_lm import whitebox

pytestmark = pytest.mark.usefixtures("unseen")


def numbers(found):
    """All that a score consists of, seconds apart."""
    return [
        float(found), found.msp, found.diversity, found.gate, found.scored_text, found.settings,
        [vars(token) for token in found.tokens],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def ending():
    return ending_model()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scope": "response", "depth": 0.9, "seed": 3, "top_k": 8, "mask_sampler": "balanced",
         "gate_token": "last", "closing_token": False, "aggregation": "sum", "num_masks": 9,
         "mask_rate": 0.3, "num_samples": 3},
    ],
    ids=str,
)  # fmt: skip
def test_scores_are_those_of_the_benchmark(ending, settings, monkeypatch):
    """`tests/test_manager.py` compares the scores of all methods."""
    estimator = AdaptASMI(**settings)
    run = manager(ending, [estimator], save_stats=[*SAVED, "greedy_tokens", "sample_tokens"])
    run()
    stats, scorer = run.stats, Scorer(ending, method="adapt", max_new_tokens=5, **settings)
    assert set(stats["asmi_closing"]) == {True, False}
    clock = Mock(perf_counter=count().__next__)
    monkeypatch.setattr("lm_polygraph_asmi.core.engine.time", clock)
    for row, masked in enumerate(at_depth(stats, settings.get("depth", 0.6))):
        ids = stats["greedy_tokens"][row]
        found = scorer.score(TEXTS[row], ids, stats["sample_tokens"][row])
        score = run.estimations["sequence", str(estimator)][row]
        assert (float(found), found.seconds) == (pytest.approx(score, rel=1e-9), 2)
        assert found.settings.items() >= masked["settings"].items()
        chosen = votes(masked["top_token"], ids)
        expected = pd.DataFrame(
            {
                "id": ids,
                "mi": masked["mi"],
                "agreement": masked["agreement"],
                "entropy": stats["asmi_entropy"][row],
                "log_likelihood": stats["asmi_log_likelihood"][row],
                "vote": [vote.agree for vote in chosen],
                "alternative": [
                    v.alternative and ending.tokenizer.decode([v.alternative]) for v in chosen
                ],
                "alternative_share": [vote.share for vote in chosen],
            }
        )
        pd.testing.assert_frame_equal(found.to_df()[[*expected]], expected, rtol=1e-9)


def test_stop_strings_of_a_model_of_lm_polygraph(model, tokenizer):
    plain = greedy(model, tokenizer, 6)
    stop = tokenizer.decode(plain[3:4])
    length = next(n for n in range(1, 5) if stop in tokenizer.decode(plain[:n]))
    own = whitebox(stop_strings=[stop])
    own.model = model
    assert list(Scorer(own, stop=[], max_new_tokens=6).read(PROMPT).ids) == plain
    with patch.object(type(model), "forward", autospec=True, side_effect=type(model).forward) as f:
        assert list(Scorer(own, max_new_tokens=40).read(PROMPT).ids) == plain[:length]
    assert f.call_count < 20  # few after the end


def test_a_text_for_an_instruct_model_of_lm_polygraph_is_a_chat(model, tokenizer):
    own = WhiteboxModel(model, templated(tokenizer, CHAT), instruct=True)
    of_text, of_chat = (score(own, prompt, [7, 8]) for prompt in (PROMPT, MESSAGES))
    assert (of_text.prompt, numbers(of_text)) == (MESSAGES, numbers(of_chat))


def test_what_a_model_ships_does_not_change_its_answers(model, tokenizer, monkeypatch):
    """Neither the greedy one nor samples, which have the paper's settings."""
    settings = {"tokenizer": tokenizer, "max_new_tokens": 8, "num_masks": 2, "method": "adapt",
                "num_samples": 3}  # fmt: skip
    expected, plain = greedy(model, tokenizer, 8), score(model, PROMPT, **settings)
    for shipped in (
        {"do_sample": True, "temperature": 5.0, "return_dict_in_generate": True, "max_length": 7},
        {"no_repeat_ngram_size": 1, "repetition_penalty": 3.0, "num_beams": 3, "min_p": 0.9},
        {"suppress_tokens": expected[:1]},
    ):
        changed = GenerationConfig(**model.generation_config.to_diff_dict() | shipped)
        monkeypatch.setattr(model, "generation_config", changed)
        found = score(model, PROMPT, **settings)
        assert (list(found.ids), found.diversity) == (expected, plain.diversity), shipped
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("ends", "answer", "expected"),
    [([1], " Brask", " Brask<s>"), (None, " Brask", " Brask"), (None, "", None)],
)
def test_an_end_that_the_tokenizer_does_not_name(tokenizer, ends, answer, expected):
    model, nameless = whitebox().model, deepcopy(tokenizer)
    nameless.eos_token, model.generation_config.eos_token_id = None, ends
    with nullcontext() if expected else pytest.raises(ValueError, match="answer is empty"):
        assert score(model, PROMPT, answer, tokenizer=nameless).scored_text == expected


def test_a_given_answer_is_never_generated(model, tokenizer, monkeypatch):
    """Nor are samples that were passed."""
    scorer = Scorer(model, tokenizer=tokenizer, method="adapt", num_samples=2, max_new_tokens=2)
    monkeypatch.setattr(type(model), "generate", Mock(side_effect=LookupError))
    for answer in (" Brask", "", [7, 8]):
        scorer.score(PROMPT, answer, [" Brask", [5, 6]])
        scorer.read(PROMPT, answer)
    with pytest.raises(LookupError):
        scorer.score(PROMPT, [7, 8])


@pytest.mark.parametrize("settings", [{}, {"seed": 3, "max_new_tokens": 2, "stop": "e"}], ids=str)
def test_samples_are_those_of_a_run(ending, settings, monkeypatch):
    """Also where a token that samples begin with is an end token, and comes too early."""
    settings = {"method": "adapt", "max_new_tokens": 8, "num_samples": 3} | settings
    prompt, end = prompt_tokens(ending.tokenizer, PROMPT), ending.tokenizer.eos_token_id
    first = Scorer(ending, **settings)._generation.sampled(prompt, 2, 1, 0)[0][0]
    monkeypatch.setattr(ending.model.generation_config, "eos_token_id", [end, first])
    stops = [settings["stop"]] if "stop" in settings else None
    monkeypatch.setattr(ending.generation_parameters, "stop_strings", stops)
    scorer = Scorer(ending, **settings)
    count, seed, most = (
        getattr(scorer.config, n) for n in ("num_samples", "seed", "max_new_tokens")
    )
    for text in TEXTS:
        (saved,) = SeededSamplingCalculator(count, seed)({}, [text], ending, most)["sample_tokens"]
        ids = prompt_tokens(scorer.tokenizer, text)
        drawn = scorer._generation.sampled(ids, most, count, seed)
        assert [ids[:-1] if ids[-1] == end else ids for ids in drawn] == saved
        assert scorer.score(text, [5]).diversity == scorer.score(text, [5], saved).diversity


@pytest.mark.parametrize("samples", [[], [" Brask", ""], [[5, 6], []]], ids=str)
def test_without_two_samples_adapt_asmi_is_asmi(model, tokenizer, samples):
    found = score(model, PROMPT, [5, 6], tokenizer=tokenizer, method="adapt", samples=samples)
    plain = score(model, PROMPT, [5, 6], tokenizer=tokenizer, method="asmi")
    assert ["sampled answers" in said for said in found.warnings] == [True]
    assert (found.diversity, float(found)) == (1, pytest.approx(float(plain), rel=1e-3))


def test_samples_as_texts_and_as_ids(model, tokenizer):
    """With an end token or without, as `generate` returns them."""
    texts = [" Brask", " in 1931"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    settings = {"method": "adapt", "tau": np.float32(0.5), "beta": 3.0, "tokenizer": tokenizer}
    found, *others = (
        score(model, PROMPT, [5, 6], samples=samples, **settings)
        for samples in (texts, ids, [[*one, tokenizer.eos_token_id] for one in ids])
    )
    assert [numbers(other) for other in others] == [numbers(found)] * 2
    assert found.gate == pytest.approx(1 / (1 + np.exp(-3 * (0.5 - found.diversity))))
    assert found.settings.items() >= {"tau": 0.5, "beta": 3.0, "num_samples": 2}.items()


@pytest.mark.parametrize(
    ("samples", "run"),
    [
        ([[5, 6, 7], [8, 9, 7]], [[5, 6], [8, 9]]),  # as long as they may be
        ([[5, 6, 2], [8, 9]], [[5, 6], [8, 9]]),  # the end token was run
        ([[5, 6, 2], [8], [2]], [[5, 6], [8]]),
    ],
)
def test_a_samples_last_token_was_run_unless_it_ended_there(model, tokenizer, samples, run):
    """As LM-Polygraph embeds samples, "second_last" leaves out what no pass has read."""
    settings = {"method": "adapt", "max_new_tokens": 3, "tokenizer": tokenizer}
    found = score(model, PROMPT, [5], samples=samples, gate_token="second_last", **settings)
    expected = score(model, PROMPT, [5], samples=run, gate_token="last", **settings)
    assert 0 < found.diversity < 1
    assert found.diversity == pytest.approx(expected.diversity, abs=1e-6)


class Int8Linear(torch.nn.Module):
    """Weights as bitsandbytes or torchao keep them: small integers, scaled when used."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("numbers", (weight / self.scale).round().to(torch.int8))

    def forward(self, states):
        return states @ (self.numbers * self.scale).T


def test_a_quantised_model(tokenizer):
    quantised, plain = whitebox().model, whitebox().model
    settings = {"method": "adapt", "num_samples": 3, "max_new_tokens": 8, "tokenizer": tokenizer}
    for name, linear in plain.named_modules():
        if isinstance(linear, torch.nn.Linear):
            small = Int8Linear(linear.weight.data)
            linear.weight.data = small.numbers * small.scale  # rounded, too
            quantised.set_submodule(name, small)
    found, expected = (float(score(model, PROMPT, **settings)) for model in (quantised, plain))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_quantises_by_batch_is_refused(model, tokenizer):
    """Torch's dynamic quantisation rounds a row otherwise in another batch."""
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(TypeError, match="rounded with them"):
        score(quantised, PROMPT, " Brask", tokenizer=tokenizer)


def found_in(model):
    """What a call could leave changed; Python's own generator serves the checks of types."""
    return {
        "modules": [
            (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
            for m in model.modules()
        ],
        "attention": attention_of(model),
        "generation": (id(model.generation_config), model.generation_config.to_dict()),
        "config": model.config.to_dict(),
        "weights": [(id(p), p._version, p.requires_grad, p.grad) for p in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "numpy": [np.asarray(part).tolist() for part in np.random.get_state()],  # noqa: NPY002
        "inference": torch.is_inference_mode_enabled(),
    }


CALLS = {
    "answer": {"answer": " Brask", "attention": "sdpa"},
    "samples": {"method": "adapt", "max_new_tokens": 4, "num_samples": 3, "stop": "never said"},
}


@pytest.mark.parametrize(("kind", "passes"), [("answer", 0), ("answer", 3), ("samples", 3)])
def test_a_model_in_training_scores_as_one_at_rest_and_is_left_as_found(
    model, tokenizer, kind, passes
):
    """Also by a call that is stopped, at once, amid generation or a masked pass."""
    settings, trained = CALLS[kind], whitebox().model.train()
    trained.model.layers[0].eval()  # flags of single modules, too
    trained.gradient_checkpointing_enable()
    trained.model.embed_tokens.weight.requires_grad_(False)
    trained.generation_config.temperature = 0.7
    before, left = found_in(trained), [True] * passes

    def stop(*_):
        assert found_in(trained)["generation"] == before["generation"]  # for other threads, too
        if not left:
            raise KeyboardInterrupt
        left.pop()

    with trained.model.layers[-1].mlp.register_forward_hook(stop), pytest.raises(KeyboardInterrupt):
        score(trained, PROMPT, tokenizer=tokenizer, **settings)
    assert found_in(trained) == before
    found = score(trained, PROMPT, tokenizer=tokenizer, **settings)
    assert found_in(trained) == before
    assert numbers(found) == numbers(score(model, PROMPT, tokenizer=tokenizer, **settings))
    ids = torch.tensor([[1, 5, 6]])
    trained(ids, labels=ids).loss.backward()


def test_calls_of_other_threads_are_right_at_every_moment(monkeypatch, tokenizer):
    """While an answer and samples are generated, embedded and scored."""
    model, own, scoring, seen = whitebox().model, LlamaMLP.forward, current_thread(), []

    def other():
        out = model(torch.tensor([[1, 5, 6]]), output_hidden_states=True, output_attentions=True)
        return [part.tolist() for part in (*out.hidden_states, *out.attentions)]

    def forward(mlp, states):
        if current_thread() is scoring:
            seen.append(pool.submit(other).result(60))
        return own(mlp, states)

    alone = other()
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with ThreadPoolExecutor(1) as pool:
        score(model, PROMPT, tokenizer=tokenizer, method="adapt", num_samples=2, max_new_tokens=3)
    assert len(seen) > 10
    assert seen == [alone] * len(seen)


@pytest.mark.parametrize("token", [None, "[PAD]"])
def test_a_padding_token_that_is_none_of_the_model(ending, tokenizer, token):
    """Or one of a tokenizer that got it, while the model was not resized. Samples end apart."""
    other = deepcopy(tokenizer)
    other.add_special_tokens({"pad_token": token} if token else {})
    other.pad_token = token
    assert other.pad_token_id == (token and ending.model.config.vocab_size)
    settings = {"method": "adapt", "num_samples": 3, "num_masks": 2, "max_new_tokens": 20}
    found, expected = (
        score(ending.model, PROMPT, tokenizer=each, **settings) for each in (other, tokenizer)
    )
    assert numbers(found) == numbers(expected)
