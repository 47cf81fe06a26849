"""What a run must load from elsewhere: models, datasets, and data of Python libraries."""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import nltk
from lm_polygraph.defaults.register_default_stat_calculators import (
    register_default_stat_calculators,
)
from omegaconf import DictConfig, OmegaConf

from lm_polygraph_asmi.host.align_score import CHECKPOINT, FILE, read_weights, source_of
from lm_polygraph_asmi.host.configs import container, has_shipped_script, needed_calculators
from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.host.side_models import CLASSIFIERS, classifier_problem
from lm_polygraph_asmi.runs.rows import are_chosen, repository_of

if TYPE_CHECKING:
    from lm_polygraph_asmi.runs.checks import Plan

LANGUAGE_MODEL, ROWS = "the run", "the rows"  # values of `Need.by` for the model and the dataset
MODELS = {
    "BertScoreMetric": "roberta-large",
    "SbertMetric": "sentence-transformers/all-mpnet-base-v2",
    "AlignScore": "roberta-large",
}
"""Quality metric -> the model that LM-Polygraph loads for it, for English."""
OTHER_METRIC = "set generation_metrics=[{name: RougeMetric, args: [rougeL]}]"  # needs no download


class LibraryData(NamedTuple):
    """Data of a Python library, installed by `python -m ...`; `find` raises an error without it."""

    name: str
    command: str
    find: Callable[[str], Any]

    def problem(self) -> str | None:
        """That the data are not on this machine, and the command that installs them; or None."""
        try:
            self.find(self.name)
        except (LookupError, PackageNotFoundError):
            return f"is not installed; run `python -m {self.command}`"
        return None

    def download(self) -> None:
        """Run the command if the data are missing. Raises ConnectionError if it fails."""
        if not self.problem():
            return
        done = subprocess.run(
            [sys.executable, "-m", *self.command.split()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        invalidate_caches()
        if self.problem():
            last_line = f"{done.stdout}{done.stderr}".strip().split("\n")[-1]
            raise ConnectionError(f"`python -m {self.command}` failed: {last_line}")


SENTENCES = (
    LibraryData(
        "en_core_web_sm", "spacy download en_core_web_sm",
        lambda name: Path(name).is_dir() or distribution(name),  # as spaCy does
    ),
    LibraryData(
        "punkt_tab", "nltk.downloader punkt_tab",
        lambda name: nltk.data.find(f"tokenizers/{name}/english/"),
    ),
)  # fmt: skip
"""Data with which AlignScore splits texts. During a run, LM-Polygraph would start pip for the
first."""


class Need(NamedTuple):
    """Something that a run must load from elsewhere.

    Attributes:
        name: its description.
        by: the part of the run that needs it.
        source: where it comes from; None for a local file.
        problem: why it cannot be used; None if it is on this machine or a hub has it.
        fatal: whether the run fails without it.
    """

    name: str
    by: str
    source: Repository | LibraryData | None
    problem: str | None = None
    fatal: bool = True

    @property
    def to_download(self) -> int | None:
        """Number of bytes to download; None if unknown."""
        if isinstance(self.source, Repository) and not self.problem and self.source.missing():
            return self.source.size()
        return None if self.problem else 0


def needs_of(plan: "Plan") -> list[Need]:
    """Everything that the run would load from elsewhere, also what LM-Polygraph itself downloads.

    A hub is asked only for things that are not on this machine.
    """
    return [
        *_language_model(plan.model),
        *_rows(plan),
        *_of_methods(plan),
        *_of_metrics(plan.config),
    ]


def download(needs: Iterable[Need]) -> Iterator[str]:
    """Download what is missing. Yields a sentence for each thing that could not be downloaded."""
    for need in needs:
        if need.problem and not isinstance(need.source, LibraryData):
            yield need.problem
        elif need.source:
            try:
                need.source.download()
            except ConnectionError as error:
                yield str(error)


def _language_model(model: Mapping[str, Any]) -> Iterator[Need]:
    if "path" not in model or model.get("type", "CausalLM") not in ("CausalLM", "Seq2SeqLM"):
        return
    name, chosen = str(model["path"]), (model.get("load_model_args") or {}).get
    repository = Repository(name, chosen("revision"), chosen("cache_dir"), chosen("gguf_file"))
    if base := repository.base:
        yield from _language_model(
            {"path": base, "load_model_args": {"cache_dir": repository.cache}}
        )
    if not Path(name).is_dir():
        problem = repository.problem()
        text = (
            problem and f"the model {name!r} {problem}; to use another, set model.path to a folder"
        )
        # A user's own load script may load a model that is not on this machine.
        yield Need(f"model {name}", LANGUAGE_MODEL, repository, text, has_shipped_script(model))


def _rows(plan: "Plan") -> Iterator[Need]:
    """The dataset, if its rows have not been read yet."""
    unread = not plan.rows.rows and not plan.faults
    source = "data.source" if are_chosen(plan.config) else "dataset"
    if unread and (rows := repository_of(OmegaConf.select(plan.config, source))):
        reason = rows.refusal()
        text = reason and f"the dataset {rows.name} cannot be read: {reason}; see data.source"
        yield Need(f"dataset {rows.name}", ROWS, rows, text)


def _of_methods(plan: "Plan") -> Iterator[Need]:
    for name, settings in _calculators(plan).items():
        for setting in CLASSIFIERS.keys() & settings.keys():
            path, cache = settings[setting], settings.get("hf_cache")
            problem = classifier_problem(setting, path, cache)
            yield Need(f"model {path}", name, Repository(path, cache=cache), problem)


def _calculators(plan: "Plan") -> dict[str, dict[str, Any]]:
    """Settings of the calculators on which the run's estimators depend, directly or not."""
    listed = plan.config.get("stat_calculators") or []
    entries: list[Any] = [entry for entry in listed if entry != "auto"]
    if "auto" in listed:
        language = plan.config.get("language", "en")
        entries = [*register_default_stat_calculators("Whitebox", language), *entries]
    needed, _ = needed_calculators(
        (stat for estimator in plan.estimators for stat in estimator.stats_dependencies), entries
    )
    return {name: container(entry.cfg) for name, entry in needed.items()}


def metrics_of(config: DictConfig) -> list[dict[str, Any]]:
    """Quality metrics of a run. If the config names none, LM-Polygraph uses a default list.

    Of that list, only those are returned that need a model or cannot read every script.
    """
    chosen = config.get("generation_metrics") or ()
    default = [{"name": name} for name in ("RougeMetric", *MODELS)]
    return [container(metric) for metric in chosen] or default


def _of_metrics(config: DictConfig) -> Iterator[Need]:
    for metric in metrics_of(config):
        name, options = metric["name"], metric.get("kwargs") or {}
        sources: list[Repository | LibraryData] = []
        if name in MODELS and "lang" not in options:  # with `lang`, the user chose the model
            sources.append(Repository(MODELS[name]))
        if name == "AlignScore":
            yield _checkpoint(str(options.get("ckpt_path") or CHECKPOINT))
            sources += SENTENCES
        for source in sources:
            problem = source.problem()
            text = (
                problem
                and f"{source.name}, which {name} needs, {problem}; to do without, {OTHER_METRIC}"
            )
            yield Need(source.name, name, source, text)


def _checkpoint(path: str) -> Need:
    """AlignScore's checkpoint. If it is on this machine, it is opened to check it."""
    text, source = None, source_of(path)
    if source and source.missing():
        problem = source.problem()
        text = problem and f"{path} {problem}; to use a copy, set align_score_path to its {FILE}"
    else:
        try:
            read_weights(path)
        except ValueError as error:
            text = str(error)
    return Need(f"{path}, of AlignScore", "AlignScore", source, text)
