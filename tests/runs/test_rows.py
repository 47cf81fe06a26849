"""Which rows a run asks, and who they are."""

import hashlib
import json
from random import Random
from unittest.mock import Mock, call

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from datasets.arrow_writer import ArrowWriter
from lm_polygraph.utils.dataset import Dataset as HostDataset
from omegaconf import OmegaConf

from lm_polygraph_asmi.analysis.clusters import cluster_key
from lm_polygraph_asmi.decisions.labels import clusters_of
from lm_polygraph_asmi.runs import rows
from lm_polygraph_asmi.runs.rows import DataRow
from lm_polygraph_asmi.tables import Row
from tests.runs.test_squad import QUESTION, write

STORIES = [DataRow(f"{i}", f"story {i // 5}", f"q{i}?", "a") for i in range(200)]
"""Forty stories with five questions each: their kinds are the ids modulo five."""
SOUND = {"input": list("abcd"), "output": list("efgh")}


def data(source, **changed):
    """A config's node `data`."""
    return {
        "source": str(source), "split": "test", "text_column": "input", "label_column": "output"
    } | changed  # fmt: skip


def saved(tmp_path, **columns):
    folder = tmp_path / "source"
    Dataset.from_dict(columns).save_to_disk(folder)
    return folder


def read(source, split="test"):
    return rows.read_data(source, split, "input", "output").rows


def refuses(word: str, source, **changed) -> None:
    """The source, or what is chosen of it, is refused with this word."""
    with pytest.raises((ValueError, OSError), match=word):
        rows.select_rows(data(source, **changed))


@pytest.mark.parametrize("answer", ["None", "007", "1,200", "Zürich 🙂", ["None", "007"]])
def test_the_host_reads_every_answer_as_text_from_the_results_folder(tmp_path, answer):
    source = write(tmp_path / "q.json", [QUESTION._replace(answer=answer)])
    if several := isinstance(answer, list):
        source = saved(tmp_path, input=["Answer:"], output=[answer])
    node = {"data": data(source), "save_path": str(tmp_path / "run"), "multiref": several}
    folder = rows.saved_rows(OmegaConf.create(node))
    assert folder == tmp_path / "run" / "rows"
    loaded = HostDataset.load(str(folder), "input", "output", batch_size=1, load_from_disk=True)
    assert (list(loaded.y), loaded.x[0].endswith("Answer:")) == ([answer], True)


def test_rows_are_read_once_and_replace_those_of_a_killed_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "q.json", [QUESTION, QUESTION._replace(id="q2", question="Whose?")])
    config = OmegaConf.create({"data": data(file), "save_path": str(tmp_path / "run")})
    Dataset.from_dict({"id": list("abc")}).save_to_disk(tmp_path / "run" / "rows")
    for _ in range(2):
        assert load_from_disk(rows.saved_rows(config))["id"] == ["q1", "q2"]
        write(file, [QUESTION])
    config.dataset = "asmi_rows"
    assert [row.id for row in rows.run_rows(config).rows] == ["q1"]  # the next run reads anew


@pytest.mark.parametrize("nowhere", ["", " \n", None])
def test_twins_share_rows_and_clusters(tmp_path, nowhere):
    """Open and closed book; a question without a passage, which only the latter asks, is alone."""
    file = write(tmp_path / "q.json", [
        QUESTION._replace(id=str(i), passage=f"Passage {i // 2}") for i in range(8)
    ])  # fmt: skip
    opened, closed = (
        rows.select_rows(data(file, size=5, closed_book=closed)).rows for closed in (False, True)
    )
    assert [r._replace(input="") for r in opened] == [r._replace(input="") for r in closed]
    assert all(row.cluster == cluster_key(f"Passage {int(row.id) // 2}") for row in opened)
    assert not {row.input for row in opened} & {row.input for row in closed}
    asked = [QUESTION._replace(passage=nowhere, question=f"Who is {i}?") for i in range(2)]
    alone = rows.select_rows(data(write(file, asked), closed_book=True)).rows
    assert [row.cluster for row in alone] == [cluster_key(q.question) for q in asked]


def slow_sample(asked: list[DataRow], size: int, seed: int, by_cluster: bool) -> list[DataRow]:
    """A twin of `rows.sample`, which takes one row after the other."""
    left, taken = list(asked), list[DataRow]()
    while left and len(taken) < size:
        lots = [hashlib.sha256(f"{seed}:{row.id}".encode()).hexdigest() for row in left]
        row = left.pop(lots.index(min(lots)))
        if not by_cluster or row.cluster not in {other.cluster for other in taken}:
            taken.append(row)
    return taken


def slow_choice(size=None, subsample_seed=1, first=None, sample=None, sample_seed=0, sample_by=None,
                shard=0, num_shards=1):  # fmt: skip
    """A twin of `rows.select_rows`, of STORIES: the rows of all shards, and those of one."""
    host = HostDataset(list(STORIES), list(STORIES), batch_size=1)
    if size and size < len(STORIES):  # the host shuffles all that there is; here it keeps its order
        host.subsample(size, subsample_seed)
    asked = host.x[:first]
    if sample:
        asked = slow_sample(asked, sample, sample_seed, sample_by == "cluster")
    size = len(asked)
    ends = [((at + 1) * num_shards - 1) // size for at in range(size)]
    return asked, [row for row, end in zip(asked, ends, strict=True) if end == shard]


def test_rows_are_those_of_a_slow_choice(tmp_path, caplog):
    """By size, first, sample and shard, in this order; their digest is that of all shards."""
    columns = {name: [getattr(row, name) for row in STORIES] for name in DataRow._fields}
    source, generator, digests = saved(tmp_path, **columns), Random(0), {}
    choices = {
        "size": (50, 150, 200, 300), "subsample_seed": (1, 2), "first": (20, 50, 300),
        "sample": (6, 9, 201), "sample_seed": (0, 3), "num_shards": (2, 3),
    }  # fmt: skip
    for _ in range(40):
        named = generator.sample([*choices], generator.randrange(len(choices) + 1))
        own = {name: generator.choice(choices[name]) for name in named}
        own["shard"] = generator.randrange(own.get("num_shards", 1))
        own["sample_by"] = generator.choice([None, "cluster"]) if "sample" in own else None
        caplog.clear()
        before = np.random.get_state()[1].copy()  # noqa: NPY002
        asked = rows.select_rows(data(source, **own))
        np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
        every, expected = slow_choice(**own)
        assert [row[::2] for row in asked.rows] == [row[::2] for row in expected], own
        assert ("data.sample: expected" in caplog.text) == (len(every) < own.get("sample", 0))
        assert digests.setdefault(asked.revision, every) == every
    assert len({*map(str, digests.values())}) == len(digests)
    other = saved(tmp_path / "other", **columns | {"output": ["b"] * 200})
    assert rows.select_rows(data(other)).revision != rows.select_rows(data(source)).revision


def test_clusters_without_a_column_are_those_of_a_calibration(tmp_path):
    passages = [f"{who} built the ferry Ondine in Brask. " * 4 for who in ("Ann", "Bo", "Cy")]
    prompts = [f"{passage}\nQuestion: {q}" for passage in passages for q in ("Who?", "Where?")]
    source = saved(tmp_path, input=prompts, output=["x"] * 6)
    expected = clusters_of([Row(i, {"prompt": prompt}) for i, prompt in enumerate(prompts)])
    assert [expected.index(cluster) for cluster in expected] == [0, 0, 2, 2, 4, 4]
    own = {"dataset": str(source), "eval_split": "test", "load_from_disk": True}
    listed = rows.run_rows(OmegaConf.create(data(source) | own))
    keys = enumerate(map(cluster_key, expected))
    assert [row[:2] for row in listed.rows] == [(f"test:{i}", key) for i, key in keys]
    assert (listed.named, listed.chosen) == (True, False)  # as manifests name them


def test_sources_and_ids(tmp_path, caplog):
    """Splits of a folder, files as of the hub, other columns, numbers as ids, which repeat."""
    splits = {name: Dataset.from_dict({"input": [name], "output": ["A"]}) for name in "ab"}
    DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert [row.input for row in read(tmp_path / "two", "b")] == ["b"]
    with pytest.raises(ValueError, match="split 'c'"):
        read(tmp_path / "two", "c")
    splits["a"].to_parquet(tmp_path / "d/test.parquet")
    assert read(str(tmp_path / "d")) == [DataRow("test:0", cluster_key("a"), "a", "A")]
    asked = ["Who?", "Where?", "Who?"]
    source = saved(tmp_path / "columns", question=asked, gold=list("ABC"))
    columns = {"text_column": "question", "label_column": "gold"}
    assert rows.select_rows(data(source, **columns, shard=1, num_shards=2)).rows == [
        DataRow(f"test:{i}", cluster_key(asked[i]), asked[i], "ABC"[i]) for i in (1, 2)
    ]
    assert [row.output for row in rows.read_data(source, "test", "question", None).rows] == [""] * 3
    columns = {"id": [2**60, 0, 2**60], "input": list("abc"), "output": list("xyz")}
    Dataset.from_dict(columns).to_parquet(tmp_path / "ids.parquet")
    assert [row.id for row in read(tmp_path / "ids.parquet")] == [f"{2**60}", "0", f"{2**60}#2"]
    assert "repeats 1 ids" in caplog.text


@pytest.mark.parametrize(
    ("columns", "changed", "word"),
    [
        (SOUND, {"shard": 3, "num_shards": 3}, "in 0 ... 2, got 3"),
        (SOUND, {"shard": -1}, "in 0 ... 0, got -1"),
        (SOUND | {"cluster": ["a", "b", "c", None]}, {}, r"test:3 \(its cluster"),
        (SOUND | {"cluster": ["a", "b", "c", " "]}, {}, r"test:3 \(its cluster"),
        (SOUND | {"id": ["a", "b", None, "d"]}, {}, "row 3 has no id"),
        (SOUND | {"id": ["a", "b", " ", "d"]}, {}, "row 3 has no id"),
        ({"input": [], "output": []}, {}, "of the dataset"),
        (SOUND, {"num_shards": 5}, "of at most 4"),
        (SOUND, {"sample_by": "cluster"}, r"data\.sample_by"),
        (SOUND, {"sample": 0}, r"data\.sample .* got 0"),
        (SOUND, {"sample": 2.5}, r"data\.sample .* got 2.5"),
        (SOUND, {"sample": 2, "sample_by": "facts"}, "sample_by .* 'cluster'"),
        (SOUND, {"closed_book": True}, "complete prompts"),
        (SOUND, {"prompt_style": "demo"}, "complete prompts"),
        ({"text": ["Who?"], "output": ["A"]}, {}, r"'input' in .*, got \['text', 'output'\]"),
        ({"input": ["Who?"], "gold": ["A"]}, {}, r"data\.label_column"),
        ({"input": ["Who?", None], "output": ["A", "B"]}, {"num_shards": 2}, "test:1 .* null"),
        ({"input": ["Who?", " \n"], "output": ["A", "B"]}, {}, "test:1 .* empty"),
        ({"input": [["W"], ["W"]], "output": ["A", "B"]}, {}, r"2 of 2 .*is \['W'\], not a text"),
        ({"input": ["a"] * 11, "output": [None] * 11}, {}, r"cannot use 11 .*test:9 .*; \.\.\.\."),
    ],
)
def test_rows_that_cannot_be_chosen_or_asked(tmp_path, columns, changed, word):
    refuses(word, saved(tmp_path, **columns), **changed)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"passage": None}, "bad .* null"),
        ({"question": " "}, "bad .* empty"),
        ({"question": "Who \ud800?"}, "question.* character 5"),
    ],
)
def test_questions_that_cannot_be_asked(tmp_path, changed, word):
    refuses(word, write(tmp_path / "q.json", [QUESTION._replace(id="bad", **changed), QUESTION]))


@pytest.mark.parametrize(
    ("output", "as_text", "as_list"),
    [
        ("x", None, "is a text"), (["x", "y"], "is a list", None), ([], "is a list", "no answer"),
        (["x", None], "is a list", "is null"), ([["x"]], "is a list", "is ['x'], not a text"),
        (["x", 3], "is a list", "is 3, not a text"), (["x", " "], "is a list", "is empty"),
        (3, "is 3, not a text", "is 3, not a text"), (None, "is null", "is null"),
        ({"text": ["x"]}, "is {'text': ['x']}, not a text", "is {'text': ['x']}, not a text"),
        ("\n", "is empty", "is a text"),
        (["x", "['y']"], "is a list", "is a list written as a text"),
        (["x", "\udfff"], "is a list", "at character 1"),
    ],
)  # fmt: skip
def test_gold_answers_are_texts_or_lists_of_texts(output, as_text, as_list):
    for multiref, expected in ((False, as_text), (True, as_list), (None, None)):
        problem = rows.problem_of(DataRow("1", "a", "Who?", output), multiref)
        assert (problem is None, (expected or "") in (problem or "")) == (expected is None, True)


def test_lists_written_as_texts_are_known():
    lists = (["Edda Holm", "Holm"], ["d'Or", 'a "b"'], ["\\d", "é"], [["x"]], ("x", "y"), ("x",),
             {"x"}, [], {"text": ["x"], "start": [3]}, [None, "x"], ["x" * 2000, "y"])  # fmt: skip
    texts = [*map(str, lists), *(f"{np.array(one, object)}" for one in lists[:3]), "array(['x'])",
             *(json.dumps(one) for one in lists if not isinstance(one, set)),
             "array(['a',\n 'b'], dtype=object)", " ['a'\n 'b']\n"]  # fmt: skip
    plain = ["Holm", "[0, 1]", "(1, 2)", "{1}", '("Holm")', "'Holm'", "[sic]", "['90s", "f(x)"]
    for text in (*texts, *plain):
        assert bool(rows.problem_of(DataRow("1", "a", "Who?", text))) == (text in texts), text


FORMS = {
    "a.csv": "id,input,output\n007,Who?,007\n08,When?,None\n",
    "b.csv": "id;input;output;more\r\n007;Who?;007;\r\n08;When?;None;x\r\n",
    "c.TSV": "\ufeffid\tinput\toutput\n007\tWho?\t007\n08\tWhen?\tNone\n",
    "d.ndjson": '{"id": "007", "input": "Who?", "output": "007"}\n'
    '{"id": "08", "input": "When?", "output": "None", "more": 1}\n',
}


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """A working directory from which no hub is asked."""
    monkeypatch.setattr(rows, "load_dataset", Mock(side_effect=AssertionError("the hub")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_read_as_it_is_written(cwd, name):
    (cwd / name).write_text(FORMS[name], newline="")
    assert [(r.id, r.input, r.output) for r in rows.select_rows(data(name)).rows] == [
        ("007", "Who?", "007"), ("08", "When?", "None")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.csv", "input,output\na,b,\nc,d,\n", r"a\.csv: cannot use 2 of 2 rows: row 1 "),
        ("a.csv", "input,output\na,b\nc\n", r"1 of 2 rows: row 2 \(expected 2 cells.*got 1"),
        ("a.csv", "input,output,output\na,b,c\n", "the column 'output' occurs twice"),
        ("a.csv", "question,output\na,b\n", "a column 'input', got 'question', 'output'"),
        ("a.csv", "input,gold\na,b\n", r"a column 'output' in .*got \['input', 'gold'\]"),
        ("a.csv", "input,output\n", "has no rows"),
        ("a.csv", "id,input,output\n1,a,b\n,c,d\n", "row 2 has no id"),
        ("a.csv", "input,output\na,\"['b', 'c']\"\n", "is a list written as a text"),
        ("a.jsonl", '{"input": "a", "output": "b"}\n{"input": \n', r"row 2 \(not JSON"),
        ("a.jsonl", '{"input": "a", "output": "b"}\n{"output": "b"}\n', "test:1 .* null"),
        ("a.jsonl", '{"input": "a", "output": "x"}\n{"input": "b", "output": 3}',
         r"1 of 2 rows: test:1 \(its answer is 3, not a text\)"),
        ("a.jsonl", '{"input": "a", "output": "b", "output": "c"}\n', "'output' occurs twice"),
        ("a.xlsx", "PK", r"a\.xlsx: expected a file \.jsonl"),
        *(("a.json", content, r"SQuAD-format JSON .* in .*a\.json, got an error: .*JSON lines")
          for content in ('[{"input": "a"}]', "not json", '{"data": [{"paragraphs": [{}]}]}')),
        ("sub/a.csv", "input,output\na,7\n", r"sub is a folder of files .* name one file \(sub"),
        ("sub/a.jsonl", '{"input": "a", "output": "2020-01-01"}', "sub is a folder of files"),
        *((None, name, f"{name} does not exist")
          for name in ("none.jsonl", "none.csv.gz", "none.CSV", "none.parquet")),
    ],
)  # fmt: skip
def test_files_that_are_refused(cwd, name, content, word):
    if name is None:
        refuses(word, content)
        return
    (cwd / name).parent.mkdir(exist_ok=True)
    (cwd / name).write_text(content)
    refuses(word, name.partition("/")[0])


def test_a_hub_dataset_is_pinned_and_its_commit_is_recorded(tmp_path, monkeypatch):
    cached = tmp_path / "owner___name" / "part" / "0.0.0" / "abc1" / "name-test.arrow"
    cached.parent.mkdir(parents=True)
    with ArrowWriter(path=str(cached)) as writer:
        writer.write_batch({"input": ["a", "b"], "output": ["c", "d"]})
        writer.finalize()
    table = Dataset.from_file(str(cached))
    load = Mock(return_value=table)
    monkeypatch.setattr(rows, "load_dataset", load)
    table.save_to_disk(tmp_path / "owner@home")
    for source, revision in (
        ("owner/name", "abc1"), ("owner/name@abc", "abc1"), (["owner/name@abc", "part"], "abc1"),
        (str(tmp_path / "owner@home"), None),
    ):  # fmt: skip
        found = rows.read_data(source, "test", "input", "output")
        assert (len(found.rows), found.revision) == (2, revision)
    assert load.call_args_list == [
        call("owner/name", split="test", revision=None),
        call("owner/name", split="test", revision="abc"),
        call("owner/name", "part", split="test", revision="abc"),
    ]
    with pytest.raises(ValueError, match="owner/name@def: HF_HUB_OFFLINE"):
        rows.read_data("owner/name@def", "test", "input", "output")  # another is in the cache
