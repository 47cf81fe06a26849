"""Is anything lost if a local Ray cluster of two actors is killed while it scores real rows?

    python scripts/try_ray.py xquad.en.json FOLDER   # FOLDER must not exist

A tiny random model scores questions, each with its answer and with that of another question: in one
process, and on Ray, whose driver is killed (SIGKILL) after a third of the blocks and started again.
The blocks must be equal byte for byte.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pandas as pd
from lm_polygraph.utils.common import load_external_module

memory_of_many: Any = load_external_module(str(Path(__file__).with_name("memory_of_many.py")))

BLOCK = 50


def rows(squad: Path, number: int) -> pd.DataFrame:
    """Every question twice: with its answer, and with that of the previous question."""
    asked = [
        (paragraph["context"], question["question"], question["answers"][0]["text"])
        for article in json.loads(squad.read_text(encoding="utf-8"))["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    found = [
        {"id": f"{i}{kind}", "prompt": f"{context}\nQ: {question}\nA:", "answer": f" {answer}"}
        for i, (context, question, right) in enumerate(asked)
        for kind, answer in (("right", right), ("wrong", asked[i - 1][2]))
    ]
    return pd.DataFrame(found[:number])


def start(folder: Path, out: str, engine: str) -> subprocess.Popen:
    command = [
        Path(sys.executable).with_name("polygraph_asmi"), "score", "rows.parquet",
        "--model", "model", "--scope", "response", "--tokens", "compact",
        "--num-masks", "4", "--mask-rate", "0.25", "--out", f"{out}/", "--block-rows", str(BLOCK),
        "--engine", engine, *(["--actors", "2"] if engine == "ray" else []),
    ]  # fmt: skip
    own = os.environ | {"OMP_NUM_THREADS": "1"}  # what Ray gives an actor
    with (folder / f"{out}.log").open("a") as log:
        return subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log)


def blocks(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("block-*"))}


@click.command(help=__doc__)
@click.argument("squad", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(exists=False, path_type=Path))
@click.option("--rows", "number", default=2000, show_default=True, type=click.IntRange(3 * BLOCK))
def main(squad: Path, folder: Path, number: int) -> None:
    folder.mkdir(parents=True)
    scorer = memory_of_many.tiny_scorer()
    scorer.model.save_pretrained(folder / "model")
    scorer.tokenizer.save_pretrained(folder / "model")
    rows(squad, number).to_parquet(folder / "rows.parquet")

    def timed(process: subprocess.Popen, out: str) -> None:
        began = time.perf_counter()
        if process.wait() > 1:  # 1 where a row has an error, such as a passage that is too long
            raise click.ClickException((folder / f"{out}.log").read_text()[-2000:])
        said = (folder / f"{out}.log").read_text().splitlines()[-1]
        print(f"{len(blocks(folder / out))} blocks, {time.perf_counter() - began:.0f} s: {said}")

    timed(start(folder, "alone", "local"), "alone")
    driver = start(folder, "killed", "ray")
    while len(made := blocks(folder / "killed")) < number // BLOCK // 3:
        if driver.poll() is not None:
            raise click.ClickException((folder / "killed.log").read_text()[-2000:])
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    print(f"killed after {len(made)} blocks")
    timed(start(folder, "killed", "ray"), "killed")
    same = blocks(folder / "alone") == blocks(folder / "killed")
    print("the same to the byte" if same else "NOT the same")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
