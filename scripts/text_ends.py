"""How much the score of an answer passed as text depends on how the text is ended.

    PYTHONPATH=scripts python scripts/text_ends.py MODEL            # the demo's questions
    PYTHONPATH=scripts python scripts/text_ends.py MODEL FILE --rows 30

MODEL is a folder, or `smollm2`; FILE is in SQuAD's layout, or a bAbI task file (.txt). The model's
own answers, without their end, are scored as texts: ended as the model would end them, and, as
version 0.1 did, by the first stop string. Differences of 1e-3 nats or less are rounding.
"""

from pathlib import Path

import click
import numpy as np
from build_babi import read_babi
from rich.progress import track

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.runs.squad import DEMO_DATA, prompt_of, read_squad

ROUNDING = 1e-3


def prompts_of(file: Path, few_shot: bool, rows: int) -> list[str]:
    """Prompts of random questions of a file."""
    if file.suffix == ".txt":
        prompts = [prompt for prompt, _ in read_babi(file)]
    else:
        prompts = list(map(prompt_of("demo" if few_shot else "paper", False), read_squad(file)))
    order = np.random.default_rng(0).permutation(len(prompts))[:rows]
    return [prompts[i] for i in order]


@click.command(help=__doc__)
@click.argument("model")
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=DEMO_DATA
)
@click.option("--rows", default=30, show_default=True, help="Random questions.")
@click.option("--few-shot/--zero-shot", default=True, help="The demo's 4-shot prompt.")
@click.option("--stop", default="\n", help="String that ends an answer; default: a line break.")
def main(model: str, file: Path, rows: int, few_shot: bool, stop: str) -> None:
    scorer = Scorer(model, scope="response", stop=stop, max_new_tokens=20)
    tokenizer = scorer.tokenizer
    lines = []
    for prompt in track(prompts_of(file, few_shot, rows), transient=True):
        generated = scorer.score(prompt)
        if not generated.answered:
            continue
        as_text = scorer.score(prompt, generated.answer)
        before = tokenizer(prompt)["input_ids"]
        closed = tokenizer(prompt + generated.answer + stop)["input_ids"]
        if closed[: len(before)] != before:
            continue  # the answer's first token includes the end of the prompt
        fixed = scorer.score(prompt, closed[len(before) :])
        changes = [
            abs(getattr(other, name) - getattr(as_text, name))
            for other in (fixed, generated)
            for name in ("score", "msp")
        ]
        lines.append([*changes, bool(as_text.warnings)])
    moved, msp, beside, beside_msp, warned = np.array(lines).T
    click.echo(
        f"{len(lines)} texts; moved since version 0.1: {int((msp > ROUNDING).sum())}, at most "
        f"{moved.max():.4f} nats in the score and {msp.max():.2f} in the negative log-likelihood. "
        f"From the model's own answer differ {int((beside_msp > ROUNDING).sum())}, at most "
        f"{beside.max():.4f} and {beside_msp.max():.2f}; {int(warned.sum())} have a warning."
    )


if __name__ == "__main__":
    main()
