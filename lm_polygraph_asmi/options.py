"""Command-line options for the settings declared in `config`."""

from collections.abc import Callable
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
        chosen = [
            setting for setting in fields(config)
            if setting.metadata["option"] and (not names or setting.name in names)
        ]  # fmt: skip
        for setting in reversed(chosen):
            command = _option(setting, get_type_hints(config)[setting.name])(command)
        return command

    return decorated


def _option(setting: Any, kind: Any) -> Callable[[Any], Any]:
    metadata, name = setting.metadata, setting.name.replace("_", "-")
    union = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    types = [each for each in union if each is not type(None)]
    multiple = types[0] not in (bool, int, float, str)
    text = metadata["help"]
    if metadata["method"]:
        text += f" Used only by the method {metadata['method']}."
    parts = [metadata["symbol"], metadata["unit"]]
    details = ", ".join(part for part in parts if part)
    arguments: dict[str, Any] = {
        "default": () if multiple else setting.default,
        "show_default": setting.default is not None,
        "multiple": multiple,
        "help": f"{text} [{details}]" if details else text,
    }
    if types == [bool]:
        return click.option(f"--{name}/--no-{name}", **arguments)
    if metadata["choices"]:
        arguments["type"] = click.Choice(metadata["choices"])
    elif types[0] in (int, float) and len(types) == 1:
        arguments["type"] = types[0]
    else:
        arguments["type"] = str
    return click.option(f"--{name}", **arguments)


def given_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings given to the running command, as values for a config."""
    context = click.get_current_context()
    explicit = {
        name: value
        for name, value in settings.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if "stop" in explicit:
        explicit["stop"] = [text.replace("\\n", "\n") for text in explicit["stop"]]
    return explicit
