"""Names of the statistics that the plugin adds to LM-Polygraph, and their settings.

The name of a statistic of a masked layer ends in its depth, `asmi_mi_d60`, so that a run can have
several depths. Each is a list with one entry per example, for `save_stats`: a short NumPy array, a
number or (the settings) a dictionary of plain values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lm_polygraph_asmi.config import ASMIConfig

CANDIDATES = 8
"""Tokens per position in `asmi_candidates`."""

DEPTH_FREE = {
    "asmi_entropy": "(T,) entropy of the unmasked model over the full vocabulary, nats",
    "asmi_log_likelihood": "(T,) log-likelihood of each token under the unmasked model, nats",
    "asmi_tokens": "(T,) the scored token ids",
    "asmi_token_texts": "text of each token id in the example's statistics, a dictionary",
    "asmi_closing": "whether the last token closes the answer (end token or stop string)",
    "asmi_prompt_length": "tokens in the prompt, without padding",
    "asmi_seconds": "seconds spent on the example when it was scored, all depths together",
    "asmi_reused_depths": "depths of the example taken from the result cache",
}

PER_DEPTH = (
    "asmi_mi", "asmi_agreement", "asmi_entropy_of_mean", "asmi_mean_entropy", "asmi_tail_mass",
    "asmi_coverage", "asmi_top_token", "asmi_mask_seed", "asmi_settings",
)  # fmt: skip
"""Fields of `scoring.statistics.AnswerStatistics`, which has shapes and units."""

ON_REQUEST = (
    "asmi_masks", "asmi_kl", "asmi_masked_log_likelihood", "asmi_candidates",
    "asmi_candidate_cosines",
)  # fmt: skip
"""Its fields with details."""

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


def at_depth(name: str, depth: float) -> str:
    """Full name of a statistic at a depth: ("asmi_mi", 0.6) -> "asmi_mi_d60"; of 0.625, d62.5."""
    return f"{name}_d{round(100 * depth, 6):g}"


def masked_head_stats(
    depths: Iterable[float] = (ASMIConfig.depth,), details: bool = False
) -> list[str]:
    """Every statistic of the masked-heads calculator, for `stats:` and `save_stats:`."""
    names = [*PER_DEPTH, *(ON_REQUEST if details else ())]
    return [*DEPTH_FREE, *(at_depth(name, depth) for depth in depths for name in names)]


def saved_stats(*args: Any, **kwargs: Any) -> list[str]:
    """Statistics that a run should save for later analysis; arguments as in `masked_head_stats`.

    LM-Polygraph skips those that a run does not compute.
    """
    asmi_stats = masked_head_stats(*args, **kwargs)
    return [*asmi_stats, *DIVERSITY, *SECONDS, "greedy_log_likelihoods", "sample_texts"]


@dataclass(frozen=True)
class Settings:
    """Settings of statistics: a config, and its values for a model.

    Saved with every example as `asmi_settings_d60`, a flat dictionary of plain values.

    Attributes:
        config: with the S, p and attention implementation used.
        layer: index of the masked layer, from 0.
        num_layers: number of layers, L.
        num_heads: H, query heads.
        requested_layer: the layer at `depth`, if it has no heads and another is masked.
    """

    config: ASMIConfig
    layer: int
    num_layers: int
    num_heads: int
    requested_layer: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """All settings of a statistic by name; from the config, those of the masks."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
        return self.config.to_dict("masks") | {"attention": self.config.attention} | values


def masked_layer(used: Mapping[str, Any]) -> str:
    """The masked layer of saved settings in words; also the requested one, if it has no heads."""
    text = f"layer {used['layer']} of {used['num_layers']}"
    requested = used["requested_layer"]
    return text if requested is None else f"{text} (layer {requested} has no heads)"


def require(stats: Mapping[str, Any], name: str) -> Any:
    """The statistic `name`, or a KeyError that explains how to compute it."""
    if name not in stats:
        raise KeyError(
            f"statistic {name!r} is missing. Add its calculator to `stat_calculators` of the run, "
            "with this name in `stats` and its depth in `cfg.depths` (docs/reference/config.md), "
            "or add `- /stat_calculators: asmi` to the defaults list"
        )
    return stats[name]
