"""One ordinary pass over prompt and response that records what the masked suffixes start from."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.layers import (
    context_window,
    decoder_layers,
    final_norm,
    num_layers,
    readout,
)


@dataclass(frozen=True)
class LayerCall:
    """What a decoder layer was called with, besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replay(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Call the layer again on other hidden states of any batch size."""
        output = layer(hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class UnmaskedPass:
    """The unmasked forward pass of one example.

    Attributes:
        input_ids: prompt and response, N tokens.
        prompt_length: number of prompt tokens; T = N - prompt_length.
        layer_inputs: hidden states entering each requested target layer, (1, N, D).
        layer_calls: the other arguments of every layer from the first target layer on.
        final_hidden: states after the final norm at the T positions that predict the response.
    """

    input_ids: Int[Tensor, " N"]
    prompt_length: int
    layer_inputs: dict[int, Float[Tensor, "1 N D"]]
    layer_calls: dict[int, LayerCall]
    final_hidden: Float[Tensor, "T D"]

    @property
    def predicting(self) -> slice:
        """Positions whose output distribution predicts the response tokens."""
        return _predicting(self.input_ids, self.prompt_length)

    def log_probs(self, model: PreTrainedModel) -> Float[Tensor, "T V"]:
        """The model's own next-token log-probabilities at the response positions."""
        return readout(model, self.final_hidden)


def _predicting(input_ids: Tensor, prompt_length: int) -> slice:
    return slice(prompt_length - 1, len(input_ids) - 1)


def validate_sequence(model: PreTrainedModel, input_ids: Tensor, prompt_length: int) -> None:
    """Raise ValueError unless there is a prompt, a response, and room for both."""
    if input_ids.ndim != 1:
        raise ValueError(
            f"input_ids must be one unpadded sequence of shape (N,), got {tuple(input_ids.shape)}"
        )
    if prompt_length < 1:
        raise ValueError(
            f"the prompt must have at least one token (such as BOS), got {prompt_length}: nothing "
            "predicts the first response token otherwise"
        )
    if prompt_length >= len(input_ids):
        raise ValueError(
            f"the response is empty: {len(input_ids)} tokens, {prompt_length} of them prompt. "
            "There is no token to score"
        )
    vocabulary = model.config.get_text_config().vocab_size
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise ValueError(
            f"token ids must lie in [0, {vocabulary - 1}], the model's vocabulary, got "
            f"{int(input_ids.min())} to {int(input_ids.max())}: is this the model's own tokenizer?"
        )
    window = context_window(model)
    if window is not None and len(input_ids) > window:
        raise ValueError(
            f"prompt and response are {len(input_ids)} tokens long, but {type(model).__name__} "
            f"has a context window of {window}: shorten the prompt or leave the example out"
        )


def split_hidden(args: tuple, kwargs: dict) -> tuple[Tensor, LayerCall]:
    """Split a decoder layer's arguments into its hidden states and the rest."""
    if args:
        return args[0], LayerCall(args[1:], dict(kwargs))
    rest = dict(kwargs)
    return rest.pop("hidden_states"), LayerCall((), rest)


def run_unmasked(
    model: PreTrainedModel,
    input_ids: Int[Tensor, " N"],
    prompt_length: int,
    target_layers: Iterable[int],
) -> UnmaskedPass:
    """Run the model once and keep what suffixes from each of `target_layers` need.

    Call it inside `scoring_session`. The pass goes through the model's own forward method, so
    masks, windows and rotary positions are whatever the family makes them.

    Raises:
        ValueError: no prompt, an empty response, a sequence beyond the context window, or a layer
            the model does not have.
    """
    validate_sequence(model, input_ids, prompt_length)
    targets = sorted(set(target_layers))
    total = num_layers(model)
    for layer in targets:
        if not 0 <= layer < total:
            raise ValueError(
                f"layer must be in [0, {total - 1}] for a {total}-layer model, got {layer}"
            )
    layer_inputs: dict[int, Tensor] = {}
    layer_calls: dict[int, LayerCall] = {}
    final: list[Tensor] = []

    def record_layer(index: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden, layer_calls[index] = split_hidden(args, kwargs)
            if index in targets:
                layer_inputs[index] = hidden

        return hook

    with ExitStack() as hooks:
        for index in range(targets[0] if targets else total, total):
            module = decoder_layers(model)[index]
            handle = module.register_forward_pre_hook(record_layer(index), with_kwargs=True)
            hooks.callback(handle.remove)
        handle = final_norm(model).register_forward_hook(lambda *call: final.append(call[-1]))
        hooks.callback(handle.remove)
        # The base model stops before the output projection, which only T positions need.
        model.base_model(input_ids=input_ids[None].to(model.device), use_cache=False)
    final_hidden = final[0][0, _predicting(input_ids, prompt_length)]
    return UnmaskedPass(input_ids, prompt_length, layer_inputs, layer_calls, final_hidden)
