"""Turns a GGUF file into a folder as on the Hugging Face hub, once.

`python -m workers.models.text.gguf SOURCE FOLDER` does so manually. 4-bit weights become floats.
They stay as exact as they were: what quantization lost does not come back.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shared.errors import ConfigurationError

MAX_S = 900.0
"""Seconds for one file. One of 98 MB takes about 10 s on two cores."""
_FORMAT = 1
"""Increased when the folders get another content."""


def converted(path: Path, cache_dir: Path) -> Path:
    """The folder of a GGUF file below `cache_dir`, which is made first if necessary.

    Raises:
        ConfigurationError: the file can't be read, or the `gguf` package is missing.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folder = cache_dir / "gguf" / f"{path.stem}-{digest}-{_FORMAT}"
    if folder.is_dir():
        return folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        _convert_apart(path.resolve(), partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another worker on this machine was faster. Its folder is equally good.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder.resolve()


def _convert_apart(path: Path, folder: Path) -> None:
    """Converts in a process of its own, because the I/O process never imports torch."""
    words = [sys.executable, "-m", "workers.models.text.gguf", str(path), str(folder)]
    root = Path(__file__).resolve().parents[3]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=MAX_S, cwd=root)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it failed"])[-1]
        raise ConfigurationError(f"{path}: {reason}", field="source") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{path}: {error}", field="source") from error


def convert(path: Path, folder: Path) -> None:
    """Writes the model of a GGUF file into `folder`: float32 weights, tokenizer, template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    given = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **given)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **given)
    # Else transformers would refuse to save what was quantized.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
