"""Statistics of the masked passes: those of their log-probabilities, row by row, and kept."""

from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lm_polygraph.stat_calculators import GreedyProbsCalculator

from lm_polygraph_asmi.config import SCOPES, ASMIConfig
from lm_polygraph_asmi.core import maths
from lm_polygraph_asmi.core.engine import Engine
from lm_polygraph_asmi.core.maths import example_seed
from lm_polygraph_asmi.core.model import unembedding
from lm_polygraph_asmi.results.names import MASKED_HEADS
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from lm_polygraph_asmi.stat_calculators.masked_heads import by_name, load_stat_calculator
from tests.families import of_model, subnetwork_log_probs
from tests.scripted import likeliest
from tests.tiny_lm import whitebox

TEXTS = ["Who built the ferry?", "Where do the blue kites start in the passage?", "True or"]
PER_TOKEN = ["mi", "agreement", "mean_entropy", "asmi_entropy"]
LAYER = {"mi", "agreement", "entropy_of_mean", "mean_entropy", "tail_mass", "coverage", "top_token",
         "mask_seed", "settings"}  # fmt: skip
DETAILS = {"masks", "kl", "masked_log_likelihood", "candidates", "candidate_cosines"}


def greedy(model, texts):
    return GreedyProbsCalculator(output_attentions=False, output_hidden_states=False)(
        {}, texts, model, 6
    )


def run(model, texts, calculator=None, **stats):
    return (calculator or MaskedHeadsCalculator())(greedy(model, texts) | stats, texts, model)


def of_row(stats, row=0, depth=0.6):
    """All statistics of an example, those of the masked layer among the others."""
    return {name: values[row] for name, values in stats.items()} | stats["asmi"][row][depth]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("sampler", "seeded_by", "budget"), [("bernoulli", "answer", None), ("balanced", "prompt", 1)]
)
def test_statistics_follow_from_the_masks_and_their_log_probs(
    model, scope, sampler, seeded_by, budget
):
    calculator = MaskedHeadsCalculator(
        top_k=8, details=True, scope=scope, mask_sampler=sampler, seeded_by=seeded_by,
        memory_budget=budget,
    )  # fmt: skip
    stats = greedy(model, TEXTS[:1])
    found = of_row(calculator(stats, TEXTS[:1], model))
    prompt, response = model.tokenize(TEXTS[:1])["input_ids"][0], stats["greedy_tokens"][0]
    ids = torch.tensor([*prompt, *response])
    seed = example_seed(0, [2, *(ids if seeded_by == "answer" else prompt).tolist()])
    masks = maths.sample_head_masks(47, 4, 0.09, torch.Generator().manual_seed(seed), sampler)
    how = model.model, ids, len(prompt), 2
    log_probs = subnetwork_log_probs(*how, masks, scope=scope)
    own = subnetwork_log_probs(*how, torch.ones(2, 4))[0].double()  # unmasked
    weight, support = of_model(unembedding, model.model), maths.union_support(log_probs, 8)
    expected = maths.disagreement(support)
    top, chosen = log_probs.double().exp().mean(0).topk(8).indices, range(len(response))
    for name, value in {
        "masks": masks,
        "mask_seed": seed,
        "asmi_tokens": response,
        "asmi_prompt_length": len(prompt),
        "mi": maths.mutual_information(log_probs, 8),
        "agreement": maths.semantic_agreement(log_probs, weight, 8),
        "entropy_of_mean": expected.entropy_of_mean,
        "mean_entropy": expected.mean_entropy,
        "tail_mass": support.tail.mean(0),
        "coverage": maths.top_k_coverage(log_probs, (1, 8, 16, 32, 64, 128, 256)).mean(0),
        "top_token": log_probs.argmax(-1),
        "kl": expected.divergence_from_mean,
        "asmi_entropy": -(own.exp() * own).sum(-1),
        "asmi_log_likelihood": own[chosen, response],
        "masked_log_likelihood": log_probs[:, chosen, response],
        "candidates": top,
        "candidate_cosines": maths.cosines(weight[top]),
    }.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)
    assert found["mi"].min() > 1e-3  # neither side of the comparison is trivial


def test_of_several_ends_that_which_the_model_would_write_is_scored(model):
    """Of all answers of up to three tokens from two, in any order; some begin with others."""
    answers = [[*ids] for length in (1, 2, 3) for ids in product((7, 8), repeat=length)]
    engine, prompt, chosen = Engine(), torch.tensor([1, 5, 6]), []
    for number in range(2, 14):
        ends = Random(number).sample(answers, number)
        found = engine.read(model.model, prompt, *ends)["tokens"].tolist()
        assert found == likeliest(model.model, prompt.tolist(), ends.__contains__, ends), ends
        chosen.append(ends.index(found) + len(found))
    assert len(set(chosen)) > 3


@pytest.mark.parametrize("details", [False, True])
def test_every_listed_statistic_is_written_and_no_other(model, details):
    settings = {"num_masks": 7, "mask_rate": 0.3, "top_k": 5, "seed": 3, "attention": "sdpa"}
    calculator = MaskedHeadsCalculator(
        ASMIConfig(**settings), depths=[0.6, 0.1 * 3, 0.6, 0.3], details=details
    )
    found = run(model, TEXTS[:1], calculator)
    assert set(found) == set(MASKED_HEADS) == set(MaskedHeadsCalculator.meta_info()[0])
    (by_depth,) = found["asmi"]
    assert list(by_depth) == [0.6, 0.3]  # one that occurs twice is scored once
    for depth, layer in ((0.6, 2), (0.3, 1)):
        own = by_depth[depth]
        assert set(own) == LAYER | (DETAILS if details else set())
        assert {*np.ravel(own.get("candidates", own["top_token"])).tolist()} <= {
            *found["asmi_token_texts"][0]
        }
        assert own["settings"] == {
            **ASMIConfig(depth=depth, **settings).to_dict("masks"),
            "layer": layer, "num_layers": 4, "num_heads": 4, "attention": "sdpa",
            "requested_layer": None,
        }  # fmt: skip


def test_batch_mates_order_and_padding_change_nothing(model, monkeypatch):
    """Prompts of different lengths: in a batch the host pads them on the left."""
    together, reverse = run(model, TEXTS), run(model, TEXTS[::-1])
    monkeypatch.setattr(model.tokenizer, "padding_side", "right")
    padded = model.tokenize(TEXTS)["input_ids"].tolist()
    right = run(model, TEXTS, greedy_tokens=together["asmi_tokens"], input_tokens=padded)
    for row, text in enumerate(TEXTS):
        alone = of_row(run(model, [text]))
        for found in (of_row(together, row), of_row(reverse, 2 - row), of_row(right, row)):
            for name in PER_TOKEN:
                np.testing.assert_allclose(found[name], alone[name], atol=1e-5)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_padding_behind_an_end_is_no_answer(pad_is_eos):
    """The host keeps what a batch adds behind a stop string, or behind an end token of a chat
    model's generation config, which it does not look at."""
    model, turn_end = whitebox(stop_strings=["\n"], pad_is_eos=pad_is_eos), 42
    tokenizer = model.tokenizer
    model.model.generation_config.eos_token_id = [tokenizer.eos_token_id, turn_end]
    answer = tokenizer(" Brask\n", add_special_tokens=False)["input_ids"]
    longer = tokenizer(" in 1931 the passage", add_special_tokens=False)["input_ids"]
    filling = [tokenizer.eos_token_id] if pad_is_eos else [tokenizer.pad_token_id] * 4
    rows = [answer, [7, 8, turn_end], [7, 8, tokenizer.eos_token_id]]
    together = MaskedHeadsCalculator()(
        {"greedy_tokens": [*([*row, *filling] for row in rows), longer]}, TEXTS[:1] * 4, model
    )
    assert [tokens.tolist() for tokens in together["asmi_tokens"]] == [*rows, longer]
    assert together["asmi_closing"] == [True, True, True, False]


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({}, "'greedy_tokens' is missing"),
        ({"greedy_tokens": [[]]}, "empty"),
        ({"greedy_tokens": [[7] * 256]}, "window of 256"),
        ({"greedy_tokens": [[7]], "input_tokens": [[4, 4, 4]]}, "other token ids"),
    ],
)
def test_statistics_that_are_refused(model, stats, said):
    with pytest.raises(ValueError if stats else KeyError, match=said):
        MaskedHeadsCalculator()(stats, TEXTS[:1], model)


def sampling():
    (model := whitebox()).generation_parameters.do_sample = True
    return model


def loaded(make, **settings):
    return load_stat_calculator(settings, SimpleNamespace(model=make()))


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (partial(MaskedHeadsCalculator, depths=[0.6, 1.0]), ValueError, "depth"),
        (partial(MaskedHeadsCalculator, depths=[]), ValueError, "at least one"),
        *((partial(loaded, partial(SimpleNamespace, model_type=kind, model=None)), TypeError, kind)
          for kind in ("Seq2SeqLM", "Blackbox")),
        (partial(loaded, partial(whitebox, "gemma2-softcap"), attention="sdpa"), ValueError,
         "attention"),
        (partial(loaded, sampling), ValueError, "sample"),
        (partial(loaded, partial(whitebox, stop_strings=[""])), ValueError, "empty string"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_at_once(make, error, word):
    with pytest.raises(error, match=word):
        make()


def test_what_the_cache_holds_is_not_scored_again(model, tmp_path):
    """Depth by depth, and of the same model alone; the seconds are those of the scoring."""
    stats, cached = greedy(model, TEXTS[:1]), partial(MaskedHeadsCalculator, result_cache=tmp_path)
    for scored in (model, whitebox("llama-tied")):
        found = [
            cached(depths=depths)(stats, TEXTS[:1], scored)
            for depths in ([0.6], [0.3, 0.6], [0.3, 0.6])
        ]
        assert [each.pop("asmi_reused_depths") for each in found] == [[0], [1], [2]]
        np.testing.assert_equal(found[2], found[1])


def test_all_that_statistics_depend_on_is_in_their_key(model):
    store = Mock(get=Mock(side_effect=LookupError))
    x, y = torch.tensor([1, 5, 6]), [7, 8]
    asked = [
        *(((x, y), changed) for changed in (
            {}, {"depth": 0.3}, {"top_k": 8}, {"num_masks": 9}, {"mask_rate": 0.2}, {"seed": 1},
            {"mask_sampler": "balanced"}, {"scope": "response"}, {"seeded_by": "prompt"},
            {"attention": "sdpa"}, {"compile": True}, {"details": True},
        )),
        ((x[:2], [6, *y]), {}), ((x, [7, 9]), {}), ((x, y, [7, 8, 9]), {}), ((x, [7, 8, 9], y), {}),
    ]  # fmt: skip
    for given, changed in asked:
        with pytest.raises(LookupError):
            Engine(store=store, **changed).score(model.model, *given)
    keys = [str(call.args[0]) for call in store.get.call_args_list]
    assert len(set(keys)) == len(keys) == len(asked)


def test_seconds_are_those_of_the_unmasked_pass_and_of_each_depth(model):
    (found,) = Engine(num_masks=2, mask_rate=0.5).score(model.model, torch.tensor([1, 5, 6]), [7])
    timed = replace(found, unmasked_seconds=1.0, masked_seconds=2.0)
    assert by_name([timed, timed])["asmi_seconds"] == 5.0


def test_control_tokens_of_a_data_set_are_named_once(model, caplog):
    calculator = MaskedHeadsCalculator(top_k=8, num_masks=2, mask_rate=0.5)
    for texts in (["Who?"], ["Where?", "Who </s> built it?"], ["And </s>?"]):
        run(model, texts, calculator)
    (record,) = [record for record in caplog.records if "control token" in record.message]
    assert record.args == ("</s>", 4, "Who </s> built it?")
