"""Runs grouped into settings (model x questions x prompt), with all methods on the same rows."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.right import below_right
from lm_polygraph_asmi.config import ASMIConfig, depth_key
from lm_polygraph_asmi.core.scores import aggregate, token_scores
from lm_polygraph_asmi.results.runs import MSP, Run, load_run, manager_files

PREFERRED_METRIC = "AlignScore"
SEMANTIC_ENTROPY, ENTROPY = "SemanticEntropy", "MeanTokenEntropy"


class Unavailable(ValueError):
    """A setting lacks data that an item of the report needs. The message names the data."""


def _tokens_of(name: str) -> "cached_property[list[np.ndarray] | None]":
    """A field of `asmi` at the operating depth, for each counted token; see `RunGroup.tokens`."""
    return cached_property(lambda group: group.tokens(group.masked(name)))


def _mean_of(name: str) -> "cached_property[np.ndarray | None]":
    """The mean over an answer's tokens of a field of `asmi` at the operating depth."""
    return cached_property(
        lambda group: group._score_or(None, group.tokens(group.masked(name)), "mean")
    )


@dataclass(frozen=True, eq=False)
class RunGroup:
    """One model's answers to one dataset with one prompt, and all runs that have these answers."""

    model: str  # name in tables, like `dataset`
    dataset: str
    suffix: str  # distinguishes several settings of one model and dataset; usually empty
    runs: tuple[Run, ...]  # all runs with these answers; token statistics are from `source`
    run: Run  # the runs joined into one, with all their methods
    metric: str  # the quality metric in use
    depth: float  # the operating depth
    rows: np.ndarray  # (n,) rows in use: quality and scores of all methods are finite
    notes: tuple[str, ...]  # what was left out, and why
    operating: ASMIConfig | None = None  # settings of the operating variants; None: the first one's
    right_from: float | None = None  # lowest quality of a right answer; None: 0.5 in [0, 1]
    computed: dict[Any, Any] = field(default_factory=dict, init=False)  # values cached by `once`

    @property
    def label(self) -> str:
        return f"{self.model}, {self.dataset}{self.suffix}"

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Scores (n, methods), higher = more uncertain."""
        return self.run.scores.iloc[self.rows].reset_index(drop=True)

    @cached_property
    def quality(self) -> np.ndarray:
        return self.run.quality[self.metric].to_numpy(dtype=float)[self.rows]

    @cached_property
    def wrong(self) -> np.ndarray:
        """(n,) True if the quality is below `right_from`; Unavailable if its scale is unknown."""
        try:
            named = [below_right(value, self.right_from, self.metric) for value in self.quality]
        except ValueError as error:
            raise Unavailable(f"{self.run.path}: {error}, or name another metric") from error
        return np.array(named, dtype=bool)

    @cached_property
    def clusters(self) -> list[str]:
        """Cluster keys of the rows in use; see `Run.cluster_keys`."""
        return [self.run.cluster_keys[i] for i in self.rows]

    @cached_property
    def answers(self) -> Labelled:
        """Labels, quality and clusters of the rows in use."""
        return Labelled(self.wrong, self.clusters, self.quality)

    @cached_property
    def ids(self) -> list[str] | None:
        """Ids of the rows in use; None if no manifest records them."""
        ids = self.run.ids
        return ids and [ids[i] for i in self.rows]

    @property
    def closed_book(self) -> bool:
        return bool(self.run.recorded("dataset").get("closed_book"))

    @cached_property
    def grounded(self) -> bool | None:
        """Whether answers should come from a given context; None if this is unknown."""
        return False if self.closed_book else self.run.recorded("dataset").get("grounded")

    @cached_property
    def methods(self) -> dict[str, ASMIConfig]:
        """Settings of ASMI's scores by name, in the order of the scores."""
        configs = self.run.methods
        return {name: configs[name] for name in self.scores if name in configs}

    @cached_property
    def _operating(self) -> ASMIConfig:
        """Settings of the operating variants: those of the first score at the operating depth.

        Scores with settings near to the defaults come first, so that the order of the runs does not
        matter.
        """
        at_depth = [c for c in self.methods.values() if same_depth(c.depth, self.depth)]
        at_depth.sort(key=lambda c: (c.top_k != ASMIConfig.top_k, len(c.describe())))
        return self.operating or next(iter(at_depth), ASMIConfig(depth=self.depth))

    @cached_property
    def variants(self) -> dict[str, str]:
        """Symbol -> method, for methods at the operating depth with the operating settings."""
        by_symbol: dict[str, str] = {}
        for method, config in self.methods.items():
            if same_depth(config.depth, self.depth) and config.same_but(self._operating, "method"):
                by_symbol.setdefault(config.symbol, method)
        return by_symbol

    @cached_property
    def baselines(self) -> list[str]:
        """All methods except ASMI, Sem-ASMI and Adapt-ASMI; others of this package count."""
        return [method for method in self.scores if method not in self.methods]

    def need(self, *names: str) -> list[Any]:
        """Attributes of these names, such as "mi_tokens". Raises Unavailable if one is None."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise Unavailable(f"{', '.join(missing)} not saved, or not finite for every row")
        return [getattr(self, name) for name in names]

    def need_errors(self) -> None:
        """Raise Unavailable unless there are both right and wrong answers."""
        if self.wrong.all() or not self.wrong.any():
            raise Unavailable(f"all answers are {'wrong' if self.wrong.all() else 'right'}")

    def score(self, method: str) -> np.ndarray:
        return self.scores[method].to_numpy(dtype=float)

    def _score_or(
        self, method: str | None, tokens: list[np.ndarray] | None, aggregation: str
    ) -> np.ndarray | None:
        """A method's score if a run has it, or else the aggregated tokens; None without both."""
        if method in self.scores:
            return self.score(str(method))
        return None if tokens is None else np.array([aggregate(row, aggregation) for row in tokens])

    @cached_property
    def msp(self) -> np.ndarray | None:
        """Negative log-likelihood of the answer, nats: LM-Polygraph's, or else from ASMI's pass."""
        likelihoods = self.tokens(self.saved("asmi_log_likelihood"))
        return self._score_or(MSP, likelihoods and [-answer for answer in likelihoods], "sum")

    @cached_property
    def entropy(self) -> np.ndarray | None:
        """Mean token entropy of the answer, nats: LM-Polygraph's, or else from ASMI's pass."""
        return self._score_or(ENTROPY, self.tokens(self.saved("asmi_entropy")), "mean")

    @cached_property
    def u_sem(self) -> np.ndarray | None:
        """Sem-ASMI, nats: the estimator's score, or else computed from saved tokens."""
        return self._score_or(
            self.variants.get("Sem-ASMI"), self.u_tokens, self._operating.aggregation
        )

    @cached_property
    def mi(self) -> np.ndarray | None:
        """ASMI, nats: the estimator's score, or else computed from saved tokens."""
        return self._score_or(
            self.variants.get("ASMI"), self.mi_tokens, self._operating.aggregation
        )

    entropy_of_mean = _mean_of("entropy_of_mean")  # mean over tokens of H(p_bar_t), nats
    mean_entropy = _mean_of("mean_entropy")  # mean over tokens and masks of H(p_t), nats
    agreement_tokens = _tokens_of("agreement")
    mi_tokens = _tokens_of("mi")

    @cached_property
    def u_tokens(self) -> list[np.ndarray] | None:
        """MI_t (1 - A_t) of every counted token, nats."""
        if self.mi_tokens is None or self.agreement_tokens is None:
            return None
        return list(map(token_scores, self.mi_tokens, self.agreement_tokens))

    @cached_property
    def source(self) -> Run | None:
        """The run that has the operating variants. Token statistics are read from it."""
        method = next(iter(self.variants.values()), None)
        runs = (r for r in self.runs if (method in r.scores if method else r.at(self.depth)))
        return next(runs, None)

    def saved(self, name: str) -> list[Any] | None:
        """A statistic of the rows in use, from the first run that saved it for all rows."""
        runs = (run for run in self.runs if not run.lacks([name]))
        return next(([run.stats[name][i] for i in self.rows] for run in runs), None)

    def masked(self, name: str, run: Run | None = None) -> list[Any] | None:
        """A field of `asmi` of the rows in use at the operating depth, from `run` or `source`."""
        run = run or self.source
        rows = run and run.at(self.depth, name)
        return [rows[i][name] for i in self.rows] if rows else None

    def mi_of(self, method: str) -> list[np.ndarray] | None:
        """MI_t of all tokens at the operating depth, from a run that has this score; or None."""
        runs = (run for run in self.runs if method in run.scores)
        return next((saved for run in runs if (saved := self.masked("mi", run))), None)

    def tokens(self, values: list[Any] | None) -> list[np.ndarray] | None:
        """A statistic of the tokens that scores count (`ASMIConfig.counted`).

        None if it was not saved for every row, or a value is not finite.
        """
        if values is None:
            return None
        arrays = [np.asarray(value, dtype=float) for value in values]
        if not all(len(value) and np.isfinite(value).all() for value in arrays):
            return None
        closing = self.saved("asmi_closing") or [False] * len(arrays)
        counted = self._operating.counted
        return [a[: counted(len(a), end)] for a, end in zip(arrays, closing, strict=True)]

    def settings(self) -> dict[str, Any] | None:
        """ASMI's settings in use at the operating depth; None if they were not saved."""
        saved = self.masked("settings")
        return dict(saved[0]) if saved else None


Compute = TypeVar("Compute", bound=Callable[..., Any])


def once(compute: Compute) -> Compute:
    """Cache the values of a function of a setting (and other arguments) in the setting."""

    @wraps(compute)
    def kept(group: RunGroup, *arguments: Any) -> Any:
        key = (compute.__module__, compute.__qualname__, *arguments)
        if key not in group.computed:
            group.computed[key] = compute(group, *arguments)
        return group.computed[key]

    return cast(Compute, kept)


def same_depth(first: float, second: float) -> bool:
    """Whether two depths are equal, apart from rounding."""
    return depth_key(first) == depth_key(second)


def load_run_groups(
    paths: Iterable[str | Path], metric: str | None = None, depth: float = ASMIConfig.depth
) -> list[RunGroup]:
    """Load runs, and group those that have the same answers into one setting.

    `paths`: manager files or run folders. They are pickles: only open files you trust. `metric`:
    the default is AlignScore, or else a run's first metric. If a run lacks the operating depth, the
    nearest depth is used.
    """
    same_answers: list[list[Run]] = []
    for file in dict.fromkeys(file.resolve() for path in paths for file in manager_files(path)):
        run = load_run(file)
        alike = (runs for runs in same_answers if all(_same_answers(r, run) for r in runs))
        if (same := next(alike, None)) is None:
            same_answers.append(same := [])
        same.append(run)
    groups = [_group(runs, metric, depth) for runs in same_answers]
    labels = Counter(group.label for group in groups)
    folder = os.path.commonpath([group.run.path.parent for group in groups]) if groups else ""
    for place, group in enumerate(groups):
        if labels[group.label] > 1:
            file = Path(os.path.relpath(group.run.path, folder))
            name = file.as_posix().removesuffix("/ue_manager_seed1")
            groups[place] = replace(group, suffix=f" ({name})")
    return groups


def _same_answers(first: Run, second: Run) -> bool:
    """Whether runs have a model's same answers to the same questions, and equal scores by name.

    Questions are the same if prompts and gold answers are, whatever name a config gives them.
    """
    stats, texts = (first.stats, second.stats), ("input_texts", "greedy_texts")
    golds = [of.get("target_texts") for of in stats]
    shared = first.quality.columns.intersection(second.quality.columns)
    scores = first.methods.keys() & second.methods.keys()
    return (
        _names(first)[0] == _names(second)[0]
        and all(first.stats.get(n) and first.stats[n] == second.stats.get(n) for n in texts)
        and (None in golds or golds[0] == golds[1])
        and len(shared) > 0
        and np.allclose(first.quality[shared], second.quality[shared], rtol=1e-4, equal_nan=True)
        and all(first.methods[n].score_key() == second.methods[n].score_key() for n in scores)
    )


def _combined(runs: Sequence[Run]) -> Run:
    """Join runs with the same answers. If several have a method, the first run's is taken."""
    scores = pd.concat([run.scores for run in runs], axis=1)
    methods = {name: config for run in reversed(runs) for name, config in run.methods.items()}
    return replace(runs[0], scores=scores.loc[:, ~scores.columns.duplicated()], methods=methods)


def _names(run: Run) -> tuple[str, str]:
    """Names of model and dataset, from the manifest, or else from the folder."""
    model, data = run.recorded("model"), run.recorded("dataset")
    path = Path(model.get("path") or "unknown model").name
    name = (model.get("name") or path).removeprefix("asmi_")
    dataset = data.get("name") or run.path.resolve().parent.name
    names = path if name == "local" else name, dataset.removeprefix("asmi_")
    return names[0].replace("_", " "), names[1].replace("_", " ")


def _group(runs: list[Run], metric: str | None, depth: float) -> RunGroup:
    """Make a setting of runs that have the same answers."""
    # The run with the most methods comes first. Others add only methods that it lacks.
    runs.sort(key=lambda run: -len(run.scores.columns))
    run, notes = _combined(runs), []
    names = list(run.quality)
    if metric is not None and metric not in names:
        raise ValueError(f"{run.path} has no quality metric {metric!r}; it has {names}")
    metric = metric or (PREFERRED_METRIC if PREFERRED_METRIC in names else names[0])
    finite_scores = np.isfinite(run.scores)
    if empty := list(run.scores.columns[~finite_scores.any()]):
        notes.append(f"left out, no finite score: {', '.join(empty)}")
        methods = {name: config for name, config in run.methods.items() if name not in empty}
        run = replace(run, scores=run.scores.drop(columns=empty), methods=methods)
    finite = run.finite(metric)
    if not finite.any():
        raise ValueError(
            f"{run.path} has no row with finite {metric} and finite scores of all methods"
        )
    if left_out := int((~finite).sum()):
        lacking = [name for name in run.scores if not finite_scores[name].all()]
        notes.append(
            f"{left_out} of {len(finite)} rows without a finite "
            f"{' or '.join(lacking) or metric} left out for all methods"
        )
    depths = [
        *(config.depth for config in run.methods.values()),
        *(used["depth"] for used in run.settings()),
    ]
    nearest = min(depths, key=lambda other: abs(other - depth), default=depth)
    if not same_depth(nearest, depth):
        notes.append(f"read at depth {nearest:.1%}: the run lacks {depth:.1%}")
    return RunGroup(
        *_names(run), "", tuple(runs), run, metric, nearest, np.flatnonzero(finite), tuple(notes)
    )
