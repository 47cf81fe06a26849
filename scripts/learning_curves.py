"""Learning curves of the forms of a learned score, by docs/evidence/learned-plan.md.

    python scripts/learning_curves.py docs/concepts    # some minutes

Prints the plan's decision, and writes two tables into the folder: learned-curves.csv, AUROC after
60 to 240 labels; and learned-settings.csv, % of the other rows that a threshold by each signal
accepts, at 90 % confidence and a risk of three quarters of the error rate of all. Both are means
over the plan's splits.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import click
import numpy as np
import pandas as pd
from claims import LABELS, SEED, Rows, auroc, read_rows, strongest
from scipy.stats import t
from sklearn.linear_model import LogisticRegression

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions.fit import best_threshold
from lm_polygraph_asmi.decisions.learned import learned_threshold

SIZES, SPLITS, MAIN, PRIMARY, CONFIDENCE = (60, 100, 150, 240), 40, 100, "contains", 0.9
FORMS = [(1, 1, 0.01), *product((3, 10, 30), (1, 3), (0.0003, 0.001, 0.003, 0.01))]
"""Factors of the anchor and of the other free features, scikit-learn's C; today's comes first."""
TODAY = str(FORMS[0])
ANCHORS = [0, 1, 5]
"""Columns of the free features that are MSP, perplexity and entropy but for their sign."""


def splits(rows: Rows, labels: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows that learn, and rows of all other clusters."""
    names, codes = np.unique(rows.clusters, return_inverse=True)
    for split in range(SPLITS):
        place = np.random.default_rng([SEED, split]).permutation(len(names)).argsort()
        learn = np.argsort(place[codes], kind="stable")[:labels]
        yield learn, np.flatnonzero(~np.isin(codes, codes[learn]))


def standard(table: np.ndarray, learn: np.ndarray) -> np.ndarray:
    scale = table[learn].std(0)
    return (table - table[learn].mean(0)) / np.where(scale > 0, scale, 1)


def scores(rows: Rows, wrong: np.ndarray, learn: np.ndarray) -> dict[str, np.ndarray]:
    """Form -> (n,) scores of all rows by those that learn, whose errors are `wrong`."""
    free, hidden = standard(rows.free, learn), standard(np.hstack(rows.states), learn)
    # A penalised fit stays in the span of the rows that learn: the same fit in fewer columns.
    values, axes = np.linalg.eigh(hidden[learn] @ hidden[learn].T)
    seen = values > 1e-9 * values.max()
    turned = hidden @ (hidden[learn].T @ (axes[:, seen] / values[seen] ** 0.5))
    best, sign = strongest(free[learn][:, ANCHORS], wrong)
    found = {"anchor": sign * free[:, ANCHORS[best]]}
    for anchor, others, strength in FORMS:
        factors = np.where(np.arange(free.shape[1]) == ANCHORS[best], anchor, others)
        table = np.hstack([free * factors, turned])
        model = LogisticRegression(C=strength, max_iter=1000).fit(table[learn], wrong)
        found[str((anchor, others, strength))] = model.decision_function(table)
    return found | {"mean": found["anchor"] + standard(found[TODAY], learn)}


def curve(job: tuple[str, Rows, int]) -> pd.Series:
    """Form -> AUROC of other rows after so many labels, mean over splits."""
    label, rows, labels = job
    wrong, drawn = rows.wrong(label), []
    for learn, test in splits(rows, labels):
        found = scores(rows, wrong[learn], learn)
        drawn.append({form: auroc(score[test], wrong[test])[0] for form, score in found.items()})
    return pd.DataFrame(drawn).mean().rename((label, rows.name, labels))


def accepted(job: tuple[str, Rows, int]) -> pd.Series:
    """Signal -> share of other rows that its threshold by so many labels accepts."""
    label, rows, labels = job
    wrong, drawn = rows.wrong(label), []
    simple = dict(zip(("MSP", "perplexity", "entropy"), rows.simple.T, strict=True))
    features = {"free": rows.free, "hidden": np.hstack(rows.states)}
    asked = 0.75 * float(wrong.mean()), CONFIDENCE
    for learn, test in splits(rows, labels):
        known = Labelled(wrong[learn], rows.clusters[learn].tolist(), resamples=20)
        shown = {name: column[learn] for name, column in simple.items()}
        own = learned_threshold({n: f[learn] for n, f in features.items()}, shown, known, *asked)
        values = own.score(features) if own.score else simple[own.signal]
        shares = {"learned": _share(own.rule.threshold, values[test])}
        ways = {f"{name}, named": {name: shown[name]} for name in ("MSP", "perplexity")}
        for way, signals in (ways | {"best of three": shown}).items():
            signal, rule = best_threshold(signals, known, *asked)
            shares[way] = _share(rule.threshold, simple[signal][test])
        drawn.append(shares)
    name = rows.name, labels, round(100 * float(wrong.mean()))
    return pd.DataFrame(drawn).mean().rename(name)


def _share(threshold: float | None, values: np.ndarray) -> float:
    return 0.0 if threshold is None else float((values <= threshold).mean())


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, exists=True, path_type=Path))
def main(folder: Path) -> None:
    cells = [
        (label, rows, labels)
        for label, labels, rows in product(LABELS, SIZES, read_rows())
        if len(rows.table) >= labels + 50 and (label == PRIMARY or labels == MAIN)
    ]
    with ProcessPoolExecutor(2) as pool:
        areas = pd.DataFrame(pool.map(curve, cells)).rename_axis(
            index=["label", "setting", "labels"], columns="form"
        )
        few = [cell for cell in cells if cell[0] == PRIMARY and cell[2] in (100, 240)]
        settings = 100 * pd.DataFrame(pool.map(accepted, few))
    settings.rename_axis(["setting", "labels", "wrong, %"]).round(1).to_csv(
        folder / "learned-settings.csv"
    )
    own = areas.loc[PRIMARY]
    candidates = own.drop(columns=["anchor", TODAY])
    best, at = candidates.mean().idxmax(), own.xs(MAIN, level="labels")
    apart = [candidates.drop(name, level="setting").mean().idxmax() for name in at.index]
    other = areas.xs(MAIN, level="labels").loc["ROUGE-L"]
    chosen = pd.Series([at.loc[pair] for pair in zip(at.index, apart, strict=True)], at.index)
    click.echo(f"best on the mean of {len(own)} cells: {best}; minus today's at {MAIN} labels:")
    for name, change in (
        ("mean over settings", at[best] - at[TODAY]),
        ("each form chosen by the other settings", chosen - at[TODAY]),
        ("by ROUGE-L", other[best] - other[TODAY]),
    ):
        half = t.ppf(0.975, len(change) - 1) * change.sem()
        low, high = change.mean() - half, change.mean() + half
        click.echo(f"{name}: {change.mean():+.3f} [{low:+.3f}, {high:+.3f}]")
    shown = {"anchor": "anchor alone", TODAY: f"{TODAY}, today's", best: f"{best}, best"}
    curves = own[list(shown)].rename(columns=shown).stack().unstack("labels")
    mean = pd.concat({"all": curves.groupby("form", sort=False).mean()}, names=["setting"])
    pd.concat([mean, curves]).round(3).to_csv(folder / "learned-curves.csv")


if __name__ == "__main__":
    main()
