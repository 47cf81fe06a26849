"""Perturbation scales of control conditions, from `polygraph_asmi experiments scale`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_polygraph_asmi.config import check_setting
from lm_polygraph_asmi.files import read_json
from lm_polygraph_asmi.validation import check_one_of

FORMAT = 1
MATCHINGS = ("effect", "norm")
"""Mean divergence from the unmasked model, and size of the change at the layer."""


def read_scales(path: str | Path) -> dict[str, Any]:
    """Content of a file of perturbation scales, or FileNotFoundError or ValueError."""
    try:
        content = read_json(path)
        if content["format"] != FORMAT or not isinstance(content["conditions"], dict):
            raise ValueError("another format")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}: no such file of perturbation scales: `polygraph_asmi experiments scale` "
            "writes one"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a file of `polygraph_asmi experiments scale`: {error!r}"
        ) from error
    return dict(content)


SAME_DATA = ("source", "split", "prompt_style", "closed_book")
"""Entries of a manifest's dataset that must agree; rows may differ."""


def other_than(
    recorded: Mapping[str, Any], model: Mapping[str, Any], dataset: Mapping[str, Any]
) -> str | None:
    """How a model or dataset differs from that of scales or of a run; None: no known difference.

    Compares models by revision (for a folder, a digest), else by name; datasets by `SAME_DATA`,
    files only by name, since folders move. All are as in a manifest.
    """
    known_model, known_data = recorded.get("model") or {}, recorded.get("dataset") or {}
    for key in ("revision", "path"):
        expected, actual = known_model.get(key), model.get(key)
        if None in (expected, actual) or "unknown" in (expected, actual):
            continue
        if Path(str(expected)).name != Path(str(actual)).name:
            return (
                f"model {known_model.get('path')} ({expected}), here it is {model.get('path')} "
                f"({actual})"
            )
        break
    for name in SAME_DATA:
        expected, actual = known_data.get(name), dataset.get(name)
        if None not in (expected, actual) and Path(str(expected)).name != Path(str(actual)).name:
            return f"data.{name} {expected}, here it is {actual}"
    return None


MATCHED_AT = ("depth", "scope", "mask_rate")
"""Settings that change the effect of masked heads, and so every scale."""


def matched_scale(
    path: str | Path,
    perturbation: str,
    matching: str = "effect",
    times: float = 1.0,
    *used: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    dataset: Mapping[str, Any] | None = None,
) -> float | None:
    """The perturbation scale of a condition in a file; None for unscaled heads.

    Args:
        matching: one of `MATCHINGS`.
        times: factor, for a sweep; also for heads.
        used: settings to use it with; known values of `MATCHED_AT`.
        model, dataset: to use it on, see `other_than`; None: unknown.
    """
    check_one_of("matching", matching, MATCHINGS)
    check_setting("perturbation_scale", times)
    if perturbation == "heads":
        return None if times == 1 else float(times)
    content = read_scales(path)
    scales = content["conditions"].get(perturbation, {})
    if scales.get(matching) is None:
        reason = scales.get("unsupported") or f"it has {', '.join(scales) or 'nothing'} for it"
        raise ValueError(f"{path} has no scale of {perturbation!r} matched by {matching}: {reason}")
    mismatch = other_than(content, model or {}, dataset or {})
    if mismatch is not None:
        raise ValueError(
            f"the scales in {path} are for {mismatch}: a scale is for one model and dataset. Run "
            "`polygraph_asmi experiments scale` for a run of these"
        )
    matched_at = content.get("settings", {})
    for settings in used:
        for name in MATCHED_AT:
            value = settings.get(name)
            if value is not None and value != matched_at.get(name, value):
                raise ValueError(
                    f"the scales in {path} were matched at {name} {matched_at[name]}, here it is "
                    f"{value}: run `polygraph_asmi experiments scale` for a run with these settings"
                )
    return float(times * scales[matching])
