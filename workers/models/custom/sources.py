"""The files that determine a class's behavior, their digest, and the settings in cog.yaml."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.errors import ConfigurationError

SUFFIXES = (".py", ".pyi")
COG_YAML, REQUIREMENTS, OVERRIDES = "cog.yaml", "requirements.txt", "overrides.txt"
NAMED = (COG_YAML, REQUIREMENTS, OVERRIDES)
MAX_FILES = 2000
HONORED = frozenset({"build", "predict", "run", "concurrency", "environment"})
HONORED_IN_BUILD = frozenset({"python_version", "python_packages", "python_requirements", "gpu"})
TRACEBACKS = "PENSTOCK_TRACEBACKS"
"""A variable that cog.yaml may set: `off` keeps tracebacks out of the logs that callers read."""
_LEFT_OUT = ("__pycache__", "node_modules", "venv", "site-packages")
_PORT = re.compile(
    r"""(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\])["']?\s*[:,]\s*(?P<address>\d{2,5})\b"""
    r"""|--port["']?(?:\s*[,=]\s*|\s+)["']?(?P<option>\d{2,5})\b"""
    r"""|\bport\s*=\s*(?P<argument>\d{2,5})\b""",
    re.IGNORECASE,
)
"""A port on this machine, as written in sources: in an address, an option, or an argument."""
MAX_PORT_NOTES = 3
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""Files that mark a folder as a Python environment, regardless of its name."""


@dataclass(frozen=True)
class Sources:
    """A class's sources.

    `sha256`: digest of the files' names and bytes. `environment`: the variables set in the class's
    cog.yaml.
    `shows_tracebacks`: True if callers see an exception's traceback in `logs`.
    """

    sha256: str
    environment: dict[str, str]
    shows_tracebacks: bool = True


@dataclass(frozen=True)
class AskedPackages:
    """The packages that a class requests.

    `file`: path of a requirements file, as pip reads it. `lines`: requirements from cog.yaml. One
    of these two is empty. `python_version`: for example 3.12, if specified in cog.yaml.
    """

    file: Path | None = None
    lines: tuple[str, ...] = ()
    python_version: str = ""

    def __bool__(self) -> bool:
        return bool(self.file or self.lines)


def read_sources(folder: Path) -> Sources:
    """Reads a folder's sources.

    Raises:
        ConfigurationError: there are too many source files, one of them can't be read, or cog.yaml
            is invalid.
    """
    files = source_files(folder)
    whole = hashlib.sha256()
    for path in files:
        name, data = path.relative_to(folder).as_posix(), _read_file(path)
        whole.update(os.fsencode(name) + f"\0{len(data)}\0".encode() + data)
    environment = _environment(folder)
    return Sources(whole.hexdigest(), environment, _shows_tracebacks(folder, environment))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}", field="source") from error


def source_files(folder: Path) -> list[Path]:
    """Returns a folder's sources in order.

    Raises:
        ConfigurationError: there are too many files.
    """
    files = sorted(path for path in _walk(folder) if _is_source(path, folder))
    if len(files) > MAX_FILES:
        raise ConfigurationError(
            f"{folder}: must have at most {MAX_FILES} Python files, got {len(files)}",
            field="source",
        )
    return files


def find_fixed_ports(folder: Path) -> list[str]:
    """Returns where the sources mention a local port, because processes can't share a port.

    Raises:
        ConfigurationError: there are too many sources.
    """
    places: dict[int, str] = {}
    for place, line in _code(folder):
        for match in _PORT.finditer(line):
            places.setdefault(int(match[match.lastgroup or 0]), place)
    return [
        f"{place}: port {port}: a worker runs several processes of the class, but only "
        "one of them can listen on it; if the class does, set `processes: 1` in its "
        "catalog entry"
        for port, place in list(places.items())[:MAX_PORT_NOTES]
    ]


def place_of(folder: Path, text: str) -> str:
    """Returns the first line of Python that contains a text, as FILE:LINE.

    Empty if there is none.
    """
    return next((place for place, line in _code(folder) if text in line), "")


def _code(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields each line of Python in the folder, preceded by its location."""
    for path in source_files(folder):
        if path.suffix == ".py":
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, line in enumerate(lines, 1):
                yield f"{path.relative_to(folder).as_posix()}:{number}", line


def _walk(folder: Path) -> Iterator[Path]:
    """Yields a folder's files, skipping any Python environments in it."""
    for parent, folders, names in os.walk(folder):
        source_folders = [
            name for name in folders if name not in _LEFT_OUT and not name.startswith(".")
        ]
        folders[:] = [name for name in source_folders if not _is_environment(Path(parent, name))]
        yield from (Path(parent, name) for name in names)


def _is_environment(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _ENVIRONMENT_MARKS)


def _is_source(path: Path, folder: Path) -> bool:
    is_named = path.parent == folder and path.name in NAMED
    is_code = path.suffix in SUFFIXES and not path.name.startswith(".")
    return (is_named or is_code) and path.is_file()


def find_without_effect(folder: Path) -> list[str]:
    """Describes the settings in cog.yaml that have no effect here.

    Raises:
        ConfigurationError: cog.yaml is invalid.
    """
    settings = _settings(folder)
    build = settings.get("build")
    build_settings = build if isinstance(build, dict) else {}
    others = [f"build.{name}" for name in build_settings if name not in HONORED_IN_BUILD]
    others += [name for name in settings if name not in HONORED]
    return [f"{COG_YAML}: {name} has no effect here" for name in others]


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the contents of cog.yaml.

    Empty if the file does not exist. Errors that concern its class are reported by the class's
    runner.
    """
    file = folder / COG_YAML
    if not file.is_file():
        return {}
    try:
        settings: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file}: {error}", field="source") from error
    return settings if isinstance(settings, dict) else {}


def _environment(folder: Path) -> dict[str, str]:
    """Returns `environment` from cog.yaml: a list of NAME=VALUE."""
    lines = _lines(folder, _settings(folder), "environment", "NAME=VALUE")
    if wrong := next((line for line in lines if not _is_valid_variable(line)), None):
        reason = f"environment: {wrong[:80]!r} has a character that variables can't contain"
        raise ConfigurationError(f"{folder / COG_YAML}: {reason}", field="source")
    return dict(line.partition("=")[::2] for line in lines)


def _is_valid_variable(line: str) -> bool:
    """False for a null character or an unpaired surrogate, which YAML can spell."""
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in line)


def _shows_tracebacks(folder: Path, environment: dict[str, str]) -> bool:
    value = environment.get(TRACEBACKS, "on")
    if value not in ("on", "off"):
        raise ConfigurationError(
            f"{folder / COG_YAML}: environment: {TRACEBACKS} must be on or off, got {value!r}",
            field="source",
        )
    return value == "on"


def read_packages(folder: Path) -> AskedPackages:
    """Returns the packages that a class requests, from cog.yaml's `build` or requirements.txt.

    Raises:
        ConfigurationError: cog.yaml is invalid, or names a missing file.
    """
    build = _settings(folder).get("build") or {}
    where = folder / COG_YAML
    if not isinstance(build, dict):
        raise ConfigurationError(f"{where}: build: must be a mapping", field="source")
    version = str(build.get("python_version") or "")
    version = "3.10" if version == "3.1" else version  # the way YAML parses it without quotes
    lines = tuple(_lines(folder, build, "python_packages", "requirements", "build."))
    named = build.get("python_requirements")
    if named and lines:
        raise ConfigurationError(
            f"{where}: build.python_packages and build.python_requirements are mutually exclusive",
            field="source",
        )
    if lines:
        return AskedPackages(lines=lines, python_version=version)
    file = folder / str(named or REQUIREMENTS)
    if named and (not file.is_file() or folder.resolve() not in file.resolve().parents):
        raise ConfigurationError(
            f"{where}: build.python_requirements: {named} is not a file in the folder",
            field="source",
        )
    has_some = file.is_file() and any(
        line.strip() and not line.strip().startswith("#")
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
    )
    return AskedPackages(file if has_some else None, python_version=version)


def _lines(
    folder: Path, settings: dict[str, Any], name: str, form: str, prefix: str = ""
) -> list[str]:
    lines = settings.get(name) or []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ConfigurationError(
            f"{folder / COG_YAML}: {prefix}{name}: must be a list of {form}", field="source"
        )
    return lines
