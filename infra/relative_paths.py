"""Makes the paths of editable packages relative to site-packages: `relative_paths.py VENV`.

Python versions before 3.13 decode `.pth` files using the locale's encoding. If the clone's path
contains characters missing from that encoding, such as `ü` with `LC_ALL=C`, none of the
environment's programs will start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(venv: str) -> None:
    """Rewrites the `.pth` files for this repository's packages."""
    for file in Path(venv).glob("lib/python3*/site-packages/_editable_impl_penstock*.pth"):
        folder = file.parent.absolute()
        paths = dict.fromkeys(file.read_text(encoding="utf-8").split("\n"))
        lines = [os.path.relpath(folder / path, folder) + "\n" for path in paths if path]
        file.write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1])
