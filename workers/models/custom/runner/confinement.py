"""Drops the runner's privileges before it runs a class's code.

Linux only, on a best-effort basis.

The runner exits if its parent does. It is the first process that the system kills when memory runs
low. It has no capabilities, so it can't look into other processes even if it runs as root: the
system lets a process read another's memory and `/proc/<pid>/environ` only if the other's
capabilities don't exceed its own (ptrace(2), "Ptrace access mode checking"). Its `/tmp` is private,
and it can write only there and under its scratch folder.

- Landlock (landlock(7)) prevents writing anywhere else. Reading is not restricted. A restricted
process can't access processes outside its restrictions, so it can't read their
`/proc/<pid>/environ` or their memory, no matter which user owns them. Starting with ABI 6 (Linux
6.12), it also can't send those processes signals or connect to their abstract Unix sockets. Child
processes inherit these restrictions, which can't be undone.
- A mount namespace (mount_namespaces(7)) makes `/tmp` a private folder that disappears along with
the runner, because classes write to fixed names such as `/tmp/out.png`. This requires the
corresponding capability, or user namespaces, which not all systems grant to everyone
(user_namespaces(7)).

- In such a namespace, the class's folder is mounted below the class's view of it (overlayfs,
available to everyone since Linux 5.11), so the class may change any file, and its changes are
stored in its scratch folder. The view also appears at `/src`, where Cog puts the class's folder.

`run_confined` does the same for another program, such as a package installer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_CAPBSET_DROP = 1, 15, 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
NAME = b"penstock-class"
SHARED_MEMORY = "/dev/shm"
"""Shared memory for multi-process libraries."""
DEVICES = "/dev"
"""Device files are writable because CUDA writes to /dev/nvidia*. No rule covers ioctl, so all
ioctls are allowed (LANDLOCK_ACCESS_FS_IOCTL_DEV is not handled), and no rule covers reading,
because CUDA reads /proc/driver/nvidia and /sys.
"""
OWN_THREADS = "/proc/self/task"
"""CUDA names its threads in this folder. CUDA fails to start if it can't do so
(CUDA_ERROR_OPERATING_SYSTEM).

The folder contains only the threads of the process itself, not its child processes' threads.
"""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System call numbers, which are the same on all architectures."""
_VERSION = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_CONNECT_TCP = 1 << 1
_NET_FROM_ABI = 4
_PORTS = range(1 << 16)
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1
_SIGNALS_FROM_ABI = 6

TMP = "/tmp"
MAX_SEARCHED_ENTRIES = 10_000
"""Maximum number of files and folders to search for symbolic links."""
MAX_LINKS = 40
"""Maximum number of links on the path to a file, as in Linux (path_resolution(7))."""
_PR_SET_DUMPABLE = 4
_NEW_MOUNTS, _NEW_USER = 0x0002_0000, 0x1000_0000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_NO_SUID, _NO_DEV, _NO_EXEC, _NO_ATIME, _NO_DIR_ATIME = 1 << 1, 1 << 2, 1 << 3, 1 << 10, 1 << 11
_KEPT_FLAGS = _NO_SUID | _NO_DEV | _NO_EXEC | _NO_ATIME | _NO_DIR_ATIME
"""Mount options that must be kept in a user namespace. statvfs uses the same numbers."""
_ST_RELATIME, _RELATIME = 1 << 12, 1 << 21


VIEW = "src"
"""The subfolder of the scratch folder that holds the class's private view of its folder."""
SRC = "/src"
"""The class's folder in Cog's containers."""
_DETACH = 1 << 1
_MOUNT_SETATTR = 442
"""The system call's number, which is the same on all architectures."""
_AT_FDCWD, _AT_RECURSIVE = -100, 1 << 15
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


class Confined(NamedTuple):
    """The result of confining this process.

    Attributes:
        missing: descriptions of the confinement features that this system doesn't support.
        view: path of the class's view of its folder: `/src` if possible.
    """

    missing: list[str]
    view: str


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_fs", ctypes.c_uint64),
        ("handled_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _NetPort(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def confine(
    scratch: str,
    read_only: Sequence[str] = (),
    followed: Sequence[str] = (),
    denied_ports: Sequence[int] = (),
    max_file_bytes: int = 0,
    folder: str = "",
) -> Confined:
    """Gives up all privileges that a class's code doesn't need.

    Args:
        scratch: the folder under which the process may write. It contains the view.
        read_only: folders the process reads, which stay in place if they are under `/tmp`.
        followed: more such folders. The targets of their symbolic links stay in place as well.
        denied_ports: TCP ports the process may not connect to.
        max_file_bytes: maximum size of a file the process writes. 0 means unlimited.
        folder: the class's folder, which is mounted below the view. Empty if there is no folder.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    if max_file_bytes:
        _, allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit_bytes = max_file_bytes if allowed < 0 else min(max_file_bytes, allowed)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    _set(_PR_SET_NAME, ctypes.create_string_buffer(NAME))
    _set(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    missing = []
    view = str(Path(scratch, VIEW))
    places = find_places([scratch, *read_only], followed)
    if not take_private_tmp(Path(scratch, "tmp"), places):
        missing.append("no mount namespace: it shares /tmp with other processes and has no /src")
    elif folder:
        # Without this, the class has links to large files and can't write to those files.
        lay_below(Path(view), Path(folder), Path(scratch, "work"))
        view = SRC if show_at_src(Path(view), Path(scratch, "root")) else view
    missing += _give_up([scratch, SHARED_MEMORY, TMP, view])
    if denied_ports and not deny_tcp(denied_ports):
        missing.append("no Landlock 4 (Linux 6.7): it can connect to our services")
    return Confined(missing, view)


def run_confined(writable: Sequence[str], command: Sequence[str]) -> None:
    """Replaces this process with a program that has no capabilities, confined to these folders."""
    _set(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    _give_up(writable)
    os.execv(command[0], list(command))


def _give_up(writable: Sequence[str]) -> list[str]:
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    for number in range(_CAPABILITIES):
        _set(_PR_CAPBSET_DROP, number)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), (_Sets * 2)())
    abi = restrict_writes(writable, files_of=[DEVICES, OWN_THREADS])
    if not abi:
        return [
            "no Landlock: it can write to anything its user may write to, and can see its "
            "user's other processes"
        ]
    if not scopes_signals(abi):
        return [f"Landlock {abi} (Linux before 6.12): it can kill its user's processes"]
    return []


def _set(option: int, value: object) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def abi_version() -> int:
    """Returns the system's Landlock version, or 0 if there is none."""
    return max(0, _call(_CREATE_RULESET, None, 0, _VERSION))


def restrict_writes(folders: Sequence[str], files_of: Sequence[str] = ()) -> int:
    """Allows this process to change files only under these folders.

    `no_new_privs` must be set.

    Args:
        folders: anything under them may be written, created, or removed. Missing folders are
            skipped.
        files_of: folders whose files may be written to, but not created or removed. The folders are
            kept open, because a rule applies to an inode, and /proc recreates an inode once nothing
            has it open.

    Returns:
        The version of Landlock, or 0 if nothing was restricted.
    """
    abi = abi_version()
    if not abi:
        return 0
    writes = _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0)
    handled = writes | _MAKE_AND_REMOVE | (_REFER if abi >= 2 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= _SIGNALS_FROM_ABI else 0
    ruleset = _Ruleset(handled, 0, scoped)
    size = {True: 24, False: 16 if abi >= 4 else 8}[abi >= _SIGNALS_FROM_ABI]
    fd = _call(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    if fd < 0:
        return 0
    try:
        for folder in folders:
            _allow(fd, folder, handled)
        for folder in files_of:
            _allow(fd, folder, writes, stays_open=True)
        return abi if _call(_RESTRICT_SELF, fd, 0) == 0 else 0
    finally:
        os.close(fd)


def deny_tcp(ports: Sequence[int]) -> bool:
    """Keeps this process from connecting to these TCP ports on any machine.

    Landlock supports only lists of allowed ports, so all other ports are allowed one by one, which
    takes 0.2 s. Every rule set, even one that covers only ports, also prevents moving files between
    folders (EXDEV) unless it allows such moves, so this one allows them everywhere.

    Returns:
        True if it succeeded, which requires ABI 4 or later (Linux 6.7).
    """
    if abi_version() < _NET_FROM_ABI:
        return False
    ruleset = _Ruleset(_REFER, _CONNECT_TCP, 0)
    fd = _call(_CREATE_RULESET, ctypes.byref(ruleset), 16, 0)
    if fd < 0:
        return False
    try:
        _allow(fd, "/", _REFER)
        _allow_tcp(fd, set(_PORTS).difference(ports))
        return _call(_RESTRICT_SELF, fd, 0) == 0
    finally:
        os.close(fd)


def _allow_tcp(ruleset: int, ports: Iterable[int]) -> None:
    rule = _NetPort(_CONNECT_TCP, 0)
    call = _syscall()
    # Created only once, because recreating it for each port takes three times as long.
    numbers = [ctypes.c_long(number) for number in (_ADD_RULE, ruleset, _NET_PORT)]
    reference, flags = ctypes.byref(rule), ctypes.c_long(0)
    for port in ports:
        rule.port = port
        call(*numbers, reference, flags)


def scopes_signals(abi: int) -> bool:
    """Returns whether this Landlock version confines signals."""
    return abi >= _SIGNALS_FROM_ABI


def _allow(ruleset: int, folder: str, access: int, *, stays_open: bool = False) -> None:
    try:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError:
        return
    try:
        rule = _PathBeneath(access, fd)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        if not stays_open:
            os.close(fd)


def _call(number: int, *arguments: object) -> int:
    """Makes a system call. Returns -1 on failure, or if this is not Linux."""
    syscall = _syscall()
    if syscall is None:
        return -1
    words = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    return int(syscall(ctypes.c_long(number), *words))


@cache
def _syscall() -> Any:
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (AttributeError, OSError):
        return None
    syscall.restype = ctypes.c_long
    return syscall


class KeptPlaces(NamedTuple):
    """Paths that stay visible when `/tmp` is replaced.

    Attributes:
        paths: real paths of files and folders. Only the first one is writable.
        links: the target of each symbolic link that leads to one of them.
    """

    paths: list[Path]
    links: dict[Path, Path]


def find_places(read: Sequence[str], followed: Sequence[str]) -> KeptPlaces:
    """Resolves these paths, and any links inside the paths in `followed`.

    Folders that links lead to are also searched for links, if they are under `/tmp`. The search
    stops after MAX_SEARCHED_ENTRIES files and folders.
    """
    paths, links = dict[Path, None](), dict[Path, Path]()
    for place in read:
        if real := _resolve(Path(place), links):
            paths[real] = None
    waiting = deque(Path(path) for path in followed)
    roots = set(waiting)
    searched, entries = set[Path](), 0
    while waiting and entries < MAX_SEARCHED_ENTRIES:
        path = waiting.popleft()
        real = _resolve(path, links)
        if real is None or real in searched:
            continue
        paths[real] = None
        searched.add(real)
        if path not in roots and Path(TMP) not in real.parents:
            continue
        for entry in _entries_below(real):
            entries += 1
            if entry.is_symlink():
                waiting.append(Path(entry.path))
            if entries >= MAX_SEARCHED_ENTRIES:
                break
    return KeptPlaces(list(paths), links)


def _resolve(path: Path, links: dict[Path, Path]) -> Path | None:
    """Returns the real path, or None if it doesn't exist, and records any links along the way."""
    real, waiting, followed = Path("/"), deque(path.absolute().parts[1:]), 0
    while waiting:
        part = waiting.popleft()
        step = real.parent if part == ".." else real / part
        try:
            target = step.readlink() if step.is_symlink() else None
        except OSError:
            return None
        if target is None:
            real = step
            continue
        links[step] = target
        followed += 1
        if followed > MAX_LINKS:
            return None
        real = Path("/") if target.is_absolute() else real
        waiting.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
    return real if real.exists() else None


def _entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    waiting = deque([folder])
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.popleft()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))


def take_private_tmp(folder: Path, places: KeptPlaces) -> bool:
    """Mounts a folder at `/tmp` for this process, which must have only one thread.

    Args:
        folder: the new `/tmp`, which is created.
        places: places under `/tmp` that stay at their paths.

    Returns:
        True if it succeeded. If it failed, `/tmp` is unchanged.
    """
    folder.mkdir(mode=0o1777, exist_ok=True)
    writable, *read_only = places.paths
    outermost = _outermost(read_only)
    try:
        _enter_namespace()
        _mount("none", "/", _RECURSIVE | _PRIVATE)
        for path in outermost:
            _show(path, folder, is_writable=False)
        if Path(TMP) in writable.parents:  # last: it may be inside one of the others
            _show(writable, folder, is_writable=True)
        for link, target in places.links.items():
            _link(link, target, folder, [writable, *outermost])
        _mount(str(folder), TMP, _BIND | _RECURSIVE)
    except OSError:
        return False
    return True


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths under `/tmp`, excluding any inside another of the paths."""
    below = [path for path in paths if Path(TMP) in path.parents]
    return [path for path in below if not any(other in path.parents for other in below)]


def _show(path: Path, tmp: Path, *, is_writable: bool) -> None:
    at = tmp / path.relative_to(TMP)
    if path.is_dir():
        at.mkdir(parents=True, exist_ok=True)
    else:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.touch()
    _mount(str(path), str(at), _BIND | (0 if is_writable else _RECURSIVE))
    if not is_writable:
        _make_read_only(at)


def _make_read_only(at: Path) -> None:
    """Makes a mount read-only, and the mounts below it as well (Linux 5.12 or later)."""
    attributes = _MountAttributes(attr_set=_READ_ONLY)
    size_bytes = ctypes.sizeof(attributes)
    arguments = (_AT_FDCWD, os.fsencode(at), _AT_RECURSIVE, ctypes.byref(attributes), size_bytes)
    if _call(_MOUNT_SETATTR, *arguments) == 0:
        return
    options = os.statvfs(at).f_flag
    flags = options & _KEPT_FLAGS | (_RELATIME if options & _ST_RELATIME else 0)
    _mount("none", str(at), _REMOUNT | _BIND | _READ_ONLY | flags)


def _link(link: Path, target: Path, tmp: Path, visible: Sequence[Path]) -> None:
    """Recreates a link, unless it is outside `/tmp` or already visible."""
    if Path(TMP) in link.parents and not any(path in link.parents for path in visible):
        at = tmp / link.relative_to(TMP)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)


def lay_below(view: Path, folder: Path, work: Path) -> bool:
    """Mounts a folder below a view that contains copies of the folder's files and links to it.

    These links are removed, because their targets are visible without them.

    Args:
        view: receives everything that is written to the mounted folder.
        work: a folder that overlayfs needs, on the same disk as the view. It is created.

    Returns:
        True if it succeeded. If it failed, the view is unchanged, and `work` may exist.
    """
    folder = folder.resolve()
    if any(set(str(place)) & set(",:\\") for place in (folder, view, work)):
        return False  # these characters separate the options below
    options = f"lowerdir={folder},upperdir={view},workdir={work},userxattr"
    links = [Path(entry.path) for entry in _entries_below(view) if entry.is_symlink()]
    targets = {link: link.readlink() for link in links if _is_in(folder, link.relative_to(view))}
    try:
        work.mkdir()
        for link in targets:
            link.unlink()  # first, because removing a link later would hide the file underneath it
        _mount("overlay", str(view), 0, kind="overlay", options=options)
    except OSError:
        for link, target in targets.items():
            if not link.is_symlink():
                link.symlink_to(target)
        return False
    with contextlib.suppress(OSError):
        # The system creates this folder without permissions, and measuring disk usage has to read
        # it.
        (work / "work").chmod(0o700)
    return True


def _is_in(folder: Path, name: Path) -> bool:
    """True if a name is in the folder itself rather than reached through a link."""
    return os.path.realpath(folder / name) == str(folder / name)


def show_at_src(view: Path, root: Path) -> bool:
    """Mounts a view at `/src`. If the root has no `/src`, replaces the root with one that does.

    Args:
        root: becomes the new root folder, with everything from the old one. It is created.

    Returns:
        True if it succeeded. If it failed, nothing has changed.
    """
    try:
        if Path(SRC).is_dir():
            _mount(str(view), SRC, _BIND | _RECURSIVE)
        else:
            _take_root(view, root)
    except OSError:
        return False
    return True


def _take_root(view: Path, root: Path) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError("unknown machine type")
    root.mkdir()
    _mount(str(root), str(root), _BIND)
    before = os.getcwd()
    try:
        _fill_root(view, root)
        os.chdir(root)
        # The old root is mounted on top of the new one, then unmounted (pivot_root(2), NOTES).
        if _call(number, b".", b"."):
            raise OSError(ctypes.get_errno(), "pivot_root")
        _unmount(".")
    except OSError:
        os.chdir(before)
        _unmount(str(root))  # otherwise, the class could write anywhere through it
        raise
    os.chdir("/")


def _fill_root(view: Path, root: Path) -> None:
    with os.scandir("/") as entries:
        for entry in entries:
            at = root / entry.name
            if entry.is_symlink():
                at.symlink_to(os.readlink(entry.path))
                continue
            if entry.is_dir():
                at.mkdir()
            elif entry.is_file():
                at.touch()
            else:
                continue
            _mount(entry.path, str(at), _BIND | _RECURSIVE)
    (root / SRC[1:]).mkdir()
    _mount(str(view), str(root / SRC[1:]), _BIND | _RECURSIVE)
    # The copied folder that contains the scratch folder contains this root too. Landlock allows
    # writing to everything below the scratch folder, including the mounts there.
    _unmount(f"{root}{os.path.realpath(root)}")


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) == 0:
        return
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no namespace")
    # A new namespace hides the process from its own user, and the process's maps from the process
    # itself.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        Path("/proc/self", name).write_text(text, encoding="ascii")


def _unmount(target: str) -> None:
    """Unmounts a folder and everything mounted below it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(target), _DETACH):
        raise OSError(ctypes.get_errno(), f"unmount {target}")


def _mount(
    source: str, target: str, flags: int, *, kind: str | None = None, options: str | None = None
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = (
        os.fsencode(source),
        os.fsencode(target),
        kind and kind.encode(),
        ctypes.c_ulong(flags),
        None if options is None else os.fsencode(options),
    )
    if libc.mount(*words):
        raise OSError(ctypes.get_errno(), f"mount {target}")
