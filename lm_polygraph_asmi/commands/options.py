"""Options that several commands share; those of settings are made from `ASMIConfig`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from typing import Any

import click

from lm_polygraph_asmi.config import ASMIConfig

Command = Callable[..., Any]


class NumberOrFile(click.ParamType):
    """A number, or the path of a file."""

    name = "number or file"

    def convert(self, value: Any, param: Any, ctx: Any) -> float | str:
        try:
            return float(value)
        except ValueError:
            return str(value)


_TYPES: Mapping[Any, Any] = {
    bool: bool, int: int, float: float, str: str, int | None: int, float | None: float,
    str | None: str, float | str | None: NumberOrFile(), tuple[str, ...] | None: str,
}  # fmt: skip


def _option(own: Field) -> Callable[[Command], Command]:
    about, name = own.metadata, own.name.replace("_", "-")
    unit = f" [{about['unit']}]" if about["unit"] else ""
    shown = "" if own.default is None else str(own.default)
    for_methods = f" For {', '.join(about['methods'])}." if about["methods"] else ""
    return click.option(
        f"--{name}/--no-{name}" if own.type is bool else f"--{name}",
        type=click.Choice(about["choices"]) if about["choices"] else _TYPES[own.type],
        multiple=own.name == "stop",
        default=None,  # what is not given may come from a calibration run
        show_default=shown or False,
        help=about["help"] + unit + for_methods,
    )


def settings_options(
    but: Iterable[str] = (),
    only: Iterable[str] = (),
    config: type[ASMIConfig] = ASMIConfig,
) -> Callable[[Command], Command]:
    """An option for every setting, but for some, or only for some. See `given`."""

    def decorate(command: Command) -> Command:
        for own in reversed(fields(config)):
            if own.name in only if only else own.name not in but:
                command = _option(own)(command)
        return command

    return decorate


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    r"""Those of the settings that were given; in `stop`, \n is a line break."""
    found = {name: value for name, value in settings.items() if value not in (None, ())}
    if "stop" in found:
        found["stop"] = tuple(text.replace("\\n", "\n") for text in found["stop"])
    return found


def model_options(command: Command) -> Command:
    """Which model, and how it is loaded."""
    for option in (
        click.option("--chat", is_flag=True, help="Put text prompts through the chat template."),
        click.option("--device-map", help="auto for GPUs; default: the CPU."),
        click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ..."),
        click.option("--gguf-file", help="Weights in this file of the folder."),
        click.option(
            "--model", required=True,
            help="Folder, hub name, or smollm2 (the demo's model); loaded on the CPU unless "
            "--device-map says otherwise.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command
