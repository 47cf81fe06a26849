"""Choose the number of masks S and the mask rate p before a run."""

import pandas as pd

from lm_polygraph_asmi.core import mask_plan


def plan_table(num_heads: int) -> pd.DataFrame:
    """Both bounds of the paper, for mask rates p up to twice the largest admissible one.

    Returns:
        Columns: p; S (fewest masks that cover all heads); number of heads masked at once (95 %
        quantile) by the Gaussian and by the exact distribution; and admissible, which is true if
        the exact quantile is at most a quarter of the heads.
    """
    rates = mask_plan.MASK_RATES
    bounds = [mask_plan.heads_masked_at_once(num_heads, p) for p in rates]
    exact, gaussian = zip(*bounds, strict=True)
    table = pd.DataFrame(
        {
            "p": rates,
            "S": [mask_plan.masks_for_coverage(num_heads, p) for p in rates],
            "heads, Gaussian": gaussian,
            "heads, exact": exact,
            "admissible": [heads <= mask_plan.tolerated_heads(num_heads) for heads in exact],
        }
    )
    last = table.index[table["admissible"]].max() if table["admissible"].any() else 14
    return table.loc[: 2 * last + 1]
