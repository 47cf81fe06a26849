"""`polygraph_asmi serve`: a local server with OpenAI's routes."""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from lm_polygraph_asmi.commands.calibrate import SHARED
from lm_polygraph_asmi.commands.score import score
from lm_polygraph_asmi.commands.settings import said
from lm_polygraph_asmi.config import STREAMED


def _options() -> list[click.Parameter]:
    """Those of `calibrate`, but for `--chat`, which routes say; and the length of an answer.

    Defaults are the settings of an answer that is scored while it is written.
    """
    names = SHARED - {"chat"} | {"max_new_tokens"}
    found = [copy.copy(option) for option in score.params if option.name in names]
    for option in found:
        option.default = STREAMED.get(str(option.name), option.default)
    return found


@click.command(params=_options())
@click.option("--calibration", type=click.Path(exists=True), help="Calibration run, or its file.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File whose first line is the token that clients must send.",
)
@click.option("--name", help="Of the model in requests; default: that of --model or its folder.")
@click.option("--queue", default=16, show_default=True, help="Requests that may wait; then 429.")
@click.option("--max-body", default=1_000_000, show_default=True, help="Bytes of a request.")
@click.option("--max-prompt-tokens", default=4096, show_default=True)
@click.option("--max-answer-tokens", default=256, show_default=True, help="Generated or given.")
@click.option("--drain", default=60, show_default=True, help="Seconds to finish after SIGTERM.")
@click.option("--otel", is_flag=True, help="Emit an OpenTelemetry event for each score.")
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
    """Serve one model: OpenAI's routes and /score, each reply with a field `asmi`.

    Settings that are not given are those of the calibration run. Needs the extra `serve`.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    sizes = (max_body, max_prompt_tokens, max_answer_tokens)
    if min(sizes) < 1 or queue < 0 or drain < 0:
        raise click.UsageError("expected limits of at least 1, and a queue and drain of at least 0")
    key = None
    if api_key_file is not None:
        lines = Path(api_key_file).read_text(encoding="utf-8").splitlines()
        key = lines[0].strip() if lines else ""
        if not key:
            raise click.BadParameter("its first line is empty", param_hint="--api-key-file")
    try:
        import logging

        from lm_polygraph_asmi.adapters import server, telemetry
        from lm_polygraph_asmi.adapters.contract import open_scorer
        from lm_polygraph_asmi.scoring.calibration import settled

        if key is None and host not in server.LOCAL:
            click.secho(
                f"WARNING: anyone who reaches {host}:{port} can use this model. Name a token with "
                "--api-key-file.",
                fg="red", bold=True, err=True,
            )  # fmt: skip
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
        server.LOG.setLevel(logging.INFO)
        emit = telemetry.emitter() if otel else None
        limits = server.Limits(max_body, max_prompt_tokens, max_answer_tokens, queue=queue)
        asked = {n: v for n, v in STREAMED.items() if calibration is None or n == "seeded_by"}
        config, *known = settled(calibration, None, asked | said(settings))
        scorer = open_scorer(model, gguf_file=gguf_file, dtype=dtype, device_map=device_map,
                             config=config, calibration=[*filter(None, known)])  # fmt: skip
        own = name or (Path(model).resolve().name if Path(model).is_dir() else model)
        server.serve(scorer, own, host, port, limits, key, drain, emit)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
