"""Tests of docs/evidence/fresh-plan.md on its kept rows.

    cd scripts/evidence
    python fresh_tables.py            # writes docs/evidence/tables/fresh-*.csv, prints the verdicts
    python fresh_tables.py --check    # changes nothing, reports what would change

Every feature, model and test is the plan's; nothing is chosen here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pandas as pd
from evidence import TABLES, Table, digest_of, p_text, record, table, write_tables
from scipy.special import expit
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import QuantileTransformer
from statsmodels.stats.multitest import multipletests

from lm_polygraph_asmi.analysis import Interval, auroc
from lm_polygraph_asmi.analysis.clusters import two_sided
from lm_polygraph_asmi.analysis.comparison import BootstrapAUROC
from lm_polygraph_asmi.analysis.learned import free_features
from lm_polygraph_asmi.analysis.prr import normalised_prr
from lm_polygraph_asmi.maths.scores import token_scores

FRESH = Path(__file__).parents[2] / "docs/evidence/fresh"
SEED, RESAMPLES, REPEATS, FOLDS = 20261125, 10_000, 10, 5
COMPONENTS, FEWEST, SHUFFLES, PLACES = 32, 100, 20, 7
NOT_WORTH = 0.02
"""An interval that ends below this gain of AUROC counts as no gain worth a probe."""
SETTINGS = {
    "smollm2/babi": "SmolLM2, BabiQA",
    "gemma/babi": "Gemma, BabiQA",
    "qwen05/babi": "Qwen 0.5B, BabiQA",
    "qwen15/babi": "Qwen 1.5B, BabiQA",
    "smollm2/squad-few-shot": "SmolLM2, SQuAD few-shot",
    "qwen05/squad": "Qwen 0.5B, SQuAD",
    "qwen15/squad": "Qwen 1.5B, SQuAD",
}
LABELS = {"contains": "ReferenceInAnswer", "ROUGE-L": "Rouge_rougeL"}


class Block(NamedTuple):
    """Features of a model.

    Attributes:
        columns: (n, k), used as they are.
        states: (n, d) each, reduced to principal components on training rows.
    """

    columns: np.ndarray
    states: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, eq=False)
class Rows:
    """A setting's kept rows; `name` as in `SETTINGS`."""

    name: str
    table: pd.DataFrame

    def select(self, chosen: np.ndarray) -> "Rows":
        return Rows(self.name, self.table[chosen].reset_index(drop=True))

    def wrong(self, label: str) -> np.ndarray:
        return self.table[LABELS[label]].to_numpy(float) < 0.5

    @property
    def data(self) -> str:
        """Settings of the same data share clusters."""
        return "babi" if self.name.endswith("babi") else "squad"

    @property
    def clusters(self) -> np.ndarray:
        return self.table["cluster"].to_numpy(str)

    def tokens(self, name: str) -> list[np.ndarray]:
        return [np.asarray(values, dtype=float) for values in self.table[name]]

    @cached_property
    def simple(self) -> dict[str, np.ndarray]:
        """MSP, perplexity (its logarithm) and mean entropy, nats; higher = more uncertain."""
        likelihoods, entropies = self.tokens("asmi_log_likelihood"), self.tokens("asmi_entropy")
        return {
            "MSP": np.array([-ll.sum() for ll in likelihoods]),
            "perplexity": np.array([-ll.mean() for ll in likelihoods]),
            "entropy": np.array([h.mean() for h in entropies]),
        }

    @cached_property
    def free(self) -> np.ndarray:
        """(n, 11) features of the unmasked pass."""
        tokens = map(self.tokens, ("asmi_log_likelihood", "asmi_entropy"))
        return np.stack([*map(free_features, *tokens, self.table["prompt_tokens"])])

    @cached_property
    def states(self) -> tuple[np.ndarray, ...]:
        return tuple(
            np.vstack(self.table[f"hidden_{part}"].map(np.asarray)).astype(float)
            for part in ("mean", "last")
        )

    def heads(self, permute_masks: bool = False) -> np.ndarray:
        """(n, H x depths) effect of masking each head on the answer's log-probability, nats.

        Args:
            permute_masks: assign each answer's masks to its changes at random (a control).
        """
        rng = np.random.default_rng(SEED)
        depths = [n.rpartition("_")[2] for n in self.table if n.startswith("asmi_kept_")]
        parts = []
        for depth in depths:
            changes = self.tokens(f"asmi_masked_log_likelihood_{depth}")
            rows = []
            for packed, change in zip(self.table[f"asmi_kept_{depth}"], changes, strict=True):
                bits = np.unpackbits(np.asarray(packed, dtype=np.uint8))
                heads = len(bits) // len(change)  # the packing adds fewer than eight bits
                masked = 1.0 - bits[: heads * len(change)].reshape(len(change), heads)
                masked = masked[rng.permutation(len(masked))] if permute_masks else masked
                x, y = masked - masked.mean(0), change - change.mean()
                rows.append(np.linalg.solve(x.T @ x + np.eye(heads), x.T @ y))
            parts.append(np.vstack(rows))
        return np.hstack(parts)

    def fragility(self, scope: str) -> np.ndarray:
        """(n, 3) mean MI and agreement, and Sem-ASMI, at 60 %."""
        prefix = "all " if scope == "all" else ""
        names = (f"{prefix}asmi_mi_d60", f"{prefix}asmi_agreement_d60")
        pairs = zip(*map(self.tokens, names), strict=True)
        return np.array([[mi.mean(), a.mean(), token_scores(mi, a).mean()] for mi, a in pairs])

    @property
    def place(self) -> np.ndarray:
        """(n, 7) which of bAbI's places was answered."""
        return np.eye(PLACES)[self.table["place"].to_numpy(int)]


def collected() -> list[Rows]:
    """Settings with enough rows."""
    read = []
    for name in SETTINGS:
        file = FRESH / f"{name}.parquet"
        if file.exists():
            states = pd.read_parquet(file.with_suffix(".states.parquet"))
            merged = pd.read_parquet(file).merge(states, on="id", validate="one_to_one")
            read.append(Rows(name, merged))
    return [rows for rows in read if len(rows.table) >= FEWEST]


def logits(train: np.ndarray, wrong: np.ndarray, test: np.ndarray, strength: float) -> np.ndarray:
    scale = QuantileTransformer(
        n_quantiles=min(100, len(train)), output_distribution="normal", random_state=0
    ).fit(train)
    model = LogisticRegression(C=strength, max_iter=5000)
    return model.fit(scale.transform(train), wrong).decision_function(scale.transform(test))


def folds_of(clusters: np.ndarray) -> Iterator[np.ndarray]:
    """(n,) fold of each row, one partition of the clusters after the other, without end."""
    codes = np.unique(clusters, return_inverse=True)[1]
    rng = np.random.default_rng(SEED)
    while True:
        yield (rng.permutation(codes.max() + 1) % FOLDS)[codes]


def out_of_fold(
    rows: Rows, wrong: np.ndarray, block: Block, strength: float, repeats: int
) -> np.ndarray:
    """(n,) mean logit of models trained without a row's cluster."""
    total = np.zeros(len(wrong))
    for folds in islice(folds_of(rows.clusters), repeats):
        for fold in range(FOLDS):
            train, test = folds != fold, folds == fold
            parts = [(block.columns[train], block.columns[test])]
            for states in block.states:
                reduced = PCA(min(COMPONENTS, train.sum()), random_state=0).fit(states[train])
                parts.append((reduced.transform(states[train]), reduced.transform(states[test])))
            x_train, x_test = (np.hstack(part) for part in zip(*parts, strict=True))
            total[test] += logits(x_train, wrong[train], x_test, strength)
    return total / repeats


def best_simple(rows: Rows, wrong: np.ndarray, more: np.ndarray | None = None) -> np.ndarray:
    """(n,) mean logit of the simple score that ranks each training fold best."""
    total = np.zeros(len(wrong))
    for folds in islice(folds_of(rows.clusters), REPEATS):
        for fold in range(FOLDS):
            train, test = folds != fold, folds == fold
            _, score = max(
                (abs(auroc(score[train], wrong[train]) - 0.5), name)
                for name, score in rows.simple.items()
            )
            x = rows.simple[score][:, None]
            x = x if more is None else np.hstack([x, more])
            total[test] += logits(x[train], wrong[train], x[test], 1.0)
    return total / REPEATS


class Pair(NamedTuple):
    """Two scores of a setting's rows, (n,), higher = more uncertain."""

    rows: Rows
    first: np.ndarray
    second: np.ndarray


def scored_rows(rows: Rows) -> Rows | None:
    """Rows with scope `all`; None with fewer than `FEWEST`."""
    if "all asmi_mi_d60" not in rows.table:
        return None
    chosen = rows.table["all asmi_mi_d60"].notna().to_numpy()
    return rows.select(chosen) if chosen.sum() >= FEWEST else None


def pairs_of(rows: Rows, label: str) -> dict[str, Pair]:
    """Scores of every comparison of the plan, by its name."""
    wrong, free = rows.wrong(label), rows.free
    heads = rows.heads()

    def fitted(strength: float, *columns: np.ndarray, states: bool = False) -> np.ndarray:
        block = Block(np.hstack(columns), rows.states if states else ())
        return out_of_fold(rows, wrong, block, strength, REPEATS)

    simple, base = best_simple(rows, wrong), fitted(0.05, free)
    hidden = fitted(0.01, free, states=True)
    full = fitted(0.01, free, heads, states=True)
    contrasts = fitted(0.01, free, rows.heads(permute_masks=True), states=True)
    scores = {
        "P1": (simple, full),
        "P2": (hidden, full),
        "free against simple": (simple, base),
        "heads beyond free": (base, fitted(0.02, free, heads)),
        "hidden beyond free": (base, hidden),
        "random contrasts beyond free + hidden": (hidden, contrasts),
    }
    if rows.data == "babi":
        place = rows.place
        with_place = fitted(0.01, free, place, states=True)
        known = fitted(0.01, free, heads, place, states=True)
        scores |= {
            "P1, the answer itself known": (best_simple(rows, wrong, place), known),
            "P2, the answer itself known": (with_place, known),
        }
    pairs = {name: Pair(rows, *both) for name, both in scores.items()}
    part = scored_rows(rows)
    if part is not None:
        wrong_part = part.wrong(label)
        base_part = out_of_fold(part, wrong_part, Block(part.free), 0.05, REPEATS)
        for scope in ("all", "response"):
            fragility, suffix = part.fragility(scope), "" if scope == "all" else ", scope response"
            added = Block(np.hstack([part.free, fragility]))
            with_it = out_of_fold(part, wrong_part, added, 0.05, REPEATS)
            pairs |= {
                f"P3a{suffix}": Pair(part, part.simple["MSP"], fragility[:, 2]),
                f"P3b{suffix}": Pair(part, part.simple["perplexity"], fragility[:, 2]),
                f"P3c{suffix}": Pair(part, base_part, with_it),
            }
    return pairs


class Gain(NamedTuple):
    """AUROC of the second score minus that of the first.

    Attributes:
        first, second: AUROC.
        difference: with its 95 % interval.
        p: two-sided.
        drawn: (resamples,) differences.
    """

    first: float
    second: float
    difference: Interval
    p: float
    drawn: np.ndarray


def _gain(first: float, second: float, drawn: np.ndarray, clusters: int) -> Gain:
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    difference = Interval(second - first, float(low), float(high))
    return Gain(first, second, difference, two_sided(drawn, clusters), drawn)


def gains(pairs: Sequence[Pair], label: str) -> tuple[list[Gain], Gain]:
    """Gain of each setting, and of their mean; settings of the same data share their draws."""
    each = []
    for data in ("babi", "squad"):
        shared = [pair for pair in pairs if pair.rows.data == data]
        if not shared:
            continue
        union = np.unique(np.concatenate([pair.rows.clusters for pair in shared]))
        rng = np.random.default_rng(SEED)
        counts = rng.multinomial(len(union), np.full(len(union), 1 / len(union)), RESAMPLES)
        for pair in shared:
            wrong = pair.rows.wrong(label)
            weights = counts[:, np.searchsorted(union, pair.rows.clusters)]
            drawn = [BootstrapAUROC(score, wrong)(weights) for score in (pair.first, pair.second)]
            values = [auroc(score, wrong) for score in (pair.first, pair.second)]
            each.append(_gain(*values, drawn[1] - drawn[0], len(union)))
    mean = np.mean([gain.drawn for gain in each], axis=0)
    first, second = (float(np.mean([gain[i] for gain in each])) for i in (0, 1))
    return each, _gain(first, second, mean, 10**6)


def verdict(difference: Interval) -> str:
    """The plan's words for a mean difference."""
    if difference.low > 0:
        return "holds"
    if difference.high < NOT_WORTH:
        return "fails"
    return "inconclusive"


def three(interval: Interval) -> str:
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]".replace("-", "−")


def _order(name: str, by_name: Mapping[str, Sequence[Pair]]) -> list[Pair]:
    pairs = by_name[name]
    return [p for data in ("babi", "squad") for p in pairs if p.rows.data == data]


def make_tables() -> dict[str, Table]:
    """Table of the means and table of the settings."""
    means, settings = [], []
    for label in LABELS:
        by_name: dict[str, list[Pair]] = {}
        for rows in collected():
            for name, pair in pairs_of(rows, label).items():
                by_name.setdefault(name, []).append(pair)
        for name in by_name:
            pairs = _order(name, by_name)
            each, mean = gains(pairs, label)
            others = [pair for pair in pairs if not pair.rows.name.startswith("gemma")]
            _, without = gains(others, label) if others else (None, mean)
            means.append(
                [name, label, str(len(pairs)), f"{mean.first:.3f}", f"{mean.second:.3f}",
                 three(mean.difference), p_text(mean.p), verdict(mean.difference),
                 three(without.difference)]
            )  # fmt: skip
            holm = multipletests([gain.p for gain in each], method="holm")[1]
            for pair, gain, adjusted in zip(pairs, each, holm, strict=True):
                rows, wrong = pair.rows, pair.rows.wrong(label)
                prr = [normalised_prr(score, 1.0 - wrong) for score in (pair.first, pair.second)]
                loss = [log_loss(wrong, expit(score)) for score in (pair.first, pair.second)]
                raw = name.startswith(("P3a", "P3b"))  # no probabilities
                settings.append(
                    [SETTINGS[rows.name], name, label,
                     f"{len(wrong)} / {len(set(rows.clusters))}", str(int(wrong.sum())),
                     f"{gain.first:.3f}", f"{gain.second:.3f}", three(gain.difference),
                     p_text(float(adjusted)), f"{prr[1] - prr[0]:+.3f}".replace("-", "−"),
                     "" if raw else f"{loss[1] - loss[0]:+.3f}".replace("-", "−")]
                )  # fmt: skip
    return {
        "fresh means": table(
            ["comparison", "correctness label", "settings", "mean AUROC, first", "second",
             "difference", "p", "by the plan", "difference without Gemma"], means,
        ),
        "fresh settings": table(
            ["setting", "comparison", "correctness label", "answers / clusters", "wrong",
             "AUROC, first", "second", "difference", "p (Holm)", "difference of PRR",
             "of log loss"], settings,
        ),
        "fresh permuted": permuted(),
    }  # fmt: skip


def permuted() -> Table:
    """Head effects permuted across rows: the AUROC that they add by chance, 20 times."""
    lines = []
    for rows in collected():
        wrong, free, heads = rows.wrong("contains"), rows.free, rows.heads()
        rng = np.random.default_rng(SEED)

        def score(added: np.ndarray, rows: Rows = rows, wrong: np.ndarray = wrong) -> float:
            block = Block(np.hstack([rows.free, added]), rows.states)
            return auroc(out_of_fold(rows, wrong, block, 0.01, repeats=1), wrong)

        base, real = score(np.zeros((len(free), 0))), score(heads)
        chance = [score(heads[rng.permutation(len(heads))]) - base for _ in range(SHUFFLES)]
        lines.append(
            [SETTINGS[rows.name], f"{base:.3f}", f"{real - base:+.3f}",
             f"{np.mean(chance):+.3f}", f"{np.max(chance):+.3f}"]
        )  # fmt: skip
    return table(
        ["setting", "AUROC of free + hidden", "heads add", "permuted heads add, mean", "highest"],
        [[text.replace("-", "−") for text in line] for line in lines],
    )


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something differs.")
def main(check: bool) -> None:
    files = sorted(FRESH.glob("*/*.parquet"))
    if not collected():
        raise click.ClickException(f"{FRESH}: no setting has {FEWEST} rows")
    folder = FRESH.parent / TABLES
    made: dict[str, Table] = make_tables()
    shown: Callable[[Any], None] = click.echo
    for line in made["fresh means"].rows:
        shown("  ".join(line))
    stale = write_tables(folder, made, {f.name for f in folder.glob("fresh-*.csv")}, check)
    stale += record(folder, Path(__file__).name, digest_of(files), check)
    shown(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    raise SystemExit(bool(check and stale))


if __name__ == "__main__":
    main()
