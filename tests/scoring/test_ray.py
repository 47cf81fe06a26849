"""Blocks on a local Ray cluster of two actors: what is killed goes on, and nothing differs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")

from tests import tiny_lm  # noqa: E402

pytestmark = pytest.mark.slow
ROWS = 240
BLOCK = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model, rows of which one is broken, and the blocks that one process makes of them."""
    place = tmp_path_factory.mktemp("ray")
    tiny_lm.save(place / "model")
    rows = [
        {"id": i, "prompt": f"Who built mill number {i}?", "answer": f" the miller of {i % 7}"}
        for i in range(ROWS)
    ]
    rows[-7]["answer"] = ""  # in the last block, which a run killed early has not got
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "rows.jsonl").write_text(text, encoding="utf-8")
    assert start(place, "alone", "local").wait() == 1  # of the broken row
    assert len(blocks(place / "alone")) == ROWS / BLOCK
    return place


def start(place: Path, out: str, engine: str) -> subprocess.Popen:
    command = [
        "polygraph_asmi", "score", "rows.jsonl", "--model", "model", "--scope", "response",
        "--out", f"{out}/", "--block-rows", str(BLOCK), "--engine", engine,
        *(["--actors", "2"] if engine == "ray" else []),
    ]  # fmt: skip
    script = Path(sys.executable).with_name(command[0])
    with (place / f"{out}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, str(script), *command[1:]], cwd=place, stdout=log, stderr=log
        )


def blocks(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("block-*")}


def made_at(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("block-*")}


def until(process: subprocess.Popen, folder: Path, number: int) -> None:
    while len(blocks(folder)) < number:
        assert process.poll() is None, folder.with_suffix(".log").read_text()
        time.sleep(0.05)


def test_a_killed_run_goes_on(place):
    folder = place / "killed"
    driver = start(place, folder.name, "ray")
    until(driver, folder, 3)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    held = made_at(folder)
    assert 3 <= len(held) < ROWS / BLOCK
    assert start(place, folder.name, "ray").wait() == 1
    assert held.items() <= made_at(folder).items()  # none is made twice
    assert blocks(folder) == blocks(place / "alone")


def test_a_lost_actor_loses_nothing(place):
    folder = place / "lost"
    driver = start(place, folder.name, "ray")
    until(driver, folder, 3)
    actors = [
        process.pid
        for process in psutil.Process(driver.pid).children(recursive=True)
        if "MapWorker" in " ".join(process.cmdline())
    ]
    assert len(actors) == 2
    os.kill(actors[0], signal.SIGKILL)
    assert driver.wait() == 1
    assert blocks(folder) == blocks(place / "alone")
