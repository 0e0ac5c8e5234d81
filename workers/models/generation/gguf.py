"""Converts a GGUF file, once, to a folder like those on the Hugging Face Hub.

For torch, its weights are converted to floats. Their precision doesn't change, because information
lost in quantization can't be recovered. An engine reads the file itself, so the engine's folder has
a link to the file, the tokenizer, and the chat template.

`python -m workers.models.generation.gguf SOURCE FOLDER [converted|described]` converts a file
manually.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError

MAX_S = 900.0
"""Time limit for one file. A 98 MB file takes about 10 s on two cores."""
_FORMAT = 1
"""Incremented when the folders' contents change."""
_PARTIAL = ".making-"
_NEEDED = ("config.json", "tokenizer.json")

_TOKENS = "tokenizer.ggml.tokens"
_END_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_ENDS = (
    *("<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<|return|>", "<|call|>", "<EOT>", "<eos>", "</s>"),
)
"""Tokens that end a text for llama.cpp, regardless of the file (src/llama-vocab.cpp in its
repository).
"""
_PART = re.compile(r"-\d{5}-of-")


def open_for_torch(path: Path, cache_dir: Path) -> Path:
    """Returns a GGUF file's folder for torch, under `cache_dir`, creating it if necessary.

    Raises:
        ConfigurationError: the file can't be read, its folder can't be written, or the `gguf`
            package is missing.
    """
    return _open_folder(path, cache_dir, "converted")


def open_for_engine(path: Path, cache_dir: Path) -> Path:
    """Returns a GGUF file's folder for an engine, under `cache_dir`, creating it if necessary.

    Raises:
        ConfigurationError: see `open_for_torch`.
    """
    return _open_folder(path, cache_dir, "described")


def _open_folder(path: Path, cache_dir: Path, form: str) -> Path:
    try:
        return _make_folder(path, cache_dir, form)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error}", field="source") from error


def _make_folder(path: Path, cache_dir: Path, form: str) -> Path:
    """Returns a GGUF file's folder in one of the two forms.

    A folder under its final name is complete, because it is created under a different name and then
    renamed. Anything a killed process leaves behind is removed by the next process.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    # The converting process runs in a different working directory.
    folder = (
        cache_dir.resolve()
        / "gguf"
        / (f"{path.stem}-{digest}-{_FORMAT}" + (f"-{form}" if form != "converted" else ""))
    )
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        _convert_apart(path.resolve(), partial, form)
        if not _is_whole(partial):
            raise ConfigurationError(f"{path}: could not be loaded as a model", field="source")
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.gguf"))
    return bool(weights) and all((folder / name).is_file() for name in _NEEDED)


def _publish(partial: Path, folder: Path) -> None:
    """Renames the new folder. Another worker on this machine may have gotten there first."""
    try:
        partial.rename(folder)
    except OSError:
        if _is_whole(folder):
            return  # the other folder is equally good
        shutil.rmtree(folder)  # an earlier version left incomplete folders
        partial.rename(folder)


def _remove_abandoned(parent: Path) -> None:
    """Removes leftovers from killed conversions. No running conversion is this old."""
    for leftover in parent.glob(f"{_PARTIAL}*"):
        try:
            is_abandoned = leftover.stat().st_mtime < time.time() - 2 * MAX_S
        except OSError:
            continue  # the folder has just been renamed, or another worker has removed it
        if is_abandoned:
            shutil.rmtree(leftover, ignore_errors=True)


def _convert_apart(path: Path, folder: Path, form: str) -> None:
    """Converts a file in a separate process, because the I/O process never imports torch.

    That process exits when this one does, even if this one is killed, because its standard input is
    then closed.
    """
    words = [sys.executable, "-m", "workers.models.generation.gguf", str(path), str(folder), form]
    root = Path(__file__).resolve().parents[3]
    reading, writing = os.pipe()
    try:
        subprocess.run(
            words,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
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


def read_fields(path: Path) -> Mapping[str, Any]:
    """Reads a GGUF file's metadata, and checks that the file contains all its tensors.

    Raises:
        ConfigurationError: the file is damaged or incomplete, or is not a GGUF file. The message
            does not contain the path.
        OSError: the file can't be read.
    """
    from gguf import GGUFReader

    try:
        fields: Mapping[str, Any] = GGUFReader(path).fields
    except OSError:
        raise
    except Exception as error:  # the reader trusts lengths and types, so anything may go wrong
        raise ConfigurationError("damaged, incomplete, or not a GGUF file") from error
    return fields


def _read_model_fields(path: Path) -> Mapping[str, Any]:
    fields = read_fields(path)
    if _TOKENS not in fields:
        raise ConfigurationError(f"not a text model, because it has no {_TOKENS}")
    return fields


def convert(path: Path, folder: Path) -> None:
    """Writes a GGUF file's model to `folder`: float32 weights, tokenizer, and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    _read_model_fields(path)
    options = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    # Otherwise, transformers would refuse to save a quantized model.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def describe(path: Path, folder: Path) -> None:
    """Writes a GGUF file's tokenizer and template to `folder`, with a link to the file."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    fields = _read_model_fields(path)
    tokens = [bytes(fields[_TOKENS].parts[at]).decode() for at in fields[_TOKENS].data]
    ends = {tokens.index(name) for name in _ENDS if name in tokens}
    ends |= {int(fields[name].contents()) for name in _END_IDS if name in fields}
    config: dict[str, Any] = {"vocab_size": len(tokens), "eos_token_id": sorted(ends)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True
    )
    tokenizer.save_pretrained(folder)
    for part in sorted(path.parent.glob(_PART.sub("-*-of-", path.name, count=1))):
        (folder / part.name).symlink_to(part)


def _end_with_parent(folder: Path) -> None:
    """Waits until standard input closes. Then removes the folder, and exits this process."""
    # Not sys.stdin, because the interpreter needs its lock in order to exit.
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Creates the folder named by the second argument from the file named by the first."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    if folder.name.startswith(_PARTIAL):
        threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        if sys.argv[3:] == ["described"]:
            describe(path, folder)
        else:
            convert(path, folder)
    except ConfigurationError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
