"""The claims of the paper's appendix on heads, and whether they hold on these runs."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.experiments.items.controls import prr_of_heads, verdicts_on
from lm_polygraph_asmi.experiments.items.heads import (
    NEEDS,
    coupled,
    error_detection,
    excess_heads,
    profiles,
    sharpened,
)
from lm_polygraph_asmi.experiments.items.probe import (
    CONTROLS,
    ROWS,
    Probed,
    differences,
    numbers_of,
    probed,
    rates,
    widenings,
)
from lm_polygraph_asmi.report.item import Items, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable

HOLDS, FAILS, OPEN, UNMEASURED = "holds", "does not", "inconclusive", "not measured here"
PAPER_K = (1, 2, 4, 8)
"""Numbers of heads k over which the paper's gap widens."""
STAY = 1
"""Largest percentage of the lowest-MI tokens that flip, in the paper."""


class Finding(NamedTuple):
    """Outcome of a claim on one setting.

    Attributes:
        outcome: `HOLDS`, `FAILS` or `OPEN`.
        where: the setting.
        values: the values it depends on.
    """

    outcome: str
    where: str
    values: str


Look = Callable[[Sequence[RunGroup]], Iterator[Finding]]


def _said(found: Interval) -> str:
    return str(found) if isfinite(found.low) else f"{found.value:+.2f}, without an interval"


def _above(found: Interval) -> str:
    return HOLDS if found.low > 0 else FAILS if found.high < 0 else OPEN


def _each(grounded: bool | None, look: Callable[[RunGroup], tuple[str, str] | None]) -> Look:
    """Findings of settings with a context (True), without (False), or of all (None)."""

    def find(groups: Sequence[RunGroup]) -> Iterator[Finding]:
        for group in groups:
            if grounded is not None and group.grounded is not grounded:
                continue
            try:
                found = look(group)
            except ValueError:  # data not saved, or undefined
                continue
            if found is not None:
                yield Finding(found[0], group.label, found[1])

    return find


def _coupled(group: RunGroup) -> Any:
    found = coupled(group, group.depth).get("as in the paper")
    if found is None:
        raise Unavailable("too few tokens with z_t")
    return found


def _positive(group: RunGroup) -> tuple[str, str]:
    found = _coupled(group).information
    return _above(found), _said(found)


def _negative(group: RunGroup) -> tuple[str, str]:
    found = _coupled(group).information
    return _above(-found), _said(found)


def _underpowered(group: RunGroup) -> tuple[str, str] | None:
    if "babi" not in group.dataset.lower():
        return None
    found = _coupled(group).information
    return FAILS if found.excludes(0) else HOLDS, _said(found)


def _more_than_entropy(group: RunGroup) -> tuple[str, str]:
    found = _coupled(group).difference
    return _above(found), f"{_said(found)}, paired"


def _sharpens(group: RunGroup) -> tuple[str, str]:
    found = sharpened(group)
    return _above(found), f"{_said(found)} from {group.dissected_depths[0]:.0%} of depth on"


def _fewer_with_depth(group: RunGroup) -> tuple[str, str] | None:
    depths = group.dissected_depths
    if len(depths) < 2:
        return None
    ends = [excess_heads(group, depth) for depth in (depths[0], depths[-1])]
    outcome = HOLDS if ends[1].high < ends[0].low else FAILS if ends[1].low > ends[0].high else OPEN
    return outcome, f"{_said(ends[0])} at {depths[0]:.0%}, {_said(ends[1])} at {depths[-1]:.0%}"


def _spread(group: RunGroup) -> tuple[str, str]:
    found, excess = profiles(group, group.depth), excess_heads(group, group.depth)
    count = float(found.heads[found.high].mean())
    return _above(excess), f"{count:.1f} heads, minus noise {_said(excess)}"


def _errors(group: RunGroup) -> tuple[str, str]:
    found = error_detection(group, group.depth)["mean z"]
    moved = _above(Interval(*(value - 0.5 for value in found)))
    return moved, f"AUROC {found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _no_errors(group: RunGroup) -> tuple[str, str]:
    """The claim is that there is no coupling; an interval can only refute it."""
    coupling, values = _errors(group)
    return FAILS if coupling == HOLDS else OPEN, values


def _rates(group: RunGroup, row: str) -> dict[int, Interval] | None:
    """Flip rates in percent by k, from the probe of heads."""
    for found in probed(group):
        known = rates(found, ROWS[row]) if found.condition == "heads" else None
        if known:
            return dict(zip(found.probe.k, known[1], strict=True))
    return None


def _one_head(group: RunGroup) -> tuple[str, str] | None:
    high, low = (_rates(group, f"{which} MI, critical heads") for which in ("high", "low"))
    if not high or not low:
        return None
    outcome = HOLDS if high[1].low > low[1].high else FAILS if high[1].high < low[1].low else OPEN
    return outcome, f"{high[1].value:.0f} % against {low[1].value:.0f} %"


def _low_stay(group: RunGroup) -> tuple[str, str] | None:
    low = _rates(group, "low MI, critical heads")
    if not low:
        return None
    most = max(low.values(), key=lambda rate: rate.high)
    outcome = HOLDS if most.high <= STAY else OPEN
    if any(rate.low > STAY for rate in low.values()):
        outcome = FAILS
    return outcome, f"at most {most.value:.1f} % [{most.low:.1f}, {most.high:.1f}]"


def _widens(group: RunGroup) -> tuple[str, str] | None:
    for found in probed(group):
        steps = widenings(found, PAPER_K[-1]) if found.condition == "heads" else None
        if steps:  # else a layer with one head, or not run
            return _all_above(steps), ", ".join(map(_said, steps)) + " points from k to k"
    return None


def _all_above(found: Sequence[Interval]) -> str:
    """HOLDS if all intervals are above 0, FAILS if one is below, else OPEN."""
    outcomes = {_above(one) for one in found}
    return FAILS if FAILS in outcomes else OPEN if OPEN in outcomes else HOLDS


def _highest_on_recall(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    known = [(group, _rates(group, "high MI, critical heads")) for group in groups]
    for group, own in known:
        if group.grounded is not False or not own:
            continue
        for other, theirs in known:
            if other.grounded and other.model == group.model and theirs:
                shared = [k for k in own if k >= 2 and k in theirs]
                if not shared:
                    continue
                # Other questions, so no pairs: compare whether the intervals overlap.
                outcome = HOLDS if all(own[k].low > theirs[k].high for k in shared) else OPEN
                if any(own[k].high < theirs[k].low for k in shared):
                    outcome = FAILS
                yield Finding(outcome, group.label, f"against {other.dataset}")


def _control(found: Probed, pair: str) -> dict[int, Interval]:
    """Critical heads minus one of `CONTROLS`, for each informative k; empty if not run."""
    known = differences(found, pair)
    speaking = numbers_of(found, pair)
    by_k = zip(found.probe.k, known[1], strict=True) if known else ()
    return {k: gap for k, gap in by_k if k in PAPER_K and k in speaking}


def _gaps(found: dict[int, Interval]) -> str:
    return ", ".join(f"k = {k}: {gap.value:+.0f}" for k, gap in found.items())


def _where_confident(group: RunGroup) -> tuple[str, str] | None:
    for found in probed(group):
        gaps = _control(found, "high MI, top token at .9 or more")
        if found.condition == "heads" and gaps:
            return _all_above(list(gaps.values())), _gaps(gaps)
    return None


def _identifiable(group: RunGroup) -> tuple[str, str] | None:
    """Whether every control agrees; lists those that do not, or were not run."""
    for found in probed(group):
        gaps = {pair: _control(found, pair) for pair in CONTROLS}
        if found.condition != "heads" or not any(gaps.values()):  # a layer of a single head
            continue
        outcomes = {
            pair: _all_above(list(own.values())) if own else UNMEASURED
            for pair, own in gaps.items()
        }
        against = [f"{pair} {said}" for pair, said in outcomes.items() if said != HOLDS]
        outcome = HOLDS if not against else FAILS if FAILS in outcomes.values() else OPEN
        return outcome, "; ".join([_gaps(gaps[CONTROLS[0]]) or "random heads not run", *against])
    return None


def _not_above_msp(group: RunGroup) -> tuple[str, str]:
    sem, msp = group.need("u_sem", "msp")
    scores = {"sem": sem, "msp": msp}
    _, paired = prr_intervals(scores, group.quality, group.clusters, [("sem", "msp")])
    found = paired["sem", "msp"]
    return {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}[
        _above(found)
    ], f"Sem-ASMI minus MSP {_said(found)}"


def _not_reproduced(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    outcomes = {"special": HOLDS, "reproduced": FAILS, "inconclusive": OPEN}
    for one, found in verdicts_on(groups):
        if one.group.grounded is not False:
            by = f" by {found.condition}" if found.condition else ""
            ranked = prr_of_heads(one).low > 0
            none = "" if ranked else ", but no evidence that heads rank errors"
            yield Finding(
                outcomes[found.outcome], one.group.label, f"{one.symbol}: {found.outcome}{by}{none}"
            )


CLAIMS: tuple[tuple[str, Look], ...] = (
    ("With a context, MI couples to concentration: ρ(MI, z) above 0", _each(True, _positive)),
    ("On recall ρ(MI, z) is below 0", _each(False, _negative)),
    ("On BabiQA the coupling is underpowered (the paper's interval excludes 0)",
     _each(None, _underpowered)),
    ("With a context, MI tracks the head structure more than entropy does",
     _each(True, _more_than_entropy)),
    ("The coupling sharpens with depth (the paper: on CoQA)", _each(True, _sharpens)),
    ("Criticality concentrates onto fewer heads with depth (minus noise†)",
     _each(True, _fewer_with_depth)),
    ("Criticality is spread over many heads rather than a few (beyond noise†)",
     _each(None, _spread)),
    ("With a context, fragility couples to errors (mean z†)", _each(True, _errors)),
    ("On recall it does not (mean z†)", _each(False, _no_errors)),
    ("One critical head flips more of the high-MI tokens than of the low", _each(None, _one_head)),
    ("The lowest-MI tokens flip in at most 1 % of cases", _each(None, _low_stay)),
    ("The gap between high and low MI widens with k, up to 8", _each(None, _widens)),
    ("From k = 2 on, flips are most frequent on recall", _highest_on_recall),
    ("Fragility is borne by identifiable heads (every control agrees†, up to half of the heads)",
     _each(None, _identifiable)),
    ("Where the model is confident, critical heads flip more than random ones (top token at .9 or "
     "more†)", _each(None, _where_confident)),
    ("The signal does not survive recall: Sem-ASMI is no better than MSP",
     _each(False, _not_above_msp)),
    ("Matched perturbations of other components do not reproduce it†", _not_reproduced),
)  # fmt: skip


def head_claims(groups: Sequence[RunGroup]) -> Items:
    """A row for every claim of the paper about heads."""

    def compute(line: tuple[str, Look]) -> dict[str, Any]:
        claim, look = line
        found = list(look(groups))
        outcomes = {one.outcome for one in found}
        outcome = next((o for o in (FAILS, OPEN, HOLDS) if o in outcomes), UNMEASURED)
        where = "; ".join(f"{one.where}: {one.outcome} ({one.values})" for one in found)
        return {"claim": claim, "here": outcome, "where": where or "–"}

    if not any(group.dissected_depths or group.conditions for group in groups) and not _any_probe(
        groups
    ):
        return frame("head_claims", "The paper's claims on heads", [], compute, [], otherwise=NEEDS)
    notes = [
        "Holds: on every setting with the data. Does not: refuted on at least one setting. "
        "Inconclusive: all else. †: measured otherwise than in the paper, with a control that it "
        "lacks. The paper's values are of Qwen3-4B-Base; a claim that fails here fails on this "
        "model."
    ]
    items = frame("head_claims", "The paper's claims on heads", CLAIMS, compute, notes)
    for item in items:
        item.groups = list(groups)  # type: ignore[union-attr]
    return items


def _any_probe(groups: Sequence[RunGroup]) -> bool:
    for group in groups:
        try:
            if probed(group):
                return True
        except ValueError:
            continue
    return False
