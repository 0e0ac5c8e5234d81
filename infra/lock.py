"""Reads constraints.txt, the lock file with the versions and hashes of all packages.

`make constraints` writes the lock. When run as a program, this module has these commands:

- `pins`: versions only, because pip requires hashes for all packages or none.
- `only NAME`: one package with its hashes.
- `requirements [EXTRA...]`: what the project and these extras require. A workspace member is
  replaced by its requirements. pip can't install them without the project, but an image needs them
  in a separate layer.
- `build`: what building the project requires.
- `check`: requirements that are missing from the lock.
- `covers FILE [NAME...]`: installed packages that aren't in the lock. FILE has the format of `uv
pip freeze`. The packages named by NAME may also be installed; a NAME ending in * matches a prefix.

It imports only the standard library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LOCK = Path("constraints.txt")
PROJECT = Path("pyproject.toml")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


@dataclass
class Locked:
    """One package in the lock."""

    version: str
    hashes: list[str] = field(default_factory=list)


def read_lock(path: Path = LOCK) -> dict[str, Locked]:
    """Returns the packages in the lock, keyed by normalized name."""
    locked: dict[str, Locked] = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if pin := _PIN.match(line):
            name = normalize_name(pin["name"])
            locked[name] = Locked(pin["version"])
        if hashed := _HASH.search(line):
            locked[name].hashes.append(hashed[1])
    return locked


def unmet(project_file: Path = PROJECT, lock: Path = LOCK) -> list[str]:
    """Returns the unmet requirements of the project and its workspace members.

    A requirement is met by a package in the lock or by a workspace member.
    """
    documents = [_read(project_file), *_members(project_file)]
    versions = {name: locked.version for name, locked in read_lock(lock).items()}
    lines = []
    for project in (document["project"] for document in documents):
        versions[normalize_name(project["name"])] = project["version"]
    for document in documents:
        project = document["project"]
        extras = project.get("optional-dependencies", {}).values()
        groups = document["build-system"]["requires"], project["dependencies"], *extras
        for requirement in (requirement for group in groups for requirement in group):
            pin = _PIN.match(requirement)
            if pin is None or versions.get(normalize_name(pin["name"])) != pin["version"]:
                lines.append(requirement)
    return lines


def requirements(extras: Sequence[str], project_file: Path = PROJECT) -> list[str]:
    """Returns what the project and `extras` require, in pip's format.

    Raises:
        KeyError: the project does not have one of the extras. FileNotFoundError: the folder of a
        member that `extras` require is missing.
    """
    document = _read(project_file)
    projects = [member["project"] for member in _members(project_file)]
    members = {project["name"]: project["dependencies"] for project in projects}
    lines: list[str] = list(document["project"]["dependencies"])
    for extra in extras:
        for requirement in document["project"]["optional-dependencies"][extra]:
            lines += members.get(requirement.partition("==")[0], [requirement])
    of_workspace = document["tool"]["uv"]["sources"]
    if missing := [line for line in lines if line.partition("==")[0] in of_workspace]:
        raise FileNotFoundError(f"no workspace folder contains {', '.join(missing)}")
    return list(dict.fromkeys(lines))


def find_uncovered(installed: str, allowed: list[str]) -> list[str]:
    """Returns lines of `installed`, as `name==version`, that aren't in the lock at that version.

    Args:
        allowed: packages that don't have to be in the lock, as `name`, `name==version` or `name*`.
    """
    versions = {name: locked.version for name, locked in read_lock().items()}
    patterns = [normalize_name(requirement.partition("==")[0]) for requirement in allowed]
    lines = []
    for line in filter(None, installed.splitlines()):
        name, _, version = line.partition("==")
        name = normalize_name(name)
        # A build from a custom index has a local version suffix: 2.13.0+cu126.
        if versions.get(name) != version.partition("+")[0] and not any(
            fnmatchcase(name, pattern) for pattern in patterns
        ):
            lines.append(line)
    return lines


def normalize_name(name: str) -> str:
    """Returns a package's name in the normalized form used by package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _read(project_file: Path) -> dict[str, Any]:
    return tomllib.loads(project_file.read_text(encoding="utf-8"))


def _members(project_file: Path) -> list[dict[str, Any]]:
    """Returns the project files of the other workspace members."""
    workspace = _read(project_file).get("tool", {}).get("uv", {}).get("workspace", {})
    folder, patterns = project_file.parent, workspace.get("members", [])
    files = (file for pattern in patterns for file in folder.glob(f"{pattern}/pyproject.toml"))
    return [_read(file) for file in sorted(files)]


def main(words: list[str]) -> int:
    """Runs one command. Returns the exit status."""
    if words == ["pins"]:
        print("\n".join(f"{name}=={locked.version}" for name, locked in read_lock().items()))
        return 0
    if words[:1] == ["only"] and len(words) == 2:
        locked = read_lock()[normalize_name(words[1])]
        print(f"{words[1]}=={locked.version}", *(f"--hash={digest}" for digest in locked.hashes))
        return 0
    if words[:1] == ["requirements"]:
        print("\n".join(requirements(words[1:])))
        return 0
    if words == ["build"]:
        print("\n".join(_read(PROJECT)["build-system"]["requires"]))
        return 0
    if words[:1] == ["covers"] and len(words) > 1:
        lines = find_uncovered(Path(words[1]).read_text(encoding="utf-8"), words[2:])
        if lines:
            print(f"not in {LOCK}: {', '.join(lines)}", file=sys.stderr)
        return 1 if lines else 0
    if words == ["check"]:
        if missing := unmet():
            print(
                f"{LOCK} does not pin all requirements of {PROJECT}: {', '.join(missing)}; "
                "run make constraints",
                file=sys.stderr,
            )
        return 1 if missing else 0
    print(
        "usage: python infra/lock.py pins | only NAME | requirements [EXTRA...] | build | "
        "covers FILE [NAME...] | check",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
