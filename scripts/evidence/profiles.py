"""Does a profile of fragility, learned from labels, add to free baselines?

    python scripts/evidence/profiles.py keep OUT.jsonl docs/evidence/profile/MODEL/SETTING.parquet
    python scripts/evidence/profiles.py tables          # writes docs/evidence/tables/profile-*.csv
    python scripts/evidence/profiles.py tables --check  # changes nothing, reports what would change

The plan, with data, features, tests and controls: docs/evidence/profile-plan.md. Answers are made
by profiles_collect.py; no prompt, answer or gold answer is kept.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pandas as pd
from evidence import (
    MODELS,
    TABLES,
    Table,
    digest_of,
    free_features,
    made_from,
    p_text,
    record,
    signed,
    table,
    write_tables,
)
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer, StandardScaler
from statsmodels.stats.multitest import multipletests

from lm_polygraph_asmi.analysis import Interval, Labelled, auroc
from lm_polygraph_asmi.analysis.clusters import percentile_interval, two_sided
from lm_polygraph_asmi.analysis.comparison import BootstrapAUROC, drawn_prr
from lm_polygraph_asmi.maths.scores import token_scores

EVIDENCE = Path(__file__).parents[2] / "docs/evidence"
SCRIPT = "profiles.py"
LABELS = {"contains": "ReferenceInAnswer", "ROUGE-L": "Rouge_rougeL"}
RESAMPLES, SEED, REPEATS, FOLDS = 10_000, 20260711, 10, 5
STRENGTH, PROBE_STRENGTH = 0.05, 0.01
COMPONENTS = 32
SHUFFLES = 20
EARLIER_RUNS = ("depths", "again")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
"""Of bAbI task 1."""


class Fresh(NamedTuple):
    """A setting of fresh answers: its name, that of the training answers, and their depths."""

    model: str
    name: str
    prompt: str
    trained_on: str
    depths: tuple[int, ...] = (60, 70, 90)


SETTINGS = (
    Fresh("qwen05", "babi", "BabiQA", "babi"),
    Fresh("smollm2", "babi", "BabiQA", "babi"),
    Fresh("qwen15", "babi", "BabiQA", "babi"),
    Fresh("gemma", "babi", "BabiQA", "babi"),
    Fresh("qwen05", "squad", "SQuAD, zero-shot", "xquad"),
    Fresh("smollm2", "squad-few-shot", "SQuAD, few-shot", "xquad-few-shot"),
    Fresh("qwen15", "squad", "SQuAD, zero-shot", "xquad", (60,)),
)


@dataclass(frozen=True, eq=False)
class Answers:
    """Features and labels of a setting's answers, a row each."""

    rows: pd.DataFrame
    depths: tuple[int, ...]

    def tokens(self, name: str) -> list[np.ndarray]:
        return [np.asarray(values, dtype=float) for values in self.rows[name]]

    def wrong(self, label: str) -> np.ndarray:
        column = LABELS[label]
        column = column if column in self.rows else f"quality {column}"
        return self.rows[column].to_numpy(float) < 0.5

    @property
    def clusters(self) -> list[str]:
        return list(self.rows["cluster"])

    @cached_property
    def free(self) -> np.ndarray:
        tokens = map(self.tokens, ("asmi_log_likelihood", "asmi_entropy"))
        return free_features(*tokens, self.rows["prompt_tokens"].to_numpy(float))

    def fragility(self, prefix: str = "") -> np.ndarray:
        """13 features per depth; `prefix` "mlp " selects those of masked MLP inputs."""
        return np.hstack([self._at_depth(depth, prefix) for depth in self.depths])

    def _at_depth(self, depth: int, prefix: str) -> np.ndarray:
        names = ("mi", "agreement", "majority")
        columns = [self.tokens(f"{prefix}asmi_{name}_d{depth}") for name in names]
        rows = []
        for mi, agreement, majority in zip(*columns, strict=True):
            summaries = [
                f for v in (mi, agreement, majority) for f in (v.mean(), v.max(), v.sum(), v[0])
            ]
            rows.append([token_scores(mi, agreement).mean(), *summaries])
        return np.array(rows)

    @cached_property
    def early(self) -> np.ndarray:
        """Features of log-likelihood and entropy read out after the masked layers, 8 per depth."""
        parts = []
        for depth in self.depths:
            log_likelihood = self.tokens(f"early_log_likelihood_d{depth}")
            entropy = self.tokens(f"early_entropy_d{depth}")
            parts.append(
                [
                    [ll.mean(), ll.min(), ll.sum(), ll[0], h.mean(), h.max(), h.sum(), h[0]]
                    for ll, h in zip(log_likelihood, entropy, strict=True)
                ]
            )
        return np.hstack(parts)

    @property
    def named_place(self) -> np.ndarray:
        """One-hot place that the answer names; the last column is any other answer."""
        return np.eye(len(PLACES) + 1)[self.rows["place"]]

    @property
    def hidden(self) -> np.ndarray:
        return np.vstack(self.rows["hidden"])

    @property
    def heads(self) -> np.ndarray:
        """Effect of masking each head on the answer's log-probability."""
        return np.hstack(
            [np.vstack(self.rows[f"asmi_head_effects_d{depth}"]) for depth in self.depths]
        )


def fresh_answers(setting: Fresh) -> Answers | None:
    file = EVIDENCE / "profile" / setting.model / f"{setting.name}.parquet"
    return Answers(pd.read_parquet(file), setting.depths) if file.exists() else None


def training_answers(setting: Fresh) -> Answers:
    """The training answers of the plan; on bAbI, questions on one story share a cluster.

    With three depths, answers that earlier runs had scored at other depths are left out.
    """
    rows = pd.read_parquet(EVIDENCE / setting.model / f"{setting.trained_on}.sources.parquet")
    if len(setting.depths) > 1:
        for run in EARLIER_RUNS:
            file = EVIDENCE / setting.model / f"{setting.trained_on}.{run}.parquet"
            if file.exists():
                scored = pd.read_parquet(file, columns=["id"])["id"]
                rows = rows[~rows["id"].isin(scored)]
        deeper = pd.read_parquet(EVIDENCE / setting.model / f"{setting.trained_on}.deeper.parquet")
        new_columns = [name for name in deeper if "_d70" in name or "_d90" in name]
        rows = rows.merge(deeper[["id", *new_columns]], on="id")
    if setting.name == "babi":
        rows["cluster"] = [f"story {int(row_id.split(':')[1]) // 5}" for row_id in rows["id"]]
    return Answers(rows, setting.depths)


def fitted(features: np.ndarray, wrong: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Function that predicts the logit of an error, fitted to labelled answers."""
    scale = QuantileTransformer(
        n_quantiles=min(100, len(features)), output_distribution="normal", random_state=0
    )
    model = make_pipeline(scale, LogisticRegression(C=STRENGTH, max_iter=5000))
    return model.fit(features, wrong).decision_function


def probe(hidden: np.ndarray, wrong: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    model = make_pipeline(StandardScaler(), LogisticRegression(C=PROBE_STRENGTH, max_iter=5000))
    return model.fit(hidden, wrong).decision_function


def sparse(features: np.ndarray, wrong: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    scale = QuantileTransformer(
        n_quantiles=min(100, len(features)), output_distribution="normal", random_state=0
    )
    lasso = LogisticRegression(C=0.1, l1_ratio=1.0, solver="liblinear", max_iter=5000)
    return make_pipeline(scale, lasso).fit(features, wrong).decision_function


Learner = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


def folds_of(clusters: list[str], repeats: int, seed: int) -> Iterator[np.ndarray]:
    codes = np.unique(clusters, return_inverse=True)[1]
    rng = np.random.default_rng(seed)
    for _ in range(repeats):
        yield (rng.permutation(codes.max() + 1) % FOLDS)[codes]


def out_of_fold(
    features: np.ndarray,
    wrong: np.ndarray,
    clusters: list[str],
    hidden: np.ndarray | None = None,
    repeats: int = REPEATS,
    learner: Learner = fitted,
    seed: int = SEED,
) -> np.ndarray:
    """(n,) mean logit of models trained without a row's cluster.

    Args:
        hidden: adds the logit of a probe on these states as one feature, itself out of fold.
    """
    logits = np.zeros(len(wrong))
    for folds in folds_of(clusters, repeats, seed):
        for fold in range(FOLDS):
            train, test = folds != fold, folds == fold
            x_train, x_test = features[train], features[test]
            if hidden is not None:
                inner = [c for c, chosen in zip(clusters, train, strict=True) if chosen]
                probe_logits = out_of_fold(
                    hidden[train], wrong[train], inner, repeats=1, learner=probe, seed=seed
                )
                x_train = np.column_stack([x_train, probe_logits])
                x_test = np.column_stack([x_test, probe(hidden[train], wrong[train])(hidden[test])])
            logits[test] += learner(x_train, wrong[train])(x_test)
    return logits / repeats


class Gain(NamedTuple):
    """A second model against a first one, on the same answers.

    Attributes:
        first, second: AUROC.
        auroc, prr, log_loss: second minus first; log loss first minus second, so that higher is
            always better.
        p: two-sided, of `auroc`.
    """

    first: float
    second: float
    auroc: Interval
    prr: Interval
    log_loss: Interval
    p: float


def compare(first: np.ndarray, second: np.ndarray, wrong: np.ndarray, clusters: list[str]) -> Gain:
    """Compare two models, paired over resampled clusters."""
    losses = [np.logaddexp(0, np.where(wrong, -score, score)) for score in (first, second)]
    areas = [BootstrapAUROC(score, wrong) for score in (first, second)]
    drawn_area, drawn_loss = [], []
    answers = Labelled(wrong, clusters, resamples=RESAMPLES, seed=SEED)
    for counts in answers.draws():
        drawn_area.append(areas[1](counts) - areas[0](counts))
        drawn_loss.append(counts @ (losses[0] - losses[1]) / counts.sum(1))
    value = {name: auroc(s, wrong) for name, s in (("a", first), ("b", second))}
    n, area = answers.n_clusters, np.concatenate(drawn_area)
    ranks, draws = drawn_prr({"a": first, "b": second}, answers)
    return Gain(
        value["a"],
        value["b"],
        percentile_interval(value["b"] - value["a"], area, n),
        percentile_interval(ranks["b"] - ranks["a"], draws["b"] - draws["a"], n),
        percentile_interval(float((losses[0] - losses[1]).mean()), np.concatenate(drawn_loss), n),
        two_sided(area, n),
    )


def primary(train: Answers, test: Answers, label: str) -> Gain:
    """Gain of fragility features; trained on the training answers, tested on fresh ones."""
    wrong = train.wrong(label)
    logits = [
        fitted(x_train, wrong)(x_test)
        for x_train, x_test in (
            (train.free, test.free),
            (
                np.hstack([train.free, train.fragility()]),
                np.hstack([test.free, test.fragility()]),
            ),
        )
    ]
    return compare(*logits, test.wrong(label), test.clusters)


def collected() -> list[tuple[Fresh, Answers]]:
    pairs = [(setting, fresh_answers(setting)) for setting in SETTINGS]
    return [(setting, answers) for setting, answers in pairs if answers is not None]


def _name(setting: Fresh) -> str:
    return f"{MODELS[setting.model].name}, {setting.prompt}"


def primary_table() -> Table:
    rows, gains = [], {}
    for setting, test in collected():
        for label in LABELS:
            gains[setting, label] = primary(training_answers(setting), test, label)
    adjusted = {}
    for label in LABELS:
        keys = [key for key in gains if key[1] == label]
        values = multipletests([gains[key].p for key in keys], method="holm")[1]
        adjusted |= dict(zip(keys, values, strict=True))
    for setting, test in collected():
        for label in LABELS:
            gain, wrong = gains[setting, label], test.wrong(label)
            rows.append(
                [_name(setting), label, f"{len(wrong)} / {len(set(test.clusters))}",
                 str(int(wrong.sum())), f"{gain.first:.3f}", f"{gain.second:.3f}",
                 signed(gain.auroc), p_text(adjusted[setting, label]), signed(gain.log_loss),
                 signed(gain.prr)]
            )  # fmt: skip
    columns = [
        "setting", "correctness label", "answers / clusters", "wrong", "AUROC of free features",
        "AUROC of free + fragility features", "gain of AUROC", "p of that gain (Holm)",
        "gain of log loss", "gain of PRR",
    ]  # fmt: skip
    return table(columns, rows)


def transfer_table() -> Table:
    """Trained on the same model's other data set."""
    rows = []
    for setting, test in collected():
        for other in SETTINGS:
            if other.model == setting.model and other.name != setting.name:
                depths = min(setting.depths, other.depths, key=len)
                train = Answers(training_answers(other).rows, depths)
                gain = primary(train, Answers(test.rows, depths), "contains")
                rows.append(
                    [_name(setting), other.prompt, f"{gain.first:.3f}", f"{gain.second:.3f}",
                     signed(gain.auroc)]
                )  # fmt: skip
    columns = ["AUROC of free features", "AUROC of free + fragility features", "gain of AUROC"]
    return table(["tested on", "trained on", *columns], rows)


def controls(test: Answers, label: str, mlp: Answers | None) -> Iterator[tuple[str, Gain]]:
    """Gains in cross-validation within the fresh answers."""
    wrong, clusters = test.wrong(label), test.clusters
    free, fragility, hidden = test.free, test.fragility(), test.hidden

    def score(*parts: np.ndarray, states: np.ndarray | None = None) -> np.ndarray:
        return out_of_fold(np.hstack(parts), wrong, clusters, states)

    def against(first: np.ndarray, second: np.ndarray) -> Gain:
        return compare(first, second, wrong, clusters)

    base, both = score(free), score(free, fragility)
    yield "fragility beyond free", against(base, both)
    if "place" in test.rows:
        place = test.named_place
        yield (
            "fragility beyond free and the answer itself (a)",
            against(score(free, place), score(free, place, fragility)),
        )
    probed = score(free, states=hidden)
    everything = score(free, fragility, states=hidden)
    yield "probe beyond free (b)", against(base, probed)
    yield "fragility beyond free and probe (b)", against(probed, everything)
    yield "probe beyond free and fragility (b)", against(both, everything)
    yield "early read-outs beyond free (e)", against(base, score(free, test.early))
    rng = np.random.default_rng(SEED)
    shuffled = [
        auroc(
            out_of_fold(
                np.hstack([free, fragility[rng.permutation(len(free))]]), wrong, clusters, None, 1
            ),
            wrong,
        )
        for _ in range(SHUFFLES)
    ]
    value, spread = float(np.mean(shuffled)), np.percentile(shuffled, [2.5, 97.5])
    first = auroc(base, wrong)
    none = Interval(float("nan"), float("nan"), float("nan"))
    yield (
        "shuffled fragility beyond free (d)",
        Gain(first, value, Interval(value - first, *(spread - first)), none, none, float("nan")),
    )
    if mlp is not None:
        same = Answers(test.rows.set_index("id").loc[mlp.rows["id"]].reset_index(), test.depths)
        errors = same.wrong(label)
        models = [
            out_of_fold(np.hstack(parts), errors, same.clusters)
            for parts in (
                [same.free],
                [same.free, same.fragility()],
                [same.free, mlp.fragility("mlp ")],
            )
        ]
        for added, logits in (("fragility", models[1]), ("MLP inputs", models[2])):
            name = f"{added} beyond free, on {len(errors)} answers (c)"
            yield name, compare(models[0], logits, errors, same.clusters)
    yield "single heads beyond free, sparse", compare(
        base, out_of_fold(np.hstack([free, test.heads]), wrong, clusters, learner=sparse),
        wrong, clusters,
    )  # fmt: skip


def controls_table() -> Table:
    rows = []
    for setting, test in collected():
        file = EVIDENCE / "profile" / setting.model / f"{setting.name}.mlp.parquet"
        mlp = Answers(pd.read_parquet(file), setting.depths) if file.exists() else None
        for name, gain in controls(test, "contains", mlp):
            rows.append(
                [_name(setting), name, f"{gain.first:.3f}", f"{gain.second:.3f}",
                 signed(gain.auroc)]
            )  # fmt: skip
    columns = ["setting", "what is added", "AUROC without it", "AUROC with it", "gain of AUROC"]
    return table(columns, rows)


TABLE_MAKERS: dict[str, Callable[[], Table]] = {
    "profile primary": primary_table,
    "profile transfer": transfer_table,
    "profile controls": controls_table,
}


def read_files() -> list[Path]:
    """Files that the tables are made from: fresh answers and training answers."""
    files = sorted((EVIDENCE / "profile").glob("*/*.parquet"))
    for setting in SETTINGS:
        for run in ("sources", "deeper", *EARLIER_RUNS):
            files.append(EVIDENCE / setting.model / f"{setting.trained_on}.{run}.parquet")
    return [file for file in dict.fromkeys(files) if file.exists()]


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("lines", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def keep(lines: Path, out: Path) -> None:
    """Save a small table of collected answers."""
    rows = pd.DataFrame([json.loads(line) for line in lines.open()])
    if lines.suffixes[-2:] == [".mlp", ".jsonl"]:
        rows = rows[["id", *(c for c in rows if c.startswith("mlp asmi_") and "settings" not in c)]]
    else:
        if out.stem == "babi":  # six places, and anything else
            common = rows["answer"].value_counts().index[:6].sort_values()
            rows["place"] = [
                dict(zip(common, range(6), strict=True)).get(a, 6) for a in rows.answer
            ]
        parts = [np.vstack(rows[f"hidden_{part}_d60"]) for part in ("mean", "last")]
        size = min(COMPONENTS, len(rows))
        reduced = np.hstack([PCA(size, random_state=0).fit_transform(part) for part in parts])
        rows["hidden"] = list(reduced.astype(np.float32))
        settings = [name for name in rows if "settings" in name]
        rows = rows.drop(columns=["answer", *settings, *rows.filter(like="hidden_").columns])
    for name in rows.columns[[isinstance(value, list) for value in rows.iloc[0]]]:
        rows[name] = [np.asarray(values, dtype=np.float32) for values in rows[name]]
    out.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(out, compression="zstd", compression_level=19)
    click.echo(f"{out}: {len(rows)} answers, {out.stat().st_size / 1e3:.0f} kB")


@main.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something differs.")
@click.option("--quick", is_flag=True, help="With --check: compute nothing.")
def tables(check: bool, quick: bool) -> None:
    """Compute all tables of the collected settings and write them as CSV files."""
    folder, current = EVIDENCE / TABLES, digest_of(read_files())
    if check and quick:
        stale = [] if made_from(folder).get(SCRIPT) == current else ["profile tables"]
    else:
        old = {file.name for file in folder.glob("profile-*.csv")}
        stale = write_tables(
            folder, {name: make() for name, make in TABLE_MAKERS.items()}, old, check
        )
        stale += record(folder, SCRIPT, current, check)
    click.echo(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'nothing'}")
    raise SystemExit(bool(check and stale))


if __name__ == "__main__":
    main()
