"""Convert SmolLM2's GGUF file once per environment, since transformers is slow to read it.

`python -m lm_polygraph_asmi.host.convert` writes the folder that "smollm2" then loads.
"""

import shutil
import sys
from pathlib import Path

from lm_polygraph_asmi.files import partial_of
from lm_polygraph_asmi.host.loading import load_model, load_tokenizer, quiet
from lm_polygraph_asmi.host.smollm2 import GGUF_FILE, converted_folder, weights_folder


def convert() -> None:
    """Save model (float32) and tokenizer in `converted_folder`, which exists only when complete."""
    package, folder = str(weights_folder()), converted_folder()
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    print(f"Converting SmolLM2-135M-Instruct into {folder} ...", file=sys.stderr)
    with quiet():
        load_model(package, "float32", None, gguf_file=GGUF_FILE).save_pretrained(partial)
        load_tokenizer(package, gguf_file=GGUF_FILE).save_pretrained(partial)
    _align(partial / "model.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _align(file: Path) -> None:
    """Move a file's tensors to multiples of 64 bytes, where torch also puts its tensors.

    The file is mapped into memory, and kernels round depending on the address. To move the tensors,
    spaces are added at the end of the file's header.
    """
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    spaces = -end % 64
    file.unlink()  # only its owner may read it; a new file has the usual permissions
    length = (end - 8 + spaces).to_bytes(8, "little")
    file.write_bytes(b"".join([length, content[8:end], b" " * spaces, content[end:]]))


if __name__ == "__main__":
    convert()
