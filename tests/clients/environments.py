"""An environment for each client, under var/clients.

It is created once, and recreated when the pinned versions change.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.clients import NODE, REQUIREMENTS, Client

ROOT = Path("var/clients").absolute()
INSTALL_LIMIT_S = 900.0
PYTHON_FLOOR = "3.11"
"""The oldest Python that the locks support."""


class CannotInstall(Exception):
    """A client's environment can't be created. The message explains why."""


def folder_of(client: Client) -> Path:
    """A client's environment folder, whether or not it exists yet."""
    return ROOT / client.name


def is_ready(client: Client) -> bool:
    """True if the environment exists and matches the pinned versions."""
    stamp = folder_of(client) / "installed"
    return stamp.exists() and stamp.read_text() == _stamp(client)


def install(client: Client) -> None:
    """Creates a client's environment unless it is ready.

    Raises:
        CannotInstall: node is missing or too old, or the installer failed.
    """
    if not is_ready(client):
        _install_anew(client)
    if client.language == "node":
        _check_node(client)


def _install_anew(client: Client) -> None:
    if client.language == "node" and shutil.which("npm") is None:
        raise CannotInstall("npm is not on this machine")
    folder = folder_of(client)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.language == "node":
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE / client.name / name, folder)
        _run(["npm", "ci", "--no-audit", "--no-fund"], folder)
    else:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], ROOT)
        python = str(folder / "bin/python")
        _run([*_uv(), "pip", "sync", "--require-hashes", "--python", python, str(client.pinned)])
    (folder / "installed").write_text(_stamp(client))


def command_of(client: Client) -> list[str]:
    """The command that runs a client's checks in its environment, from the repository root."""
    if client.language == "python":
        return [str(folder_of(client) / "bin/python"), *module_of(client)]
    # Node looks for packages in the script's folder.
    for script in NODE.glob("*.mjs"):
        shutil.copy(script, folder_of(client))
    return [_node_of(client), str(folder_of(client) / f"{client.script}.mjs")]


def module_of(client: Client) -> list[str]:
    """The Python arguments that run a client's checks."""
    return ["-m", f"tests.clients.python.{client.script}"]


def lock(client: Client) -> None:
    """Updates a client's pinned versions.

    Raises:
        CannotInstall: no set of versions satisfies the requirements, or the tool failed.
    """
    if client.language == "node":
        options = ["--package-lock-only", "--omit-lockfile-registry-resolved", "--no-audit"]
        _run(["npm", "install", *options], NODE / client.name)
        return
    options = ["--universal", "--python-version", PYTHON_FLOOR, "--generate-hashes"]
    options += ["--no-annotate", "--no-emit-index-url", "--upgrade"]
    options += ["--custom-compile-command", "make clients-lock"]
    wanted = str(REQUIREMENTS / f"{client.name}.in")
    _run([*_uv(), "pip", "compile", *options, "--output-file", str(client.pinned), wanted])


def _node_of(client: Client) -> str:
    """The node pinned with a client, if there is one for this machine, otherwise the machine's own
    node.
    """
    pinned = sorted(folder_of(client).glob("node_modules/node-*/bin/node"))
    return str(pinned[0]) if pinned else "node"


def _check_node(client: Client) -> None:
    package = json.loads((NODE / client.name / "package.json").read_text())
    wanted = int(package["engines"]["node"].removeprefix(">="))
    found = _run([_node_of(client), "--version"]).strip()
    if int(found.removeprefix("v").partition(".")[0]) < wanted:
        raise CannotInstall(f"node {wanted} or later is needed; this one is {found}")


def _stamp(client: Client) -> str:
    """A stamp that changes whenever the pinned versions or the Python version change."""
    digest = hashlib.sha256(client.pinned.read_bytes()).hexdigest()
    return f"{digest} {platform.python_version()}"


def _uv() -> list[str]:
    return [sys.executable, "-m", "uv", "--quiet"]


def _run(command: list[str], folder: Path | None = None) -> str:
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{command[0]}: {error}") from error
    if done.returncode:
        raise CannotInstall(f"{' '.join(command[:4])} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout
