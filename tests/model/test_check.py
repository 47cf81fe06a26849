"""The check: when it is made, what it sees, and that a pass that fails is slow, never wrong."""

import logging
from functools import partial

import pytest
import torch
import transformers

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import (
    attention_of,
    check,
    forwards,
    readout,
    response_embeddings,
    responses,
    run_unmasked,
    scoring_session,
    structure_of,
)
from lm_polygraph_asmi.model.check import (
    FULL,
    PACKED_POSITIONS,
    PASSES,
    full_passes,
    limit,
    passes_in_use,
    variation,
)
from lm_polygraph_asmi.scoring.engine import Engine
from tests import decoders
from tests.decoders import FAMILIES, apart, sequence
from tests.families import MIXED_LAYERS, tiny_model
from tests.registry import tiny_class
from tests.subnetworks import subnetwork_log_probs

PROMPT = 11
both_scopes = pytest.mark.parametrize("scope", SCOPES)


def masks(number: int = 6) -> torch.Tensor:
    return sample_head_masks(number, 4, 0.4, torch.Generator().manual_seed(0))


@pytest.fixture
def whole(monkeypatch):
    """Lengths of the texts that the check runs full passes of."""
    counted = []

    def counting(model, unmasked, *rest):
        counted.append(len(unmasked.input_ids))
        return full_passes(model, unmasked, *rest)

    monkeypatch.setattr(check, "full_passes", counting)
    return counted


def score(model, length=17, layer=2, drawn=None, **how) -> torch.Tensor:
    drawn = masks() if drawn is None else drawn
    return subnetwork_log_probs(model, sequence(length), PROMPT, layer, drawn, **how)


def is_right(model, length, scope) -> bool:
    expected = decoders.full_passes(
        FAMILIES["llama"], model, sequence(length), PROMPT, scope, drawn=masks()
    )
    return apart(score(model, length, scope=scope), expected) < 1e-5


def test_total_variation():
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()
    q = torch.tensor([[0.25, 0.75], [0.0, 1.0]]).log()
    assert variation(p, q) == pytest.approx(0.625)
    assert variation(p, p) == 0
    # One position of thirty stands out.
    p, q = (torch.cat([x[1:], p[:1].expand(30, -1)]) for x in (p, q))
    assert variation(p, q) == pytest.approx(0.1)


@both_scopes
def test_it_is_made_once_and_again_for_more_than_twice_the_length(whole, scope):
    model = tiny_model("llama")
    distinct, longest, made = len(masks().unique(dim=0)), 0, []
    for length in (17, 17, 18, 24, 13, 40, 41, 110, 110):
        packed = min(distinct, PACKED_POSITIONS["cpu"] // (length - PROMPT))
        positions = (length - PROMPT) * (packed if scope == "response" else 1)
        whole.clear()
        score(model, length, scope=scope)
        assert whole == [length] * (positions > 2 * longest), length
        longest = max(longest, positions if whole else 0)
        made += whole
    assert len(set(made)) > 1
    # A prompt of one token vouches for no longer one.
    subnetwork_log_probs(other := tiny_model("llama"), sequence(30), 1, 2, masks(), scope=scope)
    whole.clear()
    score(other, scope=scope)
    assert whole


def test_it_is_made_for_every_layer_scope_attention_and_state(whole):
    model = tiny_model("llama")
    for layer, scope, attention in ((2, "all", None), (1, "all", None), (1, "response", None),
                                    (1, "response", "sdpa")):  # fmt: skip
        for made in (True, False):
            whole.clear()
            score(model, layer=layer, scope=scope, attention=attention)
            assert bool(whole) is made
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    score(model, layer=1)
    assert whole


@both_scopes
@pytest.mark.parametrize(("row", "from_length"), [(0, 0), (-1, 0), (-1, 30)])
def test_a_pass_that_is_wrong_or_fails_is_never_believed(
    scope, row, from_length, monkeypatch, caplog
):
    """Wrong at once, or for longer texts than the first; the last way but one raises an error."""

    def spoilt(run, fails):
        def run_wrong(model, unmasked, *rest):
            found = run(model, unmasked, *rest).clone()
            if len(unmasked.input_ids) >= from_length:
                if fails:
                    raise KeyError("of a model")
                found[row] += 0.3
            return found

        return run_wrong

    names = list(PASSES[scope])
    for place, name in enumerate(names[:-1]):
        monkeypatch.setitem(PASSES[scope], name, spoilt(PASSES[scope][name], place == 1))
    caplog.set_level(logging.WARNING, "lm_polygraph")
    model = tiny_model("llama")
    for length in (17, 100, 17):
        assert is_right(model, length, scope)
    assert passes_in_use(model, scope) == [FULL]
    first, *others = caplog.messages
    assert f"{names[0]!r} failed the self-check (scope {scope}): total variation" in first
    assert others == [
        f"LlamaForCausalLM: {names[1]!r} failed the self-check (scope {scope}): "
        f"KeyError: 'of a model'. Using {FULL!r}, which is slower"
    ]


def test_an_error_of_full_passes_is_raised(monkeypatch):
    def fails(*_):
        raise KeyError("of a model")

    monkeypatch.setattr(check, "full_passes", fails)
    monkeypatch.setitem(PASSES, "all", dict.fromkeys(PASSES["all"], fails))
    with pytest.raises(KeyError, match="of a model"):
        score(tiny_model("llama"))


@pytest.mark.parametrize("first", [5, 9])
def test_embeddings_after_a_shared_prompt_that_are_wrong_are_not_believed(monkeypatch, first):
    model, after_one_prompt = tiny_model("llama"), responses._after_one_prompt

    def run_wrong(model, layer, prompt, *rest):
        return after_one_prompt(model, layer, prompt, *rest) + 0.3 * (len(prompt) > first)

    monkeypatch.setattr(responses, "_after_one_prompt", run_wrong)
    answers = [[7, 8], [9]]
    for length in (first, 40):
        with scoring_session(model):
            found = response_embeddings(model, sequence(length), answers)
            for row, answer in zip(found, answers, strict=True):
                ids = torch.cat([sequence(length), torch.tensor(answer)])[None]
                states = model(input_ids=ids, output_hidden_states=True).hidden_states[2]
                torch.testing.assert_close(row, states[0, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", [4, 8, 24])
def test_angles_that_switch_between_prompt_and_response(prompt):
    """With LongRoPE keys of the prompt have other angles once the text is longer."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}  # fmt: skip
    model, ids = tiny_model("llama", rope_parameters=long), sequence(28)
    for scope in SCOPES:
        found = subnetwork_log_probs(model, ids, prompt, 2, masks(), scope=scope)
        slow = decoders.full_passes(FAMILIES["llama"], model, ids, prompt, scope, drawn=masks())
        assert apart(found, slow) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_scale_that_is_ignored_is_seen_in_16_bits(dtype, monkeypatch):
    """0.9 on the logits of a confident model: within 0.5 nats, far outside rounding."""
    model = tiny_class("CohereForCausalLM", logit_scale=0.9).to(dtype)
    score(model, layer=1)  # as it is, it is scored
    other = tiny_class("CohereForCausalLM", logit_scale=0.9).to(dtype)
    direct = check.readout
    monkeypatch.setattr(check, "readout", lambda *a, **k: (direct(*a, **k) / 0.9).log_softmax(-1))
    with pytest.raises(RuntimeError, match=r"final states do not give .* Nothing was scored"):
        score(other, layer=1)


def test_masks_of_ones_alone_are_checked():
    """A hook of the trunk acts when states are recorded and again when they are read out."""
    model = tiny_model("llama")

    def larger(_, __, output):
        output.last_hidden_state = output.last_hidden_state * 1.3

    model.model.register_forward_hook(larger)
    with pytest.raises(RuntimeError, match="final states do not give the model's distributions"):
        score(model, drawn=torch.ones(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unembedding_whose_own_forward_was_replaced_is_called_as_it_is(dtype):
    model = tiny_model("llama").to(dtype)
    head = model.lm_head
    head.forward = lambda states: torch.nn.functional.linear(states, head.weight) * 0.5
    logits = model(input_ids=sequence(17)[None, :-1]).logits[0, PROMPT - 1 :]
    found = score(model, drawn=torch.cat([torch.ones(1, 4), masks()]))
    torch.testing.assert_close(found[0], logits.float().log_softmax(-1), atol=1e-4, rtol=0)


def test_the_unembedding_of_16_bits_is_read_out_in_32():
    """Also if accelerate has wrapped it."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, wrapped = (tiny_model("llama").to(torch.bfloat16) for _ in range(2))
    for head in (model.lm_head, wrapped.lm_head):
        head.bias = torch.nn.Parameter(torch.arange(61).bfloat16() / 8)
    hooks.add_hook_to_module(wrapped.lm_head, hooks.ModelHook())
    hidden = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = hidden.double() @ model.lm_head.weight.double().T + model.lm_head.bias.double()
    expected = logits.log_softmax(-1)
    with scoring_session(model), scoring_session(wrapped):
        found = readout(model, hidden)
        assert torch.equal(found, readout(wrapped, hidden))
        rounded = model.lm_head(hidden).float().log_softmax(-1)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 < 1e-3 < (rounded - expected).abs().max()


@pytest.mark.parametrize(("rounding", "name"), [(0.005, FULL), (0.02, "suffix")])
def test_a_model_in_16_bits_may_differ_by_what_its_own_rounding_explains(
    rounding, name, monkeypatch
):
    """Measured on the model: the same pass under another attention implementation."""
    values = iter([0.035] * 9)
    model = tiny_model("llama").to(torch.bfloat16)
    structure_of(model)
    monkeypatch.setattr("lm_polygraph_asmi.model.check.check_unmasked", lambda *_: None)
    monkeypatch.setattr(check, "variation", lambda *_: next(values))
    monkeypatch.setattr(check, "_rounding", lambda *_: rounding)
    score(model)
    assert passes_in_use(model, "all") == [name]


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [("llama", torch.float32, 0), ("llama", torch.bfloat16, 0.02),
     ("gemma2-softcap", torch.bfloat16, 0)],
)  # fmt: skip
def test_rounding_is_measured_between_two_attentions_in_16_bits(name, dtype, most):
    model = tiny_model(name).to(dtype)
    with scoring_session(model):
        unmasked = run_unmasked(model, sequence(17), PROMPT, [2])
        found = check._rounding(model, unmasked)
        assert found == 0 if most == 0 else 1e-6 < found < most
    assert attention_of(model) == "eager"


def test_what_failed_the_check_stays_out_of_the_journal(tmp_path, monkeypatch):
    engine = Engine(num_masks=6, mask_rate=0.4, result_cache=str(tmp_path))
    put = []
    engine.result_cache.put = lambda *entry: put.append(entry)
    monkeypatch.setattr(check, "variation", lambda *_: 1.0)
    with pytest.raises(RuntimeError, match="self-check failed"):
        engine.score(tiny_model("llama"), sequence(11), [3, 4])
    assert not put
    assert limit(torch.float32) < limit(torch.bfloat16) < 1


def blind_attention(_module, query, key, value, mask, scaling=None, **_):
    """Causal by itself, as flash attention is; takes no mask, and sees other keys after a cache."""
    assert mask is None
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, is_causal=True, scale=scaling).transpose(1, 2), None


@both_scopes
def test_attention_that_takes_no_mask(scope):
    transformers.AttentionInterface.register("blind", blind_attention)
    model = tiny_model("llama")
    found = score(model, scope=scope, attention="blind")
    with scoring_session(model, "blind"):
        assert passes_in_use(model, scope) == ["suffix" if scope == "all" else FULL]
    assert passes_in_use(model, scope) == []  # with another attention nothing was scored
    torch.testing.assert_close(found, score(model, scope=scope, attention="eager"))


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("llama", "all"),
        *(pytest.param("gemma3-mixed", scope, marks=pytest.mark.slow) for scope in SCOPES),
    ],
)
def test_compiled_layers_compute_the_same(name, scope, monkeypatch):
    """Traced as always, and then run as written: translating to C++ takes half a minute."""
    compiled = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiled)
    forwards._compiled.cache_clear()
    kinds = {"layer_types": MIXED_LAYERS * 2} if name == "gemma3-mixed" else {}
    model = tiny_model(name, "sdpa", num_hidden_layers=8, **kinds)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for length in (17, 19):
        with scoring_session(model, compiles=True):
            found = score(model, length, layer=3, scope=scope)
        expected = score(model, length, layer=3, scope=scope)
        torch.testing.assert_close(found, expected)
    # Each kind of layer with three kinds of arguments, at two lengths; not one for each layer.
    assert 0 < graphs["unique_graphs"] - before <= (12 if kinds else 6)
    torch._dynamo.reset()
    forwards._compiled.cache_clear()
