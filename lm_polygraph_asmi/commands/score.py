"""`polygraph_asmi score`: answers from the shell."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lm_polygraph_asmi.validation import (
    BETA,
    MASK_SAMPLERS,
    PERTURBATIONS,
    SCOPES,
    SOURCES,
    TAU,
    VARIANTS,
    check_scoring,
    check_settings,
    check_source,
    stop_strings,
)

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.result import Score


@click.command()
@click.option(
    "--model", required=True, help="Folder, name on a hub, or smollm2 (the demo's model)."
)
@click.option("--gguf-file", help="Weights in this file of the folder.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ...")
@click.option("--device-map", help="auto for GPUs; default: the CPU.")
@click.option(
    "--prompt-file",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A prompt as text, or .jsonl with prompt and, if wanted, answer and samples in each row.",
)
@click.option("--answer", help="Text as it follows the prompt; default: the model's own answer.")
@click.option("--chat", is_flag=True, help="Put text prompts through the chat template.")
@click.option("--variant", type=click.Choice(list(VARIANTS)), default="sem")
@click.option("--depth", default=0.6, show_default=True, help="Relative depth of the masked layer.")
@click.option("--scope", type=click.Choice(SCOPES), default="all", show_default=True)
@click.option(
    "--source",
    type=click.Choice(SOURCES),
    default="all",
    show_default=True,
    help="What masked heads lose: all, or what comes from the context (with --scope response).",
)
@click.option(
    "--context",
    multiple=True,
    help="A passage that stands in the prompt; says which of them the answer hangs on. @FILE reads "
    "it from a file. In a .jsonl file: a field context in each row.",
)
@click.option("--num-masks", type=int, help="S; default: derived from the model's heads.")
@click.option("--mask-rate", type=float, help="p; default: derived from the model's heads.")
@click.option(
    "--mask-sampler",
    type=click.Choice(MASK_SAMPLERS),
    default="bernoulli",
    show_default=True,
)
@click.option("--top-k", default=64, show_default=True, help="K, tokens kept per distribution.")
@click.option("--seed", default=0, show_default=True, help="Of the masks, and of drawn answers.")
@click.option(
    "--perturbation",
    type=click.Choice(PERTURBATIONS),
    default="heads",
    show_default=True,
    help="What a mask changes; all but heads are controls.",
)
@click.option("--dose", help="Times that change: a number, or a file of `polygraph_asmi dose`.")
@click.option(
    "--closing-token/--no-closing-token",
    default=True,
    show_default=True,
    help="Whether the token that ends the answer counts.",
)
@click.option("--num-samples", default=10, show_default=True, help="For adapt: answers to draw.")
@click.option("--tau", default=TAU, show_default=True, help="For adapt: middle of the gate.")
@click.option("--beta", default=BETA, show_default=True, help="For adapt: its steepness.")
@click.option("--stop", multiple=True, help="Ends answers; \\n is a line break.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option(
    "--reference",
    multiple=True,
    type=click.Path(exists=True),
    help="What the number means: a finished run (its manager file is a pickle: only files you "
    "trust), or what `polygraph_asmi calibrate` or `reference` saved; twice for one of answers and "
    "one of their parts.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="JSON lines; rows in it are kept.")
@click.option("--html", type=click.Path(dir_okay=False), help="Page to write.")
def score(
    model: str,
    gguf_file: str | None,
    dtype: str,
    device_map: str | None,
    prompt_file: str,
    answer: str | None,
    chat: bool,
    stop: tuple[str, ...],
    context: tuple[str, ...],
    out: str | None,
    html: str | None,
    **settings: Any,
) -> None:
    """Score answers: how fragile they are, token by token, and what that means.

    The exit status is 1 if a row could not be scored.
    """
    from rich.console import Console
    from rich.progress import track

    from lm_polygraph_asmi.scoring.page import render
    from lm_polygraph_asmi.scoring.rows import in_chat, read_rows, rows_left, score_rows

    console, errors = Console(), Console(stderr=True)
    if not sys.warnoptions:  # those of other libraries, which no user can act on
        warnings.simplefilter("ignore")
    try:
        settings["dose"] = _dose(settings["dose"], settings["perturbation"], settings)
        _check(settings, stop)
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
        if answer is not None:
            rows[0].content["answer"] = answer
        if context:
            rows[0].content["context"] = list(map(_passage, context))
        if chat:
            in_chat(rows)
        from lm_polygraph_asmi.scoring.reference import of_answers_and_parts

        found = of_answers_and_parts(
            settings.pop("reference"), settings["variant"], settings["depth"], settings["source"]
        )
        settings["reference"] = [one for one in found if one is not None]
        from lm_polygraph_asmi.scoring.loading import load  # torch: only once all else is right

        unescaped = [text.replace("\\n", "\n") for text in stop]
        with errors.status(f"Loading {model}"):
            scorer = load(model, gguf_file, dtype, device_map, stop=unescaped, **settings)
        left = rows_left(scorer, rows, Path(out) if out else None)
        if html and len(left) < len(rows):
            raise ValueError(
                f"{out} holds some rows already, which --html cannot show: leave it out"
            )
    except (OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    scores, seen, failed, odd = [], [], 0, 0
    results = score_rows(scorer, rows, Path(out) if out else None)
    shown = track(results, "Scoring", total=len(left), console=errors, disable=len(left) < 2)
    for row, result, problem in shown:
        if result is None:
            failed += 1
            errors.print(f"row {row.number}: {problem}", style="red", markup=False, highlight=False)
            continue
        odd += bool(result.warnings)
        seen.append(result)
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
        console.print(f"{', '.join(said)}.", highlight=False, soft_wrap=True)
        yardstick = scorer.reference
        if yardstick is not None and yardstick.decision is not None:
            from lm_polygraph_asmi.scoring.result import Score
            from lm_polygraph_asmi.scoring.rows import rows_done

            if out:  # those of earlier sessions, too
                seen = [Score.from_dict(line, yardstick) for line in rows_done(Path(out)).values()]
            console.print(decided(seen), highlight=False, soft_wrap=True)
            for drift in yardstick.drifts(seen):
                errors.print(f"Warning: {drift}.", style="yellow", highlight=False, soft_wrap=True)
    if failed:
        raise SystemExit(1)


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


def _check(settings: Mapping[str, Any], stop: Sequence[str]) -> None:
    """Refuse settings before anything heavy is imported; the scorer would do so after."""
    point = (
        "top_k", "num_masks", "mask_rate", "mask_sampler", "scope", "perturbation", "dose",
    )  # fmt: skip
    check_settings([settings["depth"]], *(settings[name] for name in point))
    check_source(settings["source"], settings["scope"])
    own = ("variant", "num_samples", "tau", "beta", "max_new_tokens", "seed", "closing_token")
    check_scoring(**{name: settings[name] for name in own})
    stop_strings(stop)


def _dose(given: str | None, perturbation: str, used: Mapping[str, Any]) -> float | None:
    """A number, or what a file says of this perturbation."""
    from lm_polygraph_asmi.saved.doses import dose_of

    try:
        number = None if given is None else float(given)
    except ValueError:
        return dose_of(given, perturbation, used)
    return dose_of(number, perturbation)
