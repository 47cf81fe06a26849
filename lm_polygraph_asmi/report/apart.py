"""Settings computed side by side, each in a process of its own."""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from joblib import Parallel, delayed, effective_n_jobs, parallel_config
from threadpoolctl import threadpool_limits

from lm_polygraph_asmi.results.run_groups import RunGroup


@contextmanager
def processes(jobs: int) -> Iterator[None]:
    """What joblib runs meanwhile has `jobs` processes (this one, if one), of one thread each.

    So cores are not asked for twice, and rounding does not depend on their number.

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
    """Make the items of each setting alone, to know what `once` keeps; none with a single job.

    Raises:
        ValueError, RuntimeError: an error in a process; names the setting.
    """
    if effective_n_jobs(None) < 2 or len(groups) < 2:
        return
    computed = Parallel(return_as="generator")(delayed(_alone)(group, makes) for group in groups)
    for group, values in zip(progress(groups, "Settings"), computed, strict=True):
        group.computed.update(_Unpickler(values, group).load())


def _alone(group: RunGroup, makes: Sequence[Callable[[Sequence[RunGroup]], Any]]) -> bytes:
    try:
        for make in makes:
            make([group])
    except Exception as error:
        kind = ValueError if isinstance(error, OSError | ValueError) else RuntimeError
        raise kind(f"{group.label}: {type(error).__name__}: {error}") from error
    values = io.BytesIO()
    _Pickler(values, group).dump(group.computed)
    return values.getvalue()


def _parts(group: RunGroup) -> list[Any]:
    """A setting and its runs, which do not travel with its values."""
    return [group, group.run, *group.runs]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, group: RunGroup) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.places = {id(part): place for place, part in enumerate(_parts(group))}

    def persistent_id(self, value: Any) -> int | None:
        return self.places.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, values: bytes, group: RunGroup) -> None:
        super().__init__(io.BytesIO(values))
        self.parts = _parts(group)

    def persistent_load(self, place: int) -> Any:
        return self.parts[place]
