"""`BatchScorer` on a local Ray cluster of two actors."""

import os
import signal
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")

from tests import tiny_lm  # noqa: E402

pytestmark = pytest.mark.slow
ROWS, BATCH = 120, 10


@pytest.fixture
def cluster():
    ray.init(num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


class KilledOnce:
    """A `BatchScorer` whose process is killed in the middle of the work, once."""

    def __init__(self, marker: str, *args, **settings) -> None:
        from lm_polygraph_asmi.scoring import BatchScorer

        self.marker, self.scorer = Path(marker), BatchScorer(*args, **settings)
        self.tables = 0

    def __call__(self, table):
        self.tables += 1
        if self.tables == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.scorer(table)


@pytest.mark.usefixtures("cluster")
def test_a_lost_actor_loses_nothing(tmp_path):
    import ray.data

    from lm_polygraph_asmi.scoring import BatchScorer

    model = str(tiny_lm.save(tmp_path / "tiny"))
    rows = pd.DataFrame(
        {
            "id": range(ROWS),
            "prompt": [f"Who built mill number {i}?" for i in range(ROWS)],
            "answer": [f" the miller of {i % 7}" if i != 113 else "" for i in range(ROWS)],
        }
    )
    settings = {"scope": "response", "result_cache": str(tmp_path / "cache")}
    table = ray.data.from_pandas(rows).repartition(ROWS // BATCH)
    scored = table.map_batches(
        KilledOnce,
        batch_format="pyarrow",
        batch_size=None,  # a block is a batch
        fn_constructor_args=(str(tmp_path / "killed"), model),
        fn_constructor_kwargs=settings,
        compute=ray.data.ActorPoolStrategy(size=2),
    ).to_pandas()
    assert (tmp_path / "killed").exists()
    alone = BatchScorer(model, scope="response")
    expected = pa.concat_tables(
        alone(pa.Table.from_pandas(rows[start : start + BATCH], preserve_index=False))
        for start in range(0, ROWS, BATCH)
    ).to_pylist()
    found = pa.Table.from_pandas(scored.sort_values("id"), preserve_index=False).to_pylist()
    assert found == expected
    assert sum(row["asmi_error"] is not None for row in found) == 1
