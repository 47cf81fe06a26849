"""Recompute the numbers of "Measured again" that README and the page of results state, and the
hours that the page of costs estimates from measured parts (docs/results/parts.csv).

    python scripts/claims.py            # some minutes: the probes are fitted anew
    python scripts/claims.py --quick    # only what needs no fitted model

Prints claim, the page's number and the recomputed one, from the rows in docs/evidence/fresh, and
exits with status 1 where they differ, or where a page states an AUROC that is no claim here.
Features, models and tests are those of docs/evidence/fresh-plan.md.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pandas as pd
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import QuantileTransformer
from statsmodels.stats.multitest import multipletests

from lm_polygraph_asmi.runs.compose import compose_run

ROOT = Path(__file__).parents[1]
FRESH, PARTS = ROOT / "docs/evidence/fresh", ROOT / "docs/results/parts.csv"
SEED, RESAMPLES, REPEATS, FOLDS, COMPONENTS, FEWEST = 20261125, 10_000, 10, 5, 32, 100
SETTINGS = (
    "smollm2/babi", "gemma/babi", "qwen05/babi", "qwen15/babi",
    "smollm2/squad-few-shot", "qwen05/squad", "qwen15/squad",
)  # fmt: skip
LABELS = {"contains": "ReferenceInAnswer", "ROUGE-L": "Rouge_rougeL"}
CLAIMS = {
    "README.md": [
        "trained on {training labels} labels, beats",
        "by {P1, value} over seven settings",
        "{P1 hindsight, value} if the best is chosen in hindsight",
        "its AUROC is {P3a, size} below MSP's",
        "and {P3b, size} below perplexity's",
    ],
    "docs/results/summary.md": [
        "{rows} answers; five folds train on {training labels} of them",
        "→ probe | 7 | {P1, both} | {P1} | {P1, p} | {P1, word} |",
        "→ with heads | 7 | {P2, both} | {P2} | {P2, p} | {P2, word} |",
        "MSP → Sem-ASMI, scope `all` | 5 | {P3a, both} | {P3a} | {P3a, p} | {P3a, word} |",
        "perplexity → Sem-ASMI, scope `all` | 5 | {P3b, both} | {P3b} | {P3b, p} | {P3b, word} |",
        "agreement and Sem-ASMI, scope `all` | 5 | {P3c, both} | {P3c} | {P3c, p} | {P3c, word} |",
        "MSP {P3a response}, perplexity {P3b response}, added {P3c response}.",
        "Sem-ASMI differs by {P3a seven} from MSP and {P3b seven} from perplexity",
        "of 1.5 billion alone, {P3a 1.5B} and {P3b 1.5B}: inconclusive",
        "and P3c have p = {P2, Holm} and {P3c, Holm}.",
        "gain is {P3c Qwen 0.5B, value} there, {P3c without Qwen 0.5B} on the mean of",
        "By ROUGE-L it is {P3c ROUGE-L}, and {P3c ROUGE-L, other folds} under",
        "in hindsight, P1 is {P1 hindsight}; where it may be turned round, {P1 turned}.",
        "is {P1 BabiQA} on BabiQA and {P1 SQuAD} on SQuAD, where Qwen 0.5B has {P1 Qwen, value}.",
        "Without Gemma, whose simple scores rank errors in reverse, P1 is {P1 without Gemma}.",
    ],
    "docs/results/costs.md": [
        "and {rest} for the baselines and",
        "| `asmi_coqa` | {asmi_coqa} | 7,983 | {asmi_coqa, hours} |",
        "`asmi_triviaqa` | {asmi_squad} | 5,000 | {asmi_squad, hours} |",
        "| `asmi_babiqa` | {asmi_babiqa} | 1,000 | {asmi_babiqa, hours} |",
        "| `asmi_depth_sweep` | {asmi_depth_sweep} | 7,983 | {asmi_depth_sweep, hours} |",
        "| `asmi_squad_seed1` | {asmi_squad_seed1} | 5,000 | {asmi_squad_seed1, hours} |",
        "| `asmi_only` | {asmi_only} | 7,983 | {asmi_only, hours} |",
        "| `asmi_triviaqa_k256` | {asmi_triviaqa_k256} | 5,000 | {asmi_triviaqa_k256, hours} |",
        "| `asmi_stability` | {asmi_stability} | 5 × 500 | {asmi_stability, hours} |",
        "| `asmi_heads` | {asmi_heads} | 500 | {asmi_heads, hours} |",
        "| `asmi_grid` | | 75,932 | {asmi_grid, hours} |",
    ],
}
"""Page -> its sentences, with the names of what is recomputed in braces."""
SECTIONS = {
    "README.md": "## What is known",
    "docs/results/summary.md": "## Measured again",
    "docs/results/costs.md": "## Hours and memory, estimated",
}
"""Sections whose every AUROC is a claim."""
COSTED = {
    "asmi_coqa": 7_983, "asmi_squad": 5_000, "asmi_babiqa": 1_000, "asmi_triviaqa": 5_000,
    "asmi_depth_sweep": 7_983, "asmi_squad_seed1": 5_000, "asmi_only": 7_983,
    "asmi_triviaqa_k256": 5_000, "asmi_stability": 5 * 500, "asmi_heads": 500,
}  # fmt: skip
"""Config -> rows that it scores, over all of its seeds."""
NUMBER = r"[-+]?(?:\d*\.)?\d+"
VALUE = rf"((?:< )?{NUMBER}(?: (?:→|or) {NUMBER}| \[{NUMBER}, {NUMBER}\])?|holds(?:, fails)?|fails)"
"""What a page states in place of a name in braces."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a setting."""

    name: str
    table: pd.DataFrame

    def tokens(self, column: str) -> list[np.ndarray]:
        return [np.asarray(values, dtype=float) for values in self.table[column]]

    def wrong(self, label: str) -> np.ndarray:
        return self.table[LABELS[label]].to_numpy(float) < 0.5

    @property
    def data(self) -> str:
        return "BabiQA" if self.name.endswith("babi") else "SQuAD"

    @cached_property
    def clusters(self) -> np.ndarray:
        return self.table["cluster"].to_numpy(str)

    @cached_property
    def simple(self) -> np.ndarray:
        """(n, 3) MSP, perplexity (its logarithm) and mean entropy, nats."""
        pairs = zip(*map(self.tokens, ("asmi_log_likelihood", "asmi_entropy")), strict=True)
        return np.array([[-ll.sum(), -ll.mean(), h.mean()] for ll, h in pairs])

    @cached_property
    def free(self) -> np.ndarray:
        """(n, 11) features of the unmasked pass."""
        tokens = map(self.tokens, ("asmi_log_likelihood", "asmi_entropy"))
        return np.array(
            [
                [*(ll.sum(), ll.mean(), ll.min(), ll[0], ll[-1]),
                 *(h.mean(), h.sum(), h.max(), h[0], len(ll), prompt)]
                for ll, h, prompt in zip(*tokens, self.table["prompt_tokens"], strict=True)
            ]
        )  # fmt: skip

    @cached_property
    def states(self) -> list[np.ndarray]:
        """(n, d) hidden states, mean over the answer and last."""
        return [np.vstack(self.tokens(f"hidden_{part}")) for part in ("mean", "last")]

    @cached_property
    def heads(self) -> np.ndarray:
        """(n, H x depths) effect of masking each head on the answer's log-probability, nats."""
        depths = [name[-3:] for name in self.table if name.startswith("asmi_kept_")]
        return np.hstack([self._heads(depth) for depth in depths])

    def _heads(self, depth: str) -> np.ndarray:
        rows = []
        changes = self.tokens(f"asmi_masked_log_likelihood_{depth}")
        for packed, change in zip(self.table[f"asmi_kept_{depth}"], changes, strict=True):
            bits = np.unpackbits(np.asarray(packed, dtype=np.uint8))
            heads = len(bits) // len(change)  # the packing adds fewer than eight bits
            masked = 1.0 - bits[: heads * len(change)].reshape(len(change), heads)
            x = masked - masked.mean(0)
            rows.append(np.linalg.solve(x.T @ x + np.eye(heads), x.T @ (change - change.mean())))
        return np.vstack(rows)

    def fragility(self, scope: str) -> np.ndarray:
        """(n, 3) mean MI, mean agreement and Sem-ASMI at 60 % depth."""
        prefix = "all " if scope == "all" else ""
        columns = (f"{prefix}asmi_mi_d60", f"{prefix}asmi_agreement_d60")
        pairs = zip(*map(self.tokens, columns), strict=True)
        return np.array([[mi.mean(), a.mean(), (mi * (1 - a)).mean()] for mi, a in pairs])

    @property
    def with_scope_all(self) -> "Rows":
        name = "all asmi_mi_d60"
        chosen = self.table[name].notna() if name in self.table else np.zeros(len(self.table), bool)
        return Rows(self.name, self.table[chosen].reset_index(drop=True))

    def folds(self, other_reading: bool) -> Iterator[np.ndarray]:
        """(n,) fold of each row: its cluster's number at its place of the permutation, modulo 5.

        The other reading is the place at which the permutation has the cluster's number."""
        codes = np.unique(self.clusters, return_inverse=True)[1]
        rng = np.random.default_rng(SEED)
        while True:
            order = rng.permutation(codes.max() + 1)
            yield ((order.argsort() if other_reading else order) % FOLDS)[codes]


def read_rows() -> list[Rows]:
    return [
        Rows(
            name,
            pd.read_parquet(FRESH / f"{name}.parquet").merge(
                pd.read_parquet(FRESH / f"{name}.states.parquet"), on="id", validate="one_to_one"
            ),
        )
        for name in SETTINGS
    ]


def auroc(score: np.ndarray, wrong: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """(draws,) AUROC by comparing all pairs; weights: (draws, n), counts exact in 32 bits."""
    weights = np.ones((1, len(wrong)), np.float32) if weights is None else weights
    high, low = score[wrong][:, None], score[~wrong][None]
    won = ((high > low) + 0.5 * (high == low)).astype(np.float32)
    errors, right = weights[:, wrong], weights[:, ~wrong]
    return ((errors @ won) * right).sum(1, dtype=float) / (errors.sum(1) * right.sum(1))


def strongest(scores: np.ndarray, wrong: np.ndarray) -> tuple[int, float]:
    """The column whose AUROC is farthest from .5, and the sign that makes it higher for errors."""
    ranks = np.array([auroc(score, wrong)[0] - 0.5 for score in scores.T])
    best = int(np.argmax(abs(ranks)))
    return best, float(np.sign(ranks[best]))


def logits(train: np.ndarray, wrong: np.ndarray, test: np.ndarray, strength: float) -> np.ndarray:
    scale = QuantileTransformer(
        n_quantiles=min(100, len(train)), output_distribution="normal", random_state=0
    ).fit(train)
    model = LogisticRegression(C=strength, max_iter=5000).fit(scale.transform(train), wrong)
    return model.decision_function(scale.transform(test))


class Fit(NamedTuple):
    """Scores of rows by models that have not seen their clusters."""

    rows: Rows
    label: str
    other_reading: bool = False

    def _out_of_fold(
        self, features: Callable[[np.ndarray], np.ndarray], strength: float
    ) -> np.ndarray:
        """(n,) mean logit; `features` gives those of all rows, fitted on the training rows."""
        wrong, total = self.rows.wrong(self.label), np.zeros(len(self.rows.table))
        for folds in islice(self.rows.folds(self.other_reading), REPEATS):
            for fold in range(FOLDS):
                train = folds != fold
                x = features(train)
                total[~train] += logits(x[train], wrong[train], x[~train], strength)
        return total / REPEATS

    def columns(self, *columns: np.ndarray) -> np.ndarray:
        table = np.hstack(columns)
        return self._out_of_fold(lambda _: table, 0.05)

    def with_states(self, *columns: np.ndarray) -> np.ndarray:
        def features(train: np.ndarray) -> np.ndarray:
            reduced = [
                PCA(COMPONENTS, random_state=0).fit(states[train]).transform(states)
                for states in self.rows.states
            ]
            return np.hstack([*columns, *reduced])

        return self._out_of_fold(features, 0.01)

    def simple(self) -> np.ndarray:
        """The simple score that ranks each training fold best, either way round."""
        wrong, simple = self.rows.wrong(self.label), self.rows.simple

        def features(train: np.ndarray) -> np.ndarray:
            return simple[:, [strongest(simple[train], wrong[train])[0]]]

        return self._out_of_fold(features, 1.0)


class Pair(NamedTuple):
    """Two scores of a setting's rows."""

    rows: Rows
    label: str
    first: np.ndarray
    second: np.ndarray


class Gain(NamedTuple):
    """Mean AUROC of the first and the second score; interval of their difference; p."""

    first: float
    second: float
    low: float
    high: float
    p: float

    @property
    def value(self) -> float:
        return self.second - self.first


@cache
def draws(clusters: int) -> np.ndarray:
    """(RESAMPLES, clusters) how often each is drawn."""
    chance = np.full(clusters, 1 / clusters)
    counts = np.random.default_rng(SEED).multinomial(clusters, chance, RESAMPLES)
    return counts.astype(np.float32)


def gain(pairs: list[Pair], kept: Callable[[Rows], bool] = lambda _: True) -> Gain:
    """Of the mean over the kept settings; all settings of the same data share their draws."""
    values, drawn = [], []
    for data in sorted({pair.rows.data for pair in pairs}):
        shared = [pair for pair in pairs if pair.rows.data == data]
        union = np.unique(np.concatenate([pair.rows.clusters for pair in shared]))
        for pair in (pair for pair in shared if kept(pair.rows)):
            wrong = pair.rows.wrong(pair.label)
            weights = draws(len(union))[:, np.searchsorted(union, pair.rows.clusters)]
            values.append([auroc(score, wrong)[0] for score in pair[2:]])
            drawn.append(np.subtract(*(auroc(s, wrong, weights) for s in pair[:1:-1])))
    mean = np.mean(drawn, axis=0)
    low, high = np.percentile(mean, [2.5, 97.5])
    p = 2 * min((mean <= 0).mean(), (mean >= 0).mean())
    return Gain(*np.mean(values, axis=0), low, high, min(p, 1.0))


def number(value: float, sign: str = "+", digits: int = 3) -> str:
    return f"{value:{sign}.{digits}f}".replace("0.", ".", 1)


def described(name: str, known: Gain) -> dict[str, str]:
    """The texts that a page may state of a gain."""
    outcomes = {"holds": known.low > 0, "fails": known.high < 0.02}  # "no gain worth a probe"
    interval = [number(end) for end in (known.low, known.high)]
    return {
        name: f"{number(known.value)} [{', '.join(interval)}]",
        f"{name}, value": number(known.value, "-" if known.value > 0 else "+"),
        f"{name}, size": number(abs(known.value), "-", 2),
        f"{name}, both": f"{number(known.first, '-')} → {number(known.second, '-')}",
        f"{name}, p": "< .001" if known.p < 0.001 else number(known.p, "-"),
        f"{name}, word": ", ".join(w for w, found in outcomes.items() if found) or "inconclusive",
    }


def raw_claims(all_rows: list[Rows]) -> dict[str, str]:
    """P3a and P3b, and how many rows there are."""
    sizes = sorted({len(rows.table) for rows in all_rows})
    trained = [size * (FOLDS - 1) // FOLDS for size in sizes]
    texts = {
        "rows": " or ".join(map(str, sizes)),
        "training labels": " or ".join(map(str, trained)),
    }
    part = [rows.with_scope_all for rows in all_rows]
    part = [rows for rows in part if len(rows.table) >= FEWEST]
    for name, column in (("P3a", 0), ("P3b", 1)):

        def pairs(chosen: list[Rows], scope: str, column: int = column) -> list[Pair]:
            return [
                Pair(r, "contains", r.simple[:, column], r.fragility(scope)[:, 2]) for r in chosen
            ]

        seven = pairs(all_rows, "response")
        texts |= described(name, gain(pairs(part, "all")))
        texts |= described(f"{name} response", gain(pairs(part, "response")))
        texts |= described(f"{name} seven", gain(seven))
        texts |= described(f"{name} 1.5B", gain(seven, lambda r: r.name.startswith("qwen15")))
    return texts


def cost_claims() -> dict[str, str]:
    """Seconds a row and hours of the shipped configs, estimated: the sum of measured parts."""
    greedy, samples, unmasked, masked, row = pd.read_csv(PARTS)["seconds"]
    rest = row - 11 * 20 * greedy / 6 - masked  # all 17 baselines, and the quality metric
    texts, total = {"rest": f"{rest:.1f}"}, 0.0
    for name, rows in COSTED.items():
        answers = {"asmi_stability": ["answers=RUN"], "asmi_heads": ["asmi.answers=RUN"]}
        config = compose_run(name, overrides=answers.get(name, []))
        estimators, asmi = [entry.name for entry in config.estimators], config.asmi
        each = (masked - unmasked) * (asmi.num_masks or 40) / 40
        seconds = unmasked + each * len(asmi.depths)
        seconds += 0 if asmi.answers else greedy / 6 * config.max_new_tokens
        if any("adapt" in estimator for estimator in estimators):
            seconds += samples / 6 * config.max_new_tokens
        seconds += 0 if all("asmi" in estimator for estimator in estimators) else rest
        texts |= {name: f"{seconds:.1f}", f"{name}, hours": f"{seconds * rows / 3600:.1f}"}
        total += seconds * rows / 3600 if name in list(COSTED)[:4] else 0
    return texts | {"asmi_grid, hours": f"{7 * total:.0f}"}  # three models take twice as long


def fitted_claims(all_rows: list[Rows]) -> dict[str, str]:
    """P1, P2 and P3c."""
    texts, p1, p2, hindsight, turned = dict[str, str](), [], [], [], []
    for rows in all_rows:
        fit = Fit(rows, "contains")
        full = fit.with_states(rows.free, rows.heads)
        p1.append(Pair(rows, "contains", fit.simple(), full))
        wrong, simple = rows.wrong("contains"), rows.simple
        best = max(simple.T, key=lambda score: auroc(score, wrong)[0])
        hindsight.append(Pair(rows, "contains", best, full))
        column, sign = strongest(simple, wrong)
        turned.append(Pair(rows, "contains", sign * simple[:, column], full))
        p2.append(Pair(rows, "contains", fit.with_states(rows.free), full))
    part = [rows.with_scope_all for rows in all_rows]
    part = [rows for rows in part if len(rows.table) >= FEWEST]

    def p3c(label: str, other_reading: bool = False, scope: str = "all") -> list[Pair]:
        fits = [Fit(rows, label, other_reading) for rows in part]
        return [
            Pair(f.rows, label, f.columns(f.rows.free),
                 f.columns(f.rows.free, f.rows.fragility(scope)))
            for f in fits
        ]  # fmt: skip

    added = p3c("contains")
    known = {
        "P1": gain(p1),
        "P2": gain(p2),
        "P3c": gain(added),
        "P1 hindsight": gain(hindsight),
        "P1 turned": gain(turned),
        "P1 BabiQA": gain(p1, lambda rows: rows.data == "BabiQA"),
        "P1 SQuAD": gain(p1, lambda rows: rows.data == "SQuAD"),
        "P1 Qwen": gain(p1, lambda rows: rows.name == "qwen05/squad"),
        "P1 without Gemma": gain(p1, lambda rows: rows.name != "gemma/babi"),
        "P3c response": gain(p3c("contains", scope="response")),
        "P3c Qwen 0.5B": gain(added, lambda rows: rows.name == "qwen05/babi"),
        "P3c without Qwen 0.5B": gain(added, lambda rows: rows.name != "qwen05/babi"),
        "P3c ROUGE-L": gain(p3c("ROUGE-L")),
        "P3c ROUGE-L, other folds": gain(p3c("ROUGE-L", other_reading=True)),
    }
    for name, change in known.items():
        texts |= described(name, change)
    tested = ("P1", "P2", "P3c")
    holm = multipletests([known[name].p for name in tested], method="holm")[1]
    return texts | {f"{n}, Holm": number(p, "-") for n, p in zip(tested, holm, strict=True)}


def stated(page: str) -> list[tuple[str, str]]:
    """(name, the page's number) of each claim.

    Raises:
        click.ClickException: a sentence is not on the page, or an AUROC of the page is no claim.
    """
    section = (ROOT / page).read_text().partition(SECTIONS[page])[2].partition("\n## ")[0]
    section = " ".join(section.replace("−", "-").split())
    known, left = [], section
    for sentence in CLAIMS[page]:
        parts = re.split(r"\{(.+?)\}", sentence)
        match = re.search(
            "".join(VALUE if i % 2 else re.escape(part) for i, part in enumerate(parts)), section
        )
        if match is None:
            raise click.ClickException(f"{page} does not state: {sentence}")
        known += zip(parts[1::2], match.groups(), strict=True)
        left = left.replace(match[0], "")
    if more := re.findall(r"[+-]?\.\d{3}\b", left):
        raise click.ClickException(f"{page} states more than is recomputed: {', '.join(more)}")
    return known


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Only what needs no fitted model.")
@click.option("--check", is_flag=True, help="Print only what differs.")
def main(quick: bool, check: bool) -> None:
    claims = [(page, *claim) for page in CLAIMS for claim in stated(page)]
    rows = read_rows()
    texts = raw_claims(rows) | cost_claims() | ({} if quick else fitted_claims(rows))
    lines = [(*claim, texts[claim[1]]) for claim in claims if claim[1] in texts]
    differs = [line for line in lines if line[2] != line[3]]
    shown = pd.DataFrame(differs if check else lines, columns=["page", "claim", "page's", "rows"])
    if len(shown):
        click.echo(shown.to_string(index=False))
    click.echo(f"{len(lines)} claims, {len(differs)} differ")
    raise SystemExit(bool(differs))


if __name__ == "__main__":
    main()
