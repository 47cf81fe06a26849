"""How head masks are drawn. One file each: its function `sample` fulfils the contract `Sampler`.

The name of the file is a value of the setting `mask_sampler`.
"""

from importlib import import_module
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from lm_polygraph_asmi.config import check_setting


@runtime_checkable
class Sampler(Protocol):
    """Draws random head masks.

    All randomness is the generator's, on its device and in 32-bit floats: equal generators give
    equal masks on every machine.
    """

    def __call__(
        self, num_samples: int, num_heads: int, mask_rate: float, generator: torch.Generator, /
    ) -> Float[Tensor, "S H"]:
        """Masks in the generator's order: 1 keeps a head, 0 masks it.

        Args:
            num_samples: number of masks, S, at least 2.
            num_heads: query heads of the layer, H, at least 1.
            mask_rate: mean share of masked heads, p, in (0, 1).
            generator: source of the random numbers.
        """


def load_sampler(name: str) -> Sampler:
    """A sampler by the name of its file.

    Raises:
        ValueError: no such file.

    Example:
        >>> load_sampler("bernoulli")(2, 4, 0.2, torch.Generator()).shape
        torch.Size([2, 4])
    """
    check_setting("mask_sampler", name)
    return cast(Sampler, import_module(f"{__name__}.{name}").sample)
