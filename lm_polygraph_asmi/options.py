"""Command-line options for the settings declared in `config`."""

import inspect
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, get_args, get_type_hints

import click
from click.core import ParameterSource

from lm_polygraph_asmi.config import ADAPT, CHOICES, ASMIConfig


def setting_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with options for these settings; without names, for all."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        kinds, helps = get_type_hints(ASMIConfig), setting_helps()
        for name in reversed(names or ASMIConfig.names()):
            command = _option(name, kinds[name], helps.get(name, ""))(command)
        return command

    return decorated


def setting_helps() -> dict[str, str]:
    """Setting -> what the docstring of `ASMIConfig` says of it."""
    text = inspect.getdoc(ASMIConfig) or ""
    listed = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(help.split()) for name, help in entries}


def _option(setting: str, kind: Any, text: str) -> Callable[[Any], Any]:
    name, default = setting.replace("_", "-"), getattr(ASMIConfig, setting)
    union = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    types = [each for each in union if each is not type(None)]
    multiple = types[0] not in (bool, int, float, str)
    arguments: dict[str, Any] = {
        "default": () if multiple else default,
        "show_default": default is not None,
        "multiple": multiple,
        "help": f"{text} Used only by the method adapt." if setting in ADAPT else text,
    }
    if types == [bool]:
        return click.option(f"--{name}/--no-{name}", **arguments)
    if setting in CHOICES:
        arguments["type"] = click.Choice(CHOICES[setting])
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
