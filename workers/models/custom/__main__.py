"""`python -m workers.models.custom install|refresh FOLDER`: processes that `penstock` is not in.

The image of workers is built by `install`, as `penstock models install` does it. `penstock up`
inspects each class by `refresh`, in a process that it can kill.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shared.errors import PenstockError
from workers.models.custom.checking import is_current, show_inspection, write_interface
from workers.models.custom.environments import python_for


def main(words: Sequence[str]) -> int:
    """Returns 0, 1 if the class of the folder can't be served, or 2 for other words."""
    try:
        match words:
            case ["install", folder]:
                print(f"{folder}: runs with {python_for(Path(folder))}")
            case ["refresh", folder]:
                refresh(Path(folder))
            case _:
                print("usage: python -m workers.models.custom install|refresh FOLDER")
                return 2
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def refresh(folder: Path) -> None:
    """Inspects a class whose sources have changed, and prints notes. Installs its packages."""
    if is_current(folder):
        python_for(folder)
    else:
        write_interface(folder, show_inspection(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
