"""Choose the number of masks S and the mask rate p before a run."""

import pandas as pd

from lm_polygraph_asmi import maths


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
