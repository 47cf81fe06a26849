"""Choose the number of masks S and the mask rate p before a run."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lm_polygraph_asmi import maths

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lm_polygraph_asmi.results.run_groups import RunGroup


def plan_table(num_heads: int) -> pd.DataFrame:
    """Both bounds, for mask rates p up to twice the largest admissible one.

    Returns:
        Columns: p; S (fewest masks for coverage); heads masked at once, Gaussian and exact (95 %
        quantiles); admissible (the exact one within a quarter of the heads); S for pairs.
    """
    tolerated = maths.tolerated_heads(num_heads)
    rows = []
    for p in maths.mask_rates():
        masks = maths.masks_for_coverage(num_heads, p)
        exact = maths.heads_masked_at_once(num_heads, p)
        rows.append(
            {
                "p": p,
                "S": masks,
                "heads, Gaussian": maths.heads_masked_at_once(num_heads, p, exact=False),
                "heads, exact": int(exact),
                "admissible": exact <= tolerated,
                "S for pairs": maths.masks_for_pair_coverage(num_heads, p),
            }
        )
    table = pd.DataFrame(rows)
    last = table.index[table["admissible"]].max() if table["admissible"].any() else 14
    return table.loc[: 2 * last + 1]


def plan_figure(table: pd.DataFrame, num_heads: int) -> "Figure":
    """Figure of the plan; source: figure "supp_fidelity" of the paper."""
    from lm_polygraph_asmi.report import figures

    admissible = table[table["admissible"]]
    chosen = None
    if len(admissible):
        corner = admissible.iloc[-1]
        chosen = (float(corner["p"]), int(corner["S"]))
    return figures.operating_point(
        table["p"].tolist(),
        table["S"].tolist(),
        table["heads, Gaussian"].tolist(),
        table["heads, exact"].tolist(),
        maths.tolerated_heads(num_heads),
        chosen,
    )


def power_table(group: "RunGroup", difference: float, resamples: int = 2000) -> pd.DataFrame:
    """Questions that each comparison of the report needs to detect a difference of PRR.

    Args:
        group: the pilot.
        difference: of PRR, to be detected with a power of 0.8 at 5 %, two-sided.

    Returns:
        A row per comparison: the pilot's difference, its standard error, the difference that the
        pilot's size would detect, clusters and questions needed.

    Raises:
        ValueError: fewer than two clusters, no ASMI score and other method, or all answers
            equally good.
    """
    from lm_polygraph_asmi.analysis.comparison import drawn_prr
    from lm_polygraph_asmi.analysis.power import sample_size
    from lm_polygraph_asmi.report.items.benchmark import compared_on

    pairs = compared_on(group)
    clusters = group.answers.n_clusters
    names = {method for pair in pairs.values() for method in pair}
    if not names or clusters < 2:
        raise ValueError(
            "expected a pilot with an ASMI score, another method and two clusters, got "
            f"{list(group.scores)} and {clusters} clusters"
        )
    scores = {method: group.score(method) for method in sorted(names)}
    value, drawn = drawn_prr(scores, group.answers.resampled(resamples))
    rows = []
    for name, (first, second) in pairs.items():
        error = float(np.nanstd(drawn[first] - drawn[second], ddof=1))
        if not error > 0:
            continue
        needed = sample_size(difference, error, clusters, len(group))
        rows.append(
            {
                "comparison": name,
                "pilot": value[first] - value[second],
                "SE": error,
                "pilot would find": needed.detectable,
                "clusters": needed.clusters,
                "questions": needed.questions,
            }
        )
    if not rows:
        raise ValueError(f"{group.label}: PRR is undefined, or the same for all methods")
    return pd.DataFrame(rows)
