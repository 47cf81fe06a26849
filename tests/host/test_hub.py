"""What is said of repositories that a hub has, hides, lacks, or is silent about."""

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
    for folder, files in (("models", FILES), ("datasets", {"part/test.parquet": 99})):
        for name, size in files.items():
            file = tmp_path / "hub" / folder / OWN / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"{}" + b" " * (size - 2))
    with Hub(tmp_path / "hub") as hub:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def test_what_is_needed_of_a_repository(hub, tmp_path):
    """The weights in one form, and no other folder; then nothing is missing."""
    model = Repository(OWN, cache=str(tmp_path / "cache"))
    needed = {name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert model.listed() == needed
    assert (model.size(), model.problem()) == (sum(needed.values()), None)
    assert model.missing() == ["configuration", "weights", "tokenizer"]
    assert model.download() == model.folder
    assert (model.missing(), model.size()) == ([], 0)
    assert Repository(OWN, part="part", kind="dataset").listed() == {"part/test.parquet": 99}
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
    assert all("/own/" in request.path for request in hub.requests)


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        (Repository("own/gated"), "accepted its terms; .*/own/gated .*`hf auth login`"),
        (Repository("own/none"), "has no model of this name"),
        (Repository("Qwen/Qwen3-4B-Bas"), r"no model of this name \(did you mean Qwen/Qwen3-4B-"),
        (Repository("own/none", kind="dataset"), "has no dataset of this name"),
        (Repository(OWN, part="a.ckpt"), "has no file a.ckpt in it"),
        (Repository("own/silent"), "does not answer .*; where there is a connection, run "),
    ],
)
def test_what_cannot_be_had(hub, repository, said, tmp_path):
    for name in ("gated", "silent"):
        (tmp_path / "hub/models/own" / name).symlink_to(tmp_path / "hub/models" / OWN)
    hub.gated.add("own/gated"), hub.silent.add("own/silent")
    with pytest.raises(ConnectionError, match=f"^{repository.name} was not downloaded .*{said}"):
        repository.download()
    assert repository.problem().startswith("is not on this machine, and the hub ")


def test_without_a_connection_nothing_is_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE blocks the hub; where there is a con" in Repository(OWN).problem()
    assert "(in a run, it is model=asmi_smollm2);" in Repository("smollm2").problem()
    assert hub.requests == []
