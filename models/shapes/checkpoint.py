"""State of a training stage on disk, from which a stopped run continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Writes the state atomically: afterwards the file is complete, or unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(dict(state), partial)
    partial.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
    """The saved state, or None if there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
