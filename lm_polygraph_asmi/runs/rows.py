"""The rows of a run: read from their source, sampled, and split into shards, with ids.

LM-Polygraph keeps only texts, and reads CSV files in a way that turns the answer "None" into NaN
and "007" into 7. So for a shipped config (`data.source`), rows are read strictly here and saved as
a `datasets` folder (`load_from_disk: true`). Its columns are `id`, `cluster`, `input` (prompt) and
`output` (the gold answer, or with `multiref` a list of them).
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import datasets
import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.analysis.clusters import cluster_key, text_clusters
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.inputs import chat_as_text
from lm_polygraph_asmi.runs.squad import DEMO_DATA, Question, prompt_of, questions_of, read_squad
from lm_polygraph_asmi.tables import LINES, TABLES, read_table
from lm_polygraph_asmi.validation import (
    check_at_least_one,
    check_one_of,
    check_whole,
    identity,
    listed,
    lone_surrogate,
)

log = logging.getLogger("lm_polygraph")

SELECTING = {
    "size": None, "subsample_seed": 1, "first": None, "sample": None, "sample_seed": 0,
    "sample_by": None, "shard": 0, "num_shards": 1,
    "grounded": None,  # selects no rows; it describes the prompts
}  # fmt: skip
"""Entries of the node `data` that select rows of the source, and their defaults."""
Table = list[dict[str, Any]]


WRITTEN_LIST = re.compile(
    r"""(array\()?[\[{][\[{(\s]*((None|null|nan),?\s*)*(['"].*)?[\]})]"""
    r"""|\(\s*['"].*['"]\s*,\s*(['"].*['"])?\s*\)""",
    re.DOTALL,
)
"""Matches a list or dictionary of texts that was written as one text by Python, NumPy or JSON,
also an empty one. A list of numbers does not match, since "[0, 1]" may be meant as an interval."""


class DataRow(NamedTuple):
    """One question of a run: its prompt and gold answer, or all accepted answers (`multiref`).

    Attributes:
        id: id in the source, or "split:number". Sampling and sharding do not change it.
        cluster: key (hash) shared by dependent rows, such as rows on the same story or passage.
    """

    id: str
    cluster: str
    input: str
    output: str | list[str] | None


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, before LM-Polygraph itself samples from them.

    Attributes:
        revision: commit of a hub dataset; for other rows of the node `data`, a digest over all
            shards.
        labelled: whether the rows have gold answers. If not, their answers are empty.
        named: whether a manifest lists the row ids. It does not if LM-Polygraph reads the source in
            its own way, which may give other rows.
        chosen: whether the config's node `data` selected the rows.
        saved: folders to which the rows were written.
    """

    rows: list[DataRow]
    revision: str | None = None
    labelled: bool = True
    named: bool = True
    chosen: bool = False
    saved: set[Path] = field(default_factory=set)

    def asked(self, config: Mapping[str, Any], seed: int) -> list[DataRow]:
        """The rows that LM-Polygraph's `subsample_eval_dataset` selects, in its order."""
        size = config.get("subsample_eval_dataset", -1)
        if size == -1:
            return self.rows
        return subsample(self.rows, int(size * len(self.rows)) if size < 1 else size, seed)


def _identity(value: Any) -> str:
    """`identity` of an id or cluster; "" if it is missing, which `problem_of` reports."""
    try:
        return identity(value)
    except ValueError:
        return ""


def problem_of(row: DataRow, multiref: bool | None = False) -> str | None:
    """Why a row cannot be used; None if it can.

    Args:
        row: the row.
        multiref: as in the config: whether the gold answer must be a list of all accepted answers,
            and not a text. None: the run has no gold answers.
    """
    given = row.output
    if multiref and isinstance(given, str):
        return "its answer is a text, but multiref expects a list of answers: leave multiref out"
    if multiref is False and isinstance(given, list):
        return "its answer is a list: set +multiref=true to compare with the best of its answers"
    golds = [] if multiref is None else given if isinstance(given, list) else [given]
    for name, text in [("prompt", row.input), *(("answer", gold) for gold in golds)]:
        if text is None:
            return f"its {name} is null"
        if not isinstance(text, str):
            return f"its {name} is {text!r:.40}, not a text"
        if not text.strip():
            return f"its {name} is empty"
        if half := lone_surrogate(text):
            return f"its {name} has {half}"
        if chat_as_text(text):
            return f"its {name} is a chat written as text, {text[:40]!r}: write only its content"
        if name == "answer" and WRITTEN_LIST.fullmatch(text.strip()):
            return (
                f"its answer {text!r:.40} is a list written as a text: write a text; or write a "
                "list in JSON lines or Parquet, and set +multiref=true"
            )
    if multiref and not golds:
        return "it has no answer"
    return None if row.cluster else "its cluster is missing"


def sample(rows: list[DataRow], size: int, seed: int, by_cluster: bool = False) -> list[DataRow]:
    """At most `size` rows in a random order that depends only on the ids and `seed`.

    A smaller sample is the beginning of a larger one. Removing rows does not change the order of
    the others. `by_cluster`: take at most one row of each cluster.
    """
    rows = sorted(rows, key=lambda row: hashlib.sha256(f"{seed}:{row.id}".encode()).digest())
    if by_cluster:
        rows = [rows[i] for i in pd.Series([row.cluster for row in rows]).drop_duplicates().index]
    if size > len(rows):
        log.warning(
            "data.sample: expected %d rows, but there are only %d; using all", size, len(rows)
        )
    return rows[:size]


def subsample(items: list[DataRow], size: int | None, seed: int) -> list[DataRow]:
    """The rows that LM-Polygraph's `subsample_eval_dataset` selects with a seed, in its order."""
    if size is None or size >= len(items):
        return items
    return [items[i] for i in np.random.RandomState(seed).choice(len(items), size, replace=False)]


def shard_of(items: list[DataRow], shard: int, num_shards: int) -> list[DataRow]:
    """The rows of shard `shard` (from 0): consecutive ones. Shard sizes differ by at most one."""
    if not 0 <= shard < num_shards:
        raise ValueError(f"expected data.shard in 0 ... {num_shards - 1}, got {shard}")
    if num_shards > len(items):
        raise ValueError(f"expected data.num_shards of at most {len(items)} rows, got {num_shards}")
    return items[shard * len(items) // num_shards : (shard + 1) * len(items) // num_shards]


def read_data(
    source: str | Path | Sequence[str] | None,
    split: str,
    text_column: str,
    label_column: str | None,
    prompt_style: str = "paper",
    closed_book: bool = False,
) -> RunRows:
    """All rows of a source, in order: a file, a `datasets` folder, or a hub dataset.

    A file is JSON lines, CSV or Parquet, or SQuAD's format in a .json file. A hub dataset is given
    by its name, by name and configuration, or by "name@revision". None: the demo's questions. If
    there are SQuAD's columns, prompts are built from them (`squad.prompt_of`); otherwise, prompts
    and answers are read from the two named columns (`label_column` None: no answers). A cluster is
    the value of a column `cluster`, or the passage, or found from the prompts by `text_clusters`.
    """
    revision = None
    name = " ".join(source) if isinstance(source, list | tuple) else str(source or DEMO_DATA)
    suffix, known = Path(name).suffix.lower(), (".json", *LINES, *TABLES, ".txt", ".xlsx", ".gz")
    file = Path(name).is_file() or (suffix in known and not Path(name).is_dir())
    if file and not Path(name).is_file():
        raise FileNotFoundError(f"data.source: the file {name} does not exist")
    if suffix == ".json" and file:
        rows = _from_questions(read_squad(name), prompt_style, closed_book)
    else:
        table, revision = (table_of(name, text_column), None) if file else _load(source, split)
        columns = list(dict.fromkeys(column for row in table for column in row))
        if text_column not in columns and {*columns} >= {"context", "question", "answers"}:
            rows = _from_questions(questions_of(table), prompt_style, closed_book)
        elif closed_book or prompt_style != "paper":
            raise ValueError(
                f"{name} has complete prompts (its columns are {columns}): data.closed_book and "
                "data.prompt_style need SQuAD's columns"
            )
        else:
            rows = _from_columns(table, name, text_column, label_column, f"{split}:")
    if not rows:
        raise ValueError(f"{name} has no rows in the split {split!r}: see data.split")
    if label_column is None:
        rows = [row._replace(output="") for row in rows]
    ids = pd.Series([row.id for row in rows])
    times = ids.groupby(ids).cumcount() + 1  # the second "7" becomes "7#2"
    if repeated := int((times > 1).sum()):
        log.warning("%s repeats %d ids; the repeated ids get a number", name, repeated)
    unique = ids.where(times == 1, ids + "#" + times.astype(str))
    rows = [row._replace(id=i) for row, i in zip(rows, unique, strict=True)]
    return RunRows(rows, revision, labelled=label_column is not None)


def table_of(file: str | Path, text_column: str) -> Table:
    """The rows of a file, read strictly. Raises ValueError that lists the unreadable rows."""
    rows = list(read_table(file, (text_column,)))
    wrong = [f"row {row.number} ({row.error})" for row in rows if row.error]
    if wrong:
        raise ValueError(f"{file}: {_cannot_use(wrong, len(rows))}")
    return [row.content for row in rows]


def _load(source: Any, split: str) -> tuple[Table, str | None]:
    """A table, and for a hub dataset its commit, which is the name of its folder in the cache."""
    first, *configuration = [source] if isinstance(source, str | Path) else source
    name = " ".join(map(str, (first, *configuration)))
    # If the hub does not answer, `datasets` would retry for a minute. So ask the hub first.
    refusal = (hub := repository_of(source)) and hub.refusal()
    try:
        if _is_saved(Path(first)):
            loaded = load_from_disk(str(first))
            return (loaded[split] if isinstance(loaded, DatasetDict) else loaded).to_list(), None
        if Path(first).exists():
            return load_dataset(str(first), *configuration, split=split).to_list(), None
        place, _, pinned = str(first).partition("@")
        offline = bool(refusal) or datasets.config.HF_HUB_OFFLINE
        with patch.object(datasets.config, "HF_HUB_OFFLINE", offline):
            table = load_dataset(place, *configuration, split=split, revision=pinned or None)
        commits = [Path(file["filename"]).parent.name for file in table.cache_files]
        if refusal and pinned and not "".join(commits).startswith(pinned):
            raise LookupError(f"{pinned} is not on this machine")  # `datasets` took the newest
        return table.to_list(), commits[0] if commits else None
    except Exception as error:  # the library raises its own types
        reason = refusal or error.__cause__ or error
        raise ValueError(
            f"cannot read the split {split!r} of the dataset {name}: {reason}. Expected an "
            "existing file, a dataset of the hub, a folder written by save_to_disk, or a folder "
            "of Parquet files: see data.source and data.split"
        ) from error


def repository_of(source: Any) -> Repository | None:
    """The hub dataset that a source names, with its configuration as the folder; None if none."""
    named = [source or ""] if isinstance(source, str | Path | None) else source
    first, *configuration = map(str, named)
    name, _, revision = first.partition("@")
    if not name or Path(first).exists() or Path(first).suffix in (".json", *LINES, *TABLES):
        return None
    return Repository(name, revision or None, part="".join(configuration) or None, kind="dataset")


def are_chosen(config: DictConfig) -> bool:
    """Whether the config's node `data` selects the rows of a run."""
    # Do not resolve the config, which would save the rows.
    return "asmi_rows" in str(cast(dict[str, Any], OmegaConf.to_container(config)).get("dataset"))


def _is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((folder / f).is_file() for f in ("dataset_info.json", "dataset_dict.json"))


def _from_questions(questions: list[Question], style: str, closed_book: bool) -> list[DataRow]:
    prompt = prompt_of(style, closed_book)
    rows = []
    for question in questions:
        parts = [question.question] if closed_book else [question.passage, question.question]
        empty = [part for part in parts if not (isinstance(part, str) and part.strip())]
        text = empty[0] if empty else prompt(question)  # in a prompt, the empty part is not seen
        # Closed-book data may lack a passage: then rows with the same question are a cluster.
        shared = question.passage if str(question.passage or "").strip() else question.question
        rows.append(DataRow(question.id, cluster_key(shared), text, question.answer))
    return rows


def _from_columns(
    table: Table, name: str, text: str, label: str | None, prefix: str
) -> list[DataRow]:
    """Rows from complete prompts. Without a column `id`, ids are `prefix` and the row's number."""
    columns = list(dict.fromkeys(column for row in table for column in row))
    for column in (text, label):
        if table and column is not None and column not in columns:
            raise ValueError(
                f"expected a column {column!r} in {name}, got {columns}: set text_column and "
                "label_column, or for data.source data.text_column and data.label_column"
            )
    ids = [row.get("id") if "id" in columns else f"{prefix}{i}" for i, row in enumerate(table)]
    if nameless := [i for i, given in enumerate(ids) if given is None or not str(given).strip()]:
        raise ValueError(
            f"{name}: row {nameless[0] + 1} has no id: give ids to all rows, or to none"
        )
    prompts: list[Any] = [row.get(text) for row in table]
    clusters = (
        [row.get("cluster") for row in table]
        if "cluster" in columns
        else map(cluster_key, text_clusters(list(map(str, prompts))))
    )
    return [
        DataRow(str(i), _identity(cluster), prompt, row.get(label or ""))
        for i, cluster, prompt, row in zip(ids, clusters, prompts, table, strict=True)
    ]


def select_rows(data: Mapping[str, Any], multiref: bool = False) -> RunRows:
    """The rows that a config's node `data` selects. Raises ValueError if one cannot be used.

    `data` holds arguments of `read_data` and entries of `SELECTING`, which are applied in this
    order: `size` with `subsample_seed` (drawn as by LM-Polygraph), `first`, `sample` (see
    `sample`), `shard`. `multiref`: see `problem_of`.
    """
    how = SELECTING | {name: value for name, value in data.items() if name in SELECTING}
    for name in ("size", "first", "sample"):
        check_at_least_one(f"data.{name}", how[name])
    check_whole("data.sample_seed", how["sample_seed"])
    if how["sample_by"] is not None:
        check_one_of("data.sample_by", how["sample_by"], ("cluster",))
        check_whole("data.sample, of which data.sample_by is a part,", how["sample"])
    source = data.get("source") or ""
    folder = Path(source if isinstance(source, str) else source[0])
    if source and folder.is_dir() and not _is_saved(folder):
        for file in folder.rglob("*"):
            if file.suffix.lower() in {*LINES, *TABLES, ".json"} - {".parquet"}:
                raise ValueError(
                    f"data.source: {folder} is a folder of files whose types would be guessed: "
                    "name one file "
                    f"({file})"
                )
    read = read_data(**{name: value for name, value in data.items() if name not in SELECTING})
    rows = subsample(read.rows, how["size"], how["subsample_seed"])[: how["first"]]
    if how["sample"] is not None:
        rows = sample(rows, how["sample"], how["sample_seed"], how["sample_by"] == "cluster")
    check_usable(replace(read, rows=rows), multiref)
    digest = f"sha256:{hashlib.sha256(repr(rows).encode()).hexdigest()[:16]}"
    rows = shard_of(rows, how["shard"], how["num_shards"])
    return replace(read, rows=rows, revision=read.revision or digest, chosen=True)


def unusable_rows(rows: Sequence[DataRow], problem: Callable[[DataRow], str | None]) -> str | None:
    """An error message that lists the unusable rows with reasons; None if all are usable."""
    problems = [f"{row.id} ({reason})" for row in rows if (reason := problem(row))]
    return _cannot_use(problems, len(rows)) if problems else None


def _cannot_use(problems: list[str], rows: int) -> str:
    named = listed(problems, 10, between="; ")
    return f"cannot use {len(problems)} of {rows} rows: {named}. Correct or remove them"


def check_usable(read: RunRows, multiref: bool) -> None:
    """Raise ValueError if rows would end a run in the middle, or get a wrong label."""
    if multiref and not read.labelled:
        raise ValueError(
            "multiref needs gold answers, but label_column is null: change one of them"
        )
    form = multiref if read.labelled else None
    if unusable := unusable_rows(read.rows, partial(problem_of, multiref=form)):
        raise ValueError(unusable)


def run_rows(config: DictConfig) -> RunRows:
    """The rows of a run: those of its node `data`, or of the `dataset` that its config names."""
    if are_chosen(config):
        _chosen_rows.cache_clear()  # the source may have changed since an earlier run
        return chosen_rows(config)
    if OmegaConf.select(config, "data.num_shards", default=1) != 1:
        raise ValueError(
            "data.num_shards splits only the rows of data.source, but this config names its own "
            "`dataset`, so each job would ask all rows. Leave data.num_shards out, or name the "
            "file as data.source in a config with asmi_base"
        )
    source = config.dataset if isinstance(config.dataset, str) else list(config.dataset)
    columns = config.text_column, config.get("label_column")
    if isinstance(source, str) and Path(source).is_file():
        return RunRows(_as_the_host_reads(source, config.eval_split, *columns), named=False)
    # LM-Polygraph reads other sources in its own way.
    named = bool(config.get("load_from_disk")) and isinstance(source, str)
    return replace(read_data(source, config.eval_split, *columns), named=named)


def _as_the_host_reads(file: str, split: str, text: str, label: str | None) -> list[DataRow]:
    """Rows of a config's own `dataset: FILE.csv`, as LM-Polygraph's `Dataset.from_csv` reads them.

    It uses pandas, which guesses types and separators. Raises ValueError if this changes a row.
    """
    if label is None:
        raise ValueError(f"LM-Polygraph reads {file} only with a label_column: set it")
    frame = pd.read_csv(file)
    cells = frame.astype(object).where(frame.notna(), None)
    rows = _from_columns(cells.to_dict("records"), file, text, label, f"{split}:")
    written = [(row.get(text), row.get(label)) for row in table_of(file, text)]
    read = [(row.input, row.output) for row in rows]
    wrong = [
        f"row {number} (read as {theirs!r:.80}, written {ours!r:.80})"
        for number, cells in enumerate(zip_longest(read, written, fillvalue=(None,) * 2), 1)
        for theirs, ours in [pair for pair in zip(*cells, strict=True) if pair[0] != pair[1]][:1]
    ]
    if wrong:
        raise ValueError(
            f"{file}, as LM-Polygraph reads it with pandas: {_cannot_use(wrong, len(rows))}, or "
            "name the file as data.source in a config with asmi_base, which reads all cells as "
            "text"
        )
    return rows


def chosen_rows(config: DictConfig) -> RunRows:
    """The rows that the config's node `data` selects, cached."""
    # The working folder is part of the key, since a source may be a relative path.
    data = json.dumps(container(config.data), default=str)
    return _chosen_rows(data, bool(config.get("multiref")), Path.cwd())


@lru_cache(maxsize=1)  # both the checks and LM-Polygraph ask for these rows
def _chosen_rows(data_json: str, multiref: bool, _: Path) -> RunRows:
    return select_rows(json.loads(data_json), multiref)


def results_folder(config: DictConfig) -> Path:
    """The folder of a run's manager files and manifests and, until it ends, its rows."""
    return Path(config.get("save_path") or HydraConfig.get().runtime.output_dir)


def saved_rows(config: DictConfig) -> Path:
    """Save the rows of a run for LM-Polygraph to read, and return the folder."""
    chosen, folder = chosen_rows(config), results_folder(config) / "rows"
    if folder not in chosen.saved:  # LM-Polygraph asks for it twice
        Dataset.from_pandas(pd.DataFrame(chosen.rows)).save_to_disk(folder)
        chosen.saved.add(folder)
    return folder
