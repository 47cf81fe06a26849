"""Tables of the results: made of small files by one command, and held to them."""

import csv
import json
import re
import subprocess
import sys

import controls as evidence_controls
import evidence as evidence_runs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tables as evidence_tables
from click.testing import CliRunner
from lm_polygraph.utils.common import load_external_module
from PIL import Image

from lm_polygraph_asmi.analysis import (
    Labelled,
    adds_information,
    adds_over_settings,
    auroc,
    normalised_prr,
)
from tests.test_scripts import SCRIPTS

REPOSITORY = SCRIPTS.parent
HERE = SCRIPTS / "evidence"

N = 80
RESAMPLES = 20


@pytest.fixture(scope="module")
def pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence_tables, "RESAMPLES", RESAMPLES)
        patch.setattr(evidence_controls, "RESAMPLES", 10 * RESAMPLES)
        yield load_external_module(str(HERE / "pages.py"))


def answers(
    seed: int, run: str = "sources", correctness: str = "quality Rouge_rougeL"
) -> pd.DataFrame:
    """Answers whose MI knows of errors, with the columns that scripts/evidence/keep.py keeps."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(N) < 0.4
    lengths = rng.integers(1, 9, N)
    columns = {
        "id": [f"q{i}" for i in range(N)],
        "cluster": [f"passage {i // 2}" for i in range(N)],
        "ReferenceInAnswer": (~wrong).astype(float),
        correctness: np.clip(0.8 - 0.6 * wrong + rng.normal(0, 0.2, N), 0, 1),
        "words": np.where(rng.random(N) < 0.1, 0, lengths),
        "asmi_log_likelihood": [-rng.exponential(0.5, t) for t in lengths],
        "asmi_entropy": [rng.exponential(0.5, t) for t in lengths],
    }
    depths = (60, 70, 80, 90) if run == "depths" else (60,)
    for ending in (f"_d{depth}" for depth in depths):
        pairs = [*zip(lengths, wrong, strict=True)]
        columns[f"asmi_mi{ending}"] = [rng.exponential(0.02 + 0.02 * w, t) for t, w in pairs]
        columns[f"asmi_agreement{ending}"] = [rng.random(t) for t in lengths]
    if run in ("sources", "benchmark", "baselines"):
        surprisals = [-own for own in columns["asmi_log_likelihood"]]
        columns["score MaximumSequenceProbability"] = [own.sum() for own in surprisals]
        columns["score Perplexity"] = [own.mean() for own in surprisals]
        columns["score MeanTokenEntropy"] = [own.mean() for own in columns["asmi_entropy"]]
    if run == "baselines":
        columns["score RAUQ (0.2)"] = rng.random(N)
    return pd.DataFrame(columns)


def put(folder, model, setting, run, asked=N, seed=0, **settings):
    file = folder / "evidence" / model / f"{setting}.{run}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pandas(answers(seed, run, **settings), preserve_index=False)
    about = {"data": {"limit": asked}}
    pq.write_table(table.replace_schema_metadata({"run": json.dumps(about)}), file)
    return file


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    """Evidence of every kind: three models, settings of two commands, runs with other settings."""
    folder = tmp_path_factory.mktemp("docs")
    put(folder, "smollm2", "xquad-few-shot", "sources", asked=100)
    put(folder, "smollm2", "xquad-few-shot", "depths")
    put(folder, "smollm2", "xquad-few-shot", "baselines", seed=3)
    put(folder, "qwen05", "xquad", "sources", seed=1)
    put(folder, "llama2_7b", "coqa", "benchmark", seed=2, correctness="quality AlignScore")
    return folder


@pytest.fixture(scope="module")
def start(pages):
    """The command over some documentation."""

    def started(docs, *arguments):
        pages.DOCS = docs
        return CliRunner().invoke(pages.main, list(arguments))

    return started


@pytest.fixture(scope="module")
def published(pages, docs):
    """Every table, made of other evidence."""
    return pages.all_tables(evidence_runs.load(docs / "evidence"))


def rows_of(tables, name: str) -> list[list[str]]:
    return tables[name].rows


def written(docs, name: str) -> list[dict[str, str]]:
    with (docs / f"evidence/tables/{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float:
    return float(text.split()[0].replace("−", "-"))


def test_every_table_is_a_file_of_plain_numbers(start, published, docs):
    """One number a setting: an interval is three columns, a pair of numbers two."""
    assert start(docs).exit_code == 0
    folder = docs / "evidence/tables"
    named = {name.replace(" ", "-") for name, table in published.items() if table.rows}
    assert {file.stem for file in folder.glob("*.csv")} == named
    plain = re.compile(r"-?[0-9.]+(e[+-][0-9]+)?|<0\.001|")
    for row, texts in zip(
        written(docs, "signals-contains"), rows_of(published, "signals contains"), strict=True
    ):
        assert row.pop("setting") == texts[0]
        assert all(plain.fullmatch(value) for value in row.values()), row
    first, texts = written(docs, "signals-contains")[0], rows_of(published, "signals contains")[0]
    assert [first[name] for name in ("answers", "planned answers", "clusters")] == [
        "80",
        "100",
        "40",
    ]
    ends = [first[f"PRR of Sem-ASMI{end}"] for end in ("", ", low", ", high")]
    shown = re.findall(r"[+−][0-9.]+", texts[6])
    assert [float(end) for end in ends] == [number(own) for own in shown]
    z, p = (first[f"gain beyond free baselines, Sem-ASMI, {one}"] for one in "zp")
    assert float(z) == number(texts[-2])
    assert p == texts[-2].split("(")[1].strip(")").replace(".", "0.", 1).replace("< ", "<")
    halves = written(docs, "quadrants-contains")[0]
    shown = rows_of(published, "quadrants contains")[0][2]
    names = [f"wrong if confident and robust{end}" for end in (" (%)", ", answers")]
    assert "{}% of {}".format(*(halves[name] for name in names)) == shown


def test_shapes_of_cells():
    made = evidence_runs.table(
        ["answers / clusters", "median, correct / wrong", "z", "n", "p", "share", "note"],
        [
            ["1 of 2 / 3", "1.2e−03 / 2", "−2.3 to +1.4", "1,022", "< .001", "7 %", "too few"],
            ["4 / 5", "", "−1.0 to −.5", "", ".069", "", "a / b, +1"],
        ],
    )
    assert made.csv().splitlines() == [
        'answers,planned answers,clusters,"median, correct","median, wrong","z, lowest",'
        '"z, highest",n,p,share (%),note',
        "1,2,3,1.2e-03,2,-2.3,1.4,1022,<0.001,7,too few",
        '4,,5,,,-1.0,-0.5,,0.069,,"a / b, +1"',
    ]


def test_tables_are_held_to_their_evidence(start, tmp_path):
    """Fails if a number was typed by hand, or if evidence was added later."""
    put(tmp_path, "qwen05", "xquad", "sources")
    assert start(tmp_path, "--check").exit_code == 1
    assert not list(tmp_path.glob("evidence/tables/*"))
    assert start(tmp_path).output.endswith("forest.png, made-from.json\n")
    for how in ((), ("--quick",)):
        done = start(tmp_path, "--check", *how)
        assert (done.exit_code, done.output) == (0, "out of date: nothing\n")
    table = tmp_path / "evidence/tables/signals-contains.csv"
    good = table.read_text()
    typed = good.replace(",0.", ",1.", 1)
    assert typed != good
    table.write_text(typed)
    wrong = start(tmp_path, "--check")
    assert (wrong.exit_code, wrong.output) == (1, "out of date: signals-contains.csv\n")
    assert start(tmp_path).output == "written: signals-contains.csv\n"
    assert table.read_text() == good
    left = table.with_name("left-over.csv")
    left.write_text("")
    table.with_name("fresh-means.csv").write_text("")  # another script's
    table.with_name("source-contains.csv").write_text("")  # of a script that has left
    assert start(tmp_path).output == "written: left-over.csv\n"
    put(tmp_path, "gemma", "xquad", "sources", seed=5)
    late = start(tmp_path, "--check")
    assert late.exit_code == 1
    assert {"signals-contains.csv", "forest.png", "made-from.json"} <= set(
        late.output.split(": ")[1].strip().split(", ")
    )
    late = start(tmp_path, "--check", "--quick")
    assert (late.exit_code, late.output) == (1, "out of date: tables\n")


def test_numbers_are_those_of_the_statistics(published, docs):
    """Each table's first row against a call of one's own."""
    text = published
    one = pd.read_parquet(docs / "evidence/smollm2/xquad-few-shot.sources.parquet")
    wrong = one["ReferenceInAnswer"].to_numpy() < 0.5
    mi, agreement = one["asmi_mi_d60"], one["asmi_agreement_d60"]
    u = [m * (1 - a) for m, a in zip(mi, agreement, strict=True)]
    sem, total = (np.array([how(own) for own in u]) for how in (np.mean, np.sum))
    lengths = one["asmi_entropy"].map(len)
    free = np.column_stack(
        [one["score MaximumSequenceProbability"], one["score MeanTokenEntropy"], lengths]
    )
    worth = rows_of(text, "signals contains")
    assert text["signals contains"].columns[:4] == [
        "setting",
        "answers / clusters",
        "correct",
        "PRR of MSP",
    ]
    assert [row[0] for row in worth] == [
        "SmolLM2 0.13B, XQuAD, few-shot (4-shot)",
        "Qwen2.5-Coder 0.5B, XQuAD, zero-shot",
        "Llama-2-7B, CoQA",
    ]
    first = worth[0]
    assert first[1:3] == ["80 of 100 / 40", f"{1 - wrong.mean():.0%}"]
    quality = 1.0 - wrong
    for place, score in ((6, sem), (7, total)):
        assert number(first[place]) == pytest.approx(normalised_prr(score, quality), abs=0.0051)
    msp = normalised_prr(one["score MaximumSequenceProbability"], quality)
    assert number(first[8]) == pytest.approx(normalised_prr(sem, quality) - msp, abs=0.0051)
    added = adds_information(sem, free, Labelled(wrong, list(one["cluster"])))
    assert number(first[-2]) == pytest.approx(added.statistic, abs=0.051)
    assert rows_of(text, "signals rouge")[0][0] == first[0]  # the paper's setting has no ROUGE-L
    assert len(rows_of(text, "signals rouge")) == 2
    aggregated = rows_of(text, "aggregation contains")
    assert [row[1] for row in aggregated[:4]] == ["ASMI", "Sem-ASMI", "surprisal", "entropy"]
    aggregations = [np.mean, np.sum, np.max, lambda own: own[0]]
    for row, tokens in ((aggregated[0], mi), (aggregated[2], -one["asmi_log_likelihood"])):
        expected = [normalised_prr([how(own) for own in tokens], quality) for how in aggregations]
        assert [number(text) for text in row[2:6]] == pytest.approx(expected, abs=0.0051)
    asmi = np.array([own.mean() for own in mi])
    coupled = rows_of(text, "coupling contains")[0]
    assert number(coupled[5]) == pytest.approx(auroc(asmi, wrong), abs=0.0051)
    assert number(coupled[4]) > number(coupled[3])  # as it was planted
    halves = rows_of(text, "quadrants contains")[0]
    assert sum(int(text.split()[-1]) for text in halves[2:6]) == N
    within = rows_of(text, "strata contains")
    own = [row for row in within if row[0] == first[0]]
    assert sum(int(row[2]) for row in own if "tokens" in row[1]) == N
    assert int(own[-1][2]) == (one["words"] == 0).sum()
    tested = [row for row in rows_of(text, "correctness labels") if row[0] == first[0]]
    assert [row[2] for row in tested] == ["0.3", "0.3", "0.4", "0.5", "0.6", "0.7"]
    swept = rows_of(text, "settings contains")
    assert {row[0] for row in swept} == {first[0]}  # the others have no other settings
    assert [row[2] for row in swept] == ["60 %", "60 %", "70 %", "80 %", "90 %"]
    deep, whole = answers(0, "depths"), answers(0)
    deepest, usual = (
        [mi @ (1 - agreement) / len(mi) for mi, agreement in zip(*columns, strict=True)]
        for columns in (
            (deep["asmi_mi_d90"], deep["asmi_agreement_d90"]),
            (whole["asmi_mi_d60"], whole["asmi_agreement_d60"]),
        )
    )
    prr = [normalised_prr(scores, one["ReferenceInAnswer"]) for scores in (deepest, usual)]
    assert number(swept[4][5]) == pytest.approx(prr[0], abs=0.0051)
    assert number(swept[4][8]) == pytest.approx(prr[0] - prr[1], abs=0.0051)
    added = adds_information(deepest, free, Labelled(wrong, list(one["cluster"])))
    assert number(swept[4][10]) == pytest.approx(added.statistic, abs=0.051)
    assert swept[0][8:10] == ["", ""]
    methods = {row[2] for row in rows_of(text, "baselines contains") if row[0] == first[0]}
    assert {"RAUQ (0.2)", "MaximumSequenceProbability"} <= methods


def test_settings_together_are_those_of_the_statistics(published, docs):
    found = []
    for setting in (
        "smollm2/xquad-few-shot.sources",
        "qwen05/xquad.sources",
        "llama2_7b/coqa.benchmark",
    ):
        one = pd.read_parquet(docs / f"evidence/{setting}.parquet")
        pairs = zip(one["asmi_mi_d60"], one["asmi_agreement_d60"], strict=True)
        free = [one["score MaximumSequenceProbability"], one["score MeanTokenEntropy"]]
        free.append(one["asmi_entropy"].map(len))
        wrong = one["ReferenceInAnswer"].to_numpy() < 0.5
        sem = [np.mean(mi * (1 - agreement)) for mi, agreement in pairs]
        found.append(
            adds_information(sem, np.column_stack(free), Labelled(wrong, list(one["cluster"])))
        )
    whole, z = adds_over_settings(found), [one.statistic for one in found]
    rows = {row[0]: row for row in rows_of(published, "together contains")}
    row, alone = rows["Sem-ASMI"], rows["Sem-ASMI, XQuAD only"]
    assert row[1:3] == ["3", "240 / 40"]
    assert [number(own) for own in row[3].split(" to ")] == pytest.approx(
        [min(z), max(z)], abs=0.051
    )
    assert row[4] == str(sum(own < 0 for own in z))
    assert number(row[5]) == pytest.approx(whole.statistic, abs=0.051)
    assert alone[1:3] == ["2", "160 / 40"]
    assert number(alone[5]) == pytest.approx(adds_over_settings(found[:2]).statistic, abs=0.051)
    others = ["without empty answers", "sum", "first token"]  # no other depths were planned
    names = ["ASMI", "Sem-ASMI", *(f"Sem-ASMI, {one}" for one in ["XQuAD only", *others])]
    assert [row[0] for row in rows_of(published, "together rouge")] == names


def test_the_figure_says_what_it_was_drawn_from(start, published, docs):
    assert start(docs).exit_code == 0
    drawn = Image.open(docs / "evidence/forest.png")
    assert drawn.info["Description"] == published["glance contains"].csv()


def test_no_setting_is_read_before_it_is_complete(start, tmp_path):
    """Shards are not read, whatever they hold."""
    shard = tmp_path / "evidence/smollm2/shards/xquad/sources/0.parquet"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"not read")
    start(tmp_path)
    assert not list(tmp_path.glob("evidence/tables/*.csv"))
    (tmp_path / "evidence/smollm2/opne.sources.parquet").write_bytes(b"")
    assert "unknown model, setting or run" in start(tmp_path).output


def put_conditions(folder, conditions, rows=slice(None, None, 2)):
    """Runs of some of a setting's answers, in another order, whose scores are the given ones."""
    own = pd.read_parquet(put(folder, "smollm2", "babi", "sources"))
    for run, tokens in conditions.items():
        again = own.iloc[rows][::-1].copy()
        again["asmi_mi_d60"] = [
            np.full(len(mi), value)
            for mi, value in zip(again["asmi_mi_d60"], tokens(again), strict=True)
        ]
        again["asmi_agreement_d60"] = [np.zeros(len(mi)) for mi in again["asmi_mi_d60"]]
        again.to_parquet(folder / f"evidence/smollm2/babi.{run}.parquet")
    return own


def wrong_first(answers):
    return 1 - answers["ReferenceInAnswer"]


def test_heads_against_conditions(pages, tmp_path):
    """An condition that knows every error reproduces what heads know, and the twin says by how
    much."""
    mi = {"mlp": wrong_first, "foreign": lambda a: 1 - wrong_first(a)}
    own = put_conditions(tmp_path, mi)
    text = pages.all_tables(evidence_runs.load(tmp_path / "evidence"))
    half = own.iloc[::2]
    heads = [np.mean(m) for m in half["asmi_mi_d60"]]
    value = normalised_prr(heads, half["ReferenceInAnswer"])
    raw, sem = rows_of(text, "conditions contains")
    assert (raw[1], sem[1]) == ("ASMI", "Sem-ASMI")
    assert [number(raw[place]) for place in (2, 6)] == pytest.approx([value, 1], abs=0.0051)
    assert number(raw[4]) < -0.5  # negative PRR
    assert raw[3] == raw[5] == raw[7] == ""  # not run
    (said,) = rows_of(text, "controls raw contains")
    assert said[1:3] == ["40 / 40", str(int(wrong_first(half).sum()))]
    assert number(said[3]) == pytest.approx(value, abs=0.0051)
    assert number(said[7]) == pytest.approx(value - 1, abs=0.0051)
    assert said[9] == "reproduced (mlp)"
    assert said[10] == ""  # of "special" nothing is known: pseudo_heads was not run


def test_conditions_are_of_the_same_answers(start, tmp_path):
    put_conditions(tmp_path, {"mlp": wrong_first})
    put(tmp_path, "smollm2", "babi", "foreign", seed=7)
    assert "foreign.parquet holds other answers" in start(tmp_path).output
    put_conditions(tmp_path, {"foreign": wrong_first}, rows=slice(40))
    assert "conditions have different answers: foreign, mlp" in start(tmp_path).output


def test_no_complete_setting_is_no_table():
    assert not any(make([]).rows for make in evidence_tables.TABLES.values())


def test_committed_tables_are_those_of_the_committed_evidence(request):
    """Measurements and their tables go into one commit; --slow checks every number."""
    script = HERE / "pages.py"
    if request.config.getoption("--slow"):
        done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    quick = CliRunner().invoke(load_external_module(str(script)).main, ["--check", "--quick"])
    assert quick.exit_code == 0, quick.output


def test_other_depths_are_of_the_same_answers():
    """Joined with the same answers at 60 %, in another order, without those looked at before."""
    usual, looked_at = answers(0), answers(0, "depths")[:29]
    deeper = answers(0, "depths")[::-1].reset_index(drop=True)
    deeper = deeper.drop(columns=["asmi_mi_d60", "asmi_agreement_d60"])
    runs = {"sources": usual, "depths": looked_at, "deeper": deeper}
    settings = [
        evidence_runs.Evidence("smollm2", "babi", run, kept, N) for run, kept in runs.items()
    ]
    (joined,) = evidence_tables.deeper_runs(settings)
    assert list(joined.answers["id"]) == list(deeper["id"])[: N - 29]
    for depth, kept in ((60, usual), (90, deeper)):
        chosen = kept.set_index("id").loc[joined.answers["id"]]
        expected = [mi.mean() for mi in chosen[f"asmi_mi_d{depth}"]]
        assert list(joined.score("ASMI", depth=depth)) == pytest.approx(expected)
    shown = {row[0]: row for row in evidence_tables.pooled_table(settings, "contains").rows}
    wrong = joined.answers["ReferenceInAnswer"].to_numpy() < 0.5
    answers_at_90 = joined.score("Sem-ASMI", depth=90), joined.free_baselines
    added = adds_information(*answers_at_90, Labelled(wrong, joined.clusters))
    assert number(shown["Sem-ASMI at 90 %"][5]) == pytest.approx(added.statistic, abs=0.051)
    with pytest.raises(ValueError, match=r"sources\.parquet is missing"):
        evidence_tables.deeper_runs(settings[1:])
    usual["asmi_log_likelihood"] += 1
    with pytest.raises(ValueError, match=r"deeper\.parquet holds other answers"):
        evidence_tables.deeper_runs(settings)


def test_scores_with_the_passage_and_without():
    """Question by question; and nothing is ranked where hardly any answer is right."""
    with_it, without = answers(0), answers(5)[10:].reset_index(drop=True)
    own = evidence_runs.Evidence("smollm2", "xquad-few-shot", "sources", with_it)
    shut = evidence_runs.Evidence("smollm2", "closed-book-few-shot", "sources", without)
    column = "score MaximumSequenceProbability"
    rises = np.mean(without[column].to_numpy() > with_it[column].to_numpy()[10:])
    text = evidence_tables.closed_table([own, shut])
    row = text.rows[0]
    assert row[2] == f"{without['ReferenceInAnswer'].mean():.0%}"
    assert row[6] == str(N - 10)
    assert float(row[7].split()[0]) == pytest.approx(rises, abs=0.0051)
    assert evidence_runs.labelled([own, shut], "rouge") == [own, shut]
    low = without.assign(**{"quality Rouge_rougeL": np.arange(N - 10) < 9})
    few = evidence_runs.Evidence("smollm2", "closed-book-few-shot", "sources", low)
    assert evidence_runs.labelled([own, few], "rouge") == [own]
    assert evidence_tables.closed_table([own, few]).rows[0].count("too few correct") == 2
