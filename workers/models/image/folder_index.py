"""What the folder of a pipeline says of itself.

It imports no model library, because the I/O process asks it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class FolderIndex(NamedTuple):
    """What `model_index.json` says."""

    class_name: str
    """Of the pipeline, in diffusers."""
    rounds_up: bool
    """Whether image-to-image runs a part of a step as a whole one, as diffusers' transformers do.
    Its UNets drop it."""


def read_index(folder: Path) -> FolderIndex | None:
    """Returns what a folder says. None if it is not that of a pipeline."""
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    name = index.get("_class_name") if isinstance(index, dict) else None
    return FolderIndex(name, "unet" not in index) if isinstance(name, str) else None
