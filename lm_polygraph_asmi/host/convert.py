"""Converts SmolLM2's GGUF file, which transformers takes long to read, once for an environment.

`python -m lm_polygraph_asmi.host.convert` writes the folder that "smollm2" loads from then on.
"""

import shutil
import sys
from pathlib import Path

from lm_polygraph_asmi.files import partial_of
from lm_polygraph_asmi.host.loading import load_model, load_tokenizer, quiet
from lm_polygraph_asmi.host.smollm2 import GGUF_FILE, converted_folder, weights_folder


def convert() -> None:
    """Save model (float32) and tokenizer in `converted_folder`, which appears when complete."""
    package, folder = str(weights_folder()), converted_folder()
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    print(f"Converting SmolLM2-135M-Instruct into {folder} ...", file=sys.stderr)
    with quiet():
        load_model(package, "float32", None, gguf_file=GGUF_FILE).save_pretrained(partial)
        load_tokenizer(package, gguf_file=GGUF_FILE).save_pretrained(partial)
    _align(partial / "model.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _align(file: Path) -> None:
    """Let the tensors of a file begin at multiples of 64 bytes, as those of torch do.

    The file is mapped into memory, and kernels round by the address. Spaces may end its header.
    """
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    spaces = -end % 64
    file.unlink()  # another user may not read it
    length = (end - 8 + spaces).to_bytes(8, "little")
    file.write_bytes(b"".join([length, content[8:end], b" " * spaces, content[end:]]))


if __name__ == "__main__":
    convert()
