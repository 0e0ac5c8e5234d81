"""Reads the pipeline description in a folder.

It doesn't import any model libraries, because the I/O process uses it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class FolderIndex(NamedTuple):
    """The contents of `model_index.json`."""

    class_name: str
    """The pipeline's class in diffusers."""
    rounds_up: bool
    """True if image-to-image rounds a fractional step up, as diffusers does for transformers.

    For UNets, it rounds down.
    """


def read_index(folder: Path) -> FolderIndex | None:
    """Returns a folder's pipeline description, or None if the folder doesn't contain a pipeline."""
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    name = index.get("_class_name") if isinstance(index, dict) else None
    return FolderIndex(name, "unet" not in index) if isinstance(name, str) else None
