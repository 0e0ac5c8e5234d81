"""Reads the description of a pipeline in its folder.

It imports no model library, because the I/O process asks it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class FolderIndex(NamedTuple):
    """The content of `model_index.json`."""

    class_name: str
    """Class of the pipeline in diffusers."""
    rounds_up: bool
    """True if image-to-image rounds a fraction of a step up, like diffusers' transformers.

    Its UNets round it down.
    """


def read_index(folder: Path) -> FolderIndex | None:
    """Returns the description in a folder. None if the folder does not contain a pipeline."""
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    name = index.get("_class_name") if isinstance(index, dict) else None
    return FolderIndex(name, "unet" not in index) if isinstance(name, str) else None
