"""Compute settings in parallel, each in a process of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from joblib import Parallel, delayed, effective_n_jobs, parallel_config
from threadpoolctl import threadpool_limits

from lm_polygraph_asmi.results.run_groups import RunGroup


@contextmanager
def processes(jobs: int) -> Iterator[None]:
    """Let joblib use `jobs` processes with one thread each. A single job runs in this process.

    With one thread each, there are no more threads than cores, and rounding does not depend on the
    number of threads.

    Raises:
        ChildProcessError: a process ended before its work was done.
    """
    try:
        with threadpool_limits(1), parallel_config("loky", n_jobs=jobs, inner_max_num_threads=1):
            yield
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process of the report ended, perhaps for lack of memory: use fewer jobs"
        ) from error


def compute_apart(
    groups: Sequence[RunGroup],
    makes: Sequence[Callable[[Sequence[RunGroup]], Any]],
    progress: Callable[[Sequence[Any], str], Iterable[Any]],
) -> None:
    """Compute each setting in a process of its own, and keep the values that `once` caches there.

    Items that are made later find these values in their settings. With a single job or setting,
    nothing is computed here.

    Raises:
        ValueError, RuntimeError: an error in a process. The message names the setting.
    """
    if effective_n_jobs(None) < 2 or len(groups) < 2:
        return
    computed = Parallel(return_as="generator")(
        delayed(_computed_values)(group, makes) for group in groups
    )
    for group, values in zip(progress(groups, "Settings"), computed, strict=True):
        group.computed.update(values)


def _computed_values(
    group: RunGroup, makes: Sequence[Callable[[Sequence[RunGroup]], Any]]
) -> dict[Any, Any]:
    try:
        for make in makes:
            make([group])
    except Exception as error:
        kind = ValueError if isinstance(error, OSError | ValueError) else RuntimeError
        raise kind(f"{group.label}: {type(error).__name__}: {error}") from error
    return group.computed
