"""Models, files and data sets of a hub: are they here, could they be had, and getting them."""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lm_polygraph_asmi.host.configs import configs_path

SECONDS = 5.0
"""Longest wait for each answer of a hub that is asked what it has."""
PARTS = {
    "configuration": ["config.json", "adapter_config.json"],
    "weights": ["model.safetensors", "pytorch_model.bin", "adapter_model.*"],
    "tokenizer": ["tokenizer.json", "vocab.*", "spm.model", "sentencepiece.bpe.model",
                  "tokenizer.model", "*.tiktoken"],
}  # fmt: skip
"""Part of a model -> files, one of which must exist; weights may also be shards with an index."""
READ = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""Files that transformers reads beside the weights."""
WEIGHTS = ("*model[.-]*safetensors*", "*model[.-]*bin*")
"""Files of weights and their index, of which transformers loads those of the first form."""
REPOSITORY = r"(?:path|source|deberta_path|name): \[?([\w.-]+/[\w.-]+)"
"""How the shipped configs name what they take from a hub."""


class Fault(NamedTuple):
    """Why something cannot be used, and what to do; empty: name something else."""

    why: str
    remedy: str = ""

    def said(self, what: str, instead: str = "") -> str:
        """As a sentence on `what`; `instead`: what to do without it."""
        return f"{what} {self.why}: {', or '.join(filter(None, (self.remedy, instead)))}"


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, or a local folder in its place.

    `part`: the file or folder that is needed of it; None: what transformers loads of a model.
    """

    name: str
    revision: str | None = None
    cache: str | None = None
    part: str | None = None
    kind: str = "model"

    @property
    def folder(self) -> Path | None:
        """Where its files are on this machine, which may not be all; None: nowhere."""
        if Path(self.name).is_dir():
            return Path(self.name)
        for file in [self.part] if self.part else PARTS["configuration"]:
            found = try_to_load_from_cache(self.name, file, self.cache, self.revision, self.kind)
            if isinstance(found, str):
                return Path(found.removesuffix(file))
        return None

    def missing(self) -> list[str]:
        """Its parts that are not on this machine; HFValidationError for what is no name."""
        wanted = {self.part: [self.part]} if self.part else PARTS
        if (folder := self.folder) is None:
            return list(wanted)
        files = {
            part: (file for name in names for file in folder.glob(name))
            for part, names in wanted.items()
        }
        lacking = [part for part in wanted if not any(file.is_file() for file in files[part])]
        if "weights" in lacking and any(map(_has_shards, folder.glob("*.index.json"))):
            lacking.remove("weights")
        return lacking

    def listed(self) -> dict[str, int | None]:
        """Its files that are needed -> bytes, None if not known; else the error of the hub."""
        info = HfApi().repo_info(
            self.name, repo_type=self.kind, revision=self.revision, timeout=SECONDS,
            files_metadata=True,
        )  # fmt: skip
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        names = self._needed(sizes)
        place = {"repo_type": self.kind, "revision": self.revision}
        # A gated repository tells everyone what it has, and gives it to few.
        get_hf_file_metadata(hf_hub_url(self.name, (names or READ)[0], **place), timeout=SECONDS)
        return {name: sizes.get(name) for name in names}

    def _needed(self, names: Iterable[str]) -> list[str]:
        if self.kind == "dataset":
            return [n for n in names if n.startswith(f"{self.part}/")] or list(names)
        if self.part:
            return [self.part]
        top = [name for name in names if "/" not in name]
        kinds = [[name for name in top if fnmatch(name, form)] for form in WEIGHTS]
        read = [name for name in top if any(fnmatch(name, form) for form in READ)]
        others = {name for kind in kinds for name in kind}
        return [name for name in read if name not in others] + next(filter(None, kinds), [])

    def refusal(self) -> Fault | None:
        """Why the hub does not provide it; None if it does."""
        hub, meant = f"the hub ({constants.ENDPOINT})", did_you_mean(self.name)
        page = f"{constants.ENDPOINT}/{'datasets/' * (self.kind == 'dataset')}{self.name}"
        fetch = fetch_command(self.name)
        try:
            self.listed()
        except Exception as error:  # others than the named have types that depend on the release
            reasons = {
                OfflineModeIsEnabled: Fault(
                    "HF_HUB_OFFLINE blocks the hub" + meant * ("/" not in self.name), fetch
                ),
                GatedRepoError: Fault(
                    f"{hub} gives it only to users who accepted its terms",
                    f"accept them on {page} and log in with `hf auth login`",
                ),
                RevisionNotFoundError: Fault(f"{hub} has no revision {self.revision} of it"),
                RepositoryNotFoundError: Fault(f"{hub} has no {self.kind} of this name{meant}"),
                EntryNotFoundError: Fault(f"{hub} has no file {self.part} in it"),
                Exception: Fault(f"{hub} does not answer ({type(error).__name__})", fetch),
            }
            return next(fault for kind, fault in reasons.items() if isinstance(error, kind))
        return None

    def fault(self) -> Fault | None:
        """Why it cannot be loaded; None: it is on this machine, or the hub provides it."""
        try:
            missing = self.missing()
        except HFValidationError:
            return Fault("is neither a local folder nor a valid hub ID")
        if not missing:
            return None
        parts = " and ".join(missing)
        if Path(self.name).is_dir():
            return Fault(f"lacks its {parts}")
        if (refusal := self.refusal()) is None:
            return None
        here = f"is on this machine without its {parts}" if self.folder else "is not on this machine"
        return Fault(f"{here}, and {refusal.why}", refusal.remedy)

    def size(self) -> int | None:
        """Bytes that are still to be downloaded; None if the hub does not tell."""
        folder = self.folder
        left = [
            size
            for name, size in self.listed().items()
            if not (folder and (folder / name).is_file())
        ]
        return None if None in left else sum(filter(None, left))

    def download(self) -> Path:
        """Its folder, when all is on this machine; ConnectionError with what is wrong."""
        try:
            names = list(self.listed())
            folder = snapshot_download(
                self.name, repo_type=self.kind, revision=self.revision, cache_dir=self.cache,
                allow_patterns=names,
            )  # fmt: skip
            lacking = [name for name in names if not Path(folder, name).is_file()]
            if lacking:
                raise ConnectionError(f"{lacking[0]} is missing")
        except Exception as error:  # as above
            reason = f"was not downloaded to its end ({type(error).__name__}: {error})".split("\n")[0]
            fault = self.refusal() or Fault(reason, "start the command again, which goes on from there")
            raise ConnectionError(fault.said(self.name)) from error
        return Path(folder)


def _has_shards(index: Path) -> bool:
    """Whether all weights that an index names are there."""
    shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
    return bool(shards) and all(index.with_name(shard).is_file() for shard in {*shards})


def did_you_mean(name: str) -> str:
    """The name in the shipped configs that a wrong one is nearest to, as a question; or empty."""
    texts = [file.read_text(encoding="utf-8") for file in configs_path().rglob("*.yaml")]
    known = ["smollm2", *re.findall(REPOSITORY, "\n".join(texts))]
    return "".join(f" (did you mean {known}?)" for known in get_close_matches(name, known, 1))


def fetch_command(name: str) -> str:
    """The command that gets a repository where there is a connection, or all that a run needs."""
    from hydra.core.hydra_config import HydraConfig

    command = ["hf", "download", name]
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        command = ["polygraph_asmi", "fetch", "--config-name", str(hydra.job.config_name)]
        command += hydra.overrides.task
    return f"where there is a connection, run `{shlex.join(command)}`"
