"""A virtual environment for each peer, in var/peers/, created from its pinned requirements."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from shared.errors import Unavailable

FOLDER = Path("var/peers")
INSTALL_LIMIT_S = 1800.0


def programs_of(requirements: Path) -> Path:
    """Returns the `bin` folder of an environment with exactly `requirements`, created if missing.

    Raises:
        Unavailable: the environment can't be created. The message includes the end of pip's output.
    """
    environment = (FOLDER / requirements.parent.name).resolve()
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = environment / "installed-requirements.sha256"
    if not (stamp.is_file() and stamp.read_text(encoding="ascii") == wanted):
        _make(environment, requirements)
        stamp.write_text(wanted, encoding="ascii")
    return environment / "bin"


def _make(environment: Path, requirements: Path) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    # The list is complete, so pip doesn't need to resolve it; some peers require more than any one
    # index has.
    install = [
        str(environment / "bin" / "pip"),
        "install",
        "--quiet",
        "--no-deps",
        "-r",
        str(requirements),
    ]
    for command in ([sys.executable, "-m", "venv", str(environment)], install):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(
                f"{environment.name}: can't create the environment: {error}"
            ) from error
        if done.returncode:
            words = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise Unavailable(
                f"{environment.name}: can't create the environment: {' '.join(words)}"
            )
