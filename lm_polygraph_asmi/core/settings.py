"""The settings of statistics: a config, and what was derived for one model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lm_polygraph_asmi.config import ASMIConfig


@dataclass(frozen=True)
class Settings:
    """A config with the S, p and attention in use, and values of a model.

    Saved with every example and depth, as a flat dictionary of plain values.
    """

    config: ASMIConfig
    layer: int  # index of the masked layer, from 0
    num_layers: int
    num_heads: int  # query heads
    requested_layer: int | None = None  # the one at `depth`, if it has no heads

    def to_dict(self) -> dict[str, Any]:
        """All settings of a statistic by name; from the config, those of the masks."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
        return self.config.to_dict("masks") | {"attention": self.config.attention} | values


def masked_layer(used: Mapping[str, Any]) -> str:
    """The masked layer of saved settings in words; also the requested one, if it has no heads."""
    text = f"layer {used['layer']} of {used['num_layers']}"
    requested = used["requested_layer"]
    return text if requested is None else f"{text} (layer {requested} has no heads)"
