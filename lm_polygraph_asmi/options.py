"""Command-line options for the settings declared in `config`."""

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
    """Decorate a command with options for these settings; without names, for all."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        chosen = [setting for setting in fields(config) if not names or setting.name in names]
        for setting in reversed(chosen):
            command = _option(setting, get_type_hints(config)[setting.name])(command)
        return command

    return decorated


def _option(setting: Any, kind: Any) -> Callable[[Any], Any]:
    about, name = setting.metadata, setting.name.replace("_", "-")
    union = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kinds = [of for of in union if of is not type(None)]
    several = kinds[0] not in (bool, int, float, str)
    text = f"For {about['method']}: {about['help']}" if about["method"] else about["help"]
    parts = [about["symbol"], about["unit"]]
    details = ", ".join(part for part in parts if part)
    arguments: dict[str, Any] = {
        "default": () if several else setting.default,
        "show_default": setting.default is not None,
        "multiple": several,
        "help": f"{text} [{details}]" if details else text,
    }
    if kinds == [bool]:
        return click.option(f"--{name}/--no-{name}", **arguments)
    if about["choices"]:
        arguments["type"] = click.Choice(about["choices"])
    elif kinds[0] in (int, float) and len(kinds) == 1:
        arguments["type"] = kinds[0]
    else:
        arguments["type"] = str
    return click.option(f"--{name}", **arguments)


def given_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings given to the running command, as values for a config."""
    context = click.get_current_context()
    given = {
        name: value
        for name, value in settings.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if "stop" in given:
        given["stop"] = [text.replace("\\n", "\n") for text in given["stop"]]
    if "perturbation_scale" in given:
        with suppress(ValueError):  # a file of scales
            given["perturbation_scale"] = float(given["perturbation_scale"])
    return given
