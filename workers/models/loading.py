"""Errors that transformers and safetensors raise while loading a model's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shared.errors import ConfigurationError
from workers.models.device import memory_errors


@contextmanager
def folder_errors(folder: Path, reason: str = "") -> Iterator[None]:
    """Translates errors about a folder that is not a model or has damaged files.

    Args:
        reason: inserted before the library's message.

    Raises:
        ConfigurationError: the folder can't be loaded, now or later.
        OutOfMemory: see `memory_errors`, which also translates a lost GPU.
    """
    try:
        with memory_errors():
            yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigurationError(f"{folder}: {reason}{error}", field="source") from error
