"""Prints the requirements of pyproject.toml with the named extras, for a layer of an image.

pip installs a project's dependencies only together with the project, whose layer changes with every
commit.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path


def requirements(project_file: Path, extras: list[str]) -> list[str]:
    """The requirements of the project and of `extras`, as pip reads them.

    Raises:
        KeyError: the project has no such extra.
    """
    project = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


def main() -> int:
    """Prints one requirement a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("project_file", type=Path)
    parser.add_argument("extras", nargs="*")
    options = parser.parse_args()
    print("\n".join(requirements(options.project_file, options.extras)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
