"""Try what needs a GPU and write a Markdown file about it; `scripts/gpu.sh` sets up all.

    python scripts/gpu.py --out gpu.md
    python scripts/gpu.py --rehearse     # on a processor: tiny shapes, random stand-ins

The file is written anew after each part, so a part that fails or is killed costs no other. Whole
outputs are kept in the folder `<out>.parts`.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import click
import torch
from bench_suffix import machine

from lm_polygraph_asmi.host.hub import Repository
from lm_polygraph_asmi.results.manifest import packages, read_manifest

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/model/test_on_device.py"
SHAPES = ("qwen3-4b", "llama-2-7b")
ROWS = 20
MODEL = "Qwen/Qwen3-4B-Base"
"""Of asmi_coqa; whether the hub has it says whether there is a hub."""
SHOWN = 40
"""Lines of an output that failed."""


class Part(NamedTuple):
    """A part of the file.

    Attributes:
        title: its heading.
        command: as a user types it.
        outcome: "passed", "failed (...)", or "not run: ...".
        seconds: from start to end.
        text: Markdown below the command.
    """

    title: str
    command: str
    outcome: str
    seconds: float
    text: str

    @property
    def failed(self) -> bool:
        return self.outcome.startswith("failed")

    def shown(self) -> str:
        head = f"## {self.title}\n\n{self.outcome}, {self.seconds:.0f} s\n"
        return f"{head}\n```bash\n{self.command}\n```\n\n{self.text}\n"


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-SHOWN:])


def run(
    title: str,
    command: Sequence[str],
    log: Path,
    summary: Callable[[str], str],
    **process: str | Path | Mapping[str, str],
) -> Part:
    """Run a command; its output goes to the file `log`, and `summary` of it into the part."""
    click.echo(f"{title}; output: {log}", err=True)
    start = time.perf_counter()
    with log.open("w") as out, log.with_suffix(".err").open("w") as errors:
        code = subprocess.run(command, stdout=out, stderr=errors, check=False, **process).returncode
    seconds = time.perf_counter() - start
    printed = log.read_text(errors="replace")
    try:
        text = summary(printed)
    except Exception as error:  # a command that failed early may leave nothing to summarise
        text = f"No summary: {type(error).__name__}: {error}"
    if code:
        printed += log.with_suffix(".err").read_text(errors="replace")
        text += f"\n\n{fenced(last_lines(printed))}"
    shown = shlex.join(Path(word).name if word == command[0] else word for word in command)
    return Part(title, shown, f"failed (exit {code})" if code else "passed", seconds, text)


def tests(folder: Path, device: str) -> Part:
    results = folder / "tests.xml"
    results.unlink(missing_ok=True)

    def summary(_: str) -> str:
        counts: dict[str, Counter[str]] = {}
        for case in ElementTree.parse(results).iter("testcase"):
            name, _, parameters = case.get("name", "").partition("[")
            label = name.removeprefix("test_").replace("_", " ")
            if dtype := re.search(r"b?float\d+", parameters):
                label += f", {dtype[0]}"
            children = (child.tag for child in case)
            outcome = next((t for t in children if t in ("failure", "error", "skipped")), "passed")
            counts.setdefault(label, Counter())[outcome] += 1
        lines = ["| test | passed | failed | skipped |", "| --- | ---: | ---: | ---: |"]
        for label, count in counts.items():
            bad = count["failure"] + count["error"]
            lines.append(f"| {label} | {count['passed']} | {bad} | {count['skipped']} |")
        return "\n".join(lines)

    return run(
        "Numerical tests",
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", TESTS, "--device", device,
         "--junitxml", str(results)],
        folder / "tests.log",
        summary,
        cwd=ROOT,
    )  # fmt: skip


def cost(folder: Path, shape: str, device: str, rehearse: bool) -> Part:
    options = ["--dtype", "bfloat16", "--prompt-tokens", "490", "--response-tokens", "6"]
    if rehearse:
        options = ["--dtype", "float32", "--prompt-tokens", "20", "--repeats", "1"]
    return run(
        f"Cost at the shape of {shape}" + ", here a tiny one" * rehearse,
        [sys.executable, "scripts/bench_suffix.py", "--model", "tiny" if rehearse else shape,
         "--device", device, *options],
        folder / f"{shape}.log",
        fenced,
        cwd=ROOT,
    )  # fmt: skip


def phases(manager: Path) -> str:
    """Seconds of each phase of a run, as a table, and its peak memory."""
    manifest = read_manifest(manager)
    seconds, wall = manifest["seconds"], manifest["seconds_wall"]
    rows = len(manifest["rows"]["ids"])
    lines = [
        f"{rows} rows of {manifest['model']['path']}, revision {manifest['model']['revision']}.\n",
        "| phase | seconds, all rows | median of a row |",
        "| --- | ---: | ---: |",
    ]
    for name, timing in seconds.items():
        lines.append(f"| {name} | {timing['total']:.1f} | {timing['median']:.3f} |")
    rest = wall - sum(timing["total"] for timing in seconds.values())
    lines.append(f"| loading, other baselines, quality | {rest:.1f} | |")
    lines.append(f"| all | {wall:.1f} | {wall / rows:.3f} |")
    peaks = manifest["peak_memory_bytes"].items()
    return "\n".join([*lines, "", "Peak memory: " + ", ".join(
        f"{device} {size / 1e9:.1f} GB" for device, size in peaks) + "."])  # fmt: skip


def benchmark(folder: Path, rehearse: bool) -> Part:
    title = f"{ROWS} rows of asmi_coqa"
    place = folder / "coqa"
    script = str(Path(sys.executable).with_name("polygraph_eval"))
    command = [sys.executable, script, "--config-name", "asmi_coqa", f"data.sample={ROWS}",
               f"hydra.run.dir={place}"]  # fmt: skip
    process: dict[str, Path | Mapping[str, str]] = {"cwd": ROOT}
    if rehearse:
        title += ", here of stand-ins"
        overrides, process = stand_in_run(folder)
        command += overrides
    manager = place / "ue_manager_seed1"
    for file in place.glob("*_seed1*"):  # of an earlier call
        file.unlink()
    part = run(title, command, folder / "coqa.log", lambda _: phases(manager), **process)
    if part.failed and not rehearse and (refusal := Repository(MODEL).refusal()):
        return part._replace(outcome=f"not run: {refusal.why}")
    return part


def stand_in_run(folder: Path) -> tuple[list[str], dict[str, Path | Mapping[str, str]]]:
    """Overrides, working directory and environment of a run without a hub."""
    sys.path.insert(0, str(ROOT))
    from tests import tiny_lm
    from tests.benchmarks import hub_dataset
    from tests.stand_ins import make_stand_ins

    stand_ins = make_stand_ins(folder / "stand-ins")
    model = tiny_lm.save(folder / "model", max_position_embeddings=1024)
    overrides = [
        "model=asmi_local",
        f"model.path={model}",
        f"data.source={hub_dataset('asmi_coqa', folder)}",
        *stand_ins.overrides,
        f"cache_path={folder}",
        "max_new_tokens=3",
        "asmi.num_samples=3",
        "asmi.result_cache=null",
    ]
    environment = os.environ | stand_ins.environment | {"XDG_CACHE_HOME": str(folder / "cache")}
    return overrides, {"cwd": stand_ins.working_directory, "env": environment}


def written(parts: Sequence[Part], rehearse: bool, device: torch.device) -> str:
    """The whole file."""
    title = "# A rehearsal: no number here means anything" if rehearse else "# ASMI on a GPU"
    releases = ", ".join(f"{name} {release}" for name, release in packages().items())
    outcomes = [f"- {part.title}: {part.outcome}" for part in parts]
    memory = ""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        memory = f", {size / 1e9:.0f} GB, CUDA {torch.version.cuda}"
    head = [title, f"{machine(device)}{memory}.\n\n{releases}.", "\n".join(outcomes)]
    return "\n\n".join([*head, *(part.shown() for part in parts)])


@click.command(help=__doc__)
@click.option("--rehearse", is_flag=True, help="On a processor: tiny shapes, random stand-ins.")
@click.option("--out", default="gpu.md", show_default=True, type=click.Path(path_type=Path))
def main(rehearse: bool, out: Path) -> None:
    if not rehearse and not torch.cuda.is_available():
        raise click.ClickException(
            "torch finds no CUDA device: install a build of torch with CUDA (see "
            "scripts/environment.sh), or try the script itself with --rehearse"
        )
    device = torch.device("cpu" if rehearse else "cuda")
    out = out.absolute()
    folder = out.with_name(f"{out.name}.parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        out.touch()
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error}") from error
    steps: list[Callable[[], Part]] = [
        lambda: tests(folder, device.type),
        *(lambda shape=shape: cost(folder, shape, device.type, rehearse) for shape in SHAPES),
        lambda: benchmark(folder, rehearse),
    ]
    parts = []
    for step in steps:
        parts.append(step())
        out.write_text(written(parts, rehearse, device), encoding="utf-8")
    click.echo(f"{out}: " + "; ".join(f"{part.title}: {part.outcome}" for part in parts))
    if any(part.failed for part in parts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
