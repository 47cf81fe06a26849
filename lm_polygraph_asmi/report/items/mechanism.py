"""Masking response, tokens, the subnetworks' answers, and cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import pearsonr

from lm_polygraph_asmi.analysis.cost import PHASES_OF, method_seconds, phase_seconds
from lm_polygraph_asmi.analysis.mechanism import (
    OVER_ROBUST,
    error_separation,
    masking_response,
    votes,
)
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.prompts import last_question
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, ReportItem, frame
from lm_polygraph_asmi.results.manifest import PHASES, seconds_by_phase
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once
from lm_polygraph_asmi.results.runs import SYMBOLS, Run

CASES = 5
WARM_UP = 10
SEQUENTIAL, BATCHED = "one at a time", "batched"


def screen(groups: Sequence[RunGroup]) -> Items:
    """Table "babiqa-mechanism" and figure "error-separation" of the paper."""
    title = "Masking response and error separation"

    @once
    def compute(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        (information,) = group.need("mi_tokens")
        scores = {s: group.score(group.variants[s]) for s in SYMBOLS if s in group.variants}
        if group.msp is not None:
            scores["MSP"] = group.msp
        response = masking_response(information)
        separation = error_separation(information, dict(scores), group.answers)
        first_variant = [name for name in ("Adapt-ASMI", "Sem-ASMI", "ASMI") if name in scores][:1]
        drawn = {name: scores[name] for name in [*first_variant, "MSP"] if name in scores}
        row = {
            "setting": group.label,
            "tokens": response.tokens,
            "median MI_t": response.median,
            "mean MI_t": response.mean,
            "right answers": separation.right,
            "wrong answers": separation.wrong,
            "near zero": response.over_robust,
        } | {f"AUROC {name}": interval for name, interval in separation.auroc.items()}
        return row, {group.label: (drawn, group.wrong, separation.auroc)}

    notes = [
        "Mean MI_t of tokens, nats, in right and in wrong answers; error-detection AUROC with "
        "95 % intervals over clusters.",
        f"Near zero: mean MI_t below {OVER_ROBUST} nats. A candidate screen that needs no labels, "
        "not validated: the paper has one such setting (0.002 nats, and the signal fails); its "
        "others start at 0.016 nats.",
    ]
    return frame(
        "error_separation", title, groups, compute, notes, figures.violins, digits=3,
        finer=("median MI_t", "mean MI_t", "right answers", "wrong answers"),
        pictured="Figure: logarithmic axis, values below the first percentile of the positive "
        "ones at its lower end; the first of Adapt-ASMI, Sem-ASMI and ASMI that was run; dot: "
        f"median; fewer than {figures.SHAPED} answers: one stroke each.",
    )  # fmt: skip


def mechanism(groups: Sequence[RunGroup]) -> Items:
    """Figure "mechanism" (a) of the paper: disagreement and agreement of tokens."""
    title = "MI and semantic agreement of tokens"

    @once
    def compute(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
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

    notes = [
        "High MI_t counts fully with low agreement A_t, and is discounted with high agreement. "
        "Pearson r: of A_t and MI_t (not its logarithm); H_t: single-pass entropy of the token."
    ]
    return frame(
        "mechanism", title, groups, compute, notes, figures.joint, digits=3
    )  # fmt: skip


def cosines(groups: Sequence[RunGroup]) -> Items:
    """Figure "mechanism" (b) of the paper: near-synonyms among a token's candidates."""
    title = "Cosines of the top candidates of one token"

    def compute(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        matrices = group.masked("candidate_cosines")
        candidates = group.masked("candidates")
        if not matrices or not candidates or not group.mi_tokens or not group.agreement_tokens:
            raise Unavailable("not saved (set asmi.details=true)")
        # Benign instability: where the kernel discounts MI most.
        pairs = zip(group.mi_tokens, group.agreement_tokens, strict=True)
        removed = [mi * agreement for mi, agreement in pairs]
        answer = int(np.argmax([tokens.max() for tokens in removed]))
        position = int(removed[answer].argmax())
        texts = [_text(group, answer, token) for token in candidates[answer][position]]
        panel = np.asarray(matrices[answer][position]), texts
        return {"setting": group.label}, {group.label: panel}

    notes = [
        "Cosines between rows of the output projection, at the token where the kernel discounts "
        "most (largest MI_t A_t). Negative cosines count as 0 in A_t.",
    ]
    items = frame("candidate_cosines", title, groups, compute, notes, figures.cosines)
    if isinstance(items[0], ReportItem):
        items[0].table = None  # only the figure
    return items


def _text(group: RunGroup, answer: int, token: int) -> str:
    """A token as text if the run saved it, else its id."""
    saved = group.saved("asmi_token_texts")
    return (saved[answer] if saved else {}).get(int(token), f"token {int(token)}")


def case_study(groups: Sequence[RunGroup]) -> Items:
    """The subnetworks' tokens in answers that are confident and wrong."""
    title = "Confident errors: what the subnetworks answer"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        msp, u_sem, information = group.need("msp", "u_sem", "mi_tokens")
        tops = group.masked("top_token")
        tokens, prompts = group.saved("asmi_tokens"), group.saved("input_texts")
        answers, references = group.saved("greedy_texts"), group.saved("target_texts")
        if not tops or not tokens or not prompts or not answers:
            raise Unavailable("asmi, asmi_tokens or texts not saved")
        confident_errors = np.flatnonzero(group.wrong & (msp <= np.median(msp))).tolist()
        if not confident_errors:
            raise Unavailable("all confident answers are right")
        changed = []
        for i in confident_errors:
            by_token = votes(np.asarray(tops[i]), tokens[i])[: len(information[i])]
            position = min(range(len(by_token)), key=lambda t: by_token[t].agree)
            if by_token[position].agree < 1:
                changed.append((by_token[position].agree, -u_sem[i], i, position, by_token))
        if not changed:
            raise Unavailable(
                f"no mask changed a token of any of the {len(confident_errors)} confident errors"
            )
        rows = []
        for _, _, i, position, by_token in sorted(changed, key=lambda case: case[:2])[:CASES]:
            vote = by_token[position]
            other = None if vote.alternative is None else _text(group, i, vote.alternative)
            rows.append(
                {
                    "setting": group.label,
                    "question": last_question(prompts[i]),
                    "reference": str(references[i])[:60] if references else None,
                    "answer": answers[i].strip()[:60],
                    "token most changed": _text(group, i, tokens[i][position]),
                    "masks that keep it": vote.agree,
                    "alternative": other,
                    "its masks": vote.share,
                    "u_sem": float(u_sem[i]),
                    "confident errors": len(confident_errors),
                    "of these changed": len(changed),
                }
            )
        return rows

    notes = [
        f"Up to {CASES} wrong answers per setting from the confident half by MSP, at the token "
        "that most masks change: share of masks whose most likely token is the answer's, and the "
        "most frequent other one. Last columns: confident errors, and in how many of them a mask "
        "changed any token. Selected examples, no statistic. Runs without asmi_token_texts show "
        "token ids.",
    ]
    return frame("case_study", title, groups, compute, notes, digits=3)


def _masks(run: Run) -> str:
    """How a run's masks were evaluated."""
    return (
        SEQUENTIAL if run.recorded("config").get("asmi", {}).get("memory_budget") == 1 else BATCHED
    )


def cost(groups: Sequence[RunGroup]) -> Items:
    """Table "cost" of the paper."""
    title = "Measured cost"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        rows = []
        for run in group.runs:
            timings = phase_seconds(seconds_by_phase(run.stats), WARM_UP)
            manifest = run.manifest or {}
            peak, used = run.recorded("peak_memory_bytes"), run.settings()
            if timings:
                rows.append(
                    {
                        "setting": group.label,
                        "scope": used[0]["scope"] if used else "–",
                        "S": used[0]["num_masks"] if used else "–",
                        "depths": len({settings["depth"] for settings in used}),
                        "n": max(timing.n for timing in timings.values()),
                        **{phase: timing.median for phase, timing in timings.items()},
                        "masks": _masks(run),
                        "from the result cache": manifest.get("asmi_reused"),
                        **{f"peak GiB, {where}": size / 2**30 for where, size in peak.items()},
                        "device": manifest.get("device", "not recorded"),
                    }
                )  # fmt: skip
        if not rows:
            raise Unavailable(f"no seconds of more than {WARM_UP} answers saved")
        return rows

    def notes(_: ReportItem) -> list[str]:
        return [
            f"Median seconds per answer and phase, without the first {WARM_UP} answers, all depths "
            "of a run together. Seconds of cached results are those of the run that computed them. "
            "asmi.memory_budget=1 evaluates one mask at a time."
        ]

    def draw(table: pd.DataFrame) -> Figure:
        return figures.seconds(table, [name for name in table if name in PHASES.values()])

    return [*frame("cost", title, groups, compute, notes, draw), *_cost_by_method(groups)]


def _cost_by_method(groups: Sequence[RunGroup]) -> Items:
    """Table "cost" of the paper: a row per setting, and the speed-up of batched masks."""
    title = "Measured cost by method"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        by_batching: dict[tuple[Any, ...], dict[str, float]] = {}
        for run in group.runs:
            timings, used = method_seconds(seconds_by_phase(run.stats), WARM_UP), run.settings()
            if not timings or not used:
                continue
            key = (len(used), *(str(used[0][name]) for name in ("scope", "num_masks", "top_k")))
            if (marginal := timings.get("ASMI alone, marginal")) is not None:
                by_batching.setdefault(key, {})[_masks(run)] = marginal.median
            rows.append(
                {
                    "setting": group.label,
                    "scope": used[0]["scope"],
                    "S": used[0]["num_masks"],
                    "depths": len({settings["depth"] for settings in used}),
                    "masks": _masks(run),
                    **{m: timings[m].median if m in timings else None for m in PHASES_OF},
                    "n": max(timing.n for timing in timings.values()),
                    "key": key,
                }
            )
        for row in rows:
            both = by_batching.get(row.pop("key"), {})
            ratio = both[SEQUENTIAL] / both[BATCHED] if len(both) == 2 else None
            row["one at a time / batched"] = ratio
        if not rows:
            raise Unavailable(f"no seconds of more than {WARM_UP} answers saved")
        return rows

    notes = [
        "Median seconds per answer of all phases that a method needs: greedy answer (all "
        "methods); samples and NLI (Semantic Entropy); masked passes (Sem-ASMI); all of these "
        "except NLI, with the embedding of samples (Adapt-ASMI). A dash: a phase was not "
        "measured. Last column: seconds of masked passes one at a time, divided by those of "
        "batched ones, if both were run."
    ]
    return frame("cost_by_method", title, groups, compute, notes)
