"""What is said of repositories that a hub has, hides, lacks, or is silent about."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from huggingface_hub import constants, hf_api

from lm_polygraph_asmi.host.hub import Repository
from tests.hub import Hub

OWN = "own/model"
FILES = {
    "config.json": 40, "model.safetensors": 5000, "pytorch_model.bin": 7000, "README.md": 30,
    "tokenizer.json": 600, "onnx/model.onnx": 9000,
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    sizes = {f"models/{OWN}/{name}": size for name, size in FILES.items()}
    for name, size in (sizes | {f"datasets/{OWN}/part/test.parquet": 99}).items():
        file = tmp_path / "hub" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"{}" + b" " * (size - 2))
    with Hub(tmp_path / "hub") as hub:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
        for place, name, value in (
            (constants, "HUGGINGFACE_CO_URL_TEMPLATE", url),
            (constants, "ENDPOINT", hub.address),
            (hf_api.api, "endpoint", hub.address),
            (constants, "HF_HUB_OFFLINE", False),
        ):
            monkeypatch.setattr(place, name, value)
        yield hub


def slow_missing(folder):
    """A twin of `Repository.missing` for a folder, from one name to the next."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    shards = json.loads((folder / INDEX).read_text())["weight_map"] if INDEX in names else {}
    there = {
        "configuration": names & {"config.json", "adapter_config.json"},
        "weights": names & {"model.safetensors", "pytorch_model.bin", "adapter_model.bin"}
        or (shards and {*shards.values()} <= names),
        "tokenizer": names & {"tokenizer.json", "vocab.txt", "spm.model", "a.tiktoken"},
    }
    return [part for part, found in there.items() if not found]


INDEX = "model.safetensors.index.json"
NAMES = (
    "config.json", "adapter_config.json", "model.safetensors", "pytorch_model.bin",
    "adapter_model.bin", "tokenizer.json", "vocab.txt", "spm.model", "a.tiktoken", "a.safetensors",
    "b.safetensors", "README.md", "tokenizer_config.json",
)  # fmt: skip


def test_what_is_missing_is_what_a_slow_twin_misses(tmp_path):
    """Of folders with some of these files; what only has a file's name is none."""
    generator, found = Random(0), set()
    for number in range(300):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in generator.sample(NAMES, generator.randrange(7)):
            make = Path.touch if generator.random() < 0.8 else Path.mkdir
            make(folder / name)
        if shards := generator.sample(["a.safetensors", "b.safetensors"], generator.randrange(3)):
            (folder / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(shards))}))
        missing = Repository(str(folder)).missing()
        assert missing == slow_missing(folder), sorted(folder.iterdir())
        found.add(tuple(missing))
    assert len(found) == 8


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 20}, {"a": 1, "b": 0}, {"a": 1, "b": None}, {}])
def test_bytes_that_a_hub_does_not_tell(monkeypatch, sizes):
    monkeypatch.setattr(Repository, "listed", lambda _: sizes)
    known = [size for size in sizes.values() if size is not None]
    assert Repository(OWN).size() == (sum(known) if len(known) == len(sizes) else None)


def test_what_is_needed_of_a_repository(hub, tmp_path):
    """The weights in one form, and no other folder; then nothing is missing."""
    model = Repository(OWN, cache=str(tmp_path / "cache"))
    needed = {name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}
    before = model.listed(), model.size(), model.problem(), len(model.missing())
    assert before == (needed, sum(needed.values()), None, 3)
    assert model.download() == model.folder
    assert (model.missing(), model.size()) == ([], 0)
    assert len(replace(model, revision="v2").missing()) == 3  # of which nothing is there
    data = Repository(OWN, cache=model.cache, part="part", kind="dataset")
    assert (data.listed(), data.size()) == ({"part/test.parquet": 99}, 99)
    data.download()
    assert data.size() == 0
    (model.folder / "tokenizer.json").unlink()
    hub.silent.add(OWN)
    assert "is on this machine without its tokenizer, and the hub" in model.problem()


def test_the_base_of_an_adapter_comes_with_it(hub, tmp_path):
    folder, cache = tmp_path / "hub/models/own/adapter", str(tmp_path / "cache")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{OWN}"}}')
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    adapter = Repository("own/adapter", cache=cache)
    assert (adapter.download(), adapter.base) == (adapter.folder, OWN)
    assert [Repository(name, cache=cache).missing() for name in ("own/adapter", OWN)] == [[], []]
    asked = {request.path for request in hub.requests}
    # What `huggingface_hub` itself asks once a day, whichever test is the first.
    assert all("/own/" in path for path in asked - {"/api/agent-harnesses"})


@pytest.mark.parametrize(
    ("repository", "word"),
    [
        (Repository("own/gated"), "accepted its terms; .*/own/gated .*`hf auth login`"),
        (Repository("own/none"), "no model of this name"),
        (Repository("Qwen/Qwen3-4B-Bas"), r"\(did you mean Qwen/Qwen3-4B-"),
        (Repository("own/none", kind="dataset"), "no dataset of this name"),
        (Repository(OWN, part="a.ckpt"), "no file a.ckpt"),
        (Repository("own/silent"), "does not answer .*; where there is a connection, run "),
    ],
)
def test_what_cannot_be_had(hub, repository, word, tmp_path):
    for name in ("gated", "silent"):
        (tmp_path / "hub/models/own" / name).symlink_to(tmp_path / "hub/models" / OWN)
    hub.gated.add("own/gated"), hub.silent.add("own/silent")
    with pytest.raises(ConnectionError, match=f"^{repository.name} was not downloaded .*{word}"):
        repository.download()
    assert repository.problem().startswith("is not on this machine, and the hub ")


def test_without_a_connection_nothing_is_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE blocks the hub; where there is a con" in Repository(OWN).problem()
    assert "(in a run, it is model=asmi_smollm2);" in Repository("smollm2").problem()
    assert hub.requests == []
