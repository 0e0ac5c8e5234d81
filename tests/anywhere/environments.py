"""A machine's conditions, and the environments that combine them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.local.ports import Ports
from tests.anywhere.launcher import enter_mounts, mount_memory

ORDINARY_USER = 23_456
"""Has no name and no entry in /etc/passwd."""
SMALL_MEMORY_MB = 64
OPEN_FILES = 1024
BUSY_LOOPS = 4
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "ld", "as", "rustc", "cargo", "cmake")
DEAD_PROXY = "http://127.0.0.1:9"
"""No machine runs a server on port 9 (discard) these days."""
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")
NO_PROXY_VARIABLES = ("NO_PROXY", "no_proxy", "no_grpc_proxy")


@dataclass
class Machine:
    """A machine as the steps see it.

    Attributes:
        base: folder for everything that an environment needs.
        home: value of `HOME`, or None if the variable is not set.
        variables: environment variables for all steps.
        step_variables: environment variables for all steps except `make setup`.
        options: launcher options for all steps.
        step_options: launcher options for all steps except `make setup`.
        busy_loops: number of busy-looping processes to run alongside the steps, on their cores.
        is_in_memory: True if the clone is on a separate, in-memory file system.
    """

    base: Path
    folder: Path
    home: Path | None
    variables: dict[str, str] = field(default_factory=dict)
    step_variables: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    step_options: dict[str, Any] = field(default_factory=dict)
    busy_loops: int = 0
    is_in_memory: bool = False

    @property
    def user(self) -> int:
        return int(self.options.get("user", os.getuid()))


def set_ordinary_user(machine: Machine) -> None:
    if os.geteuid() == 0:
        machine.options["user"] = ORDINARY_USER


def set_folder_name(machine: Machine) -> None:
    machine.folder = machine.base / "Büro für Übungen" / "penstock"


def mount_folder(machine: Machine) -> None:
    machine.folder = machine.base / "memory" / "penstock"
    machine.is_in_memory = True


def set_proxy(machine: Machine) -> None:
    machine.step_variables |= dict.fromkeys(PROXY_VARIABLES, DEAD_PROXY)


def remove_home(machine: Machine) -> None:
    machine.home = machine.base / "missing"


def make_home_read_only(machine: Machine) -> None:
    assert machine.home is not None
    machine.options["read_only"] = str(machine.home)


def set_umask(machine: Machine) -> None:
    machine.options["umask"] = 0o077


def set_locale(machine: Machine) -> None:
    machine.variables |= {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kolkata"}


def limit_open_files(machine: Machine) -> None:
    machine.options["open_files"] = OPEN_FILES


def shrink_shared_memory(machine: Machine) -> None:
    machine.options["shared_memory_mb"] = SMALL_MEMORY_MB


def remove_shared_memory(machine: Machine) -> None:
    machine.options["shared_memory_mb"] = 0


def refuse(*features: str) -> Callable[[Machine], None]:
    """Blocks these features' system calls, named as in the launcher's `refuses`."""

    def add(machine: Machine) -> None:
        machine.options["refuses"] = [*machine.options.get("refuses", ()), *features]

    return add


def hide_processes(machine: Machine) -> None:
    machine.options["hides_processes"] = True


def set_variables_of_others(machine: Machine) -> None:
    """Another project's virtual environment, and its packages on PYTHONPATH under our names."""
    other = machine.base / "other"
    for name in ("api", "infra", "shared", "tests", "workers", "yaml"):
        package = other / "lib" / name
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise ImportError('of another project')\n")
    programs = other / "venv" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("pip", "pytest", "ruff", "mypy", "uv", "penstock"):
        (programs / name).write_text("#!/bin/sh\necho of another project >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    machine.variables |= {
        "PYTHONPATH": f"{other / 'lib'}:/missing",
        "PYTHONSAFEPATH": "1",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "VIRTUAL_ENV": str(programs.parent),
        "PATH": f"{programs}:{machine.variables['PATH']}",
    }


def remove_compilers(machine: Machine) -> None:
    """Keeps every program on PATH except compilers."""
    programs = machine.base / "programs"
    programs.mkdir(exist_ok=True)
    for folder in machine.variables["PATH"].split(":"):
        for program in Path(folder).glob("*"):
            link = programs / program.name
            is_compiler = any(name in COMPILERS for name in program.name.split("-"))
            if not is_compiler and not link.is_symlink():
                link.symlink_to(program)
    machine.variables["PATH"] = str(programs)


def take_ports(machine: Machine) -> None:
    ports = Ports()
    own = [ports.api, ports.pubsub, ports.bigquery, ports.redis, ports.functions, ports.metrics]
    machine.step_options["ports"] = [*own, *list(ports.health)[:4]]


def use_one_core(machine: Machine) -> None:
    machine.step_options["cores"] = [max(os.sched_getaffinity(0))]


def add_busy_loops(machine: Machine) -> None:
    machine.busy_loops = BUSY_LOOPS


CONDITIONS: Mapping[str, Callable[[Machine], None]] = {
    "user": set_ordinary_user,
    "spaces": set_folder_name,
    "memory": mount_folder,
    "proxy": set_proxy,
    "no-home": remove_home,
    "read-only-home": make_home_read_only,
    "umask": set_umask,
    "locale": set_locale,
    "open-files": limit_open_files,
    "small-shm": shrink_shared_memory,
    "no-shm": remove_shared_memory,
    "no-namespaces": refuse("namespaces"),
    "no-landlock": refuse("landlock"),
    "no-ipv6": refuse("ipv6"),
    "hidepid": hide_processes,
    "others": set_variables_of_others,
    "no-compiler": remove_compilers,
    "ports": take_ports,
    "one-core": use_one_core,
    "busy": add_busy_loops,
}
"""Functions that each put a machine into one condition, keyed by the condition's name."""
ENVIRONMENTS: Mapping[str, Sequence[str]] = {
    "root": (),
    "laptop": ("user", "spaces", "proxy", "umask", "locale"),
    "other-disk": ("memory", "small-shm", "open-files", "ports"),
    "no-home": ("user", "no-home", "umask"),
    "old-kernel": ("no-namespaces", "no-landlock", "no-shm"),
    "gvisor": (
        *("user", "read-only-home", "no-compiler", "others"),
        *("no-namespaces", "no-landlock", "no-ipv6", "hidepid", "small-shm"),
    ),
    "other-projects": ("user", "read-only-home", "no-compiler", "others", "no-ipv6"),
    "busy-core": ("user", "one-core", "busy"),
}
"""Each environment's conditions. All clones are under the folder for temporary files."""


def prepare_machine(base: Path, conditions: Sequence[str]) -> Machine:
    """Returns a machine under these conditions. Its folders exist and belong to its user.

    Raises:
        CannotRestrict: this machine can't be put into one of the conditions.
    """
    home = base / "home"
    path = os.environ.get("PATH", "/usr/bin:/bin")
    reachable = [folder for folder in path.split(":") if folder and is_reachable(Path(folder))]
    machine = Machine(base, base / "penstock", home, {"PATH": ":".join(reachable)})
    for name in (name for name in CONDITIONS if name in conditions):
        CONDITIONS[name](machine)
    for folder in (base, home, machine.folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if machine.home == home and "read_only" not in machine.options:
        copy_compiled_code(home)
    if os.geteuid() == 0:
        for place in (base, machine.folder.parent, home, *home.rglob("*")):
            os.chown(place, machine.user, machine.user)
    base.chmod(0o755)
    if machine.is_in_memory:
        enter_mounts()
        mount_memory(str(machine.folder.parent))
    return machine


def copy_compiled_code(home: Path) -> None:
    """Copies the SQL analyzer's machine code into a home, where a different clone would have left
    it.

    Compiling it takes 42 s of CPU time. Environments without a writable home folder compile it.
    """
    own_cache = Path(os.environ.get("HOME", "/missing"), ".cache")
    cache = Path(os.environ.get("XDG_CACHE_HOME", own_cache), "wasmtime")
    if cache.is_dir():
        unfinished = shutil.ignore_patterns("*wip*")
        shutil.copytree(cache, home / ".cache" / "wasmtime", dirs_exist_ok=True, ignore=unfinished)


def is_reachable(folder: Path) -> bool:
    """Returns whether any user may run the programs in a folder."""
    return folder.is_dir() and all(place.stat().st_mode & 1 for place in (folder, *folder.parents))


def usual_variables() -> Iterator[tuple[str, str]]:
    """This process's variables that any user's shell would have: indexes, certificates."""
    for name, value in os.environ.items():
        if name.startswith(("PIP_", "UV_", "SSL_")) and name != "UV_CACHE_DIR":
            yield name, value


def cache_variables(base: Path) -> dict[str, str]:
    """Folders for installers' downloads, shared by one user's environments."""
    return {"UV_CACHE_DIR": str(base / "uv"), "PIP_CACHE_DIR": str(base / "pip")}


def find_python() -> str:
    """The interpreter that runs the launcher, which other users can run too."""
    for name in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(name).exists():
            return name
    return shutil.which("python3") or "python3"
