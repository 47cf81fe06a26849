"""Choose the number of masks S and the mask rate p before a run."""

import pandas as pd

from lm_polygraph_asmi.core import mask_plan


def plan_table(num_heads: int) -> pd.DataFrame:
    """Both bounds, for mask rates p up to twice the largest admissible one.

    Returns:
        Columns: p; S (fewest masks for coverage); heads masked at once, Gaussian and exact (95 %
        quantiles); admissible (the exact one within a quarter of the heads).
    """
    rows = []
    for p in mask_plan.MASK_RATES:
        exact, gaussian = mask_plan.heads_masked_at_once(num_heads, p)
        rows.append(
            {
                "p": p,
                "S": mask_plan.masks_for_coverage(num_heads, p),
                "heads, Gaussian": gaussian,
                "heads, exact": exact,
                "admissible": exact <= mask_plan.tolerated_heads(num_heads),
            }
        )
    table = pd.DataFrame(rows)
    last = table.index[table["admissible"]].max() if table["admissible"].any() else 14
    return table.loc[: 2 * last + 1]
