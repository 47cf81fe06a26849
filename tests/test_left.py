"""What left the package stays away: its files, and its names wherever they could come back."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main

ROOT = Path(__file__).parents[1]
FILES = """
    lm_polygraph_asmi/adapters lm_polygraph_asmi/commands/serve.py scripts/bench_serve.py
    lm_polygraph_asmi/model/stepwise.py lm_polygraph_asmi/scoring/streaming.py
    lm_polygraph_asmi/model/perturbation.py lm_polygraph_asmi/experiments/perturbations
    lm_polygraph_asmi/experiments/scale.py lm_polygraph_asmi/experiments/matching.py
    lm_polygraph_asmi/analysis/reproduction.py lm_polygraph_asmi/experiments/items/claims.py
    lm_polygraph_asmi/analysis/drift.py lm_polygraph_asmi/analysis/labels.py
    lm_polygraph_asmi/analysis/power.py lm_polygraph_asmi/report/items/labels.py
    lm_polygraph_asmi/estimators/grounded_align_score.py lm_polygraph_asmi/scoring/segments.py
    lm_polygraph_asmi/scoring/many.py lm_polygraph_asmi/scoring/batches.py
    lm_polygraph_asmi/scoring/call.py lm_polygraph_asmi/scoring/ending.py
    lm_polygraph_asmi/host/gguf.py configs/asmi_controls.yaml configs/add/asmi_control.yaml
    configs/estimators/asmi_grounded.yaml configs/estimators/asmi_passage.yaml scripts/evidence
"""
NAMES = """
    Streamer AnswerInProgress DecisionStream StreamState PrefixCache Draft states_seen known_states
    Perturbation Edit perturbation_scale perturbation_builder asmi_scale is_control
    romano_wolf equivalence label_noise drifts GroundedAlignScore special_tokens=plain except_limit
    score_batch run_batch score_request read_request BatchDecider restored_config made_from
    pilot prometheus_client starlette uvicorn inspect_ai mlflow opentelemetry lazy_loader read_gguf
"""
KEPT = {"scripts/golden.py"}
"""Files that may name what left."""


@pytest.mark.parametrize("file", FILES.split())
def test_a_file_has_left(file):
    assert not (ROOT / file).exists()


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_has_left(name):
    word = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    files = [ROOT / "pyproject.toml", ROOT / "README.md"]
    for folder in ("lm_polygraph_asmi", "configs", "scripts", ".github"):
        files += [
            f
            for f in (ROOT / folder).rglob("*")
            if f.suffix in {".py", ".pyi", ".yaml", ".yml", ".jinja", ".sh"}
        ]
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        if file.exists() and file.relative_to(ROOT).as_posix() not in KEPT
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if word.search(line)
    ]
    assert found == []


def test_no_command_offers_what_left():
    runner, offered = CliRunner(), []
    for name, command in main.commands.items():
        done = runner.invoke(main, [name, "--help"])
        assert done.exit_code == 0
        offered += [name, *(option for p in command.params for option in p.opts)]
    assert not {"serve", "--stream", "--pilot", "--reliability", "--special-tokens"} & {*offered}
