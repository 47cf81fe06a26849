"""Options that are settings of a score, made of their declarations in `config`."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_type_hints

import click
from click.core import ParameterSource

from lm_polygraph_asmi.config import ASMIConfig


def setting_options(
    *names: str, config: type[ASMIConfig] = ASMIConfig
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command with options for these settings; without names, for all of them."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed([one for one in fields(config) if not names or one.name in names]):
            command = _option(one, get_type_hints(config)[one.name])(command)
        return command

    return decorated


def _option(one: Any, kind: Any) -> Callable[[Any], Any]:
    about, name = one.metadata, one.name.replace("_", "-")
    union = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kinds = [of for of in union if of is not type(None)]
    several = kinds[0] not in (bool, int, float, str)
    said = f"For {about['method']}: {about['help']}" if about["method"] else about["help"]
    parts = [about["symbol"], about["unit"]]
    details = ", ".join(part for part in parts if part)
    how: dict[str, Any] = {
        "default": () if several else one.default,
        "show_default": one.default is not None,
        "multiple": several,
        "help": f"{said} [{details}]" if details else said,
    }
    if kinds == [bool]:
        return click.option(f"--{name}/--no-{name}", **how)
    if about["choices"]:
        how["type"] = click.Choice(about["choices"])
    elif kinds[0] in (int, float) and len(kinds) == 1:
        how["type"] = kinds[0]
    else:
        how["type"] = str
    return click.option(f"--{name}", **how)


def said(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings of the running command that were given, as a config takes them."""
    context = click.get_current_context()
    found = {
        name: value
        for name, value in settings.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if "stop" in found:
        found["stop"] = [text.replace("\\n", "\n") for text in found["stop"]]
    if "perturbation_scale" in found:
        with suppress(ValueError):  # a file
            found["perturbation_scale"] = float(found["perturbation_scale"])
    return found
