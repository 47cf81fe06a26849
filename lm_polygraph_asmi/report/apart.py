"""Settings computed side by side, each in a process of its own."""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from joblib import Parallel, delayed, effective_n_jobs

from lm_polygraph_asmi.results.run_groups import RunGroup


def compute_apart(
    groups: Sequence[RunGroup],
    makes: Sequence[Callable[[Sequence[RunGroup]], Any]],
    progress: Callable[[Sequence[Any], str], Iterable[Any]],
) -> None:
    """Make the items of each setting alone, to know what `once` keeps; none with a single job.

    Raises:
        ChildProcessError: a process ended before its setting was computed.
        RuntimeError: an error in a process; names the setting.
    """
    if effective_n_jobs(None) < 2 or len(groups) < 2:
        return
    done = Parallel(return_as="generator")(delayed(_alone)(group, makes) for group in groups)
    try:
        for group, values in zip(progress(groups, "Settings"), done, strict=True):
            group.computed.update(_Unpickler(values, group).load())
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that computed a setting ended, perhaps for lack of memory: use fewer jobs"
        ) from error


def _alone(group: RunGroup, makes: Sequence[Callable[[Sequence[RunGroup]], Any]]) -> bytes:
    try:
        for make in makes:
            make([group])
    except Exception as error:
        raise RuntimeError(f"{group.label}: {type(error).__name__}: {error}") from error
    values = io.BytesIO()
    _Pickler(values, group).dump(group.computed)
    return values.getvalue()


def _parts(group: RunGroup) -> list[Any]:
    """A setting and its runs, which do not travel with its values."""
    return [group, group.run, *group.runs, *group.separate_runs]


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
