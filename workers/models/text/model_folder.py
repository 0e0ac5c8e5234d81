"""The files of a text model, in the form of the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigurationError

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def check_text_folder(folder: Path) -> None:
    """Checks that a folder has a text model, before libraries are imported.

    Raises:
        ConfigurationError: a file is missing.
    """
    for name in (CONFIG, TOKENIZER):
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder}: no {name}", field="source")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The settings of the tokenizer. Empty if there are none."""
    path = folder / _TOKENIZER_CONFIG
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def chat_template(folder: Path) -> str:
    """The template of conversations. Empty: the model has none."""
    path = folder / _TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = tokenizer_config(folder).get("chat_template") or ""
    if isinstance(given, list):  # several by name
        named = {one["name"]: one["template"] for one in given}
        given = named.get("default", "")
    return str(given)
