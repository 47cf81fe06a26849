"""How to read the score of one answer, in sentences."""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST
from lm_polygraph_asmi.results.names import perturbed_by
from lm_polygraph_asmi.scoring.page import probability

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.score_data import ScoreData

BOUNDARY = (
    "The score is meant only for answers from the given context. For closed-book questions, try "
    "MSP."
)


def verdict(score: "ScoreData") -> list[str]:
    """How to read the score, and on which data that rests; the last sentence is its limit."""
    aggregate = {"max": "maximum"}.get(score.aggregation, score.aggregation)
    scope = "; heads masked only while the model predicts the answer" * (
        score.config.scope == "response"
    )
    lines = [
        f"{score.label}: {score.score:.4f} nats (0 to {score.highest:.2f}; higher = more "
        f"fragile), the {aggregate} over {score.counted} token{'s' * (score.counted != 1)}"
        f"{scope}."
    ]
    if score.config.is_control:
        lines.append(
            f"Control, not a score to use: masks change {', '.join(perturbed_by(score.settings))} "
            "in the layer instead of heads (perturbation controls)."
        )
    if not score.answered:
        lines.append(
            "No verdict: the model's answer is empty. The number is the score of the token that "
            "ends the answer."
        )
    elif score.calibration is None:
        lines.append(
            "No verdict: it needs a calibration (labelled answers of this model to similar "
            "questions). In tests on four models of up to 1.5B parameters, there was no evidence "
            "that Sem-ASMI helps beyond simpler scores (MSP, entropy and length)."
        )
    else:
        run_lines = score.calibration.verdict(score.score, score.compared_settings)
        applied = score.applied_calibration
        if applied is None or applied.decision is None:
            lines += run_lines
        else:  # the decision may use another signal, and is valid even if this one ranks nothing
            lines.insert(1, score.accept_reason)
            no_verdict = f"{score.symbol}: no verdict:"
            lines += [line.replace("No verdict:", no_verdict, 1) for line in run_lines]
        if score.confident_but_fragile:
            run = score.calibration
            lines.append(
                f"Confident but fragile: the answer's probability {probability(score.msp)} is "
                f"above the calibration's median ({probability(run.msp_median)}), and so is "
                f"its score (median {run.median:.4f}). This describes the whole answer: the paper "
                "finds no such effect for single tokens."
            )
    masking_response = None if score.calibration is None else score.calibration.masking_response
    if masking_response is not None and masking_response < OVER_ROBUST:
        lines.append(
            f"Masking heads hardly changed the model's predictions on the calibration answers "
            f"(mean MI {masking_response:.4f} nats, below {OVER_ROBUST}): the score may carry no "
            "information (not validated)."
        )
    elif masking_response is None and score.masking_response < OVER_ROBUST:
        lines.append(
            f"Masking heads hardly changed the predictions (mean MI {score.masking_response:.4f} "
            f"nats, below {OVER_ROBUST}): the score may carry no information (not validated)."
        )
    return [*lines, *score.warnings, BOUNDARY]
