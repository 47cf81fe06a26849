"""What is changed while an answer is scored, or after a `Scorer` was made, is never unnoticed."""

import signal
from copy import deepcopy
from itertools import cycle
from threading import Thread

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers.normalizers import Lowercase
from transformers.models.llama.modeling_llama import LlamaMLP

from lm_polygraph_asmi.core.model import attention_of
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.forks import exit_code
from tests.scoring.conftest import PROMPT
from tests.tiny_lm import whitebox

FEW = {"num_masks": 4, "mask_rate": 0.3}


@pytest.fixture
def trained():
    """A model that computes otherwise in training mode."""
    return whitebox(attention_dropout=0.5).model


def in_a_thread(change):
    thread = Thread(target=change)
    thread.start()
    thread.join()


def meanwhile(monkeypatch, model, change, run=in_a_thread):
    """Something changes when a pass has reached the last layer for the first time."""
    own, left = LlamaMLP.forward, [change]

    def forward(mlp, *given):
        if left and mlp is model.model.layers[-1].mlp:
            run(left.pop())
        return own(mlp, *given)

    monkeypatch.setattr(LlamaMLP, "forward", forward)


def training(model):
    model.gradient_checkpointing_enable()
    model.model.layers[2].train()


MODEL_CHANGES = (
    (torch.nn.Module.train, "modules are in training mode"),
    (training, "modules are in training mode"),
    (lambda m: m.set_attn_implementation("eager"), "attention implementation is 'eager'"),
    (torch.nn.Module.double, "weights, modules, hooks"),
    (lambda m: m.model.layers[0].self_attn.o_proj.weight.data.mul_(1.01), "weights, modules"),
)
ADAPTER_CHANGES = (
    lambda adapted: adapted.set_adapter("other"),
    lambda adapted: adapted.merge_adapter(),
    lambda adapted: adapted.base_model.disable_adapter_layers(),
)
TOKENIZER_CHANGES = (
    lambda t: t.add_tokens(["Brask"]),
    lambda t: t.add_special_tokens({"additional_special_tokens": ["Brask"]}),
    lambda t: setattr(t, "chat_template", "{{ messages }}"),
    lambda t: setattr(t, "eos_token", "<s>"),
    lambda t: setattr(t.backend_tokenizer, "normalizer", Lowercase()),
    lambda t: setattr(t, "split_special_tokens", True),
    lambda t: setattr(t, "_tokenizer", deepcopy(t._tokenizer)),
)
CHANGES = [
    *(("model", change, said) for change, said in MODEL_CHANGES),
    *(("adapted", change, "was changed while it was scored") for change in ADAPTER_CHANGES),
    *(("tokenizer", change, "was changed while an answer") for change in TOKENIZER_CHANGES),
]


@pytest.mark.parametrize(
    ("what", "change", "said", "run"),
    [(*of, run) for of, run in zip(CHANGES, cycle([Scorer.score, Scorer.read]), strict=False)],
)
def test_what_another_thread_changes(run, what, change, said, trained, tokenizer, monkeypatch):
    own = {"model": trained, "tokenizer": deepcopy(tokenizer), "adapted": trained}
    if what == "adapted":
        how = {"target_modules": ["q_proj"], "init_lora_weights": False}
        own[what] = get_peft_model(trained, LoraConfig(**how))
        own[what].add_adapter("other", LoraConfig(**how))
    scorer = Scorer(own["adapted"], tokenizer=own["tokenizer"], attention="sdpa", **FEW)
    before = scorer.fingerprints()
    with monkeypatch.context() as patch:
        meanwhile(patch, trained, lambda: change(own[what]))
        with pytest.raises(ValueError, match=said):
            run(scorer, PROMPT, " Brask")
    first, second = (run(scorer, PROMPT, [5, 6]) for _ in range(2))
    assert first.signals == second.signals
    # Flags, hooks and how a tokenizer is called are in no hash.
    hashed = {*MODEL_CHANGES[3:], *ADAPTER_CHANGES, *TOKENIZER_CHANGES[:5]}
    if hashed & {change, (change, said)}:
        assert scorer.fingerprints() != before


def test_a_tokenizer_that_another_thread_truncates_with(trained, tokenizer, monkeypatch):
    """As if it did between the set-up of each call and the call itself."""
    shared = deepcopy(tokenizer)
    set_up, samples = type(shared).set_truncation_and_padding, [" Brask", " Orla"]

    def cut_meanwhile(self, *args, **how):
        set_up(self, *args, **how)
        shared._tokenizer.enable_truncation(2)

    def scored(own):
        found = Scorer(trained, tokenizer=own, method="adapt", **FEW).score(PROMPT, "x", samples)
        return found.prompt_tokens, found.tokens, found.diversity

    right = scored(tokenizer)
    monkeypatch.setattr(type(shared), "set_truncation_and_padding", cut_meanwhile)
    assert len(shared(PROMPT)["input_ids"]) == 2
    assert scored(shared) == right


@pytest.mark.parametrize("run", [in_a_thread, lambda change: change()])
def test_a_fork_amid_a_score(run, trained, tokenizer, monkeypatch):
    """Of another thread, or of the one that is inside the session and holds its lock: the child
    scores as its parent does, and a child outside the session finds the model as it was."""
    scorer = Scorer(trained.train(), tokenizer=tokenizer, attention="eager", **FEW)
    trained.set_attn_implementation("sdpa")
    expected, codes = scorer.score(PROMPT, " Brask").tokens, []

    def child():
        signal.alarm(30)  # instead of a hang
        training = all(module.training for module in trained.modules())
        hooked = any("forward" in vars(module) for module in trained.modules())
        as_it_was = (training, hooked, attention_of(trained)) == (True, False, "sdpa")
        assert as_it_was == (run is in_a_thread)
        assert scorer.score(PROMPT, " Brask").tokens == expected

    meanwhile(monkeypatch, trained, lambda: codes.append(exit_code(child)), run)
    assert scorer.score(PROMPT, " Brask").tokens == expected
    assert codes == [0]


@pytest.mark.parametrize("owner", ["model.generation_config", "tokenizer"])
@pytest.mark.parametrize("ends", [[2, 999], -1, True, [2.0], "</s>", [[2]]])
def test_end_tokens_that_are_none_of_the_model(owner, ends, trained, tokenizer):
    own = deepcopy(tokenizer)
    if owner == "tokenizer":
        own.__class__ = type("Other", (type(own),), {"eos_token_id": ends})
    else:
        trained.generation_config.eos_token_id = ends
    with pytest.raises(ValueError, match=rf"expected {owner}\.eos_token_id to hold ids"):
        Scorer(trained, tokenizer=own)


@pytest.mark.parametrize("recording", ["output_attentions", "output_hidden_states"])
def test_what_transformers_does_itself_is_no_change(recording, tokenizer):
    """It leaves hooks that record at the first pass."""
    model = whitebox(**{recording: True}).model
    assert Scorer(model, tokenizer=tokenizer, **FEW).score(PROMPT, " Brask").tokens
