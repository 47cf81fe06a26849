"""A model in a session: what its masked passes need, looked up once."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.core.model.forwards import Replacement, compiled_forward
from lm_polygraph_asmi.core.model.layers import SHARED, parameters_of
from lm_polygraph_asmi.core.model.session import attention_of, scoring_session
from lm_polygraph_asmi.core.model.state import findings
from lm_polygraph_asmi.core.model.structure import Structure, output_embeddings, structure_of


@dataclass(frozen=True)
class MaskedModel:
    """A handle to a model: what masked passes need of it, looked up once for each session.

    The model itself is unmasked; each pass masks heads for as long as it runs. Valid until the
    session of `masked_model` ends.
    """

    model: PreTrainedModel
    structure: Structure
    attention: str  # the implementation in use, such as "sdpa"
    compiles: bool  # whether `torch.compile` runs the layers
    # What was found out about the model, for this structure; emptied when the model changes.
    kept: dict[Hashable, Any]

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, with heads or without."""
        return list(self.model.get_submodule(self.structure.layers).children())

    @cached_property
    def handing_on(self) -> set[int]:
        """Layers that may hand more than states to layers above, such as keys and values.

        These are layers that return a tuple of more than the states (`Structure.returns`), and
        those with an argument for keys and values that layers share.
        """
        taken = [SHARED in parameters_of(type(layer).forward) for layer in self.layers]
        return {i for i, length in enumerate(self.structure.returns) if length > 1 or taken[i]}

    @cached_property
    def base(self) -> nn.Module:
        """The module whose first output is the final states, the input of the unembedding."""
        return self.model.get_submodule(self.structure.base_model)

    @cached_property
    def lm_head(self) -> nn.Module:
        """The unembedding, the module that returns the logits."""
        return output_embeddings(self.model, self.structure.lm_head)

    def compiled(self, layers: Sequence[nn.Module]) -> Iterator[Replacement]:
        """What lets `torch.compile` run layers, if it is to."""
        for layer in layers if self.compiles else ():
            if "forward" not in vars(layer):  # neither offloaded nor changed
                run = partial(compiled_forward(type(layer).forward), layer)
                yield layer, lambda _, *args, run=run, **given: run(*args, **given)

    def num_heads(self, layer: int) -> int:
        """H, the number of query heads of a layer (with grouped queries, too).

        Raises ValueError: no such layer, or one without heads."""
        structure = self.structure
        if not 0 <= layer < structure.num_layers:
            raise ValueError(
                f"layer must be in [0, {structure.num_layers - 1}] for a "
                f"{structure.num_layers}-layer model, got {layer}"
            )
        if layer not in structure.heads:
            raise ValueError(
                f"layer {layer} of {type(self.model).__name__} has no attention heads; layers with "
                f"heads: {', '.join(map(str, structure.heads))}"
            )
        return structure.heads[layer]

    def projection(self, layer: int) -> nn.Module:
        """The projection whose input is a layer's concatenated head outputs; see `num_heads`."""
        self.num_heads(layer)  # raises for a layer without heads
        return self.layers[layer].get_submodule(self.structure.projections[layer])


@contextmanager
def masked_model(
    model: PreTrainedModel,
    attention: str | None = None,
    structure: str | None = None,
    compiles: bool = False,
) -> Iterator[MaskedModel]:
    """A `scoring_session`, and the model as masked passes take it.

    Arguments are settings of `ASMIConfig`, `compiles` its `compile`. Raises TypeError: the heads
    cannot be masked; ValueError: as of `scoring_session`.
    """
    # Layers of a class that differ in a number, such as a window, are compiled one by one. Of each
    # class, 64 kinds of layers and arguments are kept before `torch.compile` gives up.
    options = {"specialize_float": True, "recompile_limit": 64}
    compiling = torch._dynamo.config.patch(options) if compiles else nullcontext()
    with scoring_session(model, attention), compiling:
        where = structure_of(model, structure)
        kept = findings(model).setdefault(("kept for", structure), {})
        yield MaskedModel(model, where, attention_of(model), compiles, kept)
