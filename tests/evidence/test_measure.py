"""measure.sh: what it would run, and that what it runs gives the tables of the pages."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import nltk
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from lm_polygraph.utils.common import load_external_module
from omegaconf import OmegaConf

from lm_polygraph_asmi.experiments.analysis import permutation_null
from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.results.runs import load_run
from tests import tiny_lm
from tests.benchmarks import STORIES, hub_dataset
from tests.polygraph import polygraph_eval_here
from tests.report import runs as saved_runs
from tests.runs.test_squad import QUESTION, write
from tests.stand_ins import make_stand_ins
from tests.test_scripts import BABI, SCRIPTS, run_here

SCRIPT = SCRIPTS / "evidence/measure.sh"
NOTED = '#!/bin/bash\nprintf "%s\\0" {name} "$@" >> "$NOTED"; printf "\\n\\0" >> "$NOTED"\n'
"""In the place of a program: how it was called."""
CHAT = "{% for m in messages %}Q: {{ m.content }}{% endfor %} A:"
"""Of a tiny model: who speaks, and nothing else."""


def test_the_first_sentence_of_an_answer():
    first_sentence = load_external_module(str(SCRIPTS / "evidence/keep.py")).first_sentence
    for tokens, sentence, reach in (
        ([" Mr.", " Ash", " did", ".", "\n"], " Mr. Ash did.\n", 5),
        ([" He did", ".", " The", " text", " says"], " He did.", 2),
        ([" He did", ". The", " text"], " He did.", 2),  # a token of both reaches into it
        (["\n"], "\n", 1),
    ):
        assert first_sentence("".join(tokens), tokens) == (sentence, reach)


@pytest.fixture
def noted(tmp_path) -> Callable[..., list[list[str]]]:
    """The commands of a start of the script, none of them run."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("polygraph_eval", "python"):
        (programs / name).write_text(NOTED.format(name=name))
        (programs / name).chmod(0o755)

    def start(*arguments: str, check: bool = True, **environment: str) -> list[list[str]]:
        log = tmp_path / "noted"
        log.write_text("")
        path = f"{programs}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False,
            env=os.environ | {"NOTED": str(log), "PATH": path} | environment,
        )  # fmt: skip
        if check:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode, done.stdout
            return [[done.stderr]]
        calls = log.read_text().split("\n\0")[:-1]
        return [call.split("\0")[:-1] for call in calls]

    return start


def replayed(calls: list[list[str]], *more: str) -> None:
    """The same commands in this process."""
    for program, *arguments in calls:
        if program == "polygraph_eval":
            polygraph_eval_here(*arguments, *more)
        else:
            run_here(os.path.relpath(arguments[0], SCRIPTS), *arguments[1:])


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[str, str, str]:
    """A tiny model, small data sets, and where results go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_lm.save(tmp_path / "tiny", max_position_embeddings=1024)
    (model / "chat_template.jinja").write_text(CHAT)
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        QUESTION._replace(id=str(i), passage=STORIES[i % 2], question=f"Whose mill {i}?")
        for i in range(154)  # of which four are none of `data.limit=150`
    ]
    write(data / "xquad.en.json", rows)
    (data / "babi_qa1_test.txt").write_text(BABI)
    return str(model), str(data), str(tmp_path / "out")


SHORT = ("max_new_tokens=3", "~generation_params.stop_strings")
"""A random model would have to hit a line break."""


OTHERS = {
    "baselines": (),
    "sampled": ("estimators=asmi_sampled",),
    "scope_all": ("asmi.scope=all",),
    "paper": ("asmi.mask_rate=0.15", "asmi.num_masks=40"),
    "depths": ("asmi.depths=[0.6,0.7,0.8,0.9]",),
    "balanced": ("asmi.mask_sampler=balanced",),
}
"""Runs over the answers of another, and what makes them."""


def settings_of(file: Path, name: str = "asmi_settings_d60") -> dict:
    return json.loads(pq.read_schema(file).metadata[b"run"])["settings"][name]


def test_what_is_run_of_a_model(noted, folders):
    """Shards of two settings, one of them through the chat template, and two runs of each."""
    _, _, out = folders
    asked = (*folders, "xquad", "xquad-chat", "--", *SHORT)
    often = {"SHARDS": "2", "ROWS": "4", "RUNS": "sources depths"}
    calls = noted(*asked, **often)
    runs = [call for call in calls if call[0] == "polygraph_eval"]
    assert len(runs) == 2 * 2 * 2
    assert all(call[-2:] == [*SHORT] for call in runs)
    assert [("instruct=true" in call) for call in runs] == [False] * 4 + [True] * 4
    assert f"asmi.answers={out}/runs/xquad-chat/sources/0" in runs[5]
    assert sum("data.shard=0" in call for call in runs) == len(runs) / 2
    alone = noted(*asked, **often, SHARD="1")
    shards = {part for call in alone for part in call if part.startswith("data.shard=")}
    assert shards == {"data.shard=1"}
    # Each run over the answers of the first, but the one that reads attention as answers are made.
    kinds = ("sources", *OTHERS)
    several = noted(*folders, "closed-book", "--", *SHORT, SHARDS="1", RUNS=" ".join(kinds))
    runs = [call for call in several if call[0] == "polygraph_eval"]
    found = [f"asmi.answers={out}/runs/closed-book/sources/0" in call for call in runs]
    assert dict(zip(kinds, found, strict=True)) == dict.fromkeys(kinds, True) | {
        "sources": False,
        "baselines": False,
    }
    for call, kind in zip(runs, kinds, strict=True):
        assert set(OTHERS.get(kind, ())) <= set(call)
        scopes = [word.split("=")[1] for word in call if word.startswith("asmi.scope=")]
        assert scopes[-1] == ("all" if kind == "scope_all" else "response")
    # What is there is not run again: a second start only joins the tables.
    for call in calls:
        if call[0] == "python" and "/shards/" in call[-1]:
            Path(call[-1]).parent.mkdir(parents=True, exist_ok=True)
            Path(call[-1]).touch()
    assert [call[0] for call in noted(*asked, **often)] == ["python"] * 5  # one makes BabiQA


@pytest.mark.parametrize(
    ("shards", "kinds"),
    [("1", ("sources",)), pytest.param("2", ("sources", "depths"), marks=pytest.mark.slow)],
    ids=["one run", "two runs in shards"],
)
def test_a_chat_cell(noted, folders, shards, kinds):
    _, _, out = folders
    calls = noted(*folders, "xquad-chat", "--", *SHORT, SHARDS=shards, ROWS="4",
                  RUNS=" ".join(kinds))  # fmt: skip
    replayed(calls)
    files = [Path(out) / f"xquad-chat.{kind}.parquet" for kind in kinds]
    first, *others = map(pd.read_parquet, files)
    assert len(set(first["id"])) == len(first) == 4
    for swept in others:
        assert list(swept["id"]) == list(first["id"])
        for one, other in zip(first["asmi_mi_d60"], swept["asmi_mi_d60"], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        assert {f"asmi_mi_d{depth}" for depth in (60, 70, 80, 90)} <= set(swept)
    about = json.loads(pq.read_schema(files[0]).metadata[b"run"])
    assert about["data"]["except_limit"] == 150
    assert not {"input_texts", "greedy_texts", "target_texts"} & set(first)
    tokens = tiny_lm.tokenizer()
    bare = [len(tokens(text)["input_ids"]) for text in asked(Path(out))]
    around = len(tokens("Q:  A:", add_special_tokens=False)["input_ids"])
    assert [*first["prompt_tokens"] - bare] == pytest.approx([around] * 4, abs=3)
    assert min(first["prompt_tokens"] - bare) > 0


def asked(out: Path) -> list[str]:
    """Prompts of the first run, which the kept tables lack."""
    files = sorted((out / "runs/xquad-chat/sources").rglob("ue_manager_seed1"))
    return [text for file in files for text in load_run(file).stats["input_texts"]]


@pytest.mark.parametrize(
    "kinds", [("baselines",), ("sources", "sampled", "scope_all", "paper", "balanced")], ids=len
)
@pytest.mark.slow
def test_other_runs(noted, folders, kinds):
    """Over the answers of the first; the one whose baselines read attention answers by itself."""
    _, _, out = folders
    calls = noted(*folders, "babi", "--", *SHORT, "asmi.num_samples=2", SHARDS="1",
                  RUNS=" ".join(kinds))  # fmt: skip
    replayed(calls)
    files = {kind: Path(out) / f"babi.{kind}.parquet" for kind in kinds}
    found = {kind: pd.read_parquet(file) for kind, file in files.items()}
    used = {kind: settings_of(file) for kind, file in files.items()}
    scopes = {kind: own["scope"] for kind, own in used.items()}
    assert scopes == {kind: "all" if kind == "scope_all" else "response" for kind in kinds}
    if "baselines" in kinds:
        assert any("RAUQ" in name for name in found["baselines"])
        return
    assert any("Adapt-ASMI" in name for name in found["sampled"])
    assert (used["paper"]["mask_rate"], used["paper"]["num_masks"]) == (0.15, 40)
    assert used["balanced"]["mask_sampler"] == "balanced"


def test_of_a_changed_passage_what_was_right_before_is_kept(noted, folders):
    often = {"SHARDS": "1", "ROWS": "4"}
    calls = noted(*folders, "changed", "exchanged", "xquad", **often)
    kept = [call for call in calls if call[0] == "python" and call[1].endswith("keep.py")]
    ones = [call for call in kept if "/shards/" in call[3] and call[3].endswith(".parquet")]
    assert [call[4:5] for call in ones] == [["--before"], [], []]
    assert ones[0][5].endswith("xquad.en.json")


def test_an_unknown_setting_or_run_is_named(noted, folders):
    assert "no setting opne: xquad, closed-book" in noted(*folders, "opne", check=False)[0][0]
    assert "no run source: sources" in noted(*folders, RUNS="source", check=False)[0][0]
    said = noted("--paper", folders[2], "llama2_7b/squat", check=False)[0][0]
    assert "no setting llama2_7b/squat: qwen3_4b_base/coqa" in said


def test_the_papers_settings_are_those_of_the_grid(noted, tmp_path):
    """All 16, with no messages but those on shards and folders."""
    calls = noted("--paper", str(tmp_path / "out"), SHARDS="1")
    runs = [call for call in calls if call[0] == "polygraph_eval"]
    params = OmegaConf.load(configs_path() / "asmi_grid.yaml").hydra.sweeper.params
    settings = [
        (f"model={model}", f"benchmark={benchmark}")
        for model in params.model.split(",")
        for benchmark in params.benchmark.split(",")
    ]
    assert [tuple(call[3:5]) for call in runs] == settings
    assert len(settings) == 16
    ours = ("data.num_shards", "data.shard", "asmi.result_cache", "hydra.run.dir")
    for call in runs:
        assert call[1:3] == ["--config-name", "asmi_benchmark"]
        assert tuple(override.split("=")[0] for override in call[5:]) == ours
    tables = [Path(call[-1]) for call in calls if call[0] == "python" and "shards" not in call[-1]]
    assert tables[-1] == tmp_path / "out/mistral_7b/triviaqa.benchmark.parquet"
    assert len(set(tables)) == 16


@pytest.fixture
def hub(tmp_path, monkeypatch) -> list[str]:
    """Everything a hub would give, tiny, as overrides that hold for every setting."""
    stand_ins = make_stand_ins(tmp_path / "stand-ins")
    monkeypatch.chdir(stand_ins.working_directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in stand_ins.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nltk.data, "path", [stand_ins.environment["NLTK_DATA"]])
    qwen3 = dict.fromkeys(("qwen3_4b_base", "qwen3_8b_base"), "qwen3-qk-norm")
    families = qwen3 | {"llama2_7b": "llama", "mistral_7b": "mistral-window"}
    for name, family in families.items():
        tiny_lm.save(tmp_path / "hub" / f"asmi_{name}", family, max_position_embeddings=1024)
    for benchmark in ("asmi_coqa", "asmi_babiqa", "asmi_triviaqa"):
        hub_dataset(benchmark, tmp_path / "hub")
    answers = {"text": ["red"], "answer_start": [0]}
    rows = {"id": ["1", "2"], "title": ["Mills"] * 2, "context": [QUESTION.passage] * 2,
            "question": [QUESTION.question, "Which?"], "answers": [answers] * 2}  # fmt: skip
    Dataset.from_dict(rows).to_parquet(tmp_path / "hub" / "asmi_squad" / "validation.parquet")
    return [
        *stand_ins.overrides,
        f"model.path={tmp_path}/hub/${{hydra:runtime.choices.model}}",
        "model.load_model_args.dtype=float32",
        "model.load_model_args.device_map=null",
        "model.load_model_args.revision=null",
        f"data.source={tmp_path}/hub/${{hydra:runtime.choices.benchmark}}",
        "max_new_tokens=3",
        "asmi.num_samples=3",
        "~generation_params.stop_strings",
    ]


def test_a_setting_of_the_paper(noted, hub, tmp_path):
    """One of the 16 by the same code, side models and all, with stand-ins."""
    calls = noted(
        "--paper", str(tmp_path / "out"), "llama2_7b/squad", "--", *hub, SHARDS="1", ROWS="2"
    )
    replayed(calls)
    check_benchmark(tmp_path / "out/llama2_7b/squad.benchmark.parquet")


def check_benchmark(file: Path) -> None:
    found = pd.read_parquet(file)
    methods = [name for name in found if name.startswith("score ")]
    assert len(methods) == 17 + 3
    assert {"quality AlignScore", "ReferenceInAnswer", "asmi_mi_d60", "asmi_log_likelihood"} <= set(
        found
    )
    assert len(found) == 2
    assert np.isfinite(found[methods].to_numpy(dtype=float)).all()


@pytest.mark.slow
def test_the_script_itself(hub, folders):
    """As a user starts it: a local setting, then every backbone and every benchmark of the
    paper."""
    model, data, out = folders
    environment = os.environ | {"SHARDS": "1", "ROWS": "2"}
    start = ["bash", str(SCRIPT)]
    subprocess.run([*start, model, data, out, "xquad", "--", *SHORT], env=environment, check=True)
    assert len(pd.read_parquet(f"{out}/xquad.sources.parquet")) == 2
    backbones = ("qwen3_4b_base", "qwen3_8b_base", "llama2_7b", "mistral_7b")
    settings = [
        *map("/".join, zip(backbones, ("coqa", "squad", "babiqa", "triviaqa"), strict=True))
    ]
    subprocess.run([*start, "--paper", out, *settings, "--", *hub], env=environment, check=True)
    for setting in settings:
        check_benchmark(Path(out) / f"{setting}.benchmark.parquet")


def test_it_keeps_how_few_heads_there_are_and_not_the_masks(tmp_path):
    saved = saved_runs.content(12)
    saved_runs.dissect(saved)
    saved["stats"]["asmi_mask_seed_d60"] = list(range(12))
    run = load_run(saved_runs.save(tmp_path / "run", saved, saved_runs.manifest(12)))
    run_here("evidence/keep.py", str(tmp_path / "run"), str(tmp_path / "kept.parquet"))
    kept = pd.read_parquet(tmp_path / "kept.parquet")
    assert not [name for name in kept if "kl" in name or "masks" in name]
    kl, masks = (run.stats[f"asmi_{name}_d60"][3] for name in ("kl", "masks"))
    null = permutation_null(kl, masks, seed=3)
    for name in ("z", "p", "effective_heads", "null_effective_heads"):
        np.testing.assert_allclose(kept[f"{name}_d60"][3], getattr(null, name), rtol=1e-6)


def test_it_keeps_what_was_right_before_a_passage_was_changed(tmp_path):
    saved, about = saved_runs.content(12), saved_runs.manifest(12)
    run = load_run(saved_runs.save(tmp_path / "run", saved, about))
    texts, ids = run.stats["greedy_texts"], run.recorded("rows")["ids"]
    answers = [text if i % 3 == 0 else "none of it" for i, text in enumerate(texts)]
    qas = [
        {"id": own, "question": "?", "answers": [{"text": answer, "answer_start": 0}]}
        for own, answer in zip(ids, answers, strict=True)
    ]
    content = {"data": [{"paragraphs": [{"context": "A passage.", "qas": qas}]}]}
    (tmp_path / "before.json").write_text(json.dumps(content))
    given = (str(tmp_path / "run"), str(tmp_path / "kept.parquet"))
    run_here("evidence/keep.py", *given, "--before", str(tmp_path / "before.json"))
    kept = pd.read_parquet(tmp_path / "kept.parquet")
    assert kept["ReferenceBefore"].tolist() == [float(i % 3 == 0) for i in range(12)]
    run_here("evidence/keep.py", *given)
    assert "ReferenceBefore" not in pd.read_parquet(tmp_path / "kept.parquet")
