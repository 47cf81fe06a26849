"""Make what other commits are compared with, and compare it.

    python scripts/golden.py make before --commit HASH     # in a worktree of that commit
    python scripts/golden.py make after statistics rows    # of this checkout, two parts
    python scripts/golden.py compare before after --tolerance 1e-6

Parts, each a file or folder: statistics (of a tiny model of every family, and of SmolLM2 on ten of
the demo's prompts: both scopes, one and several depths, all estimators, and `Scorer`), demo (its
table), report (CSV files of 16 planted settings), rows (100 labelled answers scored, calibrated and
decided in the shell), bench (times, which are shown and not compared), classes (of models).

A name of before that is missing after is an error, unless `LEFT` or `RENAMED` says where it went.
"""

import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RENAMED = {
    r"/asmi_(\w+)_d(\d)0/(\d+)": r"/asmi/\3/0.\2/\1",
    r"/cost_by_method\.csv": "/cost.csv",
}
"""Pattern of a name before -> its name after, as for `re.sub`; parts of a path are joined by /."""
LEFT: tuple[str, ...] = (
    r"tables/(audit|correctness_labels|label_noise|length|outcomes|outcome_counts|reliability)\.csv",
    r"/distinct_signal\.csv/\d+/(adds|p|p, Holm|z)$",
    r"^rows/(calibration/(reliability|calibration_error|error_steps|loading)|.*/offsets)",
    r"^rows/decided/\d+/error_(probability|interval)",
    r"/confident_fragile_by_regime\.csv/\d+/(p|z)$",
    r"tables/(rejection|case_study|depth_by_group|benchmark_auroc|benchmark_augrc)\.csv",
)
"""Patterns of names that left on purpose since the commit that the changelog names."""
VOLATILE = ("seconds", "settings", "digest", "revision", "warnings", "versions")
"""Parts of names whose values are no results."""
PROMPT = "The ferry Ondine was built in Brask in 1931. Who built it?"
RESPONSE = [40, 77, 131, 9, 200, 311]
DEPTHS = ([0.6], [0.3, 0.6, 0.9])


def plain(value: Any) -> Any:
    """Arrays as nested lists, names as texts."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def tiny_statistics(family: str) -> dict[str, Any]:
    from lm_polygraph_asmi.config import SCOPES
    from lm_polygraph_asmi.estimators import ASMI, AdaptASMI, SemASMI
    from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
    from tests.tiny_lm import whitebox

    model, result = whitebox(family), {}
    for scope in SCOPES:
        for depths in DEPTHS:
            calculator = MaskedHeadsCalculator(depths=depths, scope=scope, details=True)
            stats = calculator({"greedy_tokens": [RESPONSE]}, [PROMPT], model)
            diversity = {"asmi_diversity": [0.25], "asmi_diversity_second_last": [0.25]}
            estimators = [
                kind(depth=depth, scope=scope)
                for kind in (ASMI, SemASMI, AdaptASMI)
                for depth in depths
            ]
            result[f"{scope} {depths}"] = stats | {str(e): e(stats | diversity) for e in estimators}
    return result


def smollm2_statistics() -> dict[str, Any]:
    from lm_polygraph_asmi import Scorer
    from lm_polygraph_asmi.config import SCOPES

    result = {}
    for scope in SCOPES:
        scorer = Scorer("smollm2", scope=scope, stop="\n", max_new_tokens=12)
        for number, (prompt, _) in enumerate(demo_questions()[:10]):
            score = scorer.score(prompt, list(scorer.score(prompt).ids))
            tokens = [[t.u, t.mi, t.agreement, t.entropy, t.log_likelihood] for t in score.tokens]
            result[f"{scope} {number}"] = {"score": score.score, "msp": score.msp, "tokens": tokens}
    return result


def demo_questions() -> list[tuple[str, str]]:
    """Prompts of the demo with their gold answers."""
    from lm_polygraph_asmi.runs.squad import DEMO_DATA, prompt_of, read_squad

    questions = [q for q in read_squad(DEMO_DATA) if q.answer is not None]
    return [(prompt_of("demo", False)(q), str(q.answer)) for q in questions]


def statistics(out: Path) -> None:
    import torch

    from tests.families import CONFIGS

    torch.set_num_threads(1)
    content = {family: tiny_statistics(family) for family in CONFIGS}
    content["smollm2"] = smollm2_statistics()
    write(out / "statistics.json", content)


def demo(out: Path) -> None:
    run("polygraph_eval", "--config-name", "asmi_demo", f"hydra.run.dir={out / 'demo'}",
        "asmi.result_cache=null")  # fmt: skip
    (out / "demo.txt").write_text(run("polygraph_asmi", "results", out / "demo"))


def report(out: Path) -> None:
    run("python", "-m", "tests.report.sixteen", out / "report", 16, 500)


def rows(out: Path) -> None:
    """Each question with its gold answer, and with the next question's."""
    questions = demo_questions()[:50]
    answers = [answer for _, answer in questions]
    lines = [
        {"prompt": prompt, "answer": f" {answer}", "correct": right}
        for (prompt, gold), other in zip(questions, answers[1:] + answers[:1], strict=True)
        for answer, right in ((gold, True), (other, False))
    ]
    with tempfile.TemporaryDirectory() as folder:
        given, scored, calibration, decided = (
            Path(folder, name)
            for name in ("rows.jsonl", "scored.jsonl", "calibration.json", "decided.jsonl")
        )
        given.write_text("".join(json.dumps(line) + "\n" for line in lines))
        model = ("--model", "smollm2", "--scope", "response")
        run("polygraph_asmi", "score", given, *model, "--stop", r"\n", "--out", scored)
        run("polygraph_asmi", "calibrate", scored, "--risk", 0.4, "--signal", "sem",
            "--out", calibration)  # fmt: skip
        run("polygraph_asmi", "decide", given, "--calibration", calibration, "--out", decided)
        content = {
            file.stem: {str(n): json.loads(line) for n, line in enumerate(file.open())}
            for file in (scored, decided)
        }
        write(out / "rows.json", content | {"calibration": json.loads(calibration.read_text())})


def bench(out: Path) -> None:
    table = run("python", "scripts/bench_suffix.py", "--repeats", 3, "--num-masks", 20)
    (out / "bench.txt").write_text(table)


def classes(out: Path) -> None:
    run("python", "scripts/model_table.py", "--out", out / "classes.csv")


PARTS: dict[str, Callable[[Path], None]] = {
    part.__name__: part for part in (statistics, demo, report, rows, bench, classes)
}


def run(command: str, *arguments: Any) -> str:
    """What a command of this environment, of this checkout's code, prints."""
    paths = (ROOT, ROOT / "lm_polygraph_asmi" / "_hydra" / "plugin")
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    program = Path(sys.executable).parent / command
    return subprocess.run(
        [program, *map(str, arguments)], cwd=ROOT, env=environment, text=True, check=True,
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(plain(content)))


def flat(content: Any, path: str = "") -> dict[str, Any]:
    """Values by the names that lead to them."""
    if not isinstance(content, dict | list):
        return {path: content}
    items = content.items() if isinstance(content, dict) else enumerate(content)
    return {
        k: v
        for name, item in items
        if name != "model" and not any(word in str(name) for word in VOLATILE)  # it may be a path
        for k, v in flat(item, f"{path}/{name}").items()
    }


def values(folder: Path) -> dict[str, Any]:
    """Everything that is compared, by name."""
    result = {}
    for file in sorted(folder.glob("*.json")):
        result |= flat(json.loads(file.read_text()), file.stem)
    if (table := folder / "demo.txt").exists():
        result |= flat(table.read_text().splitlines(), table.stem)
    tables = folder / "report" / "report"
    for file in (*sorted(folder.glob("*.csv")), *sorted(tables.rglob("*.csv"))):
        with file.open(newline="") as lines:
            result |= flat(list(csv.DictReader(lines)), file.relative_to(folder).as_posix())
    return result


def same(before: Any, after: Any, tolerance: float) -> bool:
    """Whether two values are equal; numbers, also those written as texts, within the tolerance."""
    if str(before) == str(after):  # NaN, too
        return True
    try:
        return math.isclose(float(before), float(after), rel_tol=tolerance, abs_tol=tolerance)
    except (TypeError, ValueError):
        return False


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("out", type=click.Path(path_type=Path, resolve_path=True))
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--commit", help="Make it of this commit; it must have this script's parts.")
def make(out: Path, parts: tuple[str, ...], commit: str | None) -> None:
    """Write the parts (default: all) into the folder OUT."""
    out.mkdir(parents=True, exist_ok=True)
    if commit is None:
        for part in parts or PARTS:
            click.echo(part)
            PARTS[part](out)
        return
    git = ("git", "-C", str(ROOT), "worktree")
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        subprocess.run([*git, "add", "--detach", checkout, commit], check=True)
        try:
            script = checkout / "scripts" / "golden.py"
            subprocess.run([sys.executable, script, "make", out, *parts], check=True)
        finally:
            subprocess.run([*git, "remove", "--force", checkout], check=True)


@main.command()
@click.argument("before", type=click.Path(exists=True, path_type=Path))
@click.argument("after", type=click.Path(exists=True, path_type=Path))
@click.option("--tolerance", default=0.0, help="Largest relative or absolute difference.")
def compare(before: Path, after: Path, tolerance: float) -> None:
    """Compare two folders; exit status 1 if a value differs or is missing."""
    old, new = values(before), values(after)
    for pattern, name in RENAMED.items():
        old = {re.sub(pattern, name, key): value for key, value in old.items()}
    left = [key for key in old if any(re.search(pattern, key) for pattern in LEFT)]
    missing = old.keys() - new.keys() - set(left)
    differ = [k for k, v in old.items() if k in new and not same(v, new[k], tolerance)]
    for title, names in (
        ("same", [k for k in old if k in new and k not in set(differ)]),
        ("only after", new.keys() - old.keys()),
        ("left", left),
        ("missing", missing),
        ("differ", differ),
    ):
        click.echo(f"{title}: {len(names)}")
        for name in sorted(names)[:20] if title not in ("same", "left") else ():
            click.echo(f"  {name}: {old.get(name)} -> {new.get(name)}")
    for folder in (before, after):
        if (folder / "bench.txt").exists():
            click.echo(f"{folder}\n{(folder / 'bench.txt').read_text()}")
    raise SystemExit(bool(missing or differ))


if __name__ == "__main__":
    main()
