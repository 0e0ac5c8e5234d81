"""Prints the requirements from pyproject.toml, for the named extras or for the build.

pip can install a project's dependencies only together with the project itself, whose image layer
changes with every commit. For a workspace member, this prints the member's requirements.
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
        for requirement in project["optional-dependencies"][extra]:
            name = requirement.partition("==")[0]
            requirements += members.get(name, [requirement])
    of_workspace = document.get("tool", {}).get("uv", {}).get("sources", {})
    if missing := [
        requirement
        for requirement in requirements
        if requirement.partition("==")[0] in of_workspace
    ]:
        raise FileNotFoundError(f"no workspace folder contains {', '.join(missing)}")
    return list(dict.fromkeys(requirements))


def _members(project_file: Path, document: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the requirements of each other workspace member, keyed by name."""
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
    if options.build:
        document = tomllib.loads(options.project_file.read_text(encoding="utf-8"))
        print("\n".join(document["build-system"]["requires"]))
    else:
        print("\n".join(requirements(options.project_file, options.extras)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
