"""The rows of a run: read from their source, subsampled, split into shards, with ids.

LM-Polygraph keeps only texts, and reads CSV files so that the answer "None" becomes NaN and "007"
becomes 7. So the rows of a shipped config are saved as a `datasets` folder (`load_from_disk: true`)
with columns `id`, `cluster`, `input` (prompt) and `output` (gold answer, or a list of them).
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.analysis.clusters import cluster_key, text_clusters
from lm_polygraph_asmi.host.configs import container
from lm_polygraph_asmi.runs.squad import DEMO_DATA, Question, prompt_of, questions_of, read_squad
from lm_polygraph_asmi.validation import (
    check_at_least_one,
    check_one_of,
    check_whole,
    identity,
    lone_surrogate,
)

log = logging.getLogger("lm_polygraph")
NAMED = 10
"""Largest number of rows that a message lists."""

Item = TypeVar("Item")
SELECTING = {
    "size": None, "subsample_seed": 1, "first": None, "sample": None, "sample_seed": 0,
    "sample_by": None, "shard": 0, "num_shards": 1,
    "grounded": None,  # describes the prompts, does not select rows
}  # fmt: skip
"""Entries of the node `data` that choose among the rows of its source, and their defaults."""
Source = str | Path | Sequence[str] | None


class DataRow(NamedTuple):
    """One question of a run: prompt, and gold answer, or all accepted ones; None: it has none.

    Attributes:
        id: id in the source, or "split:number"; the same after subsampling and sharding.
        cluster: key (hash) that dependent rows share, such as those with one story or passage.
    """

    id: str
    cluster: str
    input: str
    output: str | list[str] | None


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, before LM-Polygraph's own subsampling.

    `revision`: commit of a hub dataset. `chosen`: by the node `data`. `named`: whether a manifest
    names them; LM-Polygraph may read other sources differently. `saved`: folders that have them.
    """

    rows: list[DataRow]
    revision: str | None = None
    named: bool = True
    chosen: bool = False
    saved: set[Path] = field(default_factory=set)

    def asked(self, config: Mapping[str, Any], seed: int) -> list[DataRow]:
        """Those that LM-Polygraph's `subsample_eval_dataset` leaves, in its order."""
        size = config.get("subsample_eval_dataset", -1)
        if size == -1:
            return self.rows
        return subsample(self.rows, int(size * len(self.rows)) if size < 1 else size, seed)


def _identity(value: Any) -> str:
    """`identity` of an id or a cluster; empty if it is missing, which `problem_of` reports."""
    try:
        return identity(value)
    except ValueError:
        return ""


def problem_of(row: DataRow) -> str | None:
    """Why a row cannot be asked; None if it can."""
    answers = row.output if isinstance(row.output, list) else [row.output]
    if not answers:
        return "it has no answer"
    for name, text in [("prompt", row.input), *(("answer", answer) for answer in answers)]:
        if text is None:
            return f"its {name} is null"
        if not isinstance(text, str):
            return f"its {name} is {text!r:.40}, not a text"
        if half := lone_surrogate(text):
            return f"its {name} has {half}"
    if not row.cluster:
        return "its cluster is missing"
    return None if row.input.strip() else "its prompt is empty"


def sample(rows: list[DataRow], size: int, seed: int, by_cluster: bool = False) -> list[DataRow]:
    """At most `size` rows in a random order, which depends only on ids and `seed`.

    A smaller sample is the beginning of a larger one, and rows that were left out before do not
    change the order of the others. `by_cluster`: at most one row of each cluster.
    """
    rows = sorted(rows, key=lambda row: hashlib.sha256(f"{seed}:{row.id}".encode()).digest())
    if by_cluster:
        rows = [rows[i] for i in pd.Series([row.cluster for row in rows]).drop_duplicates().index]
    if size > len(rows):
        log.warning("data.sample: expected %d rows, got %d, which are all", size, len(rows))
    return rows[:size]


def subsample(items: list[Item], size: int | None, seed: int) -> list[Item]:
    """The rows that LM-Polygraph's `subsample_eval_dataset` samples for a seed, in its order."""
    if size is None or size >= len(items):
        return items
    return [items[i] for i in np.random.RandomState(seed).choice(len(items), size, replace=False)]


def shard_of(items: list[Item], shard: int, num_shards: int) -> list[Item]:
    """Shard `shard` (from 0) of `num_shards`: consecutive rows, with sizes that differ by one."""
    if not 0 <= shard < num_shards:
        raise ValueError(f"expected data.shard in 0 ... {num_shards - 1}, got {shard}")
    if num_shards > len(items):
        raise ValueError(f"expected data.num_shards of at most {len(items)} rows, got {num_shards}")
    return items[shard * len(items) // num_shards : (shard + 1) * len(items) // num_shards]


def read_data(
    source: Source,
    split: str,
    text_column: str,
    label_column: str | None,
    prompt_style: str = "paper",
    closed_book: bool = False,
) -> RunRows:
    """All rows of a source, in order: SQuAD-format JSON file, `datasets` folder, or hub dataset.

    A hub dataset is a name, or name and configuration, "name@revision" if pinned; None: the demo's
    questions. From SQuAD's columns the prompt is built (`squad.PROMPTS`); else the columns of
    prompts and answers (None: no answers) are read. Rows share a cluster by a column
    `cluster`, the passage, or `text_clusters` of the prompts.
    """
    revision = None
    name = " ".join(source) if isinstance(source, list | tuple) else str(source or DEMO_DATA)
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise FileNotFoundError(f"data.source: the file {name} does not exist")
        rows = _from_questions(read_squad(name), prompt_style, closed_book)
    else:
        table, revision = _load(source, name, split)
        columns = table.column_names
        if text_column not in columns and {"context", "question", "answers"} <= set(columns):
            rows = _from_questions(questions_of(table), prompt_style, closed_book)
        else:
            if closed_book or prompt_style != "paper":
                raise ValueError(
                    f"{name} has complete prompts (columns {columns}): data.closed_book and "
                    "data.prompt_style need SQuAD's columns"
                )
            rows = _from_columns(table, name, text_column, label_column, f"{split}:")
    if not rows:
        raise ValueError(f"{name} has no rows in the split {split!r}: see data.split")
    ids = pd.Series([row.id for row in rows])
    times = ids.groupby(ids).cumcount() + 1  # the second "7" becomes "7#2"
    if repeated := int((times > 1).sum()):
        log.warning("%s repeats %d ids; they were numbered", name, repeated)
    unique = ids.where(times == 1, ids + "#" + times.astype(str))
    return RunRows([r._replace(id=i) for r, i in zip(rows, unique, strict=True)], revision)


def _load(source: Any, name: str, split: str) -> tuple[Dataset, str | None]:
    """A table, and the commit of a hub dataset, after which `datasets` names its cache's folder."""
    try:
        saved = ("dataset_info.json", "dataset_dict.json")
        if isinstance(source, str | Path) and any(Path(source, f).is_file() for f in saved):
            loaded = load_from_disk(str(source))
            return loaded[split] if isinstance(loaded, DatasetDict) else loaded, None
        first, *configuration = [source] if isinstance(source, str | Path) else source
        if Path(first).suffix == ".csv":
            return Dataset.from_pandas(pd.read_csv(first)), None  # as LM-Polygraph does
        if Path(first).exists():
            return load_dataset(str(first), *configuration, split=split), None
        place, _, pinned = str(first).partition("@")
        table = load_dataset(place, *configuration, split=split, revision=pinned or None)
        commits = [Path(file["filename"]).parent.name for file in table.cache_files]
        return table, commits[0] if commits else None
    except Exception as error:  # a library's own
        raise ValueError(
            f"cannot read the split {split!r} of the dataset {name}: {error.__cause__ or error}. "
            "Expected a dataset of the hub (download it once with a connection), a folder written "
            "by save_to_disk, or files of one format: see data.source and data.split"
        ) from error


def _from_questions(questions: list[Question], style: str, closed_book: bool) -> list[DataRow]:
    prompt = prompt_of(style, closed_book)
    rows = []
    for question in questions:
        parts = [question.question] if closed_book else [question.passage, question.question]
        empty = [part for part in parts if not (isinstance(part, str) and part.strip())]
        text = empty[0] if empty else prompt(question)  # else the template hides it
        # Without a passage, as in closed-book data, the question.
        shared = question.passage if str(question.passage or "").strip() else question.question
        rows.append(DataRow(question.id, cluster_key(shared), text, question.answer))
    return rows


def _from_columns(
    table: Dataset, name: str, text: str, label: str | None, prefix: str
) -> list[DataRow]:
    """Rows of complete prompts; without a column `id`, ids are their numbers after `prefix`."""
    columns = table.column_names
    for column in (text, label):
        if column is not None and column not in columns:
            raise ValueError(
                f"expected a column {column!r} in {name}, got {columns}: set text_column and "
                "label_column, of data.source data.text_column and data.label_column"
            )
    answers = [""] * len(table) if label is None else table[label]
    ids = table["id"] if "id" in columns else [f"{prefix}{i}" for i in range(len(table))]
    clusters = (
        table["cluster"]
        if "cluster" in columns
        else (map(cluster_key, text_clusters(list(map(str, table[text])))))
    )
    return [
        DataRow(str(i), _identity(cluster), prompt, answer)
        for i, cluster, prompt, answer in zip(ids, clusters, table[text], answers, strict=True)
    ]


def select_rows(data: Mapping[str, Any]) -> RunRows:
    """The rows that a config's node `data` describes; ValueError for one that cannot be asked.

    `data` has arguments of `read_data` and of `SELECTING`, which are applied in this order: `size`
    with `subsample_seed` (as LM-Polygraph draws it), `first`, `sample` (see `sample`), `shard`.
    """
    how = SELECTING | {name: value for name, value in data.items() if name in SELECTING}
    for name in ("size", "first", "sample"):
        if how[name] is not None:
            check_whole(f"data.{name}", how[name])
        check_at_least_one(f"data.{name}", how[name])
    check_whole("data.sample_seed", how["sample_seed"])
    if how["sample_by"] is not None:
        check_one_of("data.sample_by", how["sample_by"], ("cluster",))
        check_whole("data.sample, of which data.sample_by is a part,", how["sample"])
    read = read_data(**{name: value for name, value in data.items() if name not in SELECTING})
    rows = subsample(read.rows, how["size"], how["subsample_seed"])[: how["first"]]
    if how["sample"] is not None:
        rows = sample(rows, how["sample"], how["sample_seed"], how["sample_by"] == "cluster")
    check_usable(rows)
    rows = shard_of(rows, how["shard"], how["num_shards"])
    return replace(read, rows=rows, chosen=True)


def unusable_rows(rows: Sequence[DataRow], problem: Callable[[DataRow], str | None]) -> str | None:
    """Error message for rows that cannot be asked, by the reason for each; None without any."""
    problems = [f"{row.id} ({reason})" for row in rows if (reason := problem(row))]
    if not problems:
        return None
    named = "; ".join(problems[:NAMED]) + "; ..." * (len(problems) > NAMED)
    return f"cannot ask {len(problems)} of {len(rows)} rows: {named}. Correct or remove them"


def check_usable(rows: Sequence[DataRow]) -> None:
    """ValueError for rows that would end a run when their turn comes."""
    if unusable := unusable_rows(rows, problem_of):
        raise ValueError(unusable)


def run_rows(config: DictConfig) -> RunRows:
    """The rows of a run, from the hub if necessary: of its node `data`, or of a source it names."""
    # Unresolved: resolving it saves the rows.
    if "asmi_rows" in str(cast(dict[str, Any], OmegaConf.to_container(config))["dataset"]):
        _chosen_rows.cache_clear()  # the source may have changed since an earlier run
        return chosen_rows(config)
    source = config.dataset if isinstance(config.dataset, str) else list(config.dataset)
    read = read_data(source, config.eval_split, config.text_column, config.get("label_column"))
    # LM-Polygraph reads other sources in its own way.
    return replace(read, named=bool(config.get("load_from_disk")) and isinstance(source, str))


def chosen_rows(config: DictConfig) -> RunRows:
    """The rows that a run's node `data` describes."""
    # A source may be a relative path.
    return _chosen_rows(json.dumps(container(config.data), default=str), Path.cwd())


@lru_cache(maxsize=1)  # the run's checks and LM-Polygraph ask for them
def _chosen_rows(data_json: str, _: Path) -> RunRows:
    return select_rows(json.loads(data_json))


def results_folder(config: DictConfig) -> Path:
    """Where a run writes its manager files, manifests and, until it ends, its rows."""
    return Path(config.get("save_path") or HydraConfig.get().runtime.output_dir)


def saved_rows(config: DictConfig) -> Path:
    """Folder of a run's rows, which are saved for LM-Polygraph to read."""
    chosen, folder = chosen_rows(config), results_folder(config) / "rows"
    if folder not in chosen.saved:  # LM-Polygraph asks twice
        Dataset.from_pandas(pd.DataFrame(chosen.rows)).save_to_disk(folder)
        chosen.saved.add(folder)
    return folder
