"""The files of a class's folder that decide what it does: their digest, and what cog.yaml sets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.errors import ConfigurationError

SUFFIXES = (".py", ".pyi")
NAMED = ("cog.yaml", "requirements.txt")
MAX_FILES = 2000
_LEFT_OUT = ("__pycache__", "node_modules", "venv", "site-packages")


@dataclass(frozen=True)
class Sources:
    """The sources of a class.

    `sha256`: of their names and bytes. `environment`: the variables that its cog.yaml sets.
    """

    sha256: str
    environment: dict[str, str]


def read_sources(folder: Path) -> Sources:
    """Reads the sources of a folder.

    Raises:
        ConfigurationError: there are too many, or cog.yaml is not valid.
    """
    files = sorted(path for path in folder.rglob("*") if _is_source(path, folder))
    if len(files) > MAX_FILES:
        raise ConfigurationError(
            f"{folder}: {len(files)} Python files; at most {MAX_FILES} are allowed", field="source"
        )
    whole = hashlib.sha256()
    for path in files:
        name, data = path.relative_to(folder).as_posix(), path.read_bytes()
        whole.update(f"{name}\0{len(data)}\0".encode() + data)
    return Sources(whole.hexdigest(), _environment(folder))


def _is_source(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    if any(part.startswith(".") or part in _LEFT_OUT for part in parts):
        return False
    is_named = len(parts) == 1 and path.name in NAMED
    return (is_named or path.suffix in SUFFIXES) and path.is_file()


def _environment(folder: Path) -> dict[str, str]:
    """The `environment` of cog.yaml: a list of NAME=VALUE."""
    file = folder / "cog.yaml"
    if not file.is_file():
        return {}
    try:
        settings: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: {error}", field="source") from error
    lines = settings.get("environment", []) if isinstance(settings, dict) else []
    if not isinstance(lines, list) or not all(isinstance(one, str) for one in lines):
        raise ConfigurationError(
            f"{file}: environment: expected a list of NAME=VALUE", field="source"
        )
    return dict(one.partition("=")[::2] for one in lines)
