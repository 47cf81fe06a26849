"""What a scored answer's number means, in sentences."""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST
from lm_polygraph_asmi.results.names import perturbed_by
from lm_polygraph_asmi.scoring.page import probability

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.result import Score

BOUNDARY = (
    "A check of faithfulness for answers that should come from the given context. For closed-book "
    "recall it is of no use: take a sequence probability there."
)


def verdict(score: "Score") -> list[str]:
    """What the number means and on what ground; the last sentence says where it is of no use."""
    summed = score.counted if score.aggregation == "sum" else 1
    times = f"{summed} " if summed > 1 else ""
    named = {"max": "maximum"}.get(score.aggregation, score.aggregation)
    said = [
        f"{score.label}: {score.score:.4f} nats (0 to {times}ln S = {score.highest:.2f}; higher "
        f"= more fragile), the {named} over {score.counted} token{'s' * (score.counted != 1)}"
        f"{'; masks at the answer alone' * (score.config.scope == 'response')}."
    ]
    if score.config.is_control:
        said.append(
            f"Not the method: masks change {', '.join(perturbed_by(score.settings))} in the "
            "layer, a condition of the perturbation controls in the place of heads. A control, no "
            "score to use."
        )
    if not score.answered:
        said.append(
            "No verdict: the model answered nothing. The number is that of the token that ends "
            "an answer, where an answer should stand."
        )
    elif score.calibration is None:
        said.append(
            "No verdict: without a calibration run run of this model on such questions, nobody "
            "knows which way this number points. On the small models measured so far Sem-ASMI "
            "was not found to tell more of errors than probability, entropy and length do, and "
            "how well it ranks them hangs on the prompt and on the masked layer."
        )
    else:
        of_run = score.calibration.verdict(score.score, score.compared_settings)
        applied = score.applied_calibration
        if applied is None or applied.decision is None:
            said += of_run
        else:  # which may be by another signal, and stands whatever this one is worth
            said.insert(1, score.accept_reason)
            said += [one.replace("No verdict:", f"Of {score.symbol}:", 1) for one in of_run]
            seen = {"prompt_tokens": score.prompt_tokens, "msp": score.msp}
            said += applied.out_of_range(seen)
        if score.confident_but_fragile:
            run = score.calibration
            said.append(
                f"Confident but fragile: the answer's probability {probability(score.msp)} is "
                f"above that of the calibration run run's median answer "
                f"({probability(run.msp_median)}), and its score above the median score "
                f"({run.median:.4f}), too. This is a mark of the whole answer: the paper finds "
                "no such effect among single tokens."
            )
    screened = None if score.calibration is None else score.calibration.masking_response
    if screened is not None and screened < OVER_ROBUST:
        said.append(
            f"Masking heads hardly moved the model on the calibration run run (mean MI "
            f"{screened:.4f} nats, below {OVER_ROBUST}): there may be nothing to read. A "
            "candidate screen, not a validated one."
        )
    elif screened is None and score.masking_response < OVER_ROBUST:
        said.append(
            f"Masking heads hardly moved the model here (mean MI {score.masking_response:.4f} "
            f"nats, below {OVER_ROBUST}): a robust answer, or, if all answers are like this, a "
            "model too robust for the score to read anything. A candidate screen, not a "
            "validated one."
        )
    return [*said, *score.warnings, BOUNDARY]
