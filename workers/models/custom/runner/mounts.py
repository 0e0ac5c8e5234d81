"""A `/tmp` of its own for a process: a folder that is mounted there, for it and what it starts.

Classes write to `/tmp/out.png` by name. In a mount namespace (mount_namespaces(7)) such files are
their own, and end with them. It takes the capability for it, or user namespaces, which not all
systems give to everyone (user_namespaces(7)).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

TMP = "/tmp"
_PR_SET_DUMPABLE = 4
_NEW_MOUNTS, _NEW_USER = 0x0002_0000, 0x1000_0000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_NO_SUID, _NO_DEV, _NO_EXEC, _NO_ATIME, _NO_DIR_ATIME = 1 << 1, 1 << 2, 1 << 3, 1 << 10, 1 << 11
_KEPT_FLAGS = _NO_SUID | _NO_DEV | _NO_EXEC | _NO_ATIME | _NO_DIR_ATIME
"""Options that a mount in a user namespace must keep. statvfs has the same numbers."""
_ST_RELATIME, _RELATIME = 1 << 12, 1 << 21


def take_private_tmp(folder: Path, kept: Sequence[Path]) -> bool:
    """Mounts a folder at `/tmp` of this process. It must have one thread.

    Args:
        folder: what `/tmp` is from now on. It is made.
        kept: folders that stay at their paths if they are below `/tmp`: the first as it is, the
            others read-only.

    Returns:
        Whether it was done. If not, `/tmp` is as it was.
    """
    folder.mkdir(mode=0o1777, exist_ok=True)
    try:
        _enter_namespace()
        _mount("none", "/", _RECURSIVE | _PRIVATE)
        for number, path in enumerate(_below_tmp(kept)):
            _show(path, folder / path.relative_to(TMP), is_writable=number == 0 and path == kept[0])
        _mount(str(folder), TMP, _BIND | _RECURSIVE)
    except OSError:
        return False
    return True


def _below_tmp(paths: Sequence[Path]) -> list[Path]:
    """Those below /tmp, each once, and none that is in another one."""
    below = [one for one in dict.fromkeys(paths) if Path(TMP) in one.parents and one.is_dir()]
    return [one for one in below if not any(other in one.parents for other in below)]


def _show(path: Path, at: Path, *, is_writable: bool) -> None:
    at.mkdir(parents=True, exist_ok=True)
    _mount(str(path), str(at), _BIND | (0 if is_writable else _RECURSIVE))
    if not is_writable:
        options = os.statvfs(at).f_flag
        flags = options & _KEPT_FLAGS | (_RELATIME if options & _ST_RELATIME else 0)
        _mount("none", str(at), _REMOUNT | _BIND | _READ_ONLY | flags)


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) == 0:
        return
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no namespace")
    # A new namespace hides a process from its own user, and so its maps from itself.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        Path("/proc/self", name).write_text(text, encoding="ascii")


def _mount(source: str, target: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = (source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)
    if libc.mount(*words):
        raise OSError(ctypes.get_errno(), f"mount {target}")
