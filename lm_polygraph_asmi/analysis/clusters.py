"""Intervals that take clusters into account: questions on one passage are not independent."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from os.path import commonprefix
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int, Num
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import ndtr, stdtrit

from lm_polygraph_asmi.validation import identity, same_text

SEED = 20260711
"""Seed of all resampling, as in the paper."""
RESAMPLES, PRR_RESAMPLES, CURVE_RESAMPLES, BAND_RESAMPLES = 2000, 10_000, 1000, 200
"""Numbers of bootstrap resamples:

- `RESAMPLES`: for all statistics that are not listed here
- `PRR_RESAMPLES`: for PRR and its differences, as in the paper
- `CURVE_RESAMPLES`: for standard errors over answers
- `BAND_RESAMPLES`: for pointwise bands
"""
SHARED_TEXTS = (
    r"\nStory: (.*?)\n\nQuestion: ",  # CoQA's story, as LM-Polygraph's prompts have it
    r"\nPassage:\n(.*)\nQuestion: ",  # SQuAD's passage in the paper's zero-shot prompt
    r"\A(Imagine that you are only able to say a single word\..*)",  # BabiQA's whole prompts
    r"\A((?:Question: [^\n]*\nAnswer:[^\n]*\n){5}Question: .*)",  # TriviaQA's whole prompts
)
"""Patterns of the prompts in the paper's benchmarks. Rows with an equal group are a cluster."""
PASSAGE, TOLD = 80, 20
"""Fewest characters that two prompts have in common if they share a passage, and fewest prompts in
which a line may be taken for an instruction though others lack it."""
FEW_CLUSTERS, FEW_ERRORS = 50, 20
FEW = (
    f"With fewer than {FEW_CLUSTERS} clusters, fewer than {FEW_ERRORS} wrong or fewer than "
    f"{FEW_ERRORS} right answers, 95 % intervals may be too narrow."
)

ROWS_AT_ONCE = 2**16
"""Number of rows computed together, over all resamples, so that they fit into a CPU's cache."""


class Interval(NamedTuple):
    """A value with the lower and upper end of its 95 % interval. NaN if undefined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (round(number, 2) + 0.0 for number in self)  # never -0.00
        return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"

    def excludes(self, value: float) -> bool:
        """Whether `value` is outside the interval. An undefined interval excludes nothing."""
        return self.low > value or self.high < value


def _numbers(
    column: dict[str, ArrayLike], excluded: Callable[[np.ndarray], np.ndarray], problem: str
) -> np.ndarray:
    """The only column as numbers. ValueError with `problem` if some values are `excluded`."""
    ((name, values),) = column.items()
    try:
        numbers = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must contain numbers, equally many in every row") from None
    if excluded(numbers).any():
        raise ValueError(f"{name} {problem}: leave these rows out for all methods")
    return numbers


def ordered(**column: ArrayLike) -> np.ndarray:
    """The only keyword argument as numbers that can be ordered: they may be infinite, not NaN."""
    return _numbers(column, np.isnan, "contains NaN")


def finite(**column: ArrayLike) -> np.ndarray:
    """The only keyword argument as finite numbers, or else ValueError."""
    return _numbers(column, lambda numbers: ~np.isfinite(numbers), "has values that are not finite")


def binary(**column: ArrayLike) -> np.ndarray:
    """The only keyword argument as booleans. ValueError unless all are True, False, 1 or 0."""
    ((name, _),) = column.items()
    numbers = finite(**column)
    known = np.isin(numbers, (0, 1))
    if not known.all():
        raise ValueError(
            f"{name} must contain True and False (or 1 and 0), got {numbers[~known][0]}: convert "
            "a quality, for example with quality < 0.5"
        )
    return numbers.astype(bool)


def control_table(controls: ArrayLike) -> Float[np.ndarray, "n c"]:
    """Controls as a table (n, c), or else ValueError."""
    table = finite(controls=controls)
    if table.ndim != 2 or not table.shape[1]:
        raise ValueError(
            f"controls must have shape (n, c), got {table.shape}; for a single one, pass "
            "controls[:, None]"
        )
    return table


def check_rows(clusters: Sequence[Any] | None, **columns: ArrayLike) -> list[np.ndarray]:
    """The columns as numbers. ValueError unless each has a finite value for every cluster key."""
    if clusters is None:
        raise ValueError(
            "clusters must have a key for every row: the same key for answers that share a "
            "passage, otherwise a unique one"
        )
    if not len(clusters):
        raise ValueError("there is no row: expected at least one answer")
    numbers = {name: finite(**{name: values}) for name, values in columns.items()}
    for name, column in numbers.items():
        if len(column) != len(clusters):
            raise ValueError(
                f"{name} has {len(column)} values for {len(clusters)} cluster keys: expected one "
                "for each"
            )
    return list(numbers.values())


def cluster_codes(clusters: Sequence[Any]) -> Int[np.ndarray, " n"]:
    """(n,) number of each row's cluster: 0 for the first of the sorted keys, and so on.

    Two keys name the same cluster if their `identity` is equal.
    """
    keys = []
    for row, cluster in enumerate(clusters):
        try:
            keys.append(identity(cluster))
        except ValueError as error:
            raise ValueError(f"clusters, row {row}: {error}") from error
    return np.unique(np.asarray(keys, dtype=str), return_inverse=True)[1]


def tied_order(
    values: Num[np.ndarray, " n"],
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " groups"]]:
    """(n,) ascending order of values, and the places in it at which a new value begins."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    return order, np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])


def shared_texts(prompts: list[str]) -> list[str] | None:
    """The text of each prompt by which the paper clusters rows: a story, a passage, or all of it.

    None unless all prompts have the format of the same benchmark.
    """
    for pattern in SHARED_TEXTS:
        matches = [re.search(pattern, text.replace("\r\n", "\n"), re.DOTALL) for text in prompts]
        if matches and all(matches):
            return [match[1] for match in matches if match]
    return None


def cluster_key(text: Any) -> str:
    """A short, printable key of a text that several rows share."""
    return hashlib.sha256(same_text(str(text)).encode(errors="surrogatepass")).hexdigest()[:16]


def text_clusters(prompts: Sequence[str]) -> list[str]:
    r"""Cluster keys (n,) found from the prompts, for rows without keys of their own.

    If all prompts have the format of one of the paper's benchmarks, clusters are those of the paper
    (appendix "Head-to-Head Significance"): by CoQA's story, SQuAD's passage, or the whole prompt.
    Otherwise, two prompts are in one cluster if they begin with the same text, or end with the same
    lines, and what they share has at least 80 characters and is more than half of the longer
    prompt. Instructions are ignored: a beginning that all prompts share; and at ends, lines of at
    least half of the prompts, and of at least 20, or of all if there are fewer.

    Example:
        >>> prompt = "\nStory: {}\n\nQuestion: {}".format
        >>> text_clusters([prompt("Ann saw Bo.", "Who saw?"), prompt("Ann saw Bo.", "Whom?")])
        ['Ann saw Bo.', 'Ann saw Bo.']
    """
    shared = shared_texts(list(prompts))
    lines = [list(filter(None, map(same_text, each.split("\n")))) for each in shared or prompts]
    texts = list(map(" ".join, lines))  # each is `same_text` of its prompt
    if shared is not None or len(set(texts)) < 2:
        return texts
    often, least = Counter(chain.from_iterable(map(set, lines))), min(len(lines), TOLD)
    told = {line for line in often if often[line] >= max(len(lines) / 2, least)}
    ends = [tuple(line for line in each[::-1] if line not in told) for each in lines]
    return joined(_begin_alike(texts), _begin_alike(ends, lambda each: sum(map(len, each))))


def _begin_alike(texts: Sequence[Any], size: Callable[[Any], int] = len) -> list[Any]:
    """Cluster keys (n,) by the beginnings of texts, or of tuples of lines; see `text_clusters`."""
    distinct = sorted(set(texts))
    start, key = size(commonprefix([distinct[0], distinct[-1]])), {distinct[0]: distinct[0]}
    for before, text in pairwise(distinct):
        common = size(commonprefix([before, text])) - start
        longer = max(size(before), size(text)) - start
        key[text] = key[before] if common >= PASSAGE and 2 * common > longer else text
    return [key[text] for text in texts]


def joined(clusters: Sequence[str], others: Sequence[Any]) -> list[str]:
    """Join clusters so that rows with the same one of `others` share one; returns the keys, (n,).

    The key of joined clusters is that of their first row.

    Example:
        >>> joined(["b", "h", "b", "p"], ["p", "q", "q", "r"])
        ['b', 'b', 'b', 'p']
    """
    ends = [(0, key) for key in clusters], [(1, other) for other in others]
    numbers = {end: number for number, end in enumerate(dict.fromkeys(chain(*ends)))}
    rows, columns = ([numbers[end] for end in kind] for kind in ends)
    groups = connected_components(
        coo_array((np.ones(len(rows)), (rows, columns)), shape=2 * [len(numbers)]), directed=False
    )[1][rows].tolist()
    first = dict(zip(groups[::-1], clusters[::-1], strict=True))
    return [first[group] for group in groups]


Rows = TypeVar("Rows", bound="Clustered")
Value = TypeVar("Value")


class Clustered:
    """n rows in clusters, such as answers on shared passages, and bootstrap resamples of these.

    Clusters are resampled whole. Statistics computed on one object share the resamples.

    Args:
        clusters: (n,) key of each row. Answers on the same passage share a key.
        resamples: number of resamples. None: each statistic has its own number, which is 10,000
            for PRR, 1000 for standard errors over answers, 200 for bands, and 2000 otherwise.
        seed: seed of resamples, folds and other random choices.

    Attributes:
        codes: (n,) number of each row's cluster, from 0.
        n_clusters: number of clusters.
        known: values that `once` has computed. Copies with another number of resamples share them.

    Example:
        >>> counts = next(Clustered(["a", "a", "b"], resamples=100).draws())
        >>> counts.shape, bool((counts[:, 0] == counts[:, 1]).all())  # both rows of a, or neither
        ((100, 3), True)
    """

    def __init__(
        self, clusters: Sequence[Any] | None, resamples: int | None = None, seed: int = SEED
    ) -> None:
        check_rows(clusters)
        assert clusters is not None
        self.clusters, self.resamples, self.seed = list(clusters), resamples, seed
        self.codes = cluster_codes(self.clusters)
        self.n_clusters = int(self.codes.max()) + 1
        self.known: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.clusters)

    def columns(self, /, **named: ArrayLike) -> list[np.ndarray]:
        """The columns as numbers. ValueError unless each has a finite value for every answer."""
        return check_rows(self.clusters, **named)

    def resampled(self: Rows, resamples: int) -> Rows:
        """A copy with another number of resamples. The first resamples are the same."""
        other = copy(self)
        other.resamples = resamples
        return other

    @cached_property
    def independent(self) -> "Clustered":
        """The same rows, where each is a cluster of its own."""
        return Clustered([str(row) for row in range(len(self))], self.resamples, self.seed)

    def once(self, compute: Callable[..., Value], *columns: np.ndarray) -> Value:
        """`compute(*columns)`, computed only once for equal columns."""
        key = compute, *((column.shape, column.tobytes()) for column in columns)
        if key not in self.known:
            self.known[key] = compute(*columns)
        return self.known[key]

    def number(self, default: int) -> int:
        """The number of resamples, which is the statistic's `default` unless one was set."""
        return default if self.resamples is None else self.resamples

    def draws(self, default: int = RESAMPLES) -> Iterator[Int[np.ndarray, "b n"]]:
        """How often each answer is in each bootstrap resample of whole clusters.

        A resample draws as many clusters as there are, with replacement. Yields arrays of counts
        (b, n), one row per resample, until there are `number(default)` rows. Counts are integers of
        8 bits if these suffice, so that a CPU's cache holds many.
        """
        number, total = self.number(default), self.n_clusters
        if len(self.known.get("drawn", ())) < number:
            self.known["drawn"] = _drawn(self.seed, total, number)
        chunk = max(1, ROWS_AT_ONCE // len(self))
        for start in range(0, number, chunk):
            chosen = self.known["drawn"][start : min(start + chunk, number)]
            yield chosen.take(self.codes, axis=1)


@lru_cache(maxsize=8)  # both clusters and answers, for each of the paper's four datasets
def _drawn(seed: int, clusters: int, number: int) -> Int[np.ndarray, "number clusters"]:
    """(number, clusters) how often each cluster is in each resample.

    With a larger number, the first resamples are the same. Settings with equally many clusters,
    such as one dataset with several models, share one array.
    """
    rng, at_once = np.random.default_rng(seed), max(1, ROWS_AT_ONCE // clusters)
    parts = (
        rng.multinomial(
            clusters, np.full(clusters, 1 / clusters), size=min(at_once, number - start)
        )
        for start in range(0, number, at_once)
    )
    # One byte is usually enough: a cluster is hardly ever drawn more than 127 times.
    return np.concatenate([part.astype(np.min_scalar_type(~part.max())) for part in parts])


def bootstrap_values(
    statistic: Callable[[np.ndarray], np.ndarray], rows: Clustered, default: int = RESAMPLES
) -> np.ndarray:
    """(resamples, ...) values of a statistic on resamples of whole clusters.

    The statistic maps counts (b, n) to values (b, ...). `default` is the number of resamples,
    unless `rows` has one.
    """
    return np.concatenate([statistic(counts) for counts in rows.draws(default)])


def percentiles(clusters: int) -> tuple[float, float]:
    """Percentiles of a bootstrap over `clusters` clusters that give a 95 % interval.

    They are 2.5 and 97.5 for many clusters. With few clusters, resamples vary too little and normal
    quantiles are too small. So the ends are moved outwards: by sqrt(G / (G - 1)), and by Student's
    quantile instead of the normal one. In simulations of PRR differences over 11 clusters, these 95
    % intervals covered the true value in 94.5 %, plain ones in 90.5 %, bootstrap-t ones in 93 %.
    Source: Hesterberg (2015), What teachers should know about the bootstrap.
    """
    tail = 0.025
    if clusters > 1:
        tail = float(ndtr(math.sqrt(clusters / (clusters - 1)) * stdtrit(clusters - 1, tail)))
    return 100 * tail, 100 - 100 * tail


def percentile_interval(
    value: float, resampled: Float[np.ndarray, " resamples"], clusters: int
) -> Interval:
    """95 % interval by `percentiles` for this number of clusters.

    Its ends are NaN with fewer than two clusters, or if the statistic is undefined in at least half
    of the resamples.
    """
    defined = resampled[np.isfinite(resampled)]
    if clusters < 2 or not np.isfinite(value) or 2 * len(defined) <= len(resampled):
        return Interval(float(value), float("nan"), float("nan"))
    low, high = np.percentile(defined, percentiles(clusters))
    return Interval(float(value), float(low), float(high))


def wilson_interval(count: int, n: int) -> Interval:
    """95 % interval of a rate, from `count` of `n` independent answers.

    The interval is inside [0, 1], and defined from one answer on. Raises ValueError unless 0 <=
    count <= n and n > 0. Source: Wilson (1927), Probable inference.

    Example:
        >>> wilson_interval(0, 20).high > 0.1  # no error among 20: still up to one in six
        True
    """
    if not 0 <= count <= n or n < 1:
        raise ValueError(f"expected 0 <= count <= n and at least one answer, got {count} of {n}")
    from scipy.stats import binomtest

    low, high = binomtest(count, n).proportion_ci(method="wilson")
    return Interval(count / n, float(low), float(high))


def cluster_interval(statistic: Callable[[np.ndarray], float], rows: Clustered) -> Interval:
    """Bootstrap interval of a statistic over whole clusters, wider if there are few.

    To compare two methods, pass their difference as the statistic, so that both share the
    resamples. Resamples in which the statistic is NaN are left out. The ends are NaN with fewer
    than two clusters, or if at least half of the resamples are NaN. Source: section "Main Results"
    of the paper (cluster-respecting paired bootstrap, percentile 95 %). For few clusters,
    `percentiles` widens the interval.

    Args:
        statistic: function of row numbers, which may repeat. It returns NaN where it is undefined.

    Example:
        >>> wrong = np.repeat([0, 1] * 5, 4)  # four equal answers per story
        >>> stories = Clustered([str(n // 4) for n in range(40)])
        >>> rate = lambda chosen: wrong[chosen].mean()
        >>> by_story, by_row = (cluster_interval(rate, c) for c in (stories, stories.independent))
        >>> by_story.low < by_row.low < 0.5 < by_row.high < by_story.high  # whole stories vary more
        True
    """
    every = np.arange(len(rows))

    def one_by_one(counts: np.ndarray) -> np.ndarray:
        return np.array([statistic(np.repeat(every, row)) for row in counts], dtype=float)

    return bootstrap_interval(statistic(every), one_by_one, rows)


def bootstrap_interval(
    value: float, statistic: Callable[[np.ndarray], np.ndarray], rows: Clustered
) -> Interval:
    """`cluster_interval` of a statistic of counts, as in `bootstrap_values`; `value`: all rows."""
    if np.isnan(value) or rows.n_clusters < 2:
        return Interval(float(value), float("nan"), float("nan"))
    return percentile_interval(value, bootstrap_values(statistic, rows), rows.n_clusters)


class Medians:
    """Medians of a finite column (n,) in many resamples; equal to `np.median` of their rows."""

    def __init__(self, values: Num[np.ndarray, " n"]) -> None:
        self.order = np.argsort(values, kind="stable")
        self.ranked = values[self.order]

    def __call__(self, counts: Int[np.ndarray, "b n"]) -> Float[np.ndarray, " b"]:
        """(b,) median of each sample with counts (b, n); NaN if no row was drawn."""
        drawn = counts.take(self.order, axis=1).cumsum(1, dtype=int)
        total = drawn[:, -1:]
        lower = (drawn > (total - 1) // 2).argmax(1)
        upper = (drawn > total // 2).argmax(1)
        middle = (self.ranked[lower] + self.ranked[upper]) / 2
        return np.where(total[:, 0] > 0, middle, np.nan)


def cluster_band(
    curve: Callable[[np.ndarray], np.ndarray], rows: Clustered, points: int = 50
) -> Float[np.ndarray, "2 points"]:
    """Pointwise 95 % band of a curve over whole clusters.

    Returns (2, points): the lower and the upper ends. They are NaN with fewer than two clusters.

    Args:
        curve: function of row numbers, which may repeat. It returns values (m,), where m may vary.
        points: number of points, evenly spaced from the curve's first value to its last.

    Example:
        >>> wrong, rows = np.array([0, 1] * 10), Clustered([str(n) for n in range(20)])
        >>> low, high = cluster_band(lambda i: wrong[i].cumsum() / np.arange(1, 21), rows, points=2)
        >>> (high - low > 0.9).tolist()  # error rate of the first answer, and of all twenty
        [True, False]
    """
    if rows.n_clusters < 2:
        return np.full((2, points), np.nan)
    every = np.arange(len(rows))

    def on_sample(times: np.ndarray) -> np.ndarray:
        values = curve(np.repeat(every, times))
        return np.interp(np.linspace(0, len(values) - 1, points), np.arange(len(values)), values)

    drawn = bootstrap_values(
        lambda counts: np.array([on_sample(times) for times in counts]), rows, BAND_RESAMPLES
    )
    return np.percentile(drawn, percentiles(rows.n_clusters), axis=0)
