"""Shipped configs as people start them, by the names they have, with a hub on this machine."""

import os
import shutil
import time
from collections.abc import Iterator
from importlib import reload
from pathlib import Path
from subprocess import CompletedProcess

import datasets
import huggingface_hub
import nltk
import numpy as np
import pytest
import transformers

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.results.runs import Run, load_run
from tests.hub import TOKEN, Hub
from tests.hub_files import BENCHMARKS, write_hub
from tests.polygraph import forked, polygraph_eval_here
from tests.stand_ins import StandIns

QWEN, LLAMA = "Qwen/Qwen3-4B-Base", "meta-llama/Llama-2-7b-hf"
COQA = ("--config-name", "asmi_coqa", "data.first=2")  # the metric IsotonicPCC needs two rows
# Of runs that work.
SHORT = ("max_new_tokens=3", "asmi.num_samples=3", "asmi.num_masks=5", "asmi.mask_rate=0.2")
SIDE_MODELS = (
    "microsoft/deberta-large-mnli", "cross-encoder/stsb-roberta-large", "yzha/AlignScore",
    "roberta-large",
)  # fmt: skip
MODELS = {
    "asmi_qwen3_4b_base": QWEN,
    "asmi_qwen3_8b_base": "Qwen/Qwen3-8B-Base",
    "asmi_llama2_7b": LLAMA,
    "asmi_mistral_7b": "mistralai/Mistral-7B-v0.1",
}
"""Shipped config -> its model."""


@pytest.fixture(scope="module")
def files(stand_ins: StandIns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub(tmp_path_factory.mktemp("hub"), stand_ins)


class Machine:
    """A user's machine, with NLTK's data and spaCy's model; all else is on the hub.

    Forks of this process, which has imported all, do what is started there.
    """

    def __init__(self, folder: Path, hub: Hub, stand_ins: StandIns) -> None:
        self.hub, self.stand_ins = hub, stand_ins
        self.home, self.folder = folder / "home", folder / "cwd"
        self.folder.mkdir()
        name = "en_core_web_sm"
        (self.folder / name).symlink_to(stand_ins.working_directory / name)

    def start(self, command: str, *arguments: str, **variables: str) -> CompletedProcess:
        """`polygraph_eval`, or a command of `polygraph_asmi`."""
        environment = self.hub.environment(self.home) | {"COLUMNS": "1000"} | variables
        environment["NLTK_DATA"] = self.stand_ins.environment["NLTK_DATA"]
        return forked(self._command, command, *arguments, env=environment)

    def _command(self, command: str, *arguments: str) -> None:
        os.chdir(self.folder)
        nltk.data.path = [os.environ["NLTK_DATA"]]
        reload(huggingface_hub.constants)  # where libraries have read the variables
        reload(datasets.config)
        huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
        transformers.utils.hub._hf_api = None  # of an earlier test, with its mirror
        huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1000  # what is written at once, 10 MB else
        sleep = time.sleep  # before each of several attempts
        time.sleep = lambda seconds: sleep(min(seconds, 0.01))
        if command == "polygraph_eval":
            polygraph_eval_here(*arguments)
        else:
            main([command, *arguments])

    def run(self, *arguments: str, **variables: str) -> Run:
        """A run that works."""
        done = self.start("polygraph_eval", *arguments, *SHORT, **variables)
        assert done.returncode == 0, done.stderr
        (*_, manager) = sorted(self.folder.glob("workdir/output/*/*/*/ue_manager_seed1"))
        run = load_run(manager)
        assert (run.scores.shape, list(run.quality)) == ((2, 20), ["AlignScore"])
        assert np.isfinite(run.scores.to_numpy()).all()
        return run

    def fails(self, *command: str, says: tuple[str, ...], **variables: str) -> None:
        """A run stops before its model is loaded, and the doctor predicts it, with these words."""
        doctor = self.start("doctor", "--no-run", *command, **variables)
        assert (doctor.returncode, "Traceback" in doctor.stderr) == (1, False), doctor.stdout
        problems = doctor.stdout[doctor.stdout.index("│ problem │") :]
        assert [text for text in says if text not in problems] == [], problems
        self.stops(*command, says=says, **variables)

    def stops(self, *command: str, says: tuple[str, ...], **variables: str) -> None:
        run = self.start("polygraph_eval", *command, **variables)
        said = run.stdout + run.stderr
        assert (run.returncode, "Traceback" in said) == (1, False), said
        assert [text for text in says if text not in said] == [], said
        for log in self.folder.glob("workdir/output/*/*/*/*.log"):
            assert "Loading model" not in log.read_text()


@pytest.fixture
def machine(tmp_path: Path, files: Path, stand_ins: StandIns) -> Iterator[Machine]:
    with Hub(files) as hub:
        yield Machine(tmp_path, hub, stand_ins)


def test_a_benchmark_on_a_mirror(machine):
    """All is fetched from it, each file once, and then the run needs no connection."""
    hub = machine.hub
    fetch = machine.start("fetch", *COQA)
    assert fetch.returncode == 0, fetch.stderr
    assert fetch.stdout.index(" kB ") < fetch.stdout.index("on this machine")
    assert (hub.past, set(hub.fetched().values())) == (set(), {1})
    assert {file for file in hub.fetched() if file.endswith(".bin")} == {
        "microsoft/deberta-large-mnli/pytorch_model.bin"
    }
    asked = len(hub.requests)
    recorded = machine.run(*COQA, HF_HUB_OFFLINE="1").manifest["side_models"]
    assert recorded.keys() == {*SIDE_MODELS}
    assert recorded["yzha/AlignScore"] == hub.repository("models", "yzha/AlignScore").commit
    again = machine.start("fetch", *COQA, HF_HUB_OFFLINE="1")
    # Of a data set's size nothing is known without a connection.
    assert again.stdout.count(" here ") == again.stdout.count("\n│") - 1 == len(SIDE_MODELS) + 3
    assert (again.returncode, len(hub.requests)) == (0, asked), again.stderr


def test_no_connection_and_nothing_fetched(machine):
    names = [QWEN, *SIDE_MODELS, "LM-Polygraph/coqa"]
    says = (*names, "polygraph_asmi fetch --config-name asmi_coqa data.first=2")
    machine.fails(*COQA, says=says, HF_HUB_OFFLINE="1")
    fetched = machine.start("fetch", *COQA, HF_HUB_OFFLINE="1")
    # Of what is not here no size is known: the language model, five files and the data set.
    assert (fetched.returncode, fetched.stdout.count("│ ? ")) == (1, len(names))
    assert machine.hub.requests == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "model"),
    [
        *((name, "asmi_qwen3_4b_base") for name in BENCHMARKS),
        *(("asmi_coqa", name) for name in list(MODELS)[1:]),
    ],
)
def test_every_benchmark_and_backbone(machine, config, model):
    command = ("--config-name", config, f"model={model}", "data.first=2")
    run, hub = machine.run(*command), machine.hub
    sources = {"model": ("models", MODELS[model]), "dataset": ("datasets", BENCHMARKS[config][0])}
    for entry, source in sources.items():
        assert run.manifest[entry]["revision"] == hub.repository(*source).commit
    assert (hub.past, set(hub.fetched().values())) == (set(), {1})
    np.testing.assert_array_equal(machine.run(*command, HF_HUB_OFFLINE="1").scores, run.scores)


@pytest.mark.slow
def test_a_model_with_terms_to_accept(machine):
    gated = ("--config-name", "asmi_coqa", "model=asmi_llama2_7b", "data.first=2")
    machine.hub.gated.add(LLAMA)
    machine.fails(*gated, says=(LLAMA, "accept", "hf auth login"))
    machine.fails(*gated, says=(LLAMA, "accept"), HF_TOKEN="hf_of_another_user")
    machine.run(*gated, HF_TOKEN=TOKEN)


FIRST_SHARD = f"{QWEN}/model-00001-of-00003.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "size", "hangs"),
    [
        (FIRST_SHARD, 50_000, True),
        (FIRST_SHARD, 50_000, False),
        ("yzha/AlignScore/AlignScore-large.ckpt", 200_000, False),
        ("microsoft/deberta-large-mnli/pytorch_model.bin", 100_000, False),
        ("cross-encoder/stsb-roberta-large/model.safetensors", 100_000, False),
        ("FacebookAI/roberta-large/model.safetensors", 100_000, False),
        ("LM-Polygraph/coqa/continuation/test-00000-of-00001.parquet", 1000, False),
    ],
)
def test_a_repository_that_stops_answering_in_the_middle_of_a_file(machine, file, size, hangs):
    """The run ends before its model is loaded; another one fetches what is missing."""
    machine.hub.stalls[file], machine.hub.hangs = size, hangs
    name = "roberta-large" if "roberta-large" in file else "/".join(file.split("/")[:2])
    machine.stops(*COQA, says=(name,))
    machine.fails(
        *COQA, says=(name, "does not answer", "polygraph_asmi fetch --config-name asmi_c")
    )
    # It was tried again from there. Of another start, `huggingface_hub` begins the file anew.
    assert any(request.first_byte == size for request in machine.hub.requests)
    machine.hub.resume()
    machine.run(*COQA)
    assert {each for each, times in machine.hub.fetched().items() if times > 1} == {file}


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_once(machine):
    """`datasets` would ask again, each time after a longer pause, and say so."""
    machine.hub.silent.add("LM-Polygraph/coqa")
    own = machine.folder / "own"
    own.mkdir()
    shutil.copy(configs_path() / "asmi_coqa.yaml", own / "mine.yaml")
    command = ("--config-dir", str(own), "--config-name", "mine", "data.first=2")
    fetch = f"polygraph_asmi fetch --config-name mine --config-dir {own} data.first=2"
    machine.fails(*command, says=("LM-Polygraph/coqa", "does not answer", fetch))
    assert [r.path for r in machine.hub.requests if "coqa" in r.path] == [
        "/api/datasets/LM-Polygraph/coqa?blobs=true"
    ] * 2
