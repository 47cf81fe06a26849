"""Scales of the control conditions, as `polygraph_asmi experiments scale` writes
them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_polygraph_asmi.config import ASMIConfig, check_setting
from lm_polygraph_asmi.validation import check_one_of

FORMAT = 1
MATCHINGS = ("effect", "norm")
"""By the mean divergence from the unmasked model, and by the size of the change at the layer."""


def read_scales(path: str | Path) -> dict[str, Any]:
    """What a file of scales holds.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is none of `polygraph_asmi experiments scale`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT or not isinstance(content["conditions"], dict):
            raise ValueError("another format")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is neither a number nor a file of scales: `polygraph_asmi experiments scale` "
            "writes one"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no file of scales as `polygraph_asmi experiments scale` writes: {error!r}"
        ) from error
    return dict(content)


SAME_DATA = ("source", "split", "prompt_style", "closed_book")
"""What of a manifest's data set makes it another one, besides which rows are asked."""


def other_than(
    found: Mapping[str, Any], model: Mapping[str, Any], dataset: Mapping[str, Any]
) -> str | None:
    """In what a model or a data set is another than that of scales, or of a run; None: in nothing
    that is known of both.

    Models are told apart by revision, which for a folder is a digest, else by name; data sets by
    `SAME_DATA`, files by their names, since folders move.

    Args:
        found: with "model" and "dataset", as a manifest has them.
        model, dataset: as in a manifest.
    """
    there, data = found.get("model") or {}, found.get("dataset") or {}
    for by in ("revision", "path"):
        one, other = there.get(by), model.get(by)
        if None in (one, other) or "unknown" in (one, other):
            continue
        if Path(str(one)).name != Path(str(other)).name:
            return f"model {there.get('path')} ({one}), here it is {model.get('path')} ({other})"
        break
    for name in SAME_DATA:
        one, other = data.get(name), dataset.get(name)
        if None not in (one, other) and Path(str(one)).name != Path(str(other)).name:
            return f"data.{name} {one}, here it is {other}"
    return None


MATCHED_AT = ("depth", "scope", "mask_rate")
"""Settings that move what masked heads do, and with it every scale."""


def matched_scale(
    path: str | Path,
    perturbation: str,
    matching: str = "effect",
    times: float = 1.0,
    *used: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    dataset: Mapping[str, Any] | None = None,
) -> float | None:
    """The scale of a condition in a file; None for heads, which all others are matched to.

    Args:
        matching: one of `MATCHINGS`.
        times: what it is multiplied with, for a sweep; of heads too.
        used: settings it is to be used with; of each what is known of `MATCHED_AT`.
        model, dataset: what it is to be used on, see `other_than`; None: not known.

    Raises:
        FileNotFoundError, ValueError: as `read_scales`; or no such matching, no scale of that
            condition, or scales that were found for other settings, another model or another data
            set.
    """
    check_one_of("matching", matching, MATCHINGS)
    check_setting("perturbation_scale", times)
    if perturbation == "heads":
        return None if times == 1 else float(times)
    content = read_scales(path)
    found = content["conditions"].get(perturbation, {})
    if found.get(matching) is None:
        reason = found.get("refused") or f"it has {', '.join(found) or 'nothing'} for it"
        raise ValueError(f"{path} has no scale of {perturbation!r} matched by {matching}: {reason}")
    other = other_than(content, model or {}, dataset or {})
    if other is not None:
        raise ValueError(
            f"the scales in {path} were found for {other}: one number serves one model and data "
            "set. Run `polygraph_asmi experiments scale` for a run of these"
        )
    there = content.get("settings", {})
    for here in used:
        for name in MATCHED_AT:
            if here.get(name) is not None and here[name] != there.get(name, here[name]):
                raise ValueError(
                    f"the scales in {path} were matched at {name} {there[name]}, here it is "
                    f"{here[name]}: run `polygraph_asmi experiments scale` for a run with these "
                    "settings"
                )
    return float(times * found[matching])


def with_scale(config: ASMIConfig, depths: Sequence[float] = ()) -> ASMIConfig:
    """The same with a number in place of a file of scales: the one matched by effect.

    Args:
        depths: those it is to be used at; none: the config's.

    Raises:
        FileNotFoundError, ValueError: as `matched_scale`.
    """
    if not isinstance(config.perturbation_scale, str):
        return config
    masked = {"scope": config.scope, "mask_rate": config.mask_rate}
    used = ({"depth": depth, **masked} for depth in depths or [config.depth])
    return config.replace(
        perturbation_scale=matched_scale(
            config.perturbation_scale, config.perturbation, "effect", 1.0, *used
        )
    )
