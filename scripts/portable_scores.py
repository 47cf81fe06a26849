"""How much scores of SmolLM2 on the demo's questions differ between processors and threads.

for c in default avx2; do for t in 1 2 4; do
    ATEN_CPU_CAPABILITY=$c python scripts/portable_scores.py make --threads $t $c-$t.json
done; done
python scripts/portable_scores.py compare *.json   # each against the first
"""

import json
from pathlib import Path

import click
import numpy as np
import torch

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.runs.rows import spread
from lm_polygraph_asmi.runs.squad import DEMO_DATA, prompt_of, read_squad
from lm_polygraph_asmi.scoring.scorer import Scorer

PATH = click.Path(path_type=Path)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("out", type=PATH)
@click.option("--threads", default=1, show_default=True)
@click.option("--scope", type=click.Choice(SCOPES), default="all", show_default=True)
def make(out: Path, threads: int, scope: str) -> None:
    torch.set_num_threads(threads)
    scorer = Scorer("smollm2", scope=scope, stop="\n", max_new_tokens=20)
    prompt = prompt_of("demo", closed_book=False)
    scores = [scorer.score(prompt(question)) for question in spread(read_squad(DEMO_DATA), 40)]
    out.write_text(json.dumps([[score.answer, score.score] for score in scores]))


@main.command()
@click.argument("files", type=PATH, nargs=-1, required=True)
def compare(files: tuple[Path, ...]) -> None:
    first, *others = (json.loads(file.read_text()) for file in files)
    base = np.array([score for _, score in first])
    for file, other in zip(files[1:], others, strict=True):
        difference = np.abs(np.array([score for _, score in other]) - base)
        changed = sum(a != b for (a, _), (b, _) in zip(first, other, strict=True))
        print(
            f"{file.stem} against {files[0].stem}: {changed} of {len(base)} answers changed; "
            f"median {np.median(difference):.1e}, largest {difference.max():.1e} nats; "
            f"relative {np.median(difference / base):.1e}, {(difference / base).max():.1e}"
        )


if __name__ == "__main__":
    main()
