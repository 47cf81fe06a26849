"""Test the risk guarantee of a threshold on other questions of a SQuAD-format file.

    python scripts/try_guarantee.py ask xquad.en.json ask.jsonl --passages 82 --seed 1
    polygraph_asmi score --model MODEL --stop '\\n' --max-new-tokens 20 ask.jsonl --out answers.jsonl
    python scripts/try_guarantee.py correctness answers.jsonl labelled.jsonl --first 400
    polygraph_asmi calibrate labelled.jsonl --model MODEL --stop '\\n' --risk 0.2 --out calibration.json
    python scripts/try_guarantee.py ask xquad.en.json others.jsonl --skip 82 --passages 25 --seed 1
    polygraph_asmi decide --model MODEL --max-new-tokens 20 others.jsonl --calibration calibration.json --out decided.jsonl
    python scripts/try_guarantee.py check decided.jsonl

Answers of a finished benchmark run, or of its shards, can replace the first two commands; they are
split by passage:

    python scripts/try_guarantee.py take RUN ... answers.jsonl
    python scripts/try_guarantee.py label answers.jsonl labelled.jsonl held_out.jsonl --labelled 400

Without any scoring: the run is split by passage, and decisions use its saved scores.

    python scripts/try_guarantee.py part RUN labelled_run held_out_run --labelled 400
    polygraph_asmi calibrate --run labelled_run --metric ReferenceInAnswer --model MODEL ... --out calibration.json
    python scripts/try_guarantee.py decide held_out_run calibration.json decided.jsonl
    python scripts/try_guarantee.py check decided.jsonl

An answer is correct if it contains a gold answer. Held-out and labelled questions have different
passages.
"""  # noqa: E501

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy.stats import binomtest

from lm_polygraph_asmi.calibration.calibration import Calibration
from lm_polygraph_asmi.calibration.run import content_of, scored_group, settings_of, signals_of
from lm_polygraph_asmi.results.manifest import read_manifest, write_manifest
from lm_polygraph_asmi.results.runs import RIGHT, load_run, manager_files
from lm_polygraph_asmi.runs.squad import PROMPTS, Question

IN = click.Path(exists=True, dir_okay=False, path_type=Path)
OUT = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group(help=__doc__)
def main() -> None:
    pass


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    click.echo(f"{len(rows)} rows in {path}")


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options for sampling passages."""
    for option in (
        click.option("--seed", default=0, show_default=True, help="Seed for sampling passages."),
        click.option(
            "--per-passage", default=2, show_default=True, help="Labelled answers per passage."
        ),
        click.option(
            "--labelled", "size", default=400, show_default=True, help="Answers to label."
        ),
    ):
        command = option(command)
    return command


def _split(
    passages: Sequence[Any], size: int, per_passage: int, seed: int
) -> tuple[list[int], list[int]]:
    """Rows to calibrate on, and all rows of other passages."""
    distinct = sorted(set(passages))
    calibration: list[int] = []
    used = set()
    for index in np.random.default_rng(seed).permutation(len(distinct)):
        if len(calibration) >= size:
            break
        used.add(distinct[index])
        rows = [row for row, passage in enumerate(passages) if passage == distinct[index]]
        calibration += rows[:per_passage]
    return calibration[:size], [row for row, passage in enumerate(passages) if passage not in used]


@main.command()
@click.argument("source", type=IN)
@click.argument("out", type=OUT)
@click.option("--style", type=click.Choice(["paper", "demo"]), default="demo", show_default=True)
@click.option("--passages", default=None, type=int, help="Passages to sample; default: all.")
@click.option("--skip", default=0, show_default=True, help="Leave out this many sampled passages.")
@click.option("--seed", default=0, show_default=True, help="Seed for sampling.")
def ask(source: Path, out: Path, style: str, passages: int | None, skip: int, seed: int) -> None:
    """Prompts of the questions of SOURCE, with gold answers and the passage's index."""
    paragraphs = [p for a in json.loads(source.read_text("utf-8"))["data"] for p in a["paragraphs"]]
    order = np.random.default_rng(seed).permutation(len(paragraphs))[skip:]
    selected = set(order[:passages])
    rows = []
    for number, paragraph in enumerate(paragraphs):
        if number not in selected:
            continue
        for qa in paragraph["qas"]:
            gold = [answer["text"] for answer in qa["answers"]]
            question = Question(qa["id"], paragraph["context"], qa["question"], gold[0])
            prompt = PROMPTS[style, False](question)
            rows.append({"prompt": prompt, "id": qa["id"], "cluster": number, "gold": gold})
    _write(out, rows)


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=OUT)
@click.option("--metric", default="ReferenceInAnswer", show_default=True, help="Right from 0.5 on.")
def take(runs: tuple[Path, ...], out: Path, metric: str) -> None:
    """Labelled answers of finished RUNS, in the format of `score`."""
    rows = []
    for run in map(load_run, runs):
        config, columns = run.recorded("config"), run.recorded("rows")
        if metric not in run.quality or not columns:
            raise click.ClickException(f"{run.path} lacks {metric}, or a manifest with its rows")
        stops = (config.get("generation_params") or {}).get("stop_strings") or []
        for prompt, text, row_id, cluster, quality in zip(
            run.stats["input_texts"], run.stats["greedy_texts"], columns["ids"],
            columns["clusters"], run.quality[metric], strict=True,
        ):  # fmt: skip
            row_prompt = [{"role": "user", "content": prompt}] if config.get("instruct") else prompt
            row = {"prompt": row_prompt, "answer": _without_stop(text, stops), "id": row_id}
            rows.append(row | {"cluster": cluster, "correct": bool(quality >= RIGHT)})
    _write(out, rows)


def _without_stop(text: str, stops: Sequence[str]) -> str:
    """A generated answer without its stop string; unchanged if it is only the stop string."""
    for stop in stops:
        if text.endswith(stop) and not text.endswith(2 * stop):  # two stop strings may be one token
            return text.removesuffix(stop) or text
    return text


@main.command()
@click.argument("answers", type=IN)
@click.argument("labelled", type=OUT)
@click.option("--first", default=None, type=int, help="Number of answers; default: all.")
def correctness(answers: Path, labelled: Path, first: int | None) -> None:
    """Add correctness labels to scored answers."""
    _write(labelled, [row | {"correct": _is_right(row)} for row in _rows(answers)[:first]])


@main.command()
@click.argument("answers", type=IN)
@click.argument("labelled", type=OUT)
@click.argument("held_out", type=OUT)
@sampling_options
def label(
    answers: Path, labelled: Path, held_out: Path, size: int, per_passage: int, seed: int
) -> None:
    """Label answers: some to calibrate on, those of other passages held out."""
    rows = [
        {name: row[name] for name in ("prompt", "answer", "id", "cluster")}
        | {"correct": _is_right(row)}
        for row in _rows(answers)
        if row["answer"]
    ]
    calibration, others = _split([row["cluster"] for row in rows], size, per_passage, seed)
    _write(labelled, [rows[row] for row in calibration])
    _write(held_out, [rows[row] for row in others])


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("labelled", type=FOLDER)
@click.argument("held_out", type=FOLDER)
@sampling_options
def part(run: Path, labelled: Path, held_out: Path, size: int, per_passage: int, seed: int) -> None:
    """Split a finished RUN in the same way into two runs."""
    import torch

    (file,) = manager_files(run)
    content, manifest = torch.load(file, weights_only=False), read_manifest(file)
    calibration, others = _split(manifest["rows"]["clusters"], size, per_passage, seed)
    total = len(manifest["rows"]["ids"])
    for folder, rows in ((labelled, calibration), (held_out, others)):

        def kept(columns: Mapping[Any, Any], rows: Sequence[int] = rows) -> dict[Any, Any]:
            return {name: [values[row] for row in rows] for name, values in columns.items()
                    if len(values) == total}  # fmt: skip

        folder.mkdir(parents=True)
        parts = {name: kept(content[name]) for name in ("estimations", "gen_metrics", "stats")}
        torch.save(content | parts | {"metrics": {}}, folder / file.name)
        write_manifest(manifest | {"rows": kept(manifest["rows"])}, folder / file.name)
        click.echo(f"{len(rows)} rows in {folder}")


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("calibration", type=IN)
@click.argument("out", type=OUT)
@click.option("--metric", default="ReferenceInAnswer", show_default=True, help="Right from 0.5 on.")
def decide(run: Path, calibration: Path, out: Path, metric: str) -> None:
    """Decisions of CALIBRATION on the saved scores of a finished RUN."""
    saved = Calibration.load(calibration)
    chosen = {n: saved.settings[n] for n in ("method", "depth", "aggregation")}
    group, method = scored_group(run, metric, **chosen)
    described = settings_of(group, method) | {"model": str(group.run.recorded("model")["path"])}
    if differences := saved.other_circumstances(described):
        raise click.ClickException("; ".join(differences))
    values, limit = signals_of(group)[saved.signal], saved.guarantee.threshold
    stops = list(saved.config.stop or ())
    rows = []
    for row, row_id in enumerate(group.ids or range(len(group))):
        accept = None if limit is None else bool(values[row] <= limit)
        decision = {"accept": accept, "reason": str(saved.guarantee)}
        if not content_of((group.saved("greedy_texts") or [])[row], stops).strip():
            decision = {"accept": None, "reason": "It answered nothing."}
        rows.append({"id": row_id, "correct": bool(not group.wrong[row])} | decision)
    _write(out, rows)


def _is_right(row: Mapping[str, Any]) -> bool:
    if "correct" in row:
        return bool(row["correct"])
    from lm_polygraph_asmi.host.quality import reference_in_answer  # imports torch

    return any(reference_in_answer(row["answer"], gold) for gold in row["gold"])


@main.command()
@click.argument("decided", type=IN)
def check(decided: Path) -> None:
    """Errors among accepted answers of DECIDED, and among those abstained from."""
    rows = [row | {"correct": _is_right(row)} for row in _rows(decided)]
    for accept, name in ((True, "accepted"), (False, "abstained"), (None, "without a decision")):
        group = [row for row in rows if row["accept"] is accept]
        if group:
            wrong = sum(not row["correct"] for row in group)
            low, high = binomtest(wrong, len(group)).proportion_ci()  # Clopper-Pearson
            click.echo(
                f"{name}: {len(group)} of {len(rows)}, {wrong} wrong: {wrong / len(group):.3f} "
                f"[{low:.3f}, {high:.3f}]"
            )
    for reason in sorted({row["reason"] for row in rows if row["accept"] is None}):
        click.echo(reason)


if __name__ == "__main__":
    main()
