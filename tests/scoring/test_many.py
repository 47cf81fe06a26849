"""Many rows: one after the other, and as tables of a data engine."""

import json
import os
import signal
from copy import deepcopy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.scoring import BatchScorer, Scorer
from lm_polygraph_asmi.scoring.rows import Row, score_rows
from tests import tiny_lm
from tests.scoring.conftest import PROMPT

pytestmark = pytest.mark.usefixtures("unseen")

SETTINGS = {"scope": "response", "num_masks": 6, "mask_rate": 0.4, "max_new_tokens": 3}
PASSAGE = "The ferry Ondine was built in Brask in 1931. "
ROWS = [
    {"id": "a", "prompt": PASSAGE + "Who built it?", "answer": " Brask"},
    {"id": "b", "prompt": PASSAGE + "A question about the passage."},
    {"id": "c", "prompt": None, "answer": ""},
    {"id": "d", "prompt": PASSAGE + "A question about the passage.", "answer": " True"},
    {"id": "e", "prompt": PROMPT, "answer": [7, 8]},
]


@pytest.fixture
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, **SETTINGS)


def test_public_names_of_a_scorer(scorer):
    public = {name for name in (*vars(scorer), *dir(Scorer)) if not name.startswith("_")}
    assert public == {"score", "score_many", "model", "tokenizer", "config"}


def test_rows_come_out_as_they_went_in(scorer):
    given = json.loads(json.dumps(ROWS))
    taken = []

    def rows():
        for row in given:
            taken.append(row["id"])
            yield row

    found = scorer.score_many(rows())
    assert next(found).id == "a"
    assert taken == ["a"]  # no row is taken before its turn
    found = [None, *found]
    assert given == ROWS
    assert [(one.index, one.id) for one in found[1:]] == list(zip(range(1, 5), "bcde", strict=True))
    assert [one.error is None for one in found[1:]] == [True, False, True, True]
    for one, row in zip(found[1:], ROWS[1:], strict=True):
        if one.result is not None:
            assert one.result.tokens == scorer.score(row["prompt"], row.get("answer")).tokens
    with pytest.raises(ValueError, match="expected a text"):
        list(scorer.score_many(ROWS, on_error="raise"))
    with pytest.raises(ValueError, match="on_error"):
        list(scorer.score_many(ROWS, on_error="ignore"))


def test_tables(tmp_path):
    score_table = BatchScorer(Scorer, str(tiny_lm.save(tmp_path / "tiny")), **SETTINGS)
    table = pd.DataFrame(ROWS[:4], index=[7, 8, 9, 10])
    found = score_table(table)
    each = list(score_table.scorer.score_many(ROWS[:4]))
    scores = [None if one.result is None else one.result.score for one in each]
    assert found["score"].tolist() == [pd.NA if one is None else one for one in scores]
    assert found["error"].isna().tolist() == [True, True, False, True]
    assert (found["id"].tolist(), found["answer"][1]) == (list("abcd"), each[1].result.answer)
    assert json.loads(found["details"][0])["signals"] == each[0].result.signals
    # The columns of a batch without a score have their types.
    assert (score_table(table[2:3]).dtypes == found.dtypes).all()
    arrays = {"prompt": [PROMPT] * 2, "answer": [np.array([7]), [8, 9]], "samples": [pd.NA, None]}
    assert score_table(arrays)["error"].isna().all()
    with pytest.raises(ValueError, match=r"columns \[.*'score'.*\] would be overwritten"):
        score_table(found)


CALL = {"type": "function", "function": {"name": "sail", "arguments": "{}"}}
HOSTILE = [
    5, None, [], "", b"Who?", object(), {}, {"prompt": 5}, {"prompt": float("nan")},
    {"prompt": b"Who?"}, {"prompt": {"role": "user"}}, {"prompt": []}, {"prompt": ["Who?"]},
    {"prompt": [["role", "user"]]}, {"prompt": [{}]}, {"prompt": [{"content": "Who?"}]},
    {"prompt": [{"role": 5, "content": "Who?"}]}, {"prompt": [{"role": "user", "content": 5}]},
    {"prompt": [{"role": ["user"], "content": "Who?"}]}, {"prompt": [{"role": "user"}]},
    {"prompt": [{"role": "user", "content": [5]}]}, {"prompt": [{"role": "user", "content": {}}]},
    {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {"prompt": "x" * 5000},
    {"prompt": [{"role": "user", "content": "Who?", 5: "x"}], "answer": 5},
    {"prompt": [{"role": "tool", "content": None, "tool_calls": [CALL]}], "answer": []},
    {"prompt": PROMPT, "answer": {}}, {"prompt": PROMPT, "answer": 5},
    {"prompt": PROMPT, "answer": 0.5}, {"prompt": PROMPT, "answer": True},
    {"prompt": PROMPT, "answer": [[1]]}, {"prompt": PROMPT, "answer": [None]},
    {"prompt": PROMPT, "answer": ["a"]}, {"prompt": PROMPT, "answer": [1.0]},
    {"prompt": PROMPT, "answer": [True]}, {"prompt": PROMPT, "answer": [-1]},
    {"prompt": PROMPT, "answer": [10**6]}, {"prompt": PROMPT, "answer": [2**70]},
    {"prompt": PROMPT, "answer": np.ones((2, 2), int)}, {"prompt": PROMPT, "answer": np.array(5)},
    {"prompt": PROMPT, "answer": np.array([0.5])}, {"prompt": PROMPT, "answer": "\ud800"},
    {"prompt": PROMPT, "answer": b"green"}, {"prompt": PROMPT, "answer": bytearray(b"green")},
    *({"prompt": PROMPT, "answer": " Brask", "samples": samples} for samples in (
        5, "x", {}, {"a": 1}, [1], [None], [["a"]], [[1.5]], [[-1], [5]], [[10**6], [5]],
        ["a", {}], [[5], [2**70]], np.array(5), iter("a"), ["\ud800"],
    )),
]  # fmt: skip


@pytest.mark.parametrize("method", ["sem", "adapt"])
def test_bad_content_of_a_row_is_a_value_error(model, tokenizer, method):
    """Whatever stands in a row, no error of ours comes out: the next row is scored."""
    chat = deepcopy(tokenizer)
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    scorer = Scorer(model, tokenizer=chat, num_masks=2, max_new_tokens=2, method=method)
    *found, last = scorer.score_many([*HOSTILE, {"prompt": PROMPT, "answer": " Brask"}])
    assert last.error is None
    scored = [row for row, one in zip(HOSTILE, found, strict=True) if one.error is None]
    # Token ids of samples are looked up by the method that reads them.
    unread = [{"prompt": PROMPT, "answer": " Brask", "samples": ids}
              for ids in ([[-1], [5]], [[10**6], [5]])]  # fmt: skip
    assert scored == ["", *(unread if method == "sem" else [])]


@pytest.mark.parametrize(
    "bug", [TypeError, KeyError, IndexError, ZeroDivisionError, NameError, RuntimeError]
)
@pytest.mark.parametrize("where", ["prompt_tokens", "spans", "sequence_uncertainty", "tokens_of"])
def test_a_bug_of_ours_is_no_bad_row(scorer, monkeypatch, bug, where):
    def broken(*_, **__):
        raise bug("ours")

    monkeypatch.setattr(f"lm_polygraph_asmi.scoring.scorer.{where}", broken)
    with pytest.raises(bug, match="ours"):
        list(scorer.score_many(ROWS[:1]))
    with pytest.raises(bug, match="ours"):
        list(score_rows(scorer, [Row(1, ROWS[0])]))


class KilledOnce(BatchScorer):
    """Its process is killed in the middle of the work, once."""

    def __init__(self, marker: str, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.marker, self.tables = Path(marker), 0

    def __call__(self, table):
        self.tables += 1
        if self.tables == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(table)


@pytest.mark.slow
def test_a_lost_actor_of_ray_loses_nothing(tmp_path):
    ray, number = pytest.importorskip("ray"), 120
    ray.init(num_cpus=4, include_dashboard=False)
    model = str(tiny_lm.save(tmp_path / "tiny"))
    rows = pd.DataFrame(
        {
            "id": range(number),
            "prompt": [f"Who built mill number {i}?" for i in range(number)],
            "answer": [
                f" the miller of {i % 7}" if i != 113 else "\ufffd" * 999 for i in range(120)
            ],
        }
    )
    scored = (
        ray.data.from_pandas(rows)
        .repartition(12)
        .map_batches(
            KilledOnce,
            batch_format="pandas",
            batch_size=None,  # a block is a batch
            fn_constructor_args=(str(tmp_path / "killed"), Scorer, model),
            fn_constructor_kwargs={"scope": "response"},
            compute=ray.data.ActorPoolStrategy(size=2),
        )
        .to_pandas()
    )
    ray.shutdown()
    assert (tmp_path / "killed").exists()
    expected = BatchScorer(Scorer, model, scope="response")(rows)
    found = scored.sort_values("id").reset_index(drop=True)
    for name in ("id", "score", "answer", "signals", "error"):
        assert found[name].fillna("").tolist() == expected[name].fillna("").tolist()
    assert found["error"].notna().sum() == 1
