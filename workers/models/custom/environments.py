"""Virtual environments for classes with custom packages.

uv creates an environment from the class's requirements and cog, without any of our packages. Its
name is a digest of everything that determines its contents: the requirements, the interpreter, and
the Cog version. Models with identical requirements therefore share an environment, and a changed
requirement creates a new one. An environment is created next to its final location and then
renamed, so any existing environment is complete. Environments in a worker image are created by the
same function when the image is built (infra/docker/worker.Dockerfile).

Building a package from source runs the package's own code. That code runs under the same
restrictions as the class: without our variables or any capabilities, and with write access only to
the environment and uv's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from uv import find_uv_bin

from shared.errors import ConfigurationError
from shared.settings import ClassSettings, read_settings
from workers.models.custom.sources import OVERRIDES, AskedPackages, read_packages

INSTALL_LIMIT_S = 1800.0
"""Time limit per installation. torch with the CUDA libraries is 3 GB."""
FIND_LIMIT_S = 60.0
"""Time limit for finding an interpreter, and for asking it for its version."""
WAIT_S = 0.1
MAX_INCLUDED_FILES = 20
LAST_LINES = 20
_INCLUDED = re.compile(r"\s*(?:-r|-c|--requirements?|--constraints?)(?:\s+|=)?(?P<path>[^\s#]+)")
_LOCAL = re.compile(r"\s*(?:-e\b|--editable\b|\.{0,2}/|file:)|\s*[^#]*@\s*file:")
_COG = re.compile(r"\s*cog\s*(?:\[[^\]]*\]\s*)?[=<>!~@]", re.IGNORECASE)
_PASSED_ON = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TMPDIR|XDG_\w+|UV_\w+|SSL_CERT_\w+|NETRC|"
    r"(?:HTTP|HTTPS|ALL|NO)_PROXY|(?:http|https|all|no)_proxy"
)
"""The variables passed to uv. None of them are from our own environment."""
_UNHURRIED = {"UV_COMPILE_BYTECODE_TIMEOUT": "0"}
"""Disables uv's one-minute timeout, because torch takes that long on a busy machine.
INSTALL_LIMIT_S still applies.
"""
_PRINT_VERSION = "import platform; print(platform.python_version())"
_ROOT = Path(__file__).resolve().parents[3]
_CONFINED = (
    "import os, sys; sys.path.append(sys.argv[1]); "
    "from workers.models.custom.runner.confinement import run_confined; "
    "run_confined(sys.argv[2].split(os.pathsep), sys.argv[3:])"
)


class Interpreter(NamedTuple):
    """A Python interpreter for environments: its path and full version."""

    path: str
    version: str


def python_for(folder: Path) -> str:
    """Returns an interpreter that has a class's packages. Creates its environment if it is missing.

    Creating one may take minutes. A class without its own packages runs with our interpreter.

    Raises:
        ConfigurationError: the class's requirements can't be installed. The message ends with uv's
            output.
    """
    folder = folder.resolve()  # uv runs in a different directory
    requested = read_packages(folder)
    if not requested:
        return sys.executable
    base = _interpreter(requested.python_version)
    target = read_settings(ClassSettings).environments_dir.resolve() / _digest(
        folder, requested, base
    )
    if not _is_whole(target):
        _make(folder, requested, base, target)
    return str(target / "bin" / "python")


def unmet(folder: Path) -> list[str]:
    """Describes which of the class's environment requests can't be met here."""
    requested = read_packages(folder)
    return [*_find_other_cog(requested), *_find_other_python(requested)]


def _find_other_cog(packages: AskedPackages) -> list[str]:
    lines = list(packages.lines)
    if packages.file is not None:
        lines += packages.file.read_text(encoding="utf-8", errors="replace").splitlines()
    ours = f"cog=={version('cog')}"
    pinned = [line.split("#")[0].strip() for line in lines if _COG.match(line)]
    return [
        f"{requirement} has no effect here: the class runs with {ours}"
        for requirement in pinned
        if requirement != ours
    ]


def _find_other_python(packages: AskedPackages) -> list[str]:
    ours = _our_python()
    if not packages.python_version or _has_version(ours, packages.python_version):
        return []
    if not packages:
        reason = f"a class without custom packages runs with the worker's Python, {ours.version}"
    elif _has_version(_interpreter(packages.python_version), packages.python_version):
        return []
    else:
        reason = f"this Python is not installed on this machine; the class runs with {ours.version}"
    return [
        f"cog.yaml: build.python_version {packages.python_version} has no effect here: {reason}"
    ]


def _our_python() -> Interpreter:
    return Interpreter(sys.executable, platform.python_version())


def _has_version(python: Interpreter, wanted: str) -> bool:
    parts = wanted.split(".")
    return python.version.split(".")[: len(parts)] == parts


def _interpreter(wanted: str) -> Interpreter:
    """Returns a Python interpreter of this version, or ours if the machine doesn't have one."""
    ours = _our_python()
    if not wanted or _has_version(ours, wanted):
        return ours
    command = [find_uv_bin(), "python", "find", "--no-project", "--no-python-downloads", wanted]
    path = _read_output(command)
    python_version = path and _read_output([path, "-I", "-c", _PRINT_VERSION])
    return Interpreter(path, python_version) if python_version else ours


def _read_output(command: Sequence[str]) -> str:
    """Returns what a short program prints, or an empty string if it fails."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            env=_variables(),
            cwd="/",
            timeout=FIND_LIMIT_S,
        ).stdout.strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def _digest(folder: Path, packages: AskedPackages, base: Interpreter) -> str:
    files = _read_included(folder, packages.file) if packages.file else {}
    if (overrides := folder / OVERRIDES).is_file():
        files |= _read_included(folder, overrides)
    whole = {
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "lines": packages.lines,
        "python": [base.version, os.path.realpath(base.path), platform.machine()],
        "cog": version("cog"),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def _read_included(folder: Path, first: Path) -> dict[str, bytes]:
    """Returns the contents, by name, of a requirements file and the files it includes."""
    contents: dict[str, bytes] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop().resolve()
        name = os.path.relpath(path, folder.resolve())
        if name in contents:
            continue
        if len(contents) >= MAX_INCLUDED_FILES:
            raise ConfigurationError(
                f"{first}: must not include more than {MAX_INCLUDED_FILES} files", field="source"
            )
        contents[name] = data = _read(path, first)
        for line in data.decode(errors="replace").splitlines():
            if _LOCAL.match(line):
                raise ConfigurationError(
                    f"{path}: {line.strip()[:200]}: paths can't be installed; import the package "
                    "from the class's folder, or specify a version and an index (--find-links)",
                    field="source",
                )
            included = _INCLUDED.fullmatch(line.split(" #")[0].rstrip())
            if included and "://" not in included["path"]:
                waiting.append(path.parent / included["path"])
    return contents


def _read(path: Path, first: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{first}: it includes {path}: {error.strerror}", field="source"
        ) from error


def _is_whole(target: Path) -> bool:
    """Returns whether an environment is complete and its base interpreter still exists."""
    return (target / "bin" / "python").exists()


def _make(folder: Path, packages: AskedPackages, base: Interpreter, target: Path) -> None:
    until_s = time.monotonic() + INSTALL_LIMIT_S
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock_environment(target.parent / f".{target.name}.lock", until_s, folder):
            if _is_whole(target):
                return  # another process was faster
            for leftover in target.parent.glob(f".{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)  # from a process that was killed
            with _partial(target) as partial:
                _install(folder, packages, base, partial, until_s)
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: its packages are not in {target.parent} and can't be installed "
            f"there: {error.strerror or error} (PENSTOCK_ENVIRONMENTS_DIR; for worker "
            "images, install them during the build with --build-context classes=DIR)",
            field="source",
        ) from error


@contextlib.contextmanager
def _lock_environment(path: Path, until_s: float, folder: Path) -> Iterator[None]:
    """Holds an environment's lock during the block.

    The system releases the lock if this process is killed.
    """
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise ConfigurationError(
                        f"{folder}: another process has been installing its packages for more than "
                        f"{INSTALL_LIMIT_S:g} s",
                        field="source",
                    ) from None
                time.sleep(WAIT_S)
        yield


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[Path]:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    partial.chmod(0o755)  # a worker may run as a different user than the one that built its image
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _install(
    folder: Path, wanted: AskedPackages, base: Interpreter, partial: Path, until_s: float
) -> None:
    print(f"{folder}: installing its packages", file=sys.stderr, flush=True)
    cache = Path(os.environ.get("UV_CACHE_DIR") or partial.parent / "cache").resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-install-") as scratch:
        variables = {**_UNHURRIED, **_variables(), "UV_CACHE_DIR": str(cache), "TMPDIR": scratch}
        writable = os.pathsep.join((str(partial), str(cache), scratch))
        uv = find_uv_bin()
        # Package scripts find the interpreter even after the environment is renamed.
        new = [uv, "venv", "--quiet", "--no-project", "--relocatable", "--no-python-downloads"]
        python = str(partial / "bin" / "python")
        packages = [*wanted.lines, *(["--requirement", str(wanted.file)] if wanted.file else [])]
        if (overrides := folder / OVERRIDES).is_file():  # replaces packages' requirements
            packages += ["--overrides", str(overrides)]
        ours = Path(scratch, "cog.txt")  # even if its requirements or a package pin another version
        ours.write_text(f"cog=={version('cog')}\n")
        packages += ["--overrides", str(ours)]
        add = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
        for command in (
            [*new, "--allow-existing", "--python", base.path, str(partial)],
            [*add, f"cog=={version('cog')}", *packages],
        ):
            _run(folder, [_CONFINED, str(_ROOT), writable, *command], variables, until_s)


def _run(folder: Path, words: Sequence[str], variables: Mapping[str, str], until_s: float) -> None:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", *words],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",  # uv also reads the settings of an enclosing project
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == 0:
            return
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    ended = f"timed out after {INSTALL_LIMIT_S:g} s" if status is None else "failed"
    raise ConfigurationError(
        "\n  ".join([f"{folder}: installing its packages {ended}; uv's output:", *lines]),
        field="source",
    )


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
