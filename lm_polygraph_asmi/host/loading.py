"""Load a model and its tokenizer from a folder, the cache, or a hub."""

import io
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from json import JSONDecodeError
from logging import StreamHandler
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_peft_available, logging

from lm_polygraph_asmi.core.model.devices import lowest_precision
from lm_polygraph_asmi.host.hub import ADAPTER, Repository
from lm_polygraph_asmi.host.smollm2 import log, smollm2_source

SMOLLM2 = "smollm2"
"""Name that loads the demo's model."""


def load_model(
    model_path: str,
    dtype: str = "auto",
    device_map: str | None = "auto",
    attn_implementation: str | None = "eager",
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode; OSError if files are missing.

    Args:
        model_path: folder or hub ID.
        dtype: the name of a torch dtype, or "auto". "auto" takes the dtype of the files, but
            float32 instead of bfloat16 on a CPU without instructions for bfloat16.
        attn_implementation: "eager" by default, because LM-Polygraph's RAUQ reads attention maps.
            ASMI's passes use the calculator's option `attention`. None: transformers' choice.
        device_map, trust_remote_code, **kwargs: passed to `from_pretrained`.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"expected dtype auto or a torch dtype such as float32, got {dtype!r}")
    repository = Repository(
        model_path, kwargs.get("revision"), kwargs.get("cache_dir"), kwargs.get("gguf_file")
    )
    if not Path(model_path).is_dir() and (problem := repository.problem()):
        raise OSError(f"cannot load the model {model_path}: it {problem}; name a local folder")
    if Path(model_path, ADAPTER).is_file() and not is_peft_available():
        raise ValueError(
            f"cannot load the model {model_path}: it is an adapter ({ADAPTER}), which needs PEFT. "
            "Without PEFT, transformers ignores the adapter silently. Install it (pip install "
            "peft)"
        )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **kwargs,
        )
    except OSError as error:
        raise OSError(f"cannot load the model {model_path}: files are missing. {error}") from error
    except SafetensorError as error:
        raise OSError(
            f"cannot load the model {model_path}: a file of weights is damaged or incomplete "
            f"({error}). Copy or download it again"
        ) from error
    except ValueError as error:
        if "Unrecognized model" not in str(error):
            raise
        raise ValueError(
            f"cannot load the model {model_path}: its config.json is missing or has no "
            "model_type. Name a folder written by transformers' save_pretrained; for weights in "
            "a GGUF file, also name the file (gguf_file)"
        ) from error
    if kwargs.get("gguf_file") and all(w.is_floating_point() for w in model.parameters()):
        _unquantized(model)
    if dtype == "auto" and _slow_in_bfloat16(model):
        log.warning(
            "%s is loaded in float32: its files are in bfloat16, for which this CPU has no "
            "instructions, so that it would take several times as long. To keep bfloat16, set "
            "dtype=bfloat16",
            model_path,
        )
        del model  # otherwise both models would be in memory
        return load_model(
            model_path, "float32", device_map, attn_implementation, trust_remote_code, **kwargs
        )
    return model.eval()


def _slow_in_bfloat16(model: PreTrainedModel) -> bool:
    """Whether a model runs in bfloat16 on a CPU that has no instructions for it."""
    on_processor = {weights.device.type for weights in model.parameters()} == {"cpu"}
    plain = getattr(model, "hf_quantizer", None) is None
    bfloat16 = lowest_precision(model) == torch.bfloat16
    return on_processor and plain and bfloat16 and not has_bfloat16()


def has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 matrix products, and oneDNN may use them.

    The instructions are AVX512_BF16 and AMX; an environment variable can forbid oneDNN to use them.
    ATEN_CPU_CAPABILITY limits only other operators, which hardly matter. The result is True for
    CPUs other than x86, which were not measured.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    caps = (os.environ.get(f"{name}_MAX_CPU_ISA") for name in ("ONEDNN", "DNNL"))
    # These values exclude the instructions.
    low = ["SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"]
    if next(filter(None, caps), "").upper() in low:
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _unquantized(model: PreTrainedModel) -> None:
    """Describe a model read from a GGUF file like the folder in which it would be saved.

    Its weights are no longer quantized in blocks. With the same description, calibrations and
    caches recognise the model.
    """
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]


def load_tokenizer(
    model_path: str, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, with padding on the left for generation in batches."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_path, padding_side="left", trust_remote_code=trust_remote_code, **kwargs
        )
    except JSONDecodeError as error:
        raise OSError(
            f"cannot load the tokenizer of {model_path}: a file is damaged or incomplete "
            f"({error}). Copy or download it again"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@lru_cache(maxsize=1)  # notebooks load the same model repeatedly
def load_named(
    name: str, gguf_file: str | None = None, dtype: str = "auto", device_map: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer by name, without progress bars; the last pair is cached.

    Args:
        name: folder, hub ID, or "smollm2" for the demo's model.
        gguf_file: GGUF file in the folder that holds the weights.
        dtype, device_map: see `load_model`.
    """
    if name == SMOLLM2:
        if gguf_file is not None or dtype not in ("auto", "float32"):
            raise ValueError(
                f"{SMOLLM2} is one file, loaded in float32: leave gguf_file and dtype out, got "
                f"{gguf_file!r} and {dtype!r}"
            )
        (folder, gguf_file), dtype = smollm2_source(), "float32"
        name = str(folder)
    file: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        with quiet():
            model = load_model(name, dtype, device_map, attn_implementation=None, **file)
            return model, load_tokenizer(name, **file)
    except ValueError as error:
        if Path(name, ADAPTER).is_file() and "ignore_mismatched" in str(error):
            raise ValueError(
                f"cannot load {name}: the shapes of this adapter differ from its base model's, as "
                "after resizing the vocabulary. Save the merged model (PEFT's merge_and_unload, "
                f"then save_pretrained) and name its folder. {error}"
            ) from error
        raise


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars, notes and warnings of other libraries. Errors are still raised.

    Warnings of this package are logged when the block ends. If transformers reports a problem, such
    as weights that do not fit, and then raises RuntimeError, a ValueError with the report is
    raised.
    """
    report = io.StringIO()
    handler, verbosity = StreamHandler(report), logging.get_verbosity()
    logging.disable_default_handler()
    library = logging.get_logger()  # in older releases, `logging.remove_handler` fails
    library.addHandler(handler)
    logging.set_verbosity_warning()
    records: list[Any] = []
    hold: Any = records.append  # a filter that returns None holds a record back
    log.addFilter(hold)
    try:
        # No setting of transformers hides the progress bar while GGUF weights are converted.
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except RuntimeError as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", report.getvalue()).strip()  # without colours
        if not text:
            raise
        raise ValueError(f"{error} The report:\n{text}") from error
    finally:
        library.removeHandler(handler)
        logging.enable_default_handler()
        logging.set_verbosity(verbosity)
        log.removeFilter(hold)
        for record in records:
            log.handle(record)
