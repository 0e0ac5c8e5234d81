"""Errors that the model libraries raise while loading a model's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigurationError, PenstockError
from workers.models.device import memory_errors

_MAX_REASON_CHARS = 500


@contextmanager
def folder_errors(source: Path | str, field: str = "source") -> Iterator[None]:
    """Translates errors about a folder that is not a model or has damaged files.

    Args:
        source: the folder, which the error message starts with.

    Raises:
        ConfigurationError: the folder can't be loaded, now or later.
        OutOfMemory: see `memory_errors`, which also translates a lost GPU.
    """
    try:
        with memory_errors():
            yield
    except (PenstockError, MemoryError):
        raise
    except Exception as error:
        # The boundary with the libraries. Each kind of damage raises a different error.
        reason = f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARS]}"
        raise ConfigurationError(f"{source}: {reason}", field=field) from error
