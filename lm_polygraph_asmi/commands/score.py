"""`polygraph_asmi score`: score answers from the shell."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lm_polygraph_asmi.commands.settings import given_settings, setting_options
from lm_polygraph_asmi.config import ASMIConfig, check_streamed
from lm_polygraph_asmi.validation import TOKENS

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.result import Score


@click.command()
@click.argument("rows_file", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--model", required=True, help="Folder, hub ID, or smollm2 (the demo's model).")
@click.option("--gguf-file", help="GGUF file in the folder with the weights.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ...")
@click.option("--device-map", help="auto: use GPUs; default: CPU.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False),
    help="Text file with one prompt; or .jsonl or .parquet file with prompt and optional answer "
    "and samples per row. Same as the argument.",
)
@click.option("--answer", help="Answer text to score; default: the model's greedy answer.")
@click.option("--chat", is_flag=True, help="Apply the chat template to text prompts.")
@click.option(
    "--context",
    multiple=True,
    help="Passage that is part of the prompt, or @FILE; repeat for several. Reports how much the "
    "answer depends on each. In a .jsonl file: field context of a row.",
)
@setting_options()
@click.option(
    "--calibration",
    multiple=True,
    type=click.Path(exists=True),
    help="Calibrates the score: a finished run (its manager file is a pickle: only files you "
    "trust), or a file saved by `polygraph_asmi calibrate` or `calibration`. Give it twice for "
    "answers and for parts of answers.",
)
@click.option(
    "--out",
    type=click.Path(),
    help="JSON lines file, or folder (scored/) for blocks in the format of the input (Parquet or "
    "JSON lines). Rows and blocks already there are kept, not scored again.",
)
@click.option(
    "--tokens",
    type=click.Choice(TOKENS),
    help="Detail per token in --out; default: full, in a folder compact.",
)
@click.option("--id-column", help="Field with the ID of a row, shown in messages.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where to score the blocks of a folder.",
)
@click.option("--actors", default=1, show_default=True, help="For ray: models in parallel.")
@click.option("--gpus-per-actor", default=0.0, show_default=True, help="For ray: GPUs.")
@click.option("--block-rows", default=256, show_default=True, help="For a folder: rows per block.")
@click.option("--stream", is_flag=True, help="Show and score the answer during generation.")
@click.option("--html", type=click.Path(dir_okay=False), help="HTML page to write.")
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
    """Score one prompt or a file of prompts.

    Exits with status 1 if any row fails.
    """
    import time

    from rich.console import Console
    from rich.progress import track

    if (rows_file is None) == (prompt_file is None):
        raise click.UsageError(
            "expected one file of prompts: as an argument, or with --prompt-file"
        )
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
    if not sys.warnoptions:  # of other libraries, which users cannot fix
        warnings.simplefilter("ignore")
    try:
        given = given_settings(settings)
        config = ASMIConfig()
        if not calibration:  # else its settings are the defaults
            config = with_scale(config.replace(**given))
        if out and _is_folder(out):
            settled(calibration, None, given)  # raises if they do not fit together
            loading = {"model": model, "gguf_file": gguf_file, "dtype": dtype,
                       "device_map": device_map, **given}  # fmt: skip
            _refuse_given(
                ("answer", "chat", "context", "html", "stream", "id_column"),
                "not for a folder of blocks: set it in the rows, which keep all fields",
            )
            if engine == "local":
                _refuse_given(("actors", "gpus_per_actor"), "only for --engine ray")
            loading["calibration"] = list(calibration) or None
            raise SystemExit(
                _blocks(loading, prompt_file, Path(out), tokens or "compact",
                        block_rows, engine, actors, gpus_per_actor)
            )  # fmt: skip
        _refuse_given(
            ("engine", "actors", "gpus_per_actor", "block_rows"),
            "only for a folder of blocks, such as --out scored/",
        )
        if out and Path(out).suffix.lower() in (".parquet", *TABLES):
            raise ValueError(
                f"expected a .jsonl file or a folder, got --out {out}. For Parquet, or the format "
                "of the input, name a folder: --out scored/"
            )
        for file in filter(None, (out, html)):
            if not Path(file).absolute().parent.is_dir():
                raise ValueError(f"cannot write {file}: its folder does not exist")
            if not os.access(
                file if Path(file).exists() else Path(file).absolute().parent, os.W_OK
            ):
                raise ValueError(f"cannot write {file}: permission denied")
            if Path(file).absolute() == Path(prompt_file).absolute():
                raise ValueError(f"cannot write {file}: it is the --prompt-file")
        if html and out and Path(html).absolute() == Path(out).absolute():
            raise ValueError(f"--out and --html name the same file: {out}")
        if answer == "":
            raise ValueError(
                "expected a text, got an empty --answer. Leave it out to score the model's greedy "
                "answer"
            )
        rows = read_rows(prompt_file)
        if not rows:
            raise ValueError(f"{prompt_file} has no rows")
        if answer is not None and len(rows) > 1:
            raise ValueError("--answer needs a single prompt: put answers into the .jsonl file")
        if len(rows) > 1 and not (out or html):
            raise ValueError(
                f"{prompt_file} has {len(rows)} rows: name a file with --out or --html"
            )
        if context and len(rows) > 1:
            raise ValueError("--context needs a single prompt: put context into the .jsonl file")
        for field, close in misspelt({name for row in rows for name in row.content}).items():
            errors.print(f"Warning: ignoring the field {field!r}; did you mean {close!r}?",
                         style="yellow", highlight=False)  # fmt: skip
        if answer is not None:
            rows[0].content["answer"] = answer
        if context:
            rows[0].content["context"] = list(map(_passage, context))
        if chat:
            in_chat(rows)
        config, *loaded = settled(calibration, None, given)
        calibrations = [*filter(None, loaded)]
        if stream and (len(rows) > 1 or answer is not None or context or out):
            raise ValueError("--stream needs a single prompt, and no --answer, --context or --out")
        if stream:
            check_streamed({"source": config.source} | given)
        from lm_polygraph_asmi.scoring.loading import load  # imports torch: after all checks

        with errors.status(f"Loading {model}"):
            scorer = load(model, gguf_file, dtype, device_map, calibration=calibrations, **given)
        if stream:
            result = _streamed(scorer, rows[0].content, console)
            if html:
                Path(html).write_text(render([result], "Fragility of an answer"), encoding="utf-8")
            return
        left = rows_left(scorer, rows, Path(out) if out else None)
        if html and len(left) < len(rows):
            raise ValueError(f"--html cannot show the rows already in {out}: leave one of them out")
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    scores, failed, odd = [], 0, 0
    start = time.perf_counter()
    results = score_rows(scorer, rows, Path(out) if out else None, tokens or "full")
    shown = track(results, "Scoring", total=len(left), console=errors, disable=len(left) < 2)
    for row, result, problem in shown:
        if result is None:
            failed += 1
            row_id = row.content.get(id_column) if id_column else None
            named = f"row {row.number}" if row_id is None else f"row {row.number} ({row_id})"
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
        summary = [f"{number} {what}" for what, number in counts.items() if number]
        if len(left) < len(rows):
            summary.append(f"{len(rows) - len(left)} already in {out}")
        if odd:
            summary.append(f"{odd} with warnings")
        if left:
            summary.append(f"{len(left) / (time.perf_counter() - start):.3g} rows per second")
        console.print(f"{', '.join(summary)}.", highlight=False, soft_wrap=True)
        active_calibration = scorer.calibration
        if active_calibration is not None and active_calibration.decision is not None:
            from lm_polygraph_asmi.scoring.rows import rows_done

            seen: list[Any] = scores
            if out:  # also of earlier starts, whose lines may lack tokens
                seen = [SimpleNamespace(**line) for line in rows_done(Path(out)).values()]
            console.print(decided(seen), highlight=False, soft_wrap=True)
            for drift in active_calibration.drifts(seen):
                errors.print(f"Warning: {drift}.", style="yellow", highlight=False, soft_wrap=True)
    if failed:
        raise SystemExit(1)


def _refuse_given(options: Sequence[str], why: str) -> None:
    """Raise an error for options that would have no effect."""
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
    """Print the answer, each token shaded as it appears, then its score."""
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
    """Score a file into a folder of blocks and return the exit status."""
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
    for block in track(done, "Blocks", total=len(left), console=errors, disable=len(left) < 2):
        if block.error is not None:
            broken += 1
            errors.print(f"block {block.number}: {block.error}", style="red", markup=False,
                         highlight=False)  # fmt: skip
            continue
        rows, failed = rows + block.rows, failed + block.failed
    summary = [f"{rows - failed} scored"]
    if failed:
        summary.append(f"{failed} with asmi_error")
    if broken:
        summary.append(f"{broken} blocks not written: start again to retry them")
    if rows:
        summary.append(f"{rows / (time.perf_counter() - start):.3g} rows per second")
    console.print(f"{', '.join(summary)}; in {folder}.", highlight=False, soft_wrap=True)
    return 1 if broken or failed else 0


def decided(scores: "Sequence[Score]") -> str:
    """Numbers of answers accepted, abstained from, and without a decision."""
    counts = {
        "accepted": sum(one.accept is True for one in scores),
        "abstained": sum(one.accept is False for one in scores),
        "without a decision": sum(one.accept is None for one in scores),
    }
    summary = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    reason = next((one.accept_reason for one in scores if one.accept is None), None)
    return f"{summary}." if reason is None else f"{summary}. {reason}"


def _passage(text: str) -> str:
    """A passage: the text itself, or the content of @FILE."""
    if not text.startswith("@"):
        return text
    return Path(text[1:]).read_text(encoding="utf-8").removesuffix("\n")
