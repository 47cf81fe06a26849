"""Measure on a GPU what only a GPU shows, and write a Markdown file; `scripts/gpu.sh` sets up all.

    python scripts/gpu.py --out gpu.md               # every part; `--part passes` runs one
    python scripts/gpu.py --rehearse                 # on a processor: tiny shapes, stand-ins
    python scripts/gpu.py --part model --folder FOLDER --squad FILE

The plan, in this order, at most ten minutes a command:

1. passes: masked passes at Qwen3-4B's sizes (random weights), of this commit, plain and compiled,
   and of 4779b0d. Goals on an H200 at 490 and 6 tokens: `all` 115 ms, `response` 30 ms; `response`
   never slower than `all`; 16,000 and 20 tokens: 8 s. Elsewhere: .68, .55 and .39 of 4779b0d.
   `asmi.compile` leaves if it saves less than a tenth of a row.
2. samples: ten in one batch against a greedy answer. Goal: twice its time.
3. squad: 8 rows of `asmi_squad`, random weights of the same sizes and stand-in side models, with
   the seconds of each phase. Goal: 3 s a row.
4. demo: `asmi_demo` with SmolLM2's weights. Its table should be that of docs/results/demo.txt in
   every digit, but for Adapt-ASMI, whose samples come from the GPU's generator.
5. model: a model in a folder on 300 questions of a SQuAD file, both scopes and cheap baselines, no
   other choice of settings; PRR with intervals over passages.
6. tests: the numerical tests.

The file is written anew after each part, so a part that fails or is killed costs no other. Whole
outputs are kept in the folder `<out>.parts`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import click
import torch
from bench_suffix import SHAPES, machine

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.results.manifest import packages, read_manifest

ROOT = Path(__file__).resolve().parents[1]
EARLIER = "4779b0d"
LENGTHS = ("490+6", "490+200", "4000+20", "16000+20")
MINUTES = 10
"""Longest time of a command."""
ROWS, QUESTIONS = 8, 300
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


class Place(NamedTuple):
    """Where and how the parts run."""

    folder: Path  # for whole outputs
    rehearse: bool
    model: Path | None  # of the part `model`
    squad: Path | None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def run(
    title: str,
    command: Sequence[str],
    log: Path,
    summary: Callable[[str], str],
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> Part:
    """Run a command; its output goes to the file `log`, and `summary` of it into the part.

    `source`: what it reads as standard input.
    """
    click.echo(f"{title}; output: {log}", err=True)
    start, late = time.perf_counter(), False
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as out, log.with_suffix(".err").open("w") as errors:
        read = source.read_bytes() if source else b""
        try:
            code = subprocess.run(
                command, input=read, stdout=out, stderr=errors, cwd=cwd, env=env, check=False,
                timeout=60 * MINUTES,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code, late = 1, True
    seconds = time.perf_counter() - start
    printed = log.read_text(errors="replace")
    try:
        text = summary(printed)
    except Exception as error:  # a command that failed early may leave nothing to summarise
        text = f"No summary: {type(error).__name__}: {error}"
    if code:
        printed += log.with_suffix(".err").read_text(errors="replace")
        last_lines = "\n".join(printed.splitlines()[-SHOWN:])
        text += f"\n\n{fenced(last_lines)}"
    shown = shlex.join(Path(word).name if word == command[0] else word for word in command)
    shown += f" < {source.relative_to(ROOT)}" if source else ""
    failed = f"failed ({f'over {MINUTES} minutes' if late else f'exit {code}'})"
    return Part(title, shown, failed if code else "passed", seconds, text)


def timed(place: Place, mode: str, checkout: Path, lengths: Sequence[str]) -> Part:
    """`gpu_passes.py` in a checkout; its lines are those of the log."""
    shape = "tiny" if place.rehearse else "qwen3-4b"
    paths = os.pathsep.join(map(str, (checkout, checkout / "scripts")))
    return run(
        f"{checkout.name}, {mode}",
        [sys.executable, "-", shape, place.device, mode, *lengths],
        place.folder / f"{checkout.name}-{mode}.log",
        fenced,
        checkout,
        os.environ | {"PYTHONPATH": paths},
        ROOT / "scripts" / "gpu_passes.py",
    )


def joined(title: str, parts: Sequence[Part], text: str) -> Part:
    """Several commands as one part: failed if any has."""
    outcome = next((part.outcome for part in parts if part.failed), "passed")
    broken = [f"{part.title}: {part.text}" for part in parts if part.failed]
    commands = "\n".join(dict.fromkeys(part.command for part in parts))
    text = "\n\n".join([text, *broken])
    return Part(title, commands, outcome, sum(part.seconds for part in parts), text)


def milliseconds(log: Path) -> dict[str, str]:
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    return {label: f"{1e3 * seconds:.1f}" for label, seconds, _ in found}


def passes(place: Place) -> Part:
    earlier = place.folder / EARLIER
    if not earlier.is_dir():
        tree = ["git", "worktree", "add", "--detach", str(earlier), EARLIER]
        subprocess.run(tree, cwd=ROOT, check=True, capture_output=True)
    lengths = ["20+2"] if place.rehearse else LENGTHS
    runs = {"this commit": (ROOT, "plain"), "compiled": (ROOT, "compiled"),
            EARLIER: (earlier, "plain")}  # fmt: skip
    parts = [timed(place, mode, checkout, lengths) for checkout, mode in runs.values()]
    logs = [place.folder / f"{checkout.name}-{mode}.log" for checkout, mode in runs.values()]
    columns = [milliseconds(log) for log in logs]
    lines = [f"| milliseconds | {' | '.join(runs)} |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {label} | {' | '.join(column.get(label, '–') for column in columns)} |"
        for label in dict.fromkeys(label for column in columns for label in column)
    ]
    return joined("Masked passes", parts, "\n".join(lines))


def samples(place: Place) -> Part:
    part = timed(place, "samples", ROOT, ["20+2" if place.rehearse else "490+6"])
    return part._replace(title="Samples, and masked passes before them")


def phases(manager: Path) -> str:
    """Seconds of each phase of a run, as a table, and its peak memory."""
    manifest = read_manifest(manager)
    seconds, wall = manifest["seconds"], manifest["seconds_wall"]
    rows = len(manifest["rows"]["ids"])
    lines = [f"{rows} rows.\n", "| phase | seconds, all rows | median of a row |",
             "| --- | ---: | ---: |"]  # fmt: skip
    lines += [
        f"| {name} | {timing['total']:.1f} | {timing['median']:.3f} |"
        for name, timing in seconds.items()
    ]
    rest = wall - sum(timing["total"] for timing in seconds.values())
    lines.append(f"| loading, other baselines, quality | {rest:.1f} | |")
    lines.append(f"| all | {wall:.1f} | {wall / rows:.3f} |")
    peaks = manifest["peak_memory_bytes"].items()
    return "\n".join([*lines, "", "Peak memory: " + ", ".join(
        f"{device} {size / 1e9:.1f} GB" for device, size in peaks) + "."])  # fmt: skip


def benchmark(
    place: Place,
    name: str,
    overrides: Sequence[str],
    summary: Callable[[str], str],
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> Part:
    """A run of LM-Polygraph, into a folder of that name."""
    folder = place.folder / name
    for file in folder.glob("*_seed1*"):  # of an earlier call
        file.unlink()
    script = str(Path(sys.executable).with_name("polygraph_eval"))
    command = [script, *overrides, f"hydra.run.dir={folder}", "asmi.result_cache=null"]
    if not place.rehearse:
        command.append("model.load_model_args.device_map=auto")
    return run(name, command, place.folder / f"{name}.log", summary, cwd, env)


def squad(place: Place) -> Part:
    """Random weights, so that each answer and sample has all its tokens; the tokenizer has a token
    for each row of the embedding."""
    sys.path.insert(0, str(ROOT))
    from tests import tiny_lm
    from tests.runs.test_squad import QUESTION, write
    from tests.stand_ins import make_stand_ins

    stand_ins, model = make_stand_ins(place.folder / "stand-ins"), place.folder / "model"
    if place.rehearse:
        tiny_lm.save(model, max_position_embeddings=1024)
    elif not model.is_dir():
        from transformers import AutoModelForCausalLM

        tokenizer, shape = tiny_lm.tokenizer(), SHAPES["qwen3-4b"]
        added = range(len(tokenizer), shape.vocab_size)
        tokenizer.add_tokens([f"word{number}" for number in added])
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(model)
        tokenizer.save_pretrained(model)
    rows = [
        QUESTION._replace(id=str(n), passage=f"{n}. {QUESTION.passage * 8}") for n in range(ROWS)
    ]
    overrides = [
        "--config-name", "asmi_squad", "model=asmi_local", f"model.path={model}",
        f"data.source={write(place.folder / 'squad.json', rows)}", f"data.sample={ROWS}",
        f"cache_path={place.folder}", *stand_ins.overrides,
    ]  # fmt: skip
    if place.rehearse:
        overrides += ["max_new_tokens=3", "asmi.num_samples=3"]
    else:
        overrides.append("model.load_model_args.dtype=bfloat16")
    environment = os.environ | stand_ins.environment
    manager = place.folder / "squad" / "ue_manager_seed1"
    return benchmark(
        place, "squad", overrides, lambda _: phases(manager),
        cwd=stand_ins.working_directory, env=environment,
    )  # fmt: skip


def table_of(run_folder: Path) -> str:
    """What `polygraph_asmi results` prints of a run."""
    script = str(Path(sys.executable).with_name("polygraph_asmi"))
    return subprocess.run(
        [script, "results", str(run_folder)], capture_output=True, text=True, check=True
    ).stdout


def demo(place: Place) -> Part:
    def compared(_: str) -> str:
        now = [line for line in table_of(place.folder / "demo").splitlines() if "│" in line]
        page = (ROOT / "docs" / "results" / "demo.txt").read_text().splitlines()
        before = [line for line in page if "│" in line]
        changed = unified_diff(before, now, "docs/results/demo.txt", "now", lineterm="", n=0)
        return fenced("\n".join([*now, "", *(changed or ["equal in every digit"])]))

    few = ["data.sample=4", "asmi.num_samples=2"] if place.rehearse else []
    return benchmark(place, "demo", ["--config-name", "asmi_demo", *few], compared)


def model(place: Place) -> Part:
    title = f"{QUESTIONS} questions, a model's own weights"
    if place.model is None or place.squad is None:
        return Part(title, "", "not run: name --folder and --squad", 0.0, "")
    overrides = [
        "--config-name", "asmi_squad", "estimators=asmi_demo", "model=asmi_local",
        f"model.path={place.model}", f"data.source={place.squad}",
        f"data.sample={4 if place.rehearse else QUESTIONS}",
        "generation_metrics=[{name: RougeMetric, args: [rougeL]}]",
    ]  # fmt: skip
    parts = []
    for scope in SCOPES:
        name = f"model-{scope}"
        part = benchmark(place, name, [*overrides, f"asmi.scope={scope}"], lambda _: "")
        parts.append(part if part.failed else part._replace(text=table_of(place.folder / name)))
    text = "\n\n".join(f"`{p.title}`\n\n{fenced(p.text)}" for p in parts if not p.failed)
    return joined(title, parts, text)


def tests(place: Place) -> Part:
    results = place.folder / "tests.xml"
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
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", "tests/model/test_on_device.py",
         "--device", place.device, "--junitxml", str(results)],
        place.folder / "tests.log",
        summary,
    )  # fmt: skip


PARTS = {each.__name__: each for each in (passes, samples, squad, demo, model, tests)}


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
@click.option("--part", "chosen", type=click.Choice([*PARTS]), multiple=True, help="Only this one.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="A model of your own.")
@click.option("--squad", type=click.Path(exists=True, path_type=Path), help="Its questions.")
@click.option("--out", default="gpu.md", show_default=True, type=click.Path(path_type=Path))
def main(
    rehearse: bool, chosen: tuple[str, ...], folder: Path | None, squad: Path | None, out: Path
) -> None:
    if not rehearse and not torch.cuda.is_available():
        raise click.ClickException(
            "torch finds no CUDA device: install a build of torch with CUDA (see "
            "scripts/environment.sh), or try the script itself with --rehearse"
        )
    out = out.absolute()
    place = Place(out.with_name(f"{out.name}.parts"), rehearse, folder, squad)
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        out.touch()
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error}") from error
    parts = []
    for name in chosen or PARTS:
        parts.append(PARTS[name](place))
        out.write_text(written(parts, rehearse, torch.device(place.device)), encoding="utf-8")
    click.echo(f"{out}: " + "; ".join(f"{part.title}: {part.outcome}" for part in parts))
    if any(part.failed for part in parts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
