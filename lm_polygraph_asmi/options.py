"""Command-line options for the settings that `config` declares."""

import inspect
import re
from collections.abc import Callable
from types import NoneType
from typing import Any, get_args, get_type_hints

import click
from click.core import ParameterSource

from lm_polygraph_asmi.config import SETTINGS, ASMIConfig

_QUOTED = re.compile('(?s)(?!" *[,:\\]}]) *(["\'`“‘„«»])(?=.*[^"\'`“”‘’„«»])(.+)(["\'`”’“«»]) *')
"""Matches a text in quotes, but not `", "`, which ends one text of JSON and begins the next."""
_ESCAPE = re.compile(
    r"\\([nrt](?![a-z]+(?!\w*:))|[\n\r\t]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8})"
)
"""Matches an escape, such as \\t or, before a mark, \\nuser:, but not LaTeX such as \\nabla."""
_DOLLAR = re.compile(r"\$[\n\r\t]+|\$|`[nrt]|\^[nrt]?")
"""Matches what a shell leaves of $'\\n', which sh does not know, or of another shell's escapes."""


def check_shell_stop(name: str, text: str) -> None:
    """Raise ValueError if a shell seems to have changed a stop string.

    A list in Python or YAML is not changed. A command line passes through a shell, and quotes and
    escapes meant for it may become part of the string.
    """
    if quoted := _QUOTED.fullmatch(text):
        raise ValueError(
            f"{name} {text!r} is wrapped in quotes, which would be part of the stop string: "
            f"expected {quoted[2]!r}. The cmd.exe of Windows does not remove single quotes: use "
            "double ones"
        )
    if _DOLLAR.fullmatch(text):
        raise ValueError(
            f"{name} {text!r} looks like the rest of another shell's escape, such as $'\\n' in "
            "sh: write '\\n', which is read as a line break here"
        )
    if escape := _ESCAPE.search(text):
        raise ValueError(
            f"{name} {text!r} contains the escape {escape[0]!r} as text, but a model writes the "
            "character itself. --stop reads only \\n as a line break; for other characters, use "
            "a Python list or YAML"
        )


def setting_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with options for these settings; for all settings if none is named."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        kinds, helps = get_type_hints(ASMIConfig), setting_helps()
        for name in reversed(names or ASMIConfig.names()):
            command = _option(name, kinds[name], helps.get(name, ""))(command)
        return command

    return decorated


def setting_helps() -> dict[str, str]:
    """Setting -> its description in the docstring of `ASMIConfig`."""
    text = inspect.getdoc(ASMIConfig) or ""
    listed = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(help.split()) for name, help in entries}


def _option(setting: str, kind: Any, text: str) -> Callable[[Any], Any]:
    name, default = setting.replace("_", "-"), getattr(ASMIConfig, setting)
    (of_one,) = {*get_args(kind | None)} - {NoneType}
    multiple = of_one not in (bool, int, float, str)
    arguments: dict[str, Any] = {
        "default": () if multiple else default,
        "show_default": default is not None,
        "multiple": multiple,
        "help": f"{text} Used only by the method adapt." if SETTINGS[setting]["adapt"] else text,
    }
    if of_one is bool:
        return click.option(f"--{name}/--no-{name}", **arguments)
    plain, choices = str if multiple else of_one, SETTINGS[setting]["choices"]
    return click.option(f"--{name}", type=click.Choice(choices) if choices else plain, **arguments)


def given_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given to the running command, as values for a config."""
    context = click.get_current_context()
    explicit = {
        name: value
        for name, value in settings.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if "stop" in explicit:
        explicit["stop"] = [text.replace("\\n", "\n") for text in explicit["stop"]]
        for text in explicit["stop"]:
            check_shell_stop("stop", text)
    return explicit
