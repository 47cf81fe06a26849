"""LM-Polygraph's quality metric AlignScore, with a checkpoint that is read whole, or not at all.

LM-Polygraph loads it with `strict=False`: with another model's file the scores are those of an
untrained head, and nothing is reported. It also reads a local file with `weights_only=True`, which
fails if a trainer saved objects of its own beside the weights.
"""

import logging
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lm_polygraph.generation_metrics.alignscore import AlignScore as HostAlignScore
from torch import Tensor, nn

from lm_polygraph_asmi.host.hub import Repository

FILE = "AlignScore-large.ckpt"
CHECKPOINT = "yzha/AlignScore"
"""The repository of LM-Polygraph's default."""
EXPECTED = f"expected align_score_path to name the file {FILE}, or {CHECKPOINT}"
NAMED = 3
"""Largest number of weights that a message lists of each kind."""
SCORING = ("base_model.", "tri_layer.")
"""Parts that make the score; the rest served training."""
UNUSED = ".position_ids"
"""Buffers that older releases of transformers saved; newer ones count positions."""
TENSORS = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
}
"""What a checkpoint may call."""

log = logging.getLogger("lm_polygraph")


class _Skipped(dict[Any, Any]):
    """In the place of an object that a trainer saved beside the weights; its class is not run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""

    __setstate__ = append = extend = __init__


class _OnlyWeights(pickle.Unpickler):
    """Makes tensors and plain containers; torch itself looks up storages."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in TENSORS else _Skipped


class AlignScore(HostAlignScore):
    """AlignScore as LM-Polygraph computes it, in [0, 1]; higher = better supported.

    `ckpt_path` names the weights, see `source_of`; all else is as for LM-Polygraph's metric, which
    does not use `lang` either. ConnectionError without the checkpoint, ValueError if
    it is none. Source: Zha et al. (2023), AlignScore.
    """

    def __init__(self, lang: str = "en", ckpt_path: str = CHECKPOINT, **settings: Any) -> None:
        weights = read_weights(ckpt_path)
        # It would ask for NLTK's data each time, and warn of weights that are loaded afterwards.
        with patch("nltk.download"), patch(f"{HostAlignScore.__module__}_utils.warning"):
            super().__init__(lang, ckpt_path=None, **settings)
        load_weights(self.scorer.model.model, weights, str(ckpt_path))


def read_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by name, on the processor; no code in it is run."""
    source = source_of(str(checkpoint))
    path = source.download() / str(source.part) if source else Path(checkpoint)
    only_weights = SimpleNamespace(
        Unpickler=_OnlyWeights, load=lambda file, **how: _OnlyWeights(file, **how).load(),
        __name__=__name__,
    )  # fmt: skip
    try:
        # `only_weights` decides, which skips what is no weight.
        content = torch.load(path, "cpu", weights_only=False, pickle_module=only_weights)
    except Exception as error:  # its type depends on what is wrong
        raise ValueError(
            f"{checkpoint} cannot be read as weights ({type(error).__name__}: {error}): {EXPECTED}"
        ) from error
    weights = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{checkpoint} has no state_dict: {EXPECTED}")
    return dict(weights)


def checkpoint_problem(checkpoint: str) -> str | None:
    """Why a local file is no checkpoint of AlignScore, by its weights' names; None if it is."""
    try:
        names = read_weights(checkpoint)
    except ValueError as error:
        return str(error)
    missing = [f"{part}*" for part in SCORING if not any(name.startswith(part) for name in names)]
    return f"{checkpoint} lacks {', '.join(missing)}: {EXPECTED}" if missing else None


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Load weights into AlignScore's model; ValueError unless all that makes the score is there."""
    shape_of = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    needed = [n for n in shape_of if n.startswith(SCORING) and not n.endswith(UNUSED)]
    missing = [name for name in needed if name not in weights]
    shapes = [
        f"{name} {shape} instead of {shape_of[name]}"
        for name in needed
        if name in weights and (shape := tuple(weights[name].shape)) != shape_of[name]
    ]
    unexpected = [n for n in weights if n not in shape_of and not n.endswith(UNUSED)]
    kinds = {"missing": missing, "of another shape": shapes, "unexpected": unexpected}
    differences = "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:NAMED])}{' ...' * (len(names) > NAMED)}"
        for kind, names in kinds.items()
        if names
    )
    if missing or shapes:
        raise ValueError(
            f"{checkpoint} is no checkpoint of AlignScore-large. Weights {differences}. "
            f"{EXPECTED.capitalize()}"
        )
    if unexpected:
        log.warning("%s: weights that AlignScore does not use: %s", checkpoint, differences)
    model.load_state_dict(weights, strict=False)


def source_of(checkpoint: str) -> Repository | None:
    """The hub's file that is named: "owner/name", also with "@revision", or a URL of the file.

    None for a local file. A URL is asked of the hub that is set, which may be a mirror.
    """
    name = r"([\w-]+/[\w.-]+?)"
    found = re.fullmatch(
        rf"{name}(?:@([\w.-]+))?|https?://[^/]+/{name}/resolve/(.+?)/([^?]+).*", checkpoint
    )
    if found is None or Path(checkpoint).exists():
        return None
    return Repository(found[1] or found[3], found[2] or found[4], part=found[5] or FILE)
