"""`polygraph_asmi score`: answers from the shell."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lm_polygraph_asmi.commands.settings import said as given_settings
from lm_polygraph_asmi.commands.settings import setting_options
from lm_polygraph_asmi.config import ASMIConfig, check_streamed
from lm_polygraph_asmi.validation import TOKENS

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.result import Score


@click.command()
@click.argument("rows_file", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--model", required=True, help="Folder, name on a hub, or smollm2 (the demo's model)."
)
@click.option("--gguf-file", help="Weights in this file of the folder.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ...")
@click.option("--device-map", help="auto for GPUs; default: the CPU.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False),
    help="A prompt as text, or .jsonl or .parquet with prompt and, if wanted, answer and samples "
    "in each row; or name the file without this option.",
)
@click.option("--answer", help="Text as it follows the prompt; default: the model's own answer.")
@click.option("--chat", is_flag=True, help="Put text prompts through the chat template.")
@click.option(
    "--context",
    multiple=True,
    help="A passage that stands in the prompt; says which of them the answer hangs on. @FILE reads "
    "it from a file. In a .jsonl file: a field context in each row.",
)
@setting_options()
@click.option(
    "--calibration",
    multiple=True,
    type=click.Path(exists=True),
    help="What the number means: a finished run (its manager file is a pickle: only files you "
    "trust), or what `polygraph_asmi calibrate` or `calibration` saved; twice for one of answers "
    "and "
    "one of their parts.",
)
@click.option(
    "--out",
    type=click.Path(),
    help="JSON lines; rows in it are kept. A folder (scored/): blocks of Parquet or JSON lines as "
    "the input is; those in it are kept.",
)
@click.option(
    "--tokens",
    type=click.Choice(TOKENS),
    help="What --out tells of each token; default: full, in a folder compact.",
)
@click.option("--id-column", help="Field with a row's own id, for messages.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Who makes the blocks of a folder.",
)
@click.option("--actors", default=1, show_default=True, help="For ray: models side by side.")
@click.option("--gpus-per-actor", default=0.0, show_default=True, help="For ray.")
@click.option("--block-rows", default=256, show_default=True, help="Rows of a block of a folder.")
@click.option("--stream", is_flag=True, help="Show the model's answer while it is written.")
@click.option("--html", type=click.Path(dir_okay=False), help="Page to write.")
def score(
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    rows_file: str | None,
    prompt_file: str | None,
    answer: str | None,
    chat: bool,
    context: tuple[str, ...],
    calibration: tuple[str, ...],
    out: str | None,
    html: str | None,
    tokens: str | None,
    id_column: str | None,
    engine: str,
    actors: int,
    gpus_per_actor: float,
    block_rows: int,
    stream: bool,
    **settings: Any,
) -> None:
    """Score answers: how fragile they are, token by token, and what that means.

    The exit status is 1 if a row could not be scored.
    """
    import time

    from rich.console import Console
    from rich.progress import track

    if (rows_file is None) == (prompt_file is None):
        raise click.UsageError("name one file of prompts: as an argument, or with --prompt-file")
    prompt_file = str(prompt_file or rows_file)
    from lm_polygraph_asmi.results.scales import with_scale
    from lm_polygraph_asmi.scoring.calibration import settled
    from lm_polygraph_asmi.scoring.page import render
    from lm_polygraph_asmi.scoring.rows import (
        TABLES,
        in_chat,
        misspelt,
        read_rows,
        rows_left,
        score_rows,
    )

    console, errors = Console(), Console(stderr=True)
    if not sys.warnoptions:  # those of other libraries, which no user can act on
        warnings.simplefilter("ignore")
    try:
        asked = given_settings(settings)
        config = ASMIConfig()
        if not calibration:  # whose settings are those that were not given
            config = with_scale(config.replace(**asked))
        if out and _is_folder(out):
            settled(calibration, None, asked)  # refuses what does not go together
            loading = {"model": model, "gguf_file": gguf_file, "dtype": dtype,
                       "device_map": device_map, **asked}  # fmt: skip
            _refuse_given(
                ("answer", "chat", "context", "html", "stream", "id_column"),
                "not for a folder of blocks, whose rows say it and keep all their fields",
            )
            if engine == "local":
                _refuse_given(("actors", "gpus_per_actor"), "for --engine ray")
            loading["calibration"] = list(calibration) or None
            raise SystemExit(
                _blocks(loading, prompt_file, Path(out), tokens or "compact",
                        block_rows, engine, actors, gpus_per_actor)
            )  # fmt: skip
        _refuse_given(
            ("engine", "actors", "gpus_per_actor", "block_rows"),
            "for a folder of blocks: name one with --out scored/",
        )
        if out and Path(out).suffix.lower() in (".parquet", *TABLES):
            raise ValueError(
                f"--out {out}: a file of scores is .jsonl. Blocks of Parquet, or of what the input "
                "is, go into a folder: --out scored/"
            )
        for file in filter(None, (out, html)):
            if not Path(file).absolute().parent.is_dir():
                raise ValueError(f"{file} cannot be written: there is no such folder")
            if not os.access(
                file if Path(file).exists() else Path(file).absolute().parent, os.W_OK
            ):
                raise ValueError(f"{file} cannot be written: permission denied")
            if Path(file).absolute() == Path(prompt_file).absolute():
                raise ValueError(f"{file} is the --prompt-file: name another file")
        if html and out and Path(html).absolute() == Path(out).absolute():
            raise ValueError(f"--out and --html name the same file: {out}")
        if answer == "":
            raise ValueError(
                "--answer is empty: there is no token to score. Leave it out to score the model's "
                "own answer"
            )
        rows = read_rows(prompt_file)
        if not rows:
            raise ValueError(f"{prompt_file} holds no row")
        if answer is not None and len(rows) > 1:
            raise ValueError("--answer is for a single prompt: put answers into the .jsonl file")
        if len(rows) > 1 and not (out or html):
            raise ValueError(
                f"{prompt_file} holds {len(rows)} rows: name a file with --out or --html"
            )
        if context and len(rows) > 1:
            raise ValueError("--context is for a single prompt: put context into the .jsonl file")
        for field, close in misspelt({name for row in rows for name in row.content}).items():
            errors.print(f"Warning: the field {field!r} is not read; {close!r} would be.",
                         style="yellow", highlight=False)  # fmt: skip
        if answer is not None:
            rows[0].content["answer"] = answer
        if context:
            rows[0].content["context"] = list(map(_passage, context))
        if chat:
            in_chat(rows)
        config, *found = settled(calibration, None, asked)
        known = [one for one in found if one is not None]
        if stream and (len(rows) > 1 or answer is not None or context or out):
            raise ValueError("--stream is for the model's own answer to a single prompt")
        if stream:
            check_streamed({"source": config.source} | asked)
        from lm_polygraph_asmi.scoring.loading import load  # torch: only once all else is right

        with errors.status(f"Loading {model}"):
            scorer = load(model, gguf_file, dtype, device_map, calibration=known, **asked)
        if stream:
            result = _streamed(scorer, rows[0].content, console)
            if html:
                Path(html).write_text(render([result], "Fragility of an answer"), encoding="utf-8")
            return
        left = rows_left(scorer, rows, Path(out) if out else None)
        if html and len(left) < len(rows):
            raise ValueError(
                f"{out} holds some rows already, which --html cannot show: leave it out"
            )
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    scores, failed, odd = [], 0, 0
    start = time.perf_counter()
    results = score_rows(scorer, rows, Path(out) if out else None, tokens or "full")
    shown = track(results, "Scoring", total=len(left), console=errors, disable=len(left) < 2)
    for row, result, problem in shown:
        if result is None:
            failed += 1
            own = row.content.get(id_column) if id_column else None
            named = f"row {row.number}" if own is None else f"row {row.number} ({own})"
            errors.print(f"{named}: {problem}", style="red", markup=False, highlight=False)
            continue
        odd += bool(result.warnings)
        if html:
            scores.append(result)
        if len(rows) == 1:
            console.print(result, highlight=False)
    if html:
        Path(html).write_text(render(scores, "Fragility of answers"), encoding="utf-8")
        console.print(f"Page: {html}", highlight=False)
    if len(rows) > 1 or len(left) < len(rows):
        counts = {"scored": len(left) - failed, "failed": failed}
        said = [f"{number} {what}" for what, number in counts.items() if number]
        if len(left) < len(rows):
            said.append(f"{len(rows) - len(left)} were in {out} already")
        if odd:
            said.append(f"{odd} with warnings")
        if left:
            said.append(f"{len(left) / (time.perf_counter() - start):.3g} rows per second")
        console.print(f"{', '.join(said)}.", highlight=False, soft_wrap=True)
        active_calibration = scorer.calibration
        if active_calibration is not None and active_calibration.decision is not None:
            from lm_polygraph_asmi.scoring.rows import rows_done

            seen: list[Any] = scores
            if out:  # those of earlier sessions, too; of tokens their lines may tell nothing
                seen = [SimpleNamespace(**line) for line in rows_done(Path(out)).values()]
            console.print(decided(seen), highlight=False, soft_wrap=True)
            for drift in active_calibration.drifts(seen):
                errors.print(f"Warning: {drift}.", style="yellow", highlight=False, soft_wrap=True)
    if failed:
        raise SystemExit(1)


def _refuse_given(options: Sequence[str], why: str) -> None:
    """Refuse options that would go unheard."""
    context = click.get_current_context()
    given = [
        "--" + name.replace("_", "-")
        for name in options
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}")


def _is_folder(out: str) -> bool:
    return out.endswith(("/", os.sep)) or Path(out).is_dir()


def _streamed(scorer: Any, content: Mapping[str, Any], console: Any) -> Any:
    """The answer, each token shaded as it appears; then what `score` says of it."""
    from rich.text import Text

    from lm_polygraph_asmi.scoring.page import visible
    from lm_polygraph_asmi.scoring.terminal import ink

    if "error" in content:
        raise ValueError(content["error"])
    with scorer.stream(content["prompt"]) as tokens:
        for token in tokens:
            console.print(Text(visible(token.text), style=ink(token)), end="")
        console.print()
        result = tokens.result
    console.print(result, highlight=False)
    return result


def _blocks(
    loading: dict[str, Any],
    source: str,
    folder: Path,
    tokens: str,
    block_rows: int,
    engine: str,
    actors: int,
    gpus_per_actor: float,
) -> int:
    """Score a file into a folder of blocks; the exit status."""
    import time

    from rich.console import Console
    from rich.progress import track

    from lm_polygraph_asmi.scoring.blocks import (
        blocks_left,
        contents,
        score_blocks,
        score_on_ray,
    )

    console, errors = Console(), Console(stderr=True)
    if engine == "ray" and gpus_per_actor and loading["device_map"] is None:
        loading["device_map"] = "auto"
    start = time.perf_counter()
    settings = {name: value for name, value in loading.items() if name != "device_map"}
    settings |= {
        "tokens": tokens,
        "contents": contents(loading["model"], *settings["calibration"] or ()),
    }
    left = blocks_left(source, folder, block_rows, settings)
    if engine == "ray":
        done = score_on_ray(loading, source, left, folder, tokens, actors, gpus_per_actor)
    else:
        from lm_polygraph_asmi.scoring.loading import load

        done = score_blocks(load(**loading), source, left, folder, tokens) if left else iter(())
    rows = failed = broken = 0
    for one in track(done, "Blocks", total=len(left), console=errors, disable=len(left) < 2):
        if one.error is not None:
            broken += 1
            errors.print(f"block {one.number}: {one.error}", style="red", markup=False,
                         highlight=False)  # fmt: skip
            continue
        rows, failed = rows + one.rows, failed + one.failed
    said = (
        [f"{rows - failed} scored", f"{failed} with asmi_error"] if failed else [f"{rows} scored"]
    )
    if broken:
        said.append(f"{broken} blocks not written, which the next start tries again")
    if rows:
        said.append(f"{rows / (time.perf_counter() - start):.3g} rows per second")
    console.print(f"{', '.join(said)}; in {folder}.", highlight=False, soft_wrap=True)
    return 1 if broken or failed else 0


def decided(scores: "Sequence[Score]") -> str:
    """How many answers were accepted, how many refused, and of how many nothing was decided."""
    counts = {
        "accepted": sum(one.accept is True for one in scores),
        "refused": sum(one.accept is False for one in scores),
        "undecided": sum(one.accept is None for one in scores),
    }
    said = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    reason = next((one.accept_reason for one in scores if one.accept is None), None)
    return f"{said}." if reason is None else f"{said}. {reason}"


def _passage(given: str) -> str:
    """A passage as it was given, or read from the file it names."""
    if not given.startswith("@"):
        return given
    return Path(given[1:]).read_text(encoding="utf-8").removesuffix("\n")
