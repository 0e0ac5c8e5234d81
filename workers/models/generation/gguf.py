"""Turns a GGUF file into a folder as on the Hugging Face hub, once.

`python -m workers.models.generation.gguf SOURCE FOLDER` does so manually. 4-bit weights become
floats. They stay as exact as they were: what quantization lost does not come back.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from shared.errors import ConfigurationError

MAX_S = 900.0
"""Seconds for one file. One of 98 MB takes about 10 s on two cores."""
_FORMAT = 1
"""Increased when the folders get another content."""
_PARTIAL = ".making-"
_NEEDED = ("config.json", "tokenizer.json")


def converted(path: Path, cache_dir: Path) -> Path:
    """The folder of a GGUF file below `cache_dir`, which is made first if necessary.

    A folder under its own name is whole: it is made under another name and renamed. What a killed
    conversion left is removed by the next one.

    Raises:
        ConfigurationError: the file can't be read, or the `gguf` package is missing.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    # The process that converts has another working directory.
    folder = cache_dir.resolve() / "gguf" / f"{path.stem}-{digest}-{_FORMAT}"
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        _convert_apart(path.resolve(), partial)
        if not _is_whole(partial):
            raise ConfigurationError(f"{path}: it did not become a model", field="source")
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _NEEDED) and any(folder.glob("*.safetensors"))


def _publish(partial: Path, folder: Path) -> None:
    """Renames what was made. Another worker on this machine may have been faster."""
    try:
        partial.rename(folder)
    except OSError:
        if _is_whole(folder):
            return  # equally good
        shutil.rmtree(folder)  # an earlier version left folders that lack something
        partial.rename(folder)


def _remove_abandoned(parent: Path) -> None:
    """Removes what conversions left that were killed: no living one is this old."""
    for leftover in parent.glob(f"{_PARTIAL}*"):
        try:
            is_abandoned = leftover.stat().st_mtime < time.time() - 2 * MAX_S
        except OSError:
            continue  # it has just become a folder, or another worker removed it
        if is_abandoned:
            shutil.rmtree(leftover, ignore_errors=True)


def _convert_apart(path: Path, folder: Path) -> None:
    """Converts in a process of its own, because the I/O process never imports torch.

    The process ends with this one, also if this one is killed: its standard input ends then.
    """
    words = [sys.executable, "-m", "workers.models.generation.gguf", str(path), str(folder)]
    root = Path(__file__).resolve().parents[3]
    reading, writing = os.pipe()
    try:
        subprocess.run(
            words,
            check=True,
            capture_output=True,
            text=True,
            timeout=MAX_S,
            cwd=root,
            stdin=reading,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it failed"])[-1]
        raise ConfigurationError(f"{path}: {reason}", field="source") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{path}: {error}", field="source") from error
    finally:
        os.close(reading)
        os.close(writing)


def convert(path: Path, folder: Path) -> None:
    """Writes the model of a GGUF file into `folder`: float32 weights, tokenizer, template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    # Else transformers would refuse to save what was quantized.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _end_with_parent(folder: Path) -> None:
    """Waits for the end of standard input. Then removes the folder, and ends this process."""
    # Not sys.stdin, whose lock the interpreter wants at its end.
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Converts the file that the first argument names into the folder that the second names."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    if folder.name.startswith(_PARTIAL):
        threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    convert(path, folder)


if __name__ == "__main__":
    main()
