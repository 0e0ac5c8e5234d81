"""A catalog with one text model, for a whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def generation_catalog(
    name: str, folder: Path, engine: str = "auto", **changes: dict[str, Any]
) -> str:
    """A catalog as file content.

    Args:
        changes: fields for `batch`, `generation`, `deadline`, `price` or `cache`.
    """
    parts: dict[str, dict[str, Any]] = {
        "batch": {"max_tokens": 8192, "max_items": 16},
        "generation": {
            "context_tokens": 256,
            "default_tokens": 16,
            "longest_tokens": 64,
            "chunk_tokens": 64,
        },
        "deadline": {"default_s": 240, "longest_s": 300},
    }
    for part, change in changes.items():
        parts[part] = parts.get(part, {}) | change
    precision = "fp32" if engine == "auto" else "auto"
    entry = {"name": name, "task": "text", "source": f"local:{folder}", "precision": precision}
    if engine != "auto":  # which releases without engines would reject
        entry["engine"] = engine
    return json.dumps({"models": [entry | parts]})  # which is also valid YAML
