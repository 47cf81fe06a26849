"""Which rows a run asks, and who they are."""

import logging

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from datasets.arrow_writer import ArrowWriter
from lm_polygraph.utils.dataset import Dataset as HostDataset
from omegaconf import OmegaConf

from lm_polygraph_asmi.decisions.labels import clusters_of
from lm_polygraph_asmi.runs import rows
from lm_polygraph_asmi.runs.rows import (
    DataRow,
    cluster_key,
    problem_of,
    read_data,
    sample,
    select_rows,
    shard_of,
    subsample,
)
from lm_polygraph_asmi.scoring.rows import Row
from tests.runs.test_squad import QUESTION, write

WHOLE = {"size": None, "subsample_seed": 1, "shard": 0, "num_shards": 1}


def data(source, **changed):
    """A config's node `data`."""
    columns = {"split": "test", "text_column": "input", "label_column": "output"}
    prompt = {"prompt_style": "paper", "closed_book": False}
    return {"source": str(source)} | columns | prompt | WHOLE | changed


def rows_folder(node):
    return rows.chosen_rows(OmegaConf.create({"data": node})).folder


def saved(tmp_path, **columns):
    folder = tmp_path / "source"
    Dataset.from_dict(columns).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("answer", ["None", "NA", "007", "1,200", "Zürich 🙂"])
def test_the_host_reads_every_answer_as_text(tmp_path, answer):
    folder = rows_folder(data(write(tmp_path / "q.json", [QUESTION._replace(answer=answer)])))
    loaded = HostDataset.load(str(folder), "input", "output", batch_size=1, load_from_disk=True)
    (prompts, answers, _) = next(iter(loaded))
    assert answers == [answer]
    assert prompts[0].endswith("Answer:")


def test_several_accepted_answers_stay_a_list(tmp_path):
    folder = rows_folder(data(saved(tmp_path, input=["Q"], output=[["None", "007"]])))
    loaded = HostDataset.load(str(folder), "input", "output", batch_size=1, load_from_disk=True)
    assert list(loaded.y) == [["None", "007"]]


def test_rows_are_read_and_saved_once_and_removed_after_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "q.json", [QUESTION, QUESTION._replace(id="q2", question="Whose?")])
    folder = rows_folder(data(file))
    assert load_from_disk(folder)["id"] == ["q1", "q2"]
    file.unlink()
    assert rows_folder(data(file)) == folder
    rows.forget_rows()
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_twins_share_rows_and_clusters(tmp_path):
    rows = [QUESTION._replace(id=str(i), passage=f"Passage {i // 2}") for i in range(8)]
    file = write(tmp_path / "q.json", rows)
    opened, closed = (
        load_from_disk(rows_folder(data(file, size=5, closed_book=closed)))[:]
        for closed in (False, True)
    )
    for column in ("id", "cluster", "output"):
        assert opened[column] == closed[column]
    assert opened["cluster"] == [cluster_key(f"Passage {int(i) // 2}") for i in opened["id"]]
    assert not set(opened["input"]) & set(closed["input"])


@pytest.mark.parametrize(("size", "seed"), [(5, 1), (5, 2), (20, 1), (30, 1)])
def test_a_subsample_is_the_one_the_host_draws(size, seed):
    texts = [f"row {i}" for i in range(20)]
    host = HostDataset(list(texts), list(texts), batch_size=1)
    ours = subsample(texts, size, seed)
    host.subsample(size, seed)
    # The host shuffles a whole dataset that is asked for in full; here it keeps its order.
    assert sorted(ours) == sorted(host.x) if size == 20 else ours == host.x


def test_a_subsample_leaves_the_global_generator_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    subsample(list(range(10)), 4, 1)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


STORIES = [DataRow(f"{i}", f"story {i // 5}", f"q{i}?", "a") for i in range(200)]
"""Forty stories with five questions each, after 2, 4, 6, 8 and 10 facts, as in bAbI."""


def facts(row: DataRow) -> int:
    return 2 * (int(row.id) % 5) + 2


def ids(rows) -> list[str]:
    return [row.id for row in rows]


@pytest.mark.parametrize("by", [False, True])
def test_a_smaller_sample_begins_a_larger_one(by):
    largest = ids(sample(STORIES, 30, 0, by))
    assert len(set(largest)) == 30
    for size in (1, 7, 29):
        assert ids(sample(STORIES, size, 0, by)) == largest[:size]
    assert ids(sample(STORIES[::-1], 30, 0, by)) == largest  # ids decide, not places
    assert ids(sample(STORIES, 30, 1, by)) != largest
    assert largest != sorted(largest, key=int)


def test_a_sample_has_no_period():
    """Evenly spaced rows would have questions of one length only, or of three of the five."""
    lengths = [facts(row) for seed in range(100) for row in sample(STORIES, 20, seed)]
    counts = np.array([lengths.count(length) for length in (2, 4, 6, 8, 10)])
    # 400 of each are expected; six standard deviations of a binomial count.
    assert (np.abs(counts - 400) < 6 * np.sqrt(2000 * 0.2 * 0.8)).all()


def test_rows_left_out_before_do_not_change_the_order_of_the_others():
    kept = [row for i, row in enumerate(STORIES) if i % 3]
    everything = ids(sample(STORIES, 200, 0))
    assert ids(sample(kept, 50, 0)) == [i for i in everything if int(i) % 3][:50]


def test_a_sample_with_one_row_a_cluster(caplog):
    rows = sample(STORIES, 40, 0, True)
    assert len({row.cluster for row in rows}) == 40
    assert set(map(facts, rows)) == {2, 4, 6, 8, 10}
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "lm_polygraph"):
        assert len(sample(STORIES, 41, 0, True)) == 40
    assert "data.sample: expected 41 rows, got 40, which are all" in caplog.text


def test_a_configs_sample(tmp_path):
    """What is drawn: after `size` and `first`, before shards."""
    columns = {"id": ids(STORIES), "input": [row.input for row in STORIES]}
    columns |= {"cluster": [row.cluster for row in STORIES], "output": ["a"] * 200}
    source = saved(tmp_path, **columns)

    def asked(**changed) -> list[str]:
        return ids(select_rows(data(source, **changed)).rows)

    assert asked(sample=9) == ids(sample(STORIES, 9, 0))
    assert asked(sample=9, sample_seed=3) == ids(sample(STORIES, 9, 3)) != asked(sample=9)
    assert asked(sample=9, sample_by="cluster") == ids(sample(STORIES, 9, 0, True))
    assert asked(first=50, sample=9) == ids(sample(STORIES[:50], 9, 0))
    assert asked(size=50, first=20, sample=9) == ids(sample(subsample(STORIES, 50, 1)[:20], 9, 0))
    assert asked(sample=9, shard=1, num_shards=3) == asked(sample=9)[3:6]
    shown = load_from_disk(rows_folder(data(source, sample=9, sample_by="cluster")))
    assert shown["id"] == asked(sample=9, sample_by="cluster")


def test_shards_are_the_rows_in_order():
    items = list(range(11))
    shards = [shard_of(items, i, 3) for i in range(3)]
    assert [item for shard in shards for item in shard] == items
    assert {len(shard) for shard in shards} == {3, 4}
    assert shard_of(items, 0, 1) == items


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard": 3, "num_shards": 3}, "in 0 ... 2, got 3"),
        ({"num_shards": 5}, "of at most 4"),
        ({"sample_by": "cluster"}, r"of which data\.sample_by is a part, must be a whole"),
        ({"sample": 0}, r"data\.sample must be at least 1 or null, got 0"),
        ({"sample": 2.5}, r"data\.sample must be a whole number, got 2.5"),
        ({"sample": 2, "sample_by": "facts"}, "sample_by must be one of 'cluster', got"),
        ({"closed_book": True}, "has complete prompts"),
        ({"prompt_style": "demo"}, "has complete prompts"),
        ({"split": "test", "source": "nowhere/at-all"}, "dataset nowhere/at-all: "),
        ({"source": ["nowhere/at-all", "continuation"]}, "nowhere/at-all continuation: "),
    ],
)
def test_rows_that_cannot_be_chosen(tmp_path, changed, message):
    source = saved(tmp_path, input=list("abcd"), output=list("efgh"))
    with pytest.raises(ValueError, match=message):
        select_rows(data(source) | changed)


def test_rows_of_a_folder_have_their_numbers_as_ids(tmp_path):
    source = saved(tmp_path, question=["Who?", "Where?", "Who?"], gold=["A", "B", "C"])
    columns = {"text_column": "question", "label_column": "gold"}
    rows = load_from_disk(rows_folder(data(source, **columns, shard=1, num_shards=2)))
    assert rows["id"] == ["test:1", "test:2"]
    assert rows["input"] == ["Where?", "Who?"]
    assert rows["cluster"] == [cluster_key("Where?"), cluster_key("Who?")]


def test_clusters_without_a_column_are_those_of_a_calibration(tmp_path):
    passages = [f"{who} built the ferry Ondine in Brask. " * 4 for who in ("Ann", "Bo", "Cy")]
    prompts = [f"{passage}\nQuestion: {q}" for passage in passages for q in ("Who?", "Where?")]
    source = saved(tmp_path, input=prompts, output=["x"] * 6)
    own = [row.cluster for row in read_data(source, "test", "input", "output").rows]
    expected = clusters_of([Row(i, {"prompt": prompt}) for i, prompt in enumerate(prompts)])
    assert own == list(map(cluster_key, expected))
    assert [own.index(key) for key in own] == [0, 0, 2, 2, 4, 4]
    config = {"dataset": str(source), "eval_split": "test", "text_column": "input"}
    config |= {"label_column": "output", "load_from_disk": True}
    listed = rows.run_rows(OmegaConf.create(config))
    assert [row.cluster for row in listed.rows] == own
    assert ids(listed.rows) == [f"test:{i}" for i in range(6)]  # as manifests name them


def test_clusters_by_story(tmp_path):
    prompts = [f"\nStory: {s}\n\nQuestion: {q}" for s, q in (("a\nb", 1), ("a\nb", 2), ("c", 1))]
    source = saved(tmp_path, input=prompts, output=["", "", ""])
    rows = read_data(source, "test", "input", "output").rows
    assert [row.cluster for row in rows] == [cluster_key(s) for s in ("a\nb", "a\nb", "c")]


def test_one_split_of_several(tmp_path):
    splits = {name: Dataset.from_dict({"input": [name], "output": ["A"]}) for name in "ab"}
    DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert [row.input for row in read_data(tmp_path / "two", "b", "input", "output").rows] == ["b"]
    with pytest.raises(ValueError, match="cannot read the split 'c'"):
        read_data(tmp_path / "two", "c", "input", "output")


def test_a_folder_of_parquet_files_is_read_as_the_hubs_datasets_are(tmp_path):
    Dataset.from_dict({"input": ["Who?"], "output": ["A"]}).to_parquet(tmp_path / "d/test.parquet")
    (row,) = read_data(str(tmp_path / "d"), "test", "input", "output").rows
    assert (row.id, row.input, row.output) == ("test:0", "Who?", "A")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["Who?"], "output": ["A"]}, "'input' in .*, got \\['text', 'output'\\]"),
        (
            {"input": ["Who?"], "gold": ["A"]},
            "of data.source data.text_column and data.label_column",
        ),
        (
            {"input": ["Who?", "W"], "output": ["A", None]},
            r"cannot ask 1 of 2 rows: test:1 \(its answer is null\). Correct or remove",
        ),
        ({"input": ["Who?"], "output": [[]]}, r"test:0 \(it has no answer\)"),
        ({"input": ["Who?", None], "output": ["A", "B"]}, r"test:1 \(its prompt is null\)"),
        ({"input": ["Who?", " \n"], "output": ["A", "B"]}, r"test:1 \(its prompt is empty\)"),
        (
            {"input": [1.5, 2.5], "output": ["A", "B"]},
            r"2 of 2 rows: test:0 \(its prompt is 1.5, not a",
        ),
        ({"input": [["W"], ["W"]], "output": ["A", "B"]}, r"its prompt is \['W'\], not a text"),
        ({"input": ["a"], "output": [["x", None]]}, r"test:0 \(its answer is null\)"),
    ],
)
def test_bad_data(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        rows_folder(data(saved(tmp_path, **columns)))


def test_repeated_ids_are_numbered(tmp_path, caplog):
    source = saved(tmp_path, id=["7", "8", "7"], input=["a", "b", "c"], output=["x", "y", "z"])
    rows = read_data(source, "test", "input", "output").rows
    assert [row.id for row in rows] == ["7", "8", "7#2"]
    assert "repeats 1 ids; they were numbered" in caplog.text


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"passage": None}, "its prompt is null"),
        ({"question": " "}, "its prompt is empty"),
        ({"answer": None}, "its answer is null"),
    ],
)
def test_questions_that_cannot_be_asked(tmp_path, changed, reason):
    file = write(tmp_path / "q.json", [QUESTION._replace(id="bad", **changed), QUESTION])
    with pytest.raises(ValueError, match=f"1 of 2 rows: bad .{reason}"):
        rows_folder(data(file))


def test_half_of_a_surrogate_pair_is_named(tmp_path):
    file = write(tmp_path / "q.json", [QUESTION._replace(question="Who \ud800?"), QUESTION])
    message = (
        r"qas\[0\]\.question': expected text, got .*ud800' at character 5, half of a surrogate"
    )
    with pytest.raises(ValueError, match=message):
        rows_folder(data(file))
    row = DataRow("1", "a", "Who?", ["a", "\udfff"])
    assert problem_of(row) == r"its answer has '\udfff' at character 1, half of a surrogate pair"


def test_a_hub_dataset_is_pinned_and_its_commit_is_recorded(tmp_path, monkeypatch):
    asked = []
    cached = tmp_path / "owner___name" / "part" / "0.0.0" / "abc1" / "name-test.arrow"
    cached.parent.mkdir(parents=True)
    with ArrowWriter(path=str(cached)) as writer:
        writer.write_batch({"input": ["a", "b"], "output": ["c", "d"]})
        writer.finalize()
    table = Dataset.from_file(str(cached))

    def load(*source, **options):
        asked.append((source, options))
        return table

    monkeypatch.setattr(rows, "load_dataset", load)
    for source in ("owner/name", "owner/name@abc", ["owner/name@abc", "part"]):
        read = read_data(source, "test", "input", "output")
        assert (len(read.rows), read.revision) == (2, "abc1")
    assert asked == [
        (("owner/name",), {"split": "test", "revision": None}),
        (("owner/name",), {"split": "test", "revision": "abc"}),
        (("owner/name", "part"), {"split": "test", "revision": "abc"}),
    ]
    table.save_to_disk(tmp_path / "owner@home")
    assert read_data(str(tmp_path / "owner@home"), "test", "input", "output").revision is None
