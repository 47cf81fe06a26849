"""Reads GGUF files once: transformers reads them slowly, and its own folders quickly.

Configuration, tokenizer and weights of a file are saved in the user's cache, in a folder each. A
folder is kept only if what it holds equals what the file gives, bit by bit.
"""

import copy
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer

from lm_polygraph_asmi.files import locked, partial_of, user_cache
from lm_polygraph_asmi.model.model_cache import plain_values

log = logging.getLogger("lm_polygraph")

FORMAT = 1
"""Part of the name of every folder; increased when what is saved changes."""
LARGEST = 2**32
"""Bytes of the largest model that is saved."""
ALIGNED = 64
"""Bytes; torch allocates memory at multiples of it."""
RELEASES = ("transformers", "tokenizers", "gguf")
"""Packages that decide what is read from a file."""
BESIDE = {".json", ".jinja", ".model", ".txt"}
"""Suffixes of files beside a GGUF file that transformers may read, too."""
BESIDES = "besides.json"
"""File of what a folder of transformers cannot hold."""


class Part(NamedTuple):
    """What is read from a file: how to load it, from a path, and to save it in a folder.

    `opened` makes what a folder gave equal to what the file, by its path, gave; `content` is all of
    it, to be compared, and `size` in bytes.
    """

    load: Callable[..., Any]
    save: Callable[[Any, Path], None]
    opened: Callable[[Any, Path, str], None]
    content: Callable[[Any], Any]
    size: Callable[[Any], int] = lambda _: 0


def read_gguf(part: Part, name: str, path: str, gguf_file: str, **arguments: Any) -> Any:
    """What `part.load` reads from a GGUF file; from the second time on, from the cache.

    A cache that cannot be written is logged, and the file is read each time.

    Args:
        part: `CONFIG`, `TOKENIZER` or `MODEL`.
        name: of the part and of those arguments that change what is saved.
        path: folder of the file. A file on the hub is not saved.
        **arguments: for `from_pretrained`.
    """
    file = Path(path, gguf_file)
    folder: Path | None = None
    if file.is_file() and not Path(path, "adapter_config.json").exists():
        try:
            folder = user_cache() / f"gguf-{_key(file)}-{name}"
            if folder.is_dir():
                return _open(part, folder, path, arguments)
        except Exception as error:  # a damaged folder can raise anything
            log.warning("%s cannot be read (%s: %s): remove it. Reading %s instead",
                        folder or "The cache", type(error).__name__, error, file)  # fmt: skip
            folder = None
    value = part.load(path, gguf_file=gguf_file, **arguments)
    if folder is not None and part.size(value) <= LARGEST:
        _keep(part, value, folder, file, path, arguments)
    return value


def _open(part: Part, folder: Path, path: str, arguments: dict[str, Any]) -> Any:
    value = part.load(str(folder), **arguments)
    part.opened(value, folder, path)
    return value


def _keep(
    part: Part, value: Any, folder: Path, file: Path, path: str, arguments: dict[str, Any]
) -> None:
    """Save what was read from a file, unless another process does; a word if that fails."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(f"{folder}.lock", remove=True))
            except ValueError:  # another process saves it
                return
            if not folder.is_dir():
                _save(part, value, folder, path, arguments)
    except Exception as error:  # packages written in Rust raise their own
        log.warning(
            "%s is read again each time, which is slow: it could not be saved in %s (%s: %s). "
            "XDG_CACHE_HOME names another folder",
            file, folder.parent, type(error).__name__, error,
        )  # fmt: skip


def _save(part: Part, value: Any, folder: Path, path: str, arguments: dict[str, Any]) -> None:
    """Save a value in a folder that appears when it is complete and gives an equal value."""
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    try:
        partial.mkdir()
        part.save(value, partial)
        if part.content(_open(part, partial, path, arguments)) != part.content(value):
            raise RuntimeError("read again, it differs")
        _flush(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Write all files to disk, so that a folder with its final name is complete."""
    for file in folder.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())


def _key(file: Path) -> str:
    """Hash of the content of a file, of settings beside it, and of releases."""
    beside = sorted(f for f in file.parent.iterdir() if f.suffix in BESIDE and f.is_file())
    described = [FORMAT, *(version(name) for name in RELEASES)]
    for path in (file, *beside):
        status = path.stat()
        described += [path.name, _digest(path, status.st_size, status.st_mtime_ns)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)  # configuration, tokenizer and weights are read from one file
def _digest(file: Path, *_: int) -> str:  # of size and time, after which it is stale
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _public(config: PretrainedConfig) -> dict[str, Any]:
    """Entries of a configuration, without where it came from."""
    return {name: value for name, value in config.to_dict().items() if name[0] != "_"}


def _save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save weights as they are in memory, with the entries of the configuration of the file."""
    config, quantizer = model.config, vars(model).pop("hf_quantizer", None)
    model.config = copy.deepcopy(config)
    vars(model.config).pop("quantization_config", None)  # the weights are no longer in blocks
    try:
        model.save_pretrained(folder)
    finally:
        model.config = config
        if quantizer is not None:
            model.hf_quantizer = quantizer
    saved, entries = _public(AutoConfig.from_pretrained(folder)), _public(config)
    differing = {name: value for name, value in entries.items() if saved.get(name, ...) != value}
    (folder / BESIDES).write_text(json.dumps(differing), encoding="utf-8")


def _opened_model(model: PreTrainedModel, folder: Path, path: str) -> None:
    """Set what transformers sets when it reads a GGUF file."""
    for name, value in json.loads((folder / BESIDES).read_text(encoding="utf-8")).items():
        if name == "quantization_config":
            quantizer = AutoHfQuantizer.from_config(value, pre_quantized=True)
            value = quantizer.quantization_config
            vars(model).update(
                hf_quantizer=quantizer,
                is_quantized=True,
                quantization_method=value.quant_method,
            )
        setattr(model.config, name, value)
    model.name_or_path = model.config.name_or_path = path
    for weights in model.parameters():
        if weights.data_ptr() % ALIGNED:  # as in a mapped file; kernels may round by that
            weights.data = weights.data.clone()


class _Bits:
    """A tensor, equal to others with the same bits."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Bits)
        first, second = self.tensor, other.tensor
        described = [(t.shape, t.dtype, t.device, t.stride()) for t in (first, second)]
        return described[0] == described[1] and torch.equal(
            *(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
        )


def _model_content(model: PreTrainedModel) -> Any:
    modules = {
        name: (type(module), sorted(plain_values(module)), module.training)
        for name, module in model.named_modules()
    }
    tensors = (*model.named_parameters(), *model.named_buffers())
    configs = (_public(model.config), model.generation_config and model.generation_config.to_dict())
    quantizer = type(getattr(model, "hf_quantizer", None))
    return modules, {name: _Bits(tensor) for name, tensor in tensors}, configs, quantizer


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    names = ("_add_bos_token", "_add_eos_token")  # not saved where the processor adds the tokens
    flags = {name: vars(tokenizer)[name] for name in names if name in vars(tokenizer)}
    (folder / BESIDES).write_text(json.dumps(flags), encoding="utf-8")


def _opened_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, path: str) -> None:
    vars(tokenizer).update(json.loads((folder / BESIDES).read_text(encoding="utf-8")))
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = path


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> Any:
    names = ("chat_template", "model_max_length", "padding_side", "truncation_side",
             "clean_up_tokenization_spaces", "model_input_names", "add_bos_token",
             "add_eos_token", "split_special_tokens", "all_special_ids")  # fmt: skip
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    described = [repr(getattr(tokenizer, name, None)) for name in names]
    return type(tokenizer), tokenizer.backend_tokenizer.to_str(), special, described


def _named_config(config: PretrainedConfig, _: Path, path: str) -> None:
    config.name_or_path = path


CONFIG = Part(AutoConfig.from_pretrained, PretrainedConfig.save_pretrained, _named_config, _public)
TOKENIZER = Part(
    AutoTokenizer.from_pretrained, _save_tokenizer, _opened_tokenizer, _tokenizer_content
)
MODEL = Part(
    AutoModelForCausalLM.from_pretrained, _save_model, _opened_model, _model_content,
    lambda model: sum(t.numel() * t.element_size() for t in model.parameters()),
)  # fmt: skip
