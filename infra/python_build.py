"""Checks how this Python was built, which affects the speed of CPU-bound Python code.

When run as a program, it exits with 0 if `make setup` may create .venv from this Python: the lock
supports its version, it was built with optimizations, it can create environments, and it includes
the headers that torch compiles against.

It imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)


def is_optimized() -> bool:
    """True if this Python was built with profile-guided optimization, as Docker, Debian and uv do.

    A plain `configure`, which pyenv uses, omits that. Source:
    https://docs.python.org/3/using/configure.html#performance-options
    """
    arguments = sysconfig.get_config_var("CONFIG_ARGS")
    # Windows does not have this variable, and Debian's build rules apply the profile without the
    # argument.
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
