"""The user who runs a command, as named in audit logs."""

from __future__ import annotations

import getpass
import os


def current_user() -> str:
    """Returns `user NAME`, or `user UID` if the user has no name, as in many containers."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # OSError since Python 3.13
        return f"user {os.getuid()}"
