"""Prints the requirements in pyproject.toml of the named extras, or of the build.

pip installs a project's dependencies only together with the project, whose layer changes with every
commit. For a workspace member this prints the member's requirements.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project_file: Path, extras: list[str]) -> list[str]:
    """Returns the requirements of the project and `extras`, in pip's format.

    Raises:
        KeyError: the project does not have one of the extras. FileNotFoundError: the folder of a
        member that `extras` require is missing.
    """
    document = tomllib.loads(project_file.read_text(encoding="utf-8"))
    project, members = document["project"], _members(project_file, document)
    requirements: list[str] = list(project["dependencies"])
    for extra in extras:
        for asked in project["optional-dependencies"][extra]:
            name = asked.partition("==")[0]
            requirements += members.get(name, [asked])
    missing = [one for one in requirements if one.partition("==")[0] in _sources(document)]
    if missing:
        raise FileNotFoundError(f"no workspace folder contains {', '.join(missing)}")
    return list(dict.fromkeys(requirements))


def build_requirements(project_file: Path) -> list[str]:
    """Returns the requirements for building the project's wheel."""
    document = tomllib.loads(project_file.read_text(encoding="utf-8"))
    return list(document["build-system"]["requires"])


def _sources(document: dict[str, Any]) -> set[str]:
    """Returns the names of requirements that come from the workspace instead of an index."""
    return set(document.get("tool", {}).get("uv", {}).get("sources", {}))


def _members(project_file: Path, document: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the requirements of each other workspace member, by name."""
    patterns = document.get("tool", {}).get("uv", {}).get("workspace", {}).get("members", [])
    files = (
        file
        for pattern in patterns
        for file in project_file.parent.glob(f"{pattern}/pyproject.toml")
    )
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {project["name"]: project["dependencies"] for project in projects}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("project_file", type=Path)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--build", action="store_true", help="print the build requirements instead")
    options = parser.parse_args()
    lines = (
        build_requirements(options.project_file)
        if options.build
        else requirements(options.project_file, options.extras)
    )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
