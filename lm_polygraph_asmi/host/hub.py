"""Models, files and datasets of a hub: what is on this machine, what is missing, downloads."""

import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.validation import did_you_mean

SECONDS = 5.0
"""Longest wait in seconds for one answer of the hub about what it has."""
ADAPTER = "adapter_config.json"
PARTS = {
    "configuration": ["config.json", ADAPTER],
    "weights": ["model.safetensors", "pytorch_model.bin", "adapter_model.*"],
    "tokenizer": ["tokenizer.json", "vocab.*", "spm.model", "sentencepiece.bpe.model",
                  "tokenizer.model", "*.tiktoken"],
}  # fmt: skip
"""Part of a model -> file patterns, one of which must exist. Weights may also be indexed shards."""
READ = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
"""Files that transformers reads besides the weights."""
WEIGHTS = ("*model[.-]*safetensors", "*model[.-]*bin")
"""Patterns of weights files. transformers loads the files of the first pattern that matches."""


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, or a local folder.

    `part`: the file or folder of it that is needed. None: the files that transformers loads of a
    model, or all files of a dataset.
    """

    name: str
    revision: str | None = None
    cache: str | None = None
    part: str | None = None
    kind: str = "model"

    @property
    def folder(self) -> Path | None:
        """Its folder on this machine, perhaps without some of its files; None if there is none."""
        if Path(self.name).is_dir():
            return Path(self.name)
        for file in [self.part] if self.part else PARTS["configuration"]:
            if path := self.cached(file):
                return Path(path.removesuffix(file))
        return None

    @property
    def base(self) -> str | None:
        """The base model, if this is a PEFT adapter on this machine; otherwise None."""
        file = Path(self.name, ADAPTER)
        with suppress(errors.HFValidationError):  # a local folder
            file = Path(self.cached(ADAPTER) or file)
        config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return config.get("base_model_name_or_path")

    def cached(self, file: str) -> str | None:
        """Path of one of its files in the hub's cache; None if it is not there."""
        path = huggingface_hub.try_to_load_from_cache(
            self.name, file, self.cache, self.revision, self.kind
        )
        return path if isinstance(path, str) else None

    def missing(self) -> list[str]:
        """Its parts that are not completely on this machine."""
        parts = {self.part: [self.part]} if self.part else PARTS
        if (folder := self.folder) is None:
            return list(parts)
        there = {part for part, forms in parts.items() for form in forms
                 for file in folder.glob(form) if file.is_file()}  # fmt: skip
        if any(map(_has_shards, folder.glob("*.index.json"))):
            there.add("weights")
        return [part for part in parts if part not in there]

    def listed(self) -> dict[str, int | None]:
        """Names of the needed files on the hub, with their sizes in bytes (None: unknown).

        Raises the hub's own errors.
        """
        info: Any = huggingface_hub.repo_info(
            self.name,
            repo_type=self.kind,
            revision=self.revision,
            timeout=SECONDS,
            files_metadata=True,
        )
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        names = [self.part or "config.json"]
        if self.kind == "dataset":
            names = [n for n in sizes if n.startswith(f"{self.part}/")] or list(sizes)
        elif not self.part:
            top = [name for name in sizes if "/" not in name]
            weights = (list(filter_repo_objects(top, allow_patterns=form)) for form in WEIGHTS)
            names = [
                *filter_repo_objects(top, allow_patterns=READ),
                *next(filter(None, weights), []),
            ]
        # Everyone can list the files of a gated repository, but only some users may read them.
        url = huggingface_hub.hf_hub_url(
            self.name, [*names, "config.json"][0], repo_type=self.kind, revision=self.revision
        )
        huggingface_hub.get_hf_file_metadata(url, timeout=SECONDS)
        return {name: sizes.get(name) for name in names}

    def size(self) -> int | None:
        """Number of bytes that are still to be downloaded; None if the hub does not report them."""
        try:
            sizes = [size for name, size in self.listed().items() if not self.cached(name)]
        except Exception:  # types of errors differ between releases of huggingface_hub
            return None
        return None if None in sizes else sum(filter(None, sizes))

    def refusal(self) -> str | None:
        """Why the hub does not provide it, and what to do; None if the hub provides it."""
        hub, meant = f"the hub ({constants.ENDPOINT})", nearest_shipped(self.name)
        try:
            self.listed()
        except Exception as error:  # types differ between releases, as above
            reasons = {
                errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE blocks the hub"
                f"{meant * ('/' not in self.name)}; {fetch_command(self.name)}",
                errors.GatedRepoError: f"{hub} gives it only to users who accepted its terms; "
                f"accept them on {constants.ENDPOINT}/{'datasets/' * (self.kind == 'dataset')}"
                f"{self.name} and log in with `hf auth login`",
                errors.RevisionNotFoundError: f"{hub} has no revision {self.revision} of it",
                errors.RepositoryNotFoundError: f"{hub} has no {self.kind} of this name{meant}",
                errors.EntryNotFoundError: f"{hub} has no file {self.part or 'config.json'} in it",
                Exception: f"{hub} does not answer ({type(error).__name__}); "
                f"{fetch_command(self.name)}",
            }
            return next(reason for kind, reason in reasons.items() if isinstance(error, kind))
        return None

    def problem(self) -> str | None:
        """Why it cannot be loaded; None if it is on this machine or the hub provides it."""
        try:
            missing = self.missing()
        except errors.HFValidationError:
            return "is neither a local folder nor a valid hub ID"
        parts = " and ".join(missing)
        if missing and Path(self.name).is_dir():
            return f"lacks its {parts}"
        if not missing or not (refusal := self.refusal()):
            return None
        here = f"on this machine without its {parts}" if self.folder else "not on this machine"
        return f"is {here}, and {refusal}"

    def download(self) -> Path:
        """Download the needed files if one is missing, also of its base model; return its folder.

        Raises ConnectionError: a download failed. Files are downloaded one after the other: if
        several fail at once, each is retried for a minute.
        """
        try:
            for name in self.listed() if self.missing() else ():
                file = huggingface_hub.hf_hub_download(
                    self.name, name, repo_type=self.kind, revision=self.revision,
                    cache_dir=self.cache,
                )  # fmt: skip
        except Exception as error:  # types differ between releases, as above
            reason = self.refusal() or f"{error}".split("\n")[0]
            raise ConnectionError(f"{self.name} was not downloaded completely: {reason}") from error
        if base := self.base:
            Repository(base, cache=self.cache).download()
        return self.folder or Path(file.removesuffix(name))


def _has_shards(index: Path) -> bool:
    """Whether all weights files that an index names exist."""
    shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
    return bool(shards) and all(index.with_name(shard).is_file() for shard in {*shards})


def nearest_shipped(name: str) -> str:
    """A question that suggests the most similar name in the shipped configs; or empty.

    "smollm2" names a model where one is loaded by `load_named`; a run has a config for it.
    """
    if name == "smollm2":
        return " (in a run, it is model=asmi_smollm2)"
    texts = "".join(file.read_text(encoding="utf-8") for file in configs_path().rglob("*.yaml"))
    known = (
        re.findall(r"(?:path|source): \[?([\w.-]+/[\w.-]+)", texts) if "/" in name else ["smollm2"]
    )
    return did_you_mean(name, known)


def fetch_command(name: str) -> str:
    """How to download a repository elsewhere; during a run, how to download all that it needs."""
    from hydra.core.hydra_config import HydraConfig

    command = ["hf", "download", name]
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        name, sources = str(hydra.job.config_name), hydra.runtime.config_sources
        config_folders = [
            s.path
            for s in sources
            if s.provider in ("main", "command-line")
            and s.path
            and Path(s.path) != configs_path()
            and Path(s.path, f"{name.removesuffix('.yaml')}.yaml").is_file()
        ]
        folder = [word for path in config_folders[-1:] for word in ("--config-dir", path)]
        command = ["polygraph_asmi", "fetch", "--config-name", name, *folder, *hydra.overrides.task]
    return f"where there is a connection, run `{shlex.join(command)}`"
