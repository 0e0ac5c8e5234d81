"""Prints the requirements of pyproject.toml with the named extras, or those of its build.

pip installs a project's dependencies only together with the project, whose layer changes with every
commit. For a member of the workspace this prints what the member requires.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project_file: Path, extras: list[str]) -> list[str]:
    """The requirements of the project and of `extras`, as pip reads them.

    Raises:
        KeyError: the project has no such extra.
        FileNotFoundError: the folder of a member that `extras` require is not there.
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
        raise FileNotFoundError(f"no folder of the workspace has {', '.join(missing)}")
    return list(dict.fromkeys(requirements))


def build_requirements(project_file: Path) -> list[str]:
    """The requirements of what builds the project's wheel."""
    document = tomllib.loads(project_file.read_text(encoding="utf-8"))
    return list(document["build-system"]["requires"])


def _sources(document: dict[str, Any]) -> set[str]:
    """The names of what comes from the workspace and not from an index."""
    return set(document.get("tool", {}).get("uv", {}).get("sources", {}))


def _members(project_file: Path, document: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the requirements of each other member of the workspace, by its name."""
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
    parser.add_argument("--build", action="store_true", help="what builds the wheel, instead")
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
