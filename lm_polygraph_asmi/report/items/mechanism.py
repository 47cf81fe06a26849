"""Items on the masking response, the subnetworks' tokens, and cost."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import pearsonr

from lm_polygraph_asmi.analysis.cost import PHASES_OF, WARM_UP, method_seconds, phase_seconds
from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST, error_separation, masking_response
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import per_setting, text
from lm_polygraph_asmi.results.manifest import seconds_by_phase
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable
from lm_polygraph_asmi.results.runs import SYMBOLS, Run

SEQUENTIAL, BATCHED = "one at a time", "batched"


@per_setting(
    "mechanism",
    "MI and semantic agreement of tokens",
    "A high MI_t counts fully if the agreement A_t is low, and is discounted if it is high. "
    "Pearson r: of A_t and MI_t (not its logarithm); H_t: entropy of the unmasked model at the "
    "token.",
    figure=figures.joint,
    digits=3,
)
def mechanism(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figure "mechanism" (a) of the paper: disagreement and agreement of tokens."""
    mi, agreement = map(np.concatenate, group.need("mi_tokens", "agreement_tokens"))
    if len(mi) < 3 or not np.ptp(mi) or not np.ptp(agreement):
        raise Unavailable("MI_t or A_t is the same everywhere")
    r = float(pearsonr(mi, agreement).statistic)
    entropy = group.tokens(group.saved("asmi_entropy"))
    row = {
        "setting": group.label,
        "tokens": len(mi),
        "Pearson r": r,
        "Spearman of MI_t and H_t": None
        if entropy is None
        else rank_correlation(mi, np.concatenate(entropy)),
        "mean MI_t": float(mi.mean()),
        "mean A_t": float(agreement.mean()),
    }
    return row, {group.label: (mi, agreement, r)}


@per_setting(
    "candidate_cosines",
    "Cosines of the top candidates of one token",
    "Cosines between rows of the output projection, at the token where the kernel discounts most "
    "(largest MI_t A_t). Negative cosines count as 0 in A_t.",
    figure=figures.cosines,
)
def cosines(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figure "mechanism" (b) of the paper: near-synonyms among a token's candidates."""
    matrices, candidates = group.masked("candidate_cosines"), group.masked("candidates")
    if not matrices or not candidates or not group.mi_tokens or not group.agreement_tokens:
        raise Unavailable("not saved (set asmi.details=true)")
    # The token where the kernel removes most of MI: a disagreement without change of meaning.
    removed = list(map(np.multiply, group.mi_tokens, group.agreement_tokens))
    answer = int(np.argmax([tokens.max() for tokens in removed]))
    position = int(removed[answer].argmax())
    saved = group.saved("asmi_token_texts")
    known: dict[int, str] = saved[answer] if saved else {}
    texts = [known.get(int(t), f"token {int(t)}") for t in candidates[answer][position]]
    row = {"setting": group.label, "answer": answer, "token": position}
    return row, {group.label: (np.asarray(matrices[answer][position]), texts)}


def _separation(panels: Mapping[str, Mapping[str, tuple[str, Any, Any]]]) -> Figure:
    """One variant, the one that most settings have, and MSP."""
    have = Counter(name for scored in panels.values() for name in scored)
    variants = sorted(("Adapt-ASMI", "Sem-ASMI", "ASMI"), key=have.__getitem__, reverse=True)
    return figures.violins(
        {
            f"{label}\n{scored[name][0]}": (name, *scored[name][1:])
            for label, scored in panels.items()
            for name in [*[name for name in variants if name in scored][:1], "MSP"]
            if name in scored
        }
    )


@per_setting(
    "error_separation",
    "Masking response and error separation",
    "Mean MI_t of tokens, nats, in right and in wrong answers; error-detection AUROC with 95 % "
    f"intervals over clusters. Near zero: mean MI_t below {OVER_ROBUST} nats. This may serve to "
    "screen settings without labels, but it is not validated: the paper has one such setting "
    "(0.002 "
    "nats, and the signal fails); its other settings start at 0.016 nats.",
    "Figure: logarithmic axis. Values below the first percentile of the positive values are drawn "
    f"at the lower end. Dot: median; crosses: each of fewer than {figures.FEWEST_VALUES} answers. "
    "Axes of one score are alike.",
    figure=_separation,
    digits=3,
)
def screen(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Table "babiqa-mechanism" and figure "error-separation" of the paper."""
    (information,) = group.need("mi_tokens")
    scores = {s: group.score(group.variants[s]) for s in SYMBOLS if s in group.variants}
    if group.msp is not None:
        scores["MSP"] = group.msp
    response = masking_response(information)
    separation = error_separation(information, dict(scores), group.answers)
    drawn = {
        name: (f"{name} AUROC {text(separation.auroc[name], 2)}", score, group.wrong)
        for name, score in scores.items()
    }
    row = {
        "setting": group.label,
        "tokens": response.tokens,
        "median MI_t": response.median,
        "mean MI_t": response.mean,
        "right answers": separation.right,
        "wrong answers": separation.wrong,
        "near zero": response.over_robust,
    } | {f"AUROC {name}": interval for name, interval in separation.auroc.items()}
    return row, {group.label: drawn}


@per_setting(
    "cost",
    "Measured cost",
    f"Median seconds per answer, without the first {WARM_UP} answers, with all depths of a run "
    "together. Seconds are those of each phase, and of all phases that a method needs: greedy "
    "answer (all methods); samples and NLI (Semantic Entropy); masked passes (Sem-ASMI); all of "
    "these except NLI, with the embedding of samples (Adapt-ASMI). A dash: a phase was not "
    "measured. A cached result has the seconds of the run that computed it.",
    "Last column: seconds of masked passes one at a time (asmi.memory_budget=1), divided by those "
    "of batched ones, if both were run.",
    figure=figures.seconds,
)
def cost(group: RunGroup) -> list[dict[str, Any]]:
    """Table "cost" of the paper and the phases of its appendix, a row per run."""
    rows = [row for run in group.runs if (row := _cost_of(run))]
    if not rows:
        raise Unavailable(f"no seconds of more than {WARM_UP} answers saved")
    for row in rows:
        both = {
            other["masks"]: other["ASMI alone, marginal"]
            for other in rows
            if all(other[name] == row[name] for name in ("scope", "S", "K", "depths"))
            and other["ASMI alone, marginal"] is not None
        }
        row["one at a time / batched"] = (
            both[SEQUENTIAL] / both[BATCHED] if len(both) == 2 else None
        )
    return [{"setting": group.label, **row} for row in rows]


def _cost_of(run: Run) -> dict[str, Any] | None:
    """Seconds and memory of a run; None if it saved no seconds."""
    seconds, used = seconds_by_phase(run.stats), run.settings()
    phases, methods = phase_seconds(seconds), method_seconds(seconds)
    if not phases:
        return None
    depths = sorted({settings_at_depth["depth"] for settings_at_depth in used})
    settings = used[0] if used else {"scope": "–", "num_masks": "–", "top_k": "–"}
    sequential = run.recorded("config").get("asmi", {}).get("memory_budget") == 1
    manifest = run.manifest or {}
    return {
        "scope": settings["scope"],
        "S": settings["num_masks"],
        "K": settings["top_k"],
        "depths": len(depths),
        "at depth": ", ".join(f"{100 * depth:g}%" for depth in depths) or "–",
        "mask seed": run.recorded("seeds").get("masks", "–"),
        "masks": SEQUENTIAL if sequential else BATCHED,
        "n": max(timing.n for timing in phases.values()),
        **{phase: timing.median for phase, timing in phases.items()},
        **{m: methods[m].median if m in methods else None for m in PHASES_OF},
        "from the result cache": manifest.get("asmi_reused"),
        **{
            f"peak GiB, {where}": size / 2**30
            for where, size in run.recorded("peak_memory_bytes").items()
        },
        "device": manifest.get("device", "not recorded"),
    }
