"""No number without a comparison: what the check sees, when it is made, and what it remembers."""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import (
    attention_of,
    check,
    model_cache,
    model_state,
    plain_model,
    readout,
    response_embeddings,
    responses,
    run_subnetworks,
    run_unmasked,
    scoring_session,
    structure_of,
    subnetwork_log_probs,
    suffix,
)
from lm_polygraph_asmi.model.check import limit, strategies_seen_right, total_variation
from lm_polygraph_asmi.model.memory import default_budget
from lm_polygraph_asmi.model.suffix import STRATEGIES, full_forward_passes
from lm_polygraph_asmi.scoring.engine import Engine, score_depths
from tests.families import tiny_model
from tests.registry import tiny_class

PROMPT = 11


def masks(number: int = 6) -> torch.Tensor:
    return sample_head_masks(number, 4, 0.4, torch.Generator().manual_seed(0))


def sequence(length: int = 17) -> torch.Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def whole(monkeypatch):
    """Counts the full forward passes that the check compares with."""
    counted = []

    def counting(model, unmasked, *rest):
        counted.append(len(unmasked.input_ids))
        return full_forward_passes(model, unmasked, *rest)

    monkeypatch.setattr(check, "full_forward_passes", counting)
    return counted


def equals_full_passes(model, ids, prompt=PROMPT, layer=2, kept=None, scope="all"):
    kept = masks() if kept is None else kept
    found = subnetwork_log_probs(model, ids, prompt, layer, kept, scope=scope)
    with scoring_session(model):
        unmasked = run_unmasked(model, ids, prompt, [layer], scope)
        expected = readout(model, full_forward_passes(model, unmasked, layer, kept))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def beginning(first, length):
    ids = sequence(length)
    ids[0] = first
    return ids


def test_total_variation():
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()
    q = torch.tensor([[0.25, 0.75], [0.0, 1.0]]).log()
    assert total_variation(p, q).tolist() == pytest.approx([0.25, 1])
    assert total_variation(p, p).tolist() == [0, 0]
    assert check._response_variation(p, q) == pytest.approx(0.625)
    # One position of thirty stands out.
    p, q = (torch.cat([x[1:], p[:1].expand(30, -1)]) for x in (p, q))
    assert check._response_variation(p, q) == pytest.approx(0.1)


@pytest.mark.parametrize("scope", SCOPES)
def test_it_is_made_once_and_again_for_longer_sequences(whole, scope):
    model = tiny_model("llama")
    for length, made in (
        (17, True),
        (17, False),
        (18, False),
        (24, True),
        (24, False),
        (13, False),
        (12, True),  # a response of one token: layers may treat it otherwise
        (12, False),
    ):
        whole.clear()
        subnetwork_log_probs(model, sequence(length), PROMPT, 2, masks(), scope=scope)
        assert bool(whole) is made, length
        assert set(whole) <= {length}


def test_it_is_made_where_a_number_of_the_configuration_is_passed(whole):
    """A window of 20 tokens: one more token is not clearly longer, but another regime."""
    model = tiny_model("mistral-window", sliding_window=20)
    for length, made in ((20, True), (21, False), (22, True), (23, False)):
        whole.clear()
        subnetwork_log_probs(model, sequence(length), PROMPT, 2, masks())
        assert bool(whole) is made, length


@pytest.mark.parametrize(
    ("first", "then"), [((24, 4), (8, 20)), ((8, 20), (24, 4)), ((20, 8), (20, 8))]
)
def test_it_is_made_for_another_prompt_length(whole, first, then):
    """As long together, but what is kept of the prompt was made by a shorter or longer pass."""
    model = tiny_model("llama")
    for prompt, response in (first, then):
        whole.clear()
        ids = sequence(prompt + response)
        subnetwork_log_probs(model, ids, prompt, 2, masks(), scope="response")
    assert bool(whole) is (first != then)


def test_angles_that_switch_between_prompt_and_response():
    """The batch on the prompt cache is right at (24, 4), and wrong where the prompt is below 16."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
            "short_factor": [1.0], "long_factor": [4.0], "factor": 4.0}  # fmt: skip
    plain = tiny_class("Qwen3_5ForCausalLM").config.rope_parameters
    model = tiny_class("Qwen3_5ForCausalLM", rope_parameters={**plain, **long})
    layer = min(structure_of(model).sites)
    for prompt, response in ((24, 4), (8, 20)):
        equals_full_passes(model, sequence(prompt + response), prompt, layer, masks(3), "response")


def test_padding_inside_a_text_is_another_case():
    """Xmod leaves it out when it counts positions, but not behind what a cache holds."""
    model = tiny_class("XmodForCausalLM")
    padded = sequence()
    padded[4] = model.config.pad_token_id
    for ids in (sequence(), padded):
        equals_full_passes(model, ids, PROMPT, 1, masks(3), "response")


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_one_mask_says_nothing_about_two(whole, numbers):
    model = tiny_model("llama")
    kept = 1 - torch.eye(4)
    for number in numbers:
        whole.clear()
        subnetwork_log_probs(model, sequence(), PROMPT, 2, kept[:number], scope="response")
        assert whole


def test_the_second_copy_of_a_pack_is_seen_after_a_pack_of_one():
    """GPT-Neo's local layers count keys from the start of what they are given."""
    model, kept = tiny_class("GPTNeoForCausalLM"), 1 - torch.eye(4)
    for prompt, response, number in ((40, 6, 1), (34, 8, 2)):
        ids = sequence(prompt + response)
        equals_full_passes(model, ids, prompt, 1, kept[:number], "response")


def test_which_ways_were_right():
    """GPT-Neo's local layers count positions themselves: masks packed into a sequence are wrong."""
    for name, strategy in (
        ("LlamaForCausalLM", "packed sequence"),
        ("GPTNeoForCausalLM", "batch on the prompt cache"),
    ):
        model = tiny_class(name)
        masks = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1]])
        assert strategies_seen_right(model, "response") == set()
        subnetwork_log_probs(model, torch.arange(5, 30), 15, 1, masks, scope="response")
        (found,) = strategies_seen_right(model, "response")
        assert found == strategy
        assert strategies_seen_right(model, "all") == set()


def test_it_is_made_for_every_layer_scope_and_attention(whole):
    model = tiny_model("llama")
    for layer, scope, attention in ((2, "all", None), (1, "all", None), (1, "response", None),
                                    (1, "response", "sdpa")):  # fmt: skip
        whole.clear()
        how = {"scope": scope, "attention": attention}
        subnetwork_log_probs(model, sequence(), PROMPT, layer, masks(), **how)
        assert whole
        whole.clear()
        subnetwork_log_probs(model, sequence(), PROMPT, layer, masks(), **how)
        assert not whole


def test_it_is_made_anew_when_the_model_has_changed(whole):
    model = tiny_model("llama")
    subnetwork_log_probs(model, sequence(), PROMPT, 2, masks())
    whole.clear()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    subnetwork_log_probs(model, sequence(), PROMPT, 2, masks())
    assert whole


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("wrong_row", [0, 1, -1])
def test_a_wrong_row_anywhere_in_a_pack_is_seen(scope, wrong_row, monkeypatch):
    """The slower strategy takes over, and gives the true numbers."""

    def spoilt(run):
        def run_wrong(*args):
            found = run(*args).clone()
            if len(found) > 1:
                found[wrong_row] += 0.3
            return found

        return run_wrong

    strategies = [
        replace(strategy, run=spoilt(strategy.run)) if strategy.replays else strategy
        for strategy in STRATEGIES
    ]
    monkeypatch.setattr(suffix, "STRATEGIES", strategies)
    equals_full_passes(tiny_model("llama"), sequence(), scope=scope)


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        (lambda ids: len(ids) > 30, [(6, 17, 2), (6, 40, 2)]),
        # In some texts alone, as where keys score the same, and a cache chooses others among them:
        # the first is believed of no other that was not looked at, nor at another layer.
        (lambda ids: ids[0] == 5, [(5, 40, 2), (6, 17, 2), (5, 16, 2)]),
        (lambda ids: ids[0] == 5, [(5, 40, 1), (6, 17, 2), (5, 16, 2)]),
    ],
    ids=["with length", "of one text", "at one layer"],
)
def test_an_error_that_sets_in_later_is_seen(wrong, texts, monkeypatch):
    model = tiny_model("llama")

    def run_wrong(model, unmasked, *rest):
        found = suffix.masked_everywhere(model, unmasked, *rest)
        return found + 0.3 * wrong(unmasked.input_ids)

    cheapest, *others = STRATEGIES
    monkeypatch.setattr(suffix, "STRATEGIES", [replace(cheapest, run=run_wrong), *others])
    for first, length, layer in texts:
        equals_full_passes(model, beginning(first, length), layer=layer)
    cheap = {cheapest.name} if texts[0] == (6, 17, 2) else set()
    assert strategies_seen_right(model, "all") == cheap | {others[0].name}


def test_the_same_of_embeddings_behind_a_shared_prompt(monkeypatch):
    model = tiny_model("llama")
    shared_prompt_embeddings = responses._shared_prompt_embeddings

    def run_wrong(model, layer, prompt, *rest):
        return shared_prompt_embeddings(model, layer, prompt, *rest) + 0.3 * (prompt[0] == 5)

    monkeypatch.setattr(responses, "_shared_prompt_embeddings", run_wrong)
    for length, first in ((17, 5), (40, 6), (38, 5)):
        ids = beginning(first, length)
        with scoring_session(model):
            found = response_embeddings(model, ids, [[7, 8], [9]])
            expected = responses._separate_embeddings(
                model, 2, ids, [torch.tensor([7, 8]), torch.tensor([9])], [(0, 2), (1, 1)]
            )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_model_that_computes_a_row_otherwise_in_another_batch_is_run_one_mask_at_a_time(
    scope, whole
):
    model = tiny_model("llama")
    model.model.layers[3].mlp.register_forward_hook(
        lambda _, args, output: output * (1 + 0.2 * args[0].shape[:-1].numel())
    )
    found = subnetwork_log_probs(model, sequence(), PROMPT, 2, masks(), scope=scope)
    assert strategies_seen_right(model, scope) == {"full forward passes, one mask at a time"}
    whole.clear()
    subnetwork_log_probs(model, sequence(), PROMPT, 2, masks(), scope=scope)
    assert whole  # every sequence of its kind is compared
    with scoring_session(model):
        unmasked = run_unmasked(model, sequence(), PROMPT, [2], scope)
        for mask, row in zip(masks(), found, strict=True):
            expected = readout(model, full_forward_passes(model, unmasked, 2, mask[None]))[0]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_a_bug_of_this_package_is_no_slow_path(monkeypatch):
    """The same error from a layer of the model selects a slower strategy."""
    model, ids = tiny_model("llama"), torch.arange(3, 23)
    masks = sample_head_masks(5, 4, 0.4, torch.Generator().manual_seed(0))

    def fails(*_):
        raise KeyError("cache")

    with monkeypatch.context() as patched:  # raised by this file, as by code of a model
        patched.setattr("lm_polygraph_asmi.model.suffix.final_norm", fails)
        subnetwork_log_probs(model, ids, 14, 1, masks)
    assert strategies_seen_right(model, "all") == {"full forward passes"}
    monkeypatch.setattr("lm_polygraph_asmi.model.suffix.final_norm", lambda _: {})
    model = tiny_model("llama")
    with pytest.raises(TypeError, match="'dict' object is not callable"):
        subnetwork_log_probs(model, ids, 14, 1, masks)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_model_that_does_not_repeat_itself_is_refused(scope):
    model = tiny_model("llama")
    model.model.layers[3].mlp.register_forward_hook(
        lambda *call: call[-1] * (1 + torch.rand(()) * (call[-1].shape[1] == len(sequence()) - 1))
    )
    with pytest.raises(
        RuntimeError, match=r"masked passes disagree with full forward passes.*total variation"
    ):
        subnetwork_log_probs(model, sequence(), PROMPT, 2, masks(), scope=scope)
    with pytest.raises(RuntimeError, match="masked passes disagree with full forward passes"):
        Engine(scope=scope, num_masks=6, mask_rate=0.4).score(
            model, sequence()[:PROMPT], sequence()[PROMPT:].tolist()
        )


def test_what_failed_is_left_out_only_if_another_way_was_right():
    model = tiny_model("llama")
    with scoring_session(model):
        extent = check.extent_of(model, sequence(), PROMPT, False, 4)
        checks = check.checks_of(model, "both")
    asked = []

    def way(name, wrong=None):
        return name, extent, lambda: asked.append(name) or wrong

    def select(*ways):
        asked.clear()
        return checks.select(ways, extent.kind)[0], list(asked)

    cheap, dear = way("cheap"), way("dear")
    assert select(dear) == ("dear", ["dear"])
    assert select(cheap, dear) == ("cheap", ["cheap"])
    assert select(cheap, dear) == ("cheap", [])
    longer = replace(extent, response=2 * extent.response)
    failing = [(name, longer, lambda: "wrong") for name in ("cheap", "dear")]
    assert checks.select(failing, extent.kind) == (None, {"cheap": "wrong", "dear": "wrong"})
    for _ in range(2):  # what was right before is looked at again
        assert select(cheap, dear) == ("cheap", ["cheap"])
    assert select(way("cheap", "wrong"), dear) == ("dear", ["cheap", "dear"])
    assert select(cheap, dear) == ("dear", ["dear"])


def test_what_passed_for_others_is_compared_where_a_faster_way_failed():
    model = tiny_model("llama")
    with scoring_session(model):
        extent = check.extent_of(model, sequence(), PROMPT, False, 4)
        checks = check.checks_of(model, "both")
    dear = ("dear", extent, lambda: None)
    assert checks.select([dear], extent.kind) == ("dear", {})
    at_fault = [(name, extent, lambda: "wrong") for name in ("cheap", "dear")]
    assert checks.select(at_fault, extent.kind) == (None, {"cheap": "wrong", "dear": "wrong"})
    assert not checks.failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_scale_that_is_ignored_is_seen_in_16_bits(dtype, monkeypatch):
    """0.9 on the logits of a confident model: within 0.5 nats, far outside rounding."""
    model = tiny_class("CohereForCausalLM", logit_scale=0.9).to(dtype)
    ids = sequence()
    subnetwork_log_probs(model, ids, PROMPT, 1, masks())  # as it is, it is scored
    room = sys.modules["lm_polygraph_asmi.model.readout"]
    own = room.own_logits
    monkeypatch.setattr(room, "own_logits", lambda *args, **inputs: own(*args, **inputs) / 0.9)
    other = tiny_class("CohereForCausalLM", logit_scale=0.9).to(dtype)
    with pytest.raises(RuntimeError, match="the unmasked model"):
        subnetwork_log_probs(other, ids, PROMPT, 1, masks())


def test_16_bits_stay_far_below_the_limit():
    for name in ("llama", "qwen3-qk-norm", "gpt2"):
        model = tiny_model(name).to(torch.bfloat16)
        with scoring_session(model):
            for scope in SCOPES:
                unmasked = run_unmasked(model, sequence(), PROMPT, [2], scope)
                strategy = next(suffix.strategies(model, unmasked, 2))
                found = check._differences(model, unmasked, 2, masks(), 4, strategy)
                assert max(found.values()) < limit(torch.bfloat16) / 2, (name, scope, found)


def test_the_unembedding_of_16_bits_is_read_out_in_32():
    model = tiny_model("llama").to(torch.bfloat16)
    hidden = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (hidden.double() @ model.lm_head.weight.double().T).log_softmax(-1)
    with scoring_session(model):
        found = readout(model, hidden)
        rounded = model.lm_head(hidden).float().log_softmax(-1)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 < 1e-3 < (rounded - expected).abs().max()


def test_adapters_switched_off_are_another_model_to_the_journal(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama"), lora).eval()
    engine, model = (
        Engine(num_masks=6, mask_rate=0.4, result_cache=str(tmp_path)),
        plain_model(adapted),
    )
    with_adapter = scores(engine, model)
    with adapted.disable_adapter():
        without = scores(engine, model)
    assert without == pytest.approx(scores(engine, tiny_model("llama")), abs=1e-5)
    assert scores(engine, model) == with_adapter != without


def with_larger_states():
    """A model whose trunk has a hook, which acts when states are recorded and when read out."""
    model = tiny_model("llama")

    def larger(_, __, output):
        output.last_hidden_state = output.last_hidden_state * 1.3

    model.model.register_forward_hook(larger)
    return model


def test_masks_of_ones_alone_are_checked():
    model = with_larger_states()
    with pytest.raises(RuntimeError, match="the unmasked model"):
        subnetwork_log_probs(model, sequence(), PROMPT, 2, torch.ones(3, 4))


def test_what_has_not_been_checked_stays_out_of_the_journal(tmp_path):
    model = with_larger_states()
    engine = Engine(num_masks=6, mask_rate=0.4, result_cache=str(tmp_path))
    put = []
    engine.result_cache.put = lambda *entry: put.append(entry)
    with pytest.raises(RuntimeError):
        scores(engine, model)
    assert not put


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_whose_own_forward_was_replaced_is_called_as_it_is(dtype):
    model = tiny_model("llama").to(dtype)
    head = model.lm_head
    head.forward = lambda states: torch.nn.functional.linear(states, head.weight) * 0.5
    expected = (
        model(input_ids=sequence()[None, :-1]).logits[0, PROMPT - 1 :].float().log_softmax(-1)
    )
    for kept in (torch.ones(1, 4), torch.cat([torch.ones(1, 4), masks()])):
        found = subnetwork_log_probs(model, sequence(), PROMPT, 2, kept)
        torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)


def test_a_projection_that_accelerate_has_wrapped_is_still_read_out_in_32_bits():
    hooks = pytest.importorskip("accelerate.hooks")
    model, wrapped = (tiny_model("llama").to(torch.bfloat16) for _ in range(2))
    hooks.add_hook_to_module(wrapped.lm_head, hooks.ModelHook())
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with scoring_session(model), scoring_session(wrapped):
        assert torch.equal(readout(model, hidden), readout(wrapped, hidden))
        assert not torch.equal(readout(model, hidden), readout(model, hidden, wide=False))


def test_a_wrong_product_in_32_bits_is_seen(monkeypatch):
    room = sys.modules["lm_polygraph_asmi.model.readout"]
    product = room.wide_product
    monkeypatch.setattr(room, "wide_product", lambda *args: product(*args) * 0.5)
    with pytest.raises(RuntimeError, match="logits in 32 bits"):
        subnetwork_log_probs(tiny_model("llama").to(torch.bfloat16), sequence(), PROMPT, 2, masks())


# ------------------------------------------------------------------ state


def scores(engine: Engine, model) -> list[float]:
    example = engine.score(model, sequence()[:PROMPT], sequence()[PROMPT:].tolist())
    return [*example.log_likelihood.tolist(), *example.mi.tolist()]


def test_two_models_through_one_engine_with_a_journal(tmp_path):
    engine = Engine(num_masks=6, mask_rate=0.4, result_cache=str(tmp_path))
    first, second = tiny_model("llama"), tiny_model("llama-tied")
    found = [scores(engine, model) for model in (first, second, first)]
    fresh = [scores(Engine(num_masks=6, mask_rate=0.4), model) for model in (first, second)]
    assert found == [*fresh, fresh[0]]
    assert fresh[0] != fresh[1]


def test_weights_changed_in_place_are_another_model_to_the_journal(tmp_path):
    engine = Engine(num_masks=6, mask_rate=0.4, result_cache=str(tmp_path))
    model = tiny_model("llama")
    before = scores(engine, model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.3)
    after = scores(engine, model)
    assert after != before
    assert after == scores(Engine(num_masks=6, mask_rate=0.4), model)


def test_the_state_is_looked_at_once_an_example(monkeypatch, tmp_path):
    """Also with several depths and a result cache: looking costs as much as a pass of a small
    model."""
    looked, state = [], model_cache._state
    monkeypatch.setattr(model_cache, "_state", lambda model: looked.append(1) or state(model))
    engines = [
        Engine(depth=depth, num_masks=6, mask_rate=0.4, result_cache=str(tmp_path))
        for depth in (0.3, 0.6)
    ]
    model, prompt, response = tiny_model("llama"), sequence()[:PROMPT], sequence()[PROMPT:].tolist()
    for _ in range(2):  # the second comes out of the result cache
        score_depths(engines, model, prompt, response)
        assert len(looked) == 1
        looked.clear()


def test_the_state_of_a_model():
    model = tiny_model("llama")
    states = [model_state(model)]
    assert model_state(model) == states[0]
    model(input_ids=sequence()[None])
    assert model_state(model) == states[0]
    with torch.no_grad():
        model.lm_head.weight[3, 2] = 0
    states.append(model_state(model))
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    states.append(model_state(model))
    model.load_state_dict(model.state_dict())
    states.append(model_state(model))
    model.to(torch.bfloat16)
    states.append(model_state(model))
    assert len(set(states)) == 5


def test_threads_wait_for_one_another():
    """Two attention implementations, two scopes: each result is that of a thread alone."""
    model = tiny_model("llama")
    how = [{"scope": scope, "attention": a} for scope in SCOPES for a in ("eager", "sdpa")]
    expected = [subnetwork_log_probs(model, sequence(), PROMPT, 1, masks(), **h) for h in how]
    wrong: list[object] = []

    def work(which: int) -> None:
        for turn in range(8):
            place = (which + turn) % len(how)
            try:
                found = subnetwork_log_probs(model, sequence(), PROMPT, 1, masks(), **how[place])
                if not torch.equal(found, expected[place]):
                    wrong.append(how[place])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert attention_of(model) == "eager"


def test_a_vision_part_keeps_its_attention():
    model = tiny_class("Gemma3ForConditionalGeneration")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    vision, text = model.config.vision_config, model.config.text_config
    assert (vision._attn_implementation, text._attn_implementation) == ("sdpa", "eager")
    with scoring_session(model, "sdpa"):
        assert (vision._attn_implementation, text._attn_implementation) == ("sdpa", "sdpa")
    assert (vision._attn_implementation, text._attn_implementation) == ("sdpa", "eager")
    vision._attn_implementation_internal = "eager"
    for _ in range(2):  # the second switch goes without transformers
        with scoring_session(model, "sdpa"):
            assert vision._attn_implementation == "eager"
            assert text._attn_implementation == "sdpa"
    assert (vision._attn_implementation, text._attn_implementation) == ("eager", "eager")


def test_sessions_may_be_nested():
    model = tiny_model("llama").train()
    with scoring_session(model, "sdpa"):
        with scoring_session(model):  # the model's own
            assert attention_of(model) == "eager"
        assert attention_of(model) == "sdpa"
        with scoring_session(model, "sdpa"):
            assert not model.training
        assert not model.training
    assert attention_of(model) == "eager"
    assert all(module.training for module in model.modules())


def test_free_memory_counts_blocks_that_pytorch_holds_unused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    assert default_budget(torch.device("cuda", 0)) == 700


def test_the_seconds_of_the_check_are_told_apart(monkeypatch):
    model, full_passes = tiny_model("llama"), []
    model.model.layers[0].register_forward_hook(lambda *_: full_passes.append(1))
    # A clock that only the check's full forward passes advance, so that no machine is too slow.
    clock = SimpleNamespace(perf_counter=lambda: float(len(full_passes)))
    monkeypatch.setattr("lm_polygraph_asmi.model.subnetworks.time", clock)
    with scoring_session(model):
        unmasked = run_unmasked(model, sequence(), PROMPT, [2])
        first, second = (run_subnetworks(model, unmasked, 2, masks()) for _ in range(2))
    assert first.check_seconds > 0 == second.check_seconds


def test_one_refused_example_ends_no_other(monkeypatch):
    """Every way is wrong for one sequence; others are scored by the cheapest way, as before."""
    model, degenerate = tiny_model("llama"), sequence().flip(0)
    taken = []

    def spoilt(strategy):
        def run(model, unmasked, *rest):
            taken.append(strategy.name)
            found = strategy.run(model, unmasked, *rest)
            return found + 0.3 * torch.equal(unmasked.input_ids, degenerate)

        return replace(strategy, run=run)

    monkeypatch.setattr(suffix, "STRATEGIES", [spoilt(strategy) for strategy in STRATEGIES])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="masked passes disagree with full forward passes"):
            subnetwork_log_probs(model, degenerate, PROMPT, 2, masks())
    for length in (17, 40):
        taken.clear()
        equals_full_passes(model, sequence(length))
        assert set(taken) == {STRATEGIES[0].name}


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_embeddings_behind_a_prompt_whose_angles_switch_behind_it(name):
    """A shared prompt is right at the first lengths; then 16 positions lie between the two."""
    angles = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
              "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}  # fmt: skip
    model = tiny_model(
        name,
        max_position_embeddings=256,
        rope_parameters=angles,
        **({"original_max_position_embeddings": 16} if name == "phi3" else {}),
    )
    for prompt, lengths in ((30, (20, 30)), (4, (2, 3)), (10, (20, 3)), (13, (1, 9)), (17, (1,))):
        ids = sequence(prompt)
        given = [sequence(length).flip(0) for length in lengths]
        with scoring_session(model):
            found = response_embeddings(model, ids, [response.tolist() for response in given])
            for row, response in zip(found, given, strict=True):
                whole_pass = model(
                    input_ids=torch.cat([ids, response])[None], output_hidden_states=True
                )
                expected = whole_pass.hidden_states[2][0, -1]
                torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_what_is_more_than_rounding():
    """In 16 bits a single mask may round far; all masks, or the same states, may not."""
    half, single = torch.bfloat16, torch.float32

    def excess(unmasked, *rows, dtype=half):
        named = {f"mask {i}": value for i, value in enumerate(rows)}
        return check._excess({check.UNMASKED: unmasked, **named}, dtype)

    assert excess(1e-4, 0.001, 0.05, 0.001) is None
    assert "mask 1" in excess(1e-4, 0.001, 0.07, 0.001)
    assert "mask 2" in excess(1e-4, 0.02, 0.02, 0.03)
    assert "unmasked" in excess(0.01, 0.001, 0.001)
    assert "mask 0" in excess(1e-6, 1e-3, dtype=single)
    assert "mask 0" in excess(1e-6, float("nan"), dtype=single)
    assert excess(1e-6, 1e-5, dtype=single) is None


@pytest.mark.parametrize(("rounding", "right"), [(0.005, False), (0.02, True)])
def test_a_deep_model_in_16_bits_may_differ_by_what_its_own_rounding_explains(
    rounding, right, monkeypatch
):
    """Measured on the model: the same pass under another attention implementation."""
    found = {check.UNMASKED: 1e-6, "all heads kept": 0.03, "mask 1": 0.035}
    tried = []

    def differences(*how):
        tried.append(how)
        return found if len(tried) == 1 else dict.fromkeys(found, 0.0)

    monkeypatch.setattr(check, "_differences", differences)
    monkeypatch.setattr(check, "_rounding", lambda *_: rounding)
    model = tiny_model("llama").to(torch.bfloat16)
    subnetwork_log_probs(model, sequence(), PROMPT, 2, masks())
    assert len(tried) == (1 if right else 2)


def test_rounding_is_measured_between_two_attentions():
    model = tiny_model("llama")
    with scoring_session(model):
        unmasked = run_unmasked(model, sequence(), PROMPT, [2])
        assert check._rounding(model, unmasked) == 0  # 32 bits have a limit of their own
    half = tiny_model("llama").to(torch.bfloat16)
    with scoring_session(half):
        unmasked = run_unmasked(half, sequence(), PROMPT, [2])
        assert 1e-6 < check._rounding(half, unmasked) < 0.02
        assert attention_of(half) == "eager"
    capped = tiny_model("gemma2-softcap").to(torch.bfloat16)
    with scoring_session(capped):
        unmasked = run_unmasked(capped, sequence(), PROMPT, [2])
        assert check._rounding(capped, unmasked) == 0
