"""Names of the statistics that the plugin adds to LM-Polygraph.

Each is a list with one entry per example, as `save_stats` needs it. Values that differ between
masked layers are in one statistic, `asmi`, by depth: `stats["asmi"][row][0.6]["mi"]`.
"""

MASKED_HEADS = {
    "asmi": "depth -> fields of `core.statistics.AnswerStatistics`, `settings` as plain values",
    "asmi_entropy": "(T,) entropy of the unmasked model over the full vocabulary, nats",
    "asmi_log_likelihood": "(T,) log-likelihood of each token under the unmasked model, nats",
    "asmi_tokens": "(T,) the scored token ids",
    "asmi_token_texts": "dictionary: token id in the example's statistics -> its text",
    "asmi_closing": "whether the last token closes the answer (end token or stop string)",
    "asmi_prompt_length": "tokens in the prompt, without padding",
    "asmi_seconds": "seconds that scoring the example took, all depths together",
    "asmi_reused_depths": "depths of the example taken from the result cache",
}
"""Statistics of the masked-heads calculator."""

DIVERSITY_AT = {"last": "asmi_diversity", "second_last": "asmi_diversity_second_last"}
"""Value of the setting `gate_token` -> the statistic div(x) that Adapt-ASMI then reads."""

DIVERSITY = {
    "asmi_diversity": "div(x) of the sampled responses at their last tokens, higher = more diverse",
    "asmi_diversity_second_last": "div(x) at their second-last tokens",
    "asmi_num_responses": "sampled responses with at least one token",
    "asmi_diversity_seconds": "seconds for computing div(x), without LM-Polygraph's time to draw "
    "the samples",
}

SECONDS = {
    "seconds_greedy": "seconds per example: greedy answer",
    "seconds_samples": "seconds per example: sampled answers, drawn in one batch",
    "seconds_nli": "seconds per example: NLI of all pairs of sampled answers",
    "seconds_cross_encoder": "seconds per example: cross-encoder similarities",
}

SAVED = [*MASKED_HEADS, *DIVERSITY, *SECONDS, "greedy_log_likelihoods", "sample_texts"]
"""Statistics that a run should save for later analysis. LM-Polygraph skips those it lacks."""
