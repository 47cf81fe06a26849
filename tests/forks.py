"""What a process would do, in a fork of this one, which has imported all."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def exit_code(function: Callable[..., object], *arguments: Any) -> int | None:
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode
