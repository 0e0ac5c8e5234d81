"""How this Python was built, which decides what processes cost that spend their time in it.

As a program it ends with 0 if `make setup` may make .venv of this Python: it is of a version that
the lock is for, was built with optimizations, makes environments, and has the headers that torch
compiles against.

It imports the standard library only.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)


def is_optimized() -> bool:
    """True if this Python was built by the profile of a run, as those of Docker, Debian and uv are.

    A plain `configure`, which pyenv uses, leaves that out. Its source:
    https://docs.python.org/3/using/configure.html#performance-options
    """
    arguments = sysconfig.get_config_var("CONFIG_ARGS")
    # Windows has no such variable, and Debian's rules apply the profile without the argument.
    return (
        arguments is None or "--enable-optimizations" in arguments or "--prefix=/usr'" in arguments
    )


def _suits() -> bool:
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    makes_environments = importlib.util.find_spec("ensurepip") is not None
    is_known = OLDEST <= sys.version_info[:2] <= NEWEST
    return is_known and has_headers and makes_environments and is_optimized()


if __name__ == "__main__":
    sys.exit(not _suits())
