"""`polygraph_asmi serve`: a local server with OpenAI-compatible routes."""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.calibrate import SHARED
from lm_polygraph_asmi.commands.score import score
from lm_polygraph_asmi.config import STREAMED
from lm_polygraph_asmi.options import given_settings


def _options() -> list[click.Parameter]:
    """The options of `calibrate` without `--chat`: the route decides.

    Defaults are those of an answer scored during generation.
    """
    shared = SHARED - {"chat"}
    options = [copy.copy(option) for option in score.params if option.name in shared]
    for option in options:
        option.default = STREAMED.get(str(option.name), option.default)
    return options


@click.command(params=_options(), short_help="Serve a model over HTTP, with scores.")
@click.option("--calibration", type=click.Path(exists=True), help="Calibration file, to decide.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File whose first line is the token that clients must send.",
)
@click.option("--name", help="Model name in requests; default: --model, or its folder's name.")
@click.option("--queue", default=16, show_default=True, help="Requests that may wait; 429 beyond.")
@click.option("--max-body", default=1_000_000, show_default=True, help="Largest request, in bytes.")
@click.option("--max-prompt-tokens", default=4096, show_default=True, help="Longest prompt.")
@click.option("--max-answer-tokens", default=256, show_default=True, help="Longest answer.")
@click.option(
    "--drain", default=60, show_default=True, help="Seconds to finish requests after SIGTERM."
)
@click.option("--otel", is_flag=True, help="Emit an OpenTelemetry event per score.")
def serve(
    calibration: str | None,
    host: str,
    port: int,
    api_key_file: str | None,
    name: str | None,
    queue: int,
    max_body: int,
    max_prompt_tokens: int,
    max_answer_tokens: int,
    drain: int,
    otel: bool,
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    **settings: Any,
) -> None:
    """Serve one model: OpenAI's routes and /score; each reply has a field `asmi`.

    With --calibration, its settings are the defaults. Needs the extra `serve`.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    sizes = (max_body, max_prompt_tokens, max_answer_tokens)
    if min(sizes) < 1 or queue < 0 or drain < 0:
        raise click.UsageError("expected limits of at least 1, and --queue and --drain >= 0")
    key = None
    if api_key_file is not None:
        lines = Path(api_key_file).read_text(encoding="utf-8").splitlines()
        key = lines[0].strip() if lines else ""
        if not key:
            raise click.BadParameter("expected a token, got an empty line: --api-key-file")
    try:
        import logging

        from lm_polygraph_asmi.adapters import server, telemetry
        from lm_polygraph_asmi.adapters.contract import open_scorer

        if key is None and host not in server.LOCAL:
            click.secho(
                f"WARNING: anyone who reaches {host}:{port} can use this model. Set a token with "
                "--api-key-file.",
                fg="red", bold=True, err=True,
            )  # fmt: skip
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
        server.LOG.setLevel(logging.INFO)
        emit = telemetry.emitter() if otel else None
        limits = server.Limits(max_body, max_prompt_tokens, max_answer_tokens, queue=queue)
        defaults = {n: v for n, v in STREAMED.items() if calibration is None or n == "seeded_by"}
        scorer = open_scorer(
            model, calibration, gguf_file=gguf_file, dtype=dtype, device_map=device_map,
            **defaults | given_settings(settings),
        )  # fmt: skip
        served_name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
        server.serve(scorer, served_name, host, port, limits, key, drain, emit)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
