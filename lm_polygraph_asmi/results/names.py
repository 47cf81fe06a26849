"""Names of the statistics that the plugin adds to LM-Polygraph, and their settings.

Each is a list with one entry per example, for `save_stats`. What differs between masked layers is
in one statistic, `asmi`, by depth: `stats["asmi"][row][0.6]["mi"]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lm_polygraph_asmi.config import ASMIConfig

CANDIDATES = 8
"""Tokens per position in the field `candidates`."""

MASKED_HEADS = {
    "asmi": "depth -> fields of `scoring.statistics.AnswerStatistics`, `settings` as plain values",
    "asmi_entropy": "(T,) entropy of the unmasked model over the full vocabulary, nats",
    "asmi_log_likelihood": "(T,) log-likelihood of each token under the unmasked model, nats",
    "asmi_tokens": "(T,) the scored token ids",
    "asmi_token_texts": "text of each token id in the example's statistics, a dictionary",
    "asmi_closing": "whether the last token closes the answer (end token or stop string)",
    "asmi_prompt_length": "tokens in the prompt, without padding",
    "asmi_seconds": "seconds spent on the example when it was scored, all depths together",
    "asmi_reused_depths": "depths of the example taken from the result cache",
}
"""Statistics of the masked-heads calculator."""

DIVERSITY_AT = {"last": "asmi_diversity", "second_last": "asmi_diversity_second_last"}
"""Value of the setting `gate_token` -> statistic that the gate reads."""

DIVERSITY = {
    "asmi_diversity": "div(x) of the sampled responses at their last tokens, higher = more diverse",
    "asmi_diversity_second_last": "div(x) at their second-last tokens",
    "asmi_num_responses": "sampled responses with at least one token",
    "asmi_diversity_seconds": "seconds spent on embedding them, without the host's time for "
    "drawing them",
}

SECONDS = {
    "seconds_greedy": "seconds per example: greedy answer",
    "seconds_samples": "seconds per example: sampled answers, drawn in one batch",
    "seconds_nli": "seconds per example: NLI of all pairs of sampled answers",
    "seconds_cross_encoder": "seconds per example: cross-encoder similarities",
}

SAVED = [*MASKED_HEADS, *DIVERSITY, *SECONDS, "greedy_log_likelihoods", "sample_texts"]
"""Statistics that a run should save for later analysis; LM-Polygraph skips what it lacks."""


@dataclass(frozen=True)
class Settings:
    """Settings of statistics: a config with the S, p and attention used, and values of a model.

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
