"""Which files "smollm2" stands for: those converted into the environment, or the GGUF file."""

import json
import struct
import sys

import pytest

from lm_polygraph_asmi.host import smollm2

VALUES = {name: 3 + number for number, name in enumerate(smollm2.SIZES)}


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A converted folder that fits the header of a GGUF file of a package."""
    fields = [text("general.languages") + struct.pack("<IIQ", 9, 8, 2) + text("en") + text("ru")]
    fields += [text("llama.scale") + struct.pack("<If", 6, 0.5)]
    fields += [text(name) + struct.pack("<II", 4, value) for name, value in VALUES.items()]
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    (tmp_path / smollm2.GGUF_FILE).write_bytes(header + b"".join(fields))
    monkeypatch.setattr(smollm2, "weights_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    smollm2.smollm2_source.cache_clear()
    made = smollm2.converted_folder()
    made.mkdir(parents=True)
    config = {smollm2.SIZES[name]: value for name, value in VALUES.items()}
    (made / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    yield made
    smollm2.smollm2_source.cache_clear()


def test_a_folder_that_fits_the_header_is_loaded(folder, caplog):
    assert smollm2.smollm2_source() == (folder, None)
    assert not caplog.records


@pytest.mark.parametrize(
    "content", [None, "{", "[]", *({name: 999} for name in smollm2.SIZES.values())], ids=str
)
def test_a_folder_of_another_size_or_without_a_configuration_is_ignored(
    folder, caplog, tmp_path, content
):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.unlink()
    if isinstance(content, dict):
        file.write_text(json.dumps(config | content))
    elif content is not None:
        file.write_text(content)
    assert smollm2.smollm2_source() == (tmp_path, smollm2.GGUF_FILE)
    (record,) = caplog.records
    assert str(folder) in record.getMessage()
    assert not isinstance(content, dict) or f"{content}"[1:-1] in record.getMessage()


def test_the_file_is_read_where_no_folder_is(folder, caplog, tmp_path):
    folder.rename(f"{folder}.partial")  # of a killed process
    assert smollm2.smollm2_source() == (tmp_path, smollm2.GGUF_FILE)
    assert not caplog.records
