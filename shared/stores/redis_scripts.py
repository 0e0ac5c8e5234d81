"""Lua scripts, which Redis runs whole: no other command comes between their reads and writes.

Each script is a .lua file, or several: functions first, then the script that calls them.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import PurePosixPath
from typing import NamedTuple


class Script(NamedTuple):
    """A script, and the digest by which Redis knows it once it has run it (EVALSHA)."""

    text: str
    digest: str


def load_script(*files: str) -> Script:
    """Reads the files of a script and joins them in the given order.

    Args:
        files: paths from the top of the checkout, for example `shared/stores/record_claim.lua`.
    """
    text = "\n".join(_read(PurePosixPath(file)) for file in files)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(file: PurePosixPath) -> str:
    package = ".".join(file.parent.parts)
    return resources.files(package).joinpath(file.name).read_text(encoding="utf-8")
