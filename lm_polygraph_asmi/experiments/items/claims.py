"""The claims of the paper's appendix on heads, and whether they hold on these runs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.experiments.analysis.coupling import Coupling
from lm_polygraph_asmi.experiments.conditions import conditions, dissected_depths
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
    all_probes,
    differences,
    numbers_of,
    probed,
    rates,
    widenings,
)
from lm_polygraph_asmi.report.item import Items, MissingItem, frame
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable

HOLDS, FAILS, OPEN, UNMEASURED = "holds", "does not", "inconclusive", "not measured here"
PAPER_K = (1, 2, 4, 8)
"""Numbers of heads k over which the paper's gap widens."""
STAY = 1
"""Largest percentage of the lowest-MI tokens that flip, in the paper."""


class Finding(NamedTuple):
    """`HOLDS`, `FAILS` or `OPEN` for a claim on one setting, and the values it depends on."""

    outcome: str
    where: str
    values: str


Look = Callable[[Sequence[RunGroup]], Iterator[Finding]]


def _text(interval: Interval) -> str:
    known = isfinite(interval.low)
    return str(interval) if known else f"{interval.value:+.2f}, without an interval"


def _above(*intervals: Interval, limit: float = 0) -> str:
    """HOLDS if all intervals are above the limit, FAILS if one is below, else OPEN."""
    if any(interval.high < limit for interval in intervals):
        return FAILS
    return HOLDS if all(interval.low > limit for interval in intervals) else OPEN


def _no_overlap(pairs: Iterable[tuple[Interval, Interval]]) -> str:
    """HOLDS if every first interval is above its second, FAILS if one is below, else OPEN."""
    return _above(*(Interval(a.value - b.value, a.low - b.high, a.high - b.low) for a, b in pairs))


def _each(grounded: bool | None, look: Callable[[RunGroup], tuple[str, str] | None]) -> Look:
    """Findings of settings with a context (True), without (False), or of all (None)."""

    def find(groups: Sequence[RunGroup]) -> Iterator[Finding]:
        for group in groups:
            if grounded is not None and group.grounded is not grounded:
                continue
            try:
                outcome = look(group)
            except ValueError:  # data not saved, or undefined
                continue
            if outcome is not None:
                yield Finding(outcome[0], group.label, outcome[1])

    return find


def _coupled(group: RunGroup) -> Coupling:
    coupling = coupled(group, group.depth).get("as in the paper")
    if coupling is None:
        raise Unavailable("too few tokens with z_t")
    return coupling


def _positive(group: RunGroup) -> tuple[str, str]:
    rho = _coupled(group).information
    return _above(rho), _text(rho)


def _negative(group: RunGroup) -> tuple[str, str]:
    rho = _coupled(group).information
    return _above(-rho), _text(rho)


def _underpowered(group: RunGroup) -> tuple[str, str] | None:
    if "babi" not in group.dataset.lower():
        return None
    rho = _coupled(group).information
    return FAILS if rho.excludes(0) else HOLDS, _text(rho)


def _more_than_entropy(group: RunGroup) -> tuple[str, str]:
    difference = _coupled(group).difference
    return _above(difference), f"{_text(difference)}, paired"


def _sharpens(group: RunGroup) -> tuple[str, str]:
    change = sharpened(group)
    return _above(change), f"{_text(change)} from {dissected_depths(group)[0]:.0%} of depth on"


def _fewer_with_depth(group: RunGroup) -> tuple[str, str] | None:
    depths = dissected_depths(group)
    if len(depths) < 2:
        return None
    shallow, deep = (excess_heads(group, depth) for depth in (depths[0], depths[-1]))
    values = f"{_text(shallow)} at {depths[0]:.0%}, {_text(deep)} at {depths[-1]:.0%}"
    return _no_overlap([(shallow, deep)]), values


def _spread(group: RunGroup) -> tuple[str, str]:
    tokens, excess = profiles(group, group.depth), excess_heads(group, group.depth)
    count = float(tokens.heads[tokens.high].mean())
    return _above(excess), f"{count:.1f} heads, minus noise {_text(excess)}"


def _errors(group: RunGroup) -> tuple[str, str]:
    area = error_detection(group, group.depth)["mean z"]
    values = f"AUROC {area.value:.2f} [{area.low:.2f}, {area.high:.2f}]"
    return _above(area, limit=0.5), values


def _no_errors(group: RunGroup) -> tuple[str, str]:
    """The claim is that there is no coupling; an interval can only refute it."""
    coupling, values = _errors(group)
    return FAILS if coupling == HOLDS else OPEN, values


def _of_heads(group: RunGroup) -> list[Probed]:
    return [probe for probe in probed(group) if probe.condition == "heads"]


def _rates(group: RunGroup, row: str) -> dict[int, Interval] | None:
    """Flip rates in percent by k, from the probe of heads."""
    for probe in _of_heads(group):
        if flips := rates(probe, ROWS[row]):
            return dict(zip(probe.probe.k, flips[1], strict=True))
    return None


def _one_head(group: RunGroup) -> tuple[str, str] | None:
    high, low = (_rates(group, f"{level} MI, critical heads") for level in ("high", "low"))
    if not high or not low:
        return None
    return _no_overlap([(high[1], low[1])]), f"{high[1].value:.0f} % against {low[1].value:.0f} %"


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
    for probe in _of_heads(group):
        if steps := widenings(probe, PAPER_K[-1]):  # else a layer with one head, or not run
            return _above(*steps), ", ".join(map(_text, steps)) + " points from k to k"
    return None


def _highest_on_recall(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    by_group = [(group, _rates(group, "high MI, critical heads")) for group in groups]
    for closed, recall in by_group:
        for opened, context in by_group:
            alike = closed.grounded is False and opened.grounded and opened.model == closed.model
            if not (alike and recall and context):
                continue
            # Other questions, so no pairs: compare whether the intervals overlap.
            pairs = [(recall[k], context[k]) for k in recall if k >= 2 and k in context]
            if pairs:
                yield Finding(_no_overlap(pairs), closed.label, f"against {opened.dataset}")


def _control(probe: Probed, pair: str) -> dict[int, Interval]:
    """Critical heads minus one of `CONTROLS`, for each informative k; empty if not run."""
    gaps = differences(probe, pair)
    informative = {*PAPER_K}.intersection(numbers_of(probe, pair))
    by_k = zip(probe.probe.k, gaps[1], strict=True) if gaps else ()
    return {k: gap for k, gap in by_k if k in informative}


def _gaps(by_k: dict[int, Interval]) -> str:
    return ", ".join(f"k = {k}: {gap.value:+.0f}" for k, gap in by_k.items())


def _where_confident(group: RunGroup) -> tuple[str, str] | None:
    for probe in _of_heads(group):
        if gaps := _control(probe, "high MI, top token at .9 or more"):
            return _above(*gaps.values()), _gaps(gaps)
    return None


def _identifiable(group: RunGroup) -> tuple[str, str] | None:
    """Whether every control agrees; lists those that do not, or were not run."""
    for probe in _of_heads(group):
        gaps = {pair: _control(probe, pair) for pair in CONTROLS}
        if not any(gaps.values()):  # a layer of a single head
            continue
        outcomes = {
            pair: _above(*by_k.values()) if by_k else UNMEASURED for pair, by_k in gaps.items()
        }
        against = [f"{pair} {outcome}" for pair, outcome in outcomes.items() if outcome != HOLDS]
        outcome = HOLDS if not against else FAILS if FAILS in outcomes.values() else OPEN
        return outcome, "; ".join([_gaps(gaps[CONTROLS[0]]) or "random heads not run", *against])
    return None


def _not_above_msp(group: RunGroup) -> tuple[str, str]:
    sem, msp = group.need("u_sem", "msp")
    scores = {"sem": sem, "msp": msp}
    _, paired = prr_intervals(scores, group.answers, [("sem", "msp")])
    gap = paired["sem", "msp"]
    return _above(-gap), f"Sem-ASMI minus MSP {_text(gap)}"


def _not_reproduced(groups: Sequence[RunGroup]) -> Iterator[Finding]:
    outcomes = {"special": HOLDS, "reproduced": FAILS, "inconclusive": OPEN}
    for compared, verdict in verdicts_on(groups):
        if compared.group.grounded is not False:
            by = f" by {verdict.condition}" if verdict.condition else ""
            ranked = prr_of_heads(compared).low > 0
            none = "" if ranked else ", but no evidence that heads rank errors"
            values = f"{compared.symbol}: {verdict.outcome}{by}{none}"
            yield Finding(outcomes[verdict.outcome], compared.group.label, values)


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
        findings = list(look(groups))
        outcomes = {finding.outcome for finding in findings}
        outcome = next((o for o in (FAILS, OPEN, HOLDS) if o in outcomes), UNMEASURED)
        where = "; ".join(f"{f.where}: {f.outcome} ({f.values})" for f in findings)
        return {"claim": claim, "here": outcome, "where": where or "–"}

    title = "The paper's claims on heads"
    if not any(dissected_depths(g) or conditions(g) for g in groups) and not all_probes(groups)[0]:
        return [MissingItem(title, NEEDS)]
    notes = [
        "Holds: on every setting with the data. Does not: refuted on at least one setting. "
        "Inconclusive: all else. †: measured otherwise than in the paper, with a control that it "
        "lacks. The paper's values are of Qwen3-4B-Base; a claim that fails here fails on this "
        "model."
    ]
    items = frame("head_claims", title, CLAIMS, compute, notes)
    for item in items:
        item.groups = list(groups)  # type: ignore[union-attr]
    return items
