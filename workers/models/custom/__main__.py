"""`python -m workers.models.custom install|refresh FOLDER`, for use without `penstock`.

`install` is used to build the worker image, as `penstock models install` does. `penstock up`
inspects each class with `refresh`, in a process that it can kill.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shared.errors import PenstockError
from workers.models.custom.checking import check_class
from workers.models.custom.environments import python_for


def main(words: Sequence[str]) -> int:
    """Returns 0, 1 if the folder's class can't be served, or 2 if the arguments are invalid."""
    try:
        match words:
            case ["install", folder]:
                print(f"{folder}: runs with {python_for(Path(folder))}")
            case ["refresh", folder]:
                for line in check_class(Path(folder), only_if_changed=True):
                    print(line)
            case _:
                print("usage: python -m workers.models.custom install|refresh FOLDER")
                return 2
    except PenstockError as error:
        print(f"penstock: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
