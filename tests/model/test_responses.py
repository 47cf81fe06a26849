"""Embeddings of responses equal those of a pass over each."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lm_polygraph_asmi.core.model import response_embeddings, responses
from tests.families import DECODERS, FAMILIES, Decoder, of_model, sequence, tiny_model
from tests.model.test_check import first_row_alone, hooked


def separate(decoder: Decoder, model: nn.Module, prompt: Tensor, answers: list) -> Tensor:
    """What enters the middle layer at the last token, in a pass for each answer."""
    layers, states = model.get_submodule(decoder.stack), []
    handle = layers[len(layers) // 2].register_forward_pre_hook(
        lambda _, args, kwargs: states.append((args or (kwargs["hidden_states"],))[0][0, -1]),
        with_kwargs=True,
    )
    with torch.no_grad():
        for answer in answers:
            whole = torch.cat([prompt, torch.tensor(answer, dtype=torch.long)])[None]
            model(input_ids=whole, use_cache=False)
    handle.remove()
    return torch.stack(states)


DAILY = ["llama", "mistral-window", "gemma2-softcap", "gemma3-mixed", "gpt-neox", "gpt2",
         "latent attention", "chunks", "gated hybrid", "Mamba hybrid", "no cache",
         "shared keys and values", "multimodal wrapper"]  # fmt: skip
STREAMS = [name for name in DECODERS if name.startswith("streams")]
SLOW = [name for name in DECODERS if name not in DAILY + STREAMS]


@pytest.mark.parametrize(
    "name", [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_embeddings_equal_separate_passes(name):
    """Also where a recurrent state comes after the prompt; families in float64, but for norms and
    softmax, which transformers computes in float32."""
    decoder, known = DECODERS[name], name in FAMILIES
    model, most = decoder.make(), 1e-5 if known else 1e-4
    model = model.double() if known else model
    ids, answers = sequence(11), [[5], [7, 9, 11, 13, 15, 17, 19], [4, 4], [7, 9], [], [5]]
    for some in (answers, [[], []]):
        found = of_model(response_embeddings, model, ids, some)
        expected = separate(decoder, model, ids, some).double()
        torch.testing.assert_close(found.double(), expected, atol=most, rtol=most)


def test_embeddings_do_not_depend_on_the_row_where_code_of_others_does():
    """The first row is the longest, which alone is compared with a pass of its own."""
    asked = hooked(first_row_alone, "layers.0.mlp"), sequence(11), [[7, 9, 11], [4, 4]]
    found = of_model(response_embeddings, *asked)
    torch.testing.assert_close(found, separate(FAMILIES["llama"], *asked))


@pytest.mark.parametrize("first", [5, 9])
@pytest.mark.parametrize("answers", [[[7, 8], [9]], [[9], [7, 8]]])
def test_embeddings_after_a_shared_prompt_that_are_wrong_are_not_believed(
    monkeypatch, caplog, first, answers
):
    """Of the longest answer alone: at once, or for a longer prompt than the first; nor later, for
    the same."""
    model, after_one_prompt = tiny_model("llama"), responses._after_one_prompt

    def run_wrong(model, layer, prompt, ids):
        wrong = [0.3 * (len(answer) > 1 and len(prompt) > 5) for answer in ids]
        return after_one_prompt(model, layer, prompt, ids) + torch.tensor(wrong)[:, None]

    monkeypatch.setattr(responses, "_after_one_prompt", run_wrong)
    for length in (first, 40, 40):
        found = of_model(response_embeddings, model, sequence(length), answers)
        expected = separate(FAMILIES["llama"], model, sequence(length), answers)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert caplog.text.count("times the work") == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((DECODERS[name].make, "no single embedding") for name in STREAMS),
        (partial(tiny_model, "gpt2", n_layer=1), "two layers"),
    ],
)
def test_models_without_an_embedding_of_a_response(make, said):
    """Their states are several streams, or no layer is in the middle."""
    model, answers = make(), [[4], [5, 6]]
    with pytest.raises(ValueError, match=said):
        of_model(response_embeddings, model, sequence(11), answers)
