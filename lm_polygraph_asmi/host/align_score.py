"""LM-Polygraph's quality metric AlignScore, with a checkpoint that is checked when it is read.

LM-Polygraph loads the checkpoint with `strict=False`. If the file belongs to another model, the
scores come from an untrained head, and nothing is reported. LM-Polygraph also reads a local file
with `weights_only=True`, which fails if the trainer saved other objects beside the weights.
"""

import logging
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zipfile import is_zipfile

import torch
from lm_polygraph.generation_metrics.alignscore import AlignScore as HostAlignScore
from torch import Tensor, nn

from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.validation import listed

FILE = "AlignScore-large.ckpt"
CHECKPOINT = "yzha/AlignScore"
"""The hub repository from which LM-Polygraph downloads the checkpoint by default."""
EXPECTED = f"expected align_score_path to name the file {FILE}, or {CHECKPOINT}"
SCORING = ("base_model.", "tri_layer.")
"""Prefixes of the weights that compute the score. Other weights were used only in training."""
UNUSED = ".position_ids"
"""Suffix of buffers that older releases of transformers saved, and newer ones compute."""
TENSORS = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
}
"""The only functions and classes that a checkpoint may call."""

log = logging.getLogger("lm_polygraph")


class _Skipped(dict[Any, Any]):
    """Replaces an object that a trainer saved beside the weights, and keeps nothing of it.

    So no code of the object's class is run.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments that the object's class would get."""

    __setstate__ = append = extend = __init__


class _OnlyWeights(pickle.Unpickler):
    """Unpickles only tensors and plain containers; torch itself looks up storages."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in TENSORS else _Skipped


class AlignScore(HostAlignScore):
    """AlignScore as LM-Polygraph computes it, in [0, 1]; higher = better supported.

    `ckpt_path` names the weights (see `source_of`). All other arguments are those of LM-Polygraph's
    metric, which does not use `lang` either. Raises ConnectionError: the checkpoint cannot be
    downloaded. Raises ValueError: the file is not a checkpoint of AlignScore. Source: Zha et al.
    (2023), AlignScore.
    """

    def __init__(self, lang: str = "en", ckpt_path: str = CHECKPOINT, **settings: Any) -> None:
        weights = read_weights(ckpt_path)
        # LM-Polygraph downloads NLTK's data each time, and warns of weights that are loaded later.
        with patch("nltk.download"), patch(f"{HostAlignScore.__module__}_utils.warning"):
            super().__init__(lang, ckpt_path=None, **settings)
        load_weights(self.scorer.model.model, weights, str(ckpt_path))


def read_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by name, on the CPU. No code inside the file is run.

    If the file is a zip archive, as torch saves them, the values are read only when they are used.
    Raises ValueError: the file is not a checkpoint of AlignScore.
    """
    source = source_of(str(checkpoint))
    path = source.download() / str(source.part) if source else Path(checkpoint)
    only_weights = SimpleNamespace(
        Unpickler=_OnlyWeights, load=lambda file, **how: _OnlyWeights(file, **how).load(),
        __name__=__name__,
    )  # fmt: skip
    try:
        # Not `weights_only`: the unpickler above skips everything that is not a weight.
        content = torch.load(
            path, "cpu", weights_only=False, pickle_module=only_weights, mmap=is_zipfile(path)
        )
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{checkpoint} cannot be read as weights ({type(error).__name__}: {error}): {EXPECTED}"
        ) from error
    weights = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{checkpoint} has no state_dict: {EXPECTED}")
    if missing := [part for part in SCORING if not any(name.startswith(part) for name in weights)]:
        names = ", ".join(f"{part}*" for part in missing)
        raise ValueError(f"{checkpoint} lacks {names}, and has {listed(weights)}: {EXPECTED}")
    return dict(weights)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Load weights into AlignScore's model; ValueError if a weight that scores is missing."""
    try:
        missing, unused = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # weights of other shapes
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{checkpoint} holds weights of another model: {problem:.300}. {EXPECTED}"
        ) from error
    if lacking := [n for n in missing if n.startswith(SCORING) and not n.endswith(UNUSED)]:
        raise ValueError(f"{checkpoint} lacks {listed(lacking)}: {EXPECTED}")
    if more := [name for name in unused if not name.endswith(UNUSED)]:
        log.warning("%s has weights that AlignScore does not use: %s", checkpoint, listed(more))


def source_of(checkpoint: str) -> Repository | None:
    """The hub file that `checkpoint` names: "owner/name", "owner/name@revision", or a file's URL.

    None for a local file. For a URL, the configured hub is asked, which may be a mirror.
    """
    name = r"([\w-]+/[\w.-]+?)"
    match = re.fullmatch(
        rf"{name}(?:@([\w.-]+))?|https?://[^/]+/{name}/resolve/(.+?)/([^?]+).*", checkpoint
    )
    if match is None or Path(checkpoint).exists():
        return None
    return Repository(match[1] or match[3], match[2] or match[4], part=match[5] or FILE)
