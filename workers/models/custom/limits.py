"""Limits on a runner and everything it starts: memory, disk, processes. Also kills all of them.

A system limit on address space (RLIMIT_AS) doesn't help, because CUDA reserves more address space
than the machine has memory. In a container, we can't create a control group, so a thread checks the
limits ten times a second. A process's private and shared memory count toward its limit, but mapped
files don't, because the system can reclaim their pages.

Disk use is measured too, because quotas require privileges that a container lacks, and an in-memory
file system would use a scarcer resource. The system itself keeps any single file below the limit
(RLIMIT_FSIZE, set in the runner), so only several files together can exceed it between counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 0.1
WHOLE_EVERY = 20
"""One in this many checks covers everything the runner has started. The other checks cover only the
runner.
"""
MAX_PROCESSES = 512
DEFAULT_SHARE = 0.8
"""Share of the machine's or control group's memory, if the entry does not specify a limit."""
MAX_ENTRIES = 500_000
"""Maximum number of files and folders under the scratch folder."""
MAX_OUTSIDE = 10_000
"""Maximum number of files to remember outside the scratch folder."""
MIN_DISK_BYTES = 16 * 1024 * 1024
"""Minimum limit even if the disk is full, so that a class that writes nothing can still be served.
"""
COUNT_SHARE, USUAL_COUNT_SHARE = 0.1, 0.01
"""Maximum share of time spent counting files: while the disk fills up, and at other times."""
MAX_REST_S = 30.0
"""Maximum time between counts, as long as counting stays within COUNT_SHARE."""
END_LIMIT_S = 2.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def usual_memory_bytes(
    group_file: Path = Path("/sys/fs/cgroup/memory.max"), proc: Path = _PROC
) -> int:
    """Returns the memory limit for a runner whose entry doesn't set one. 0 means unlimited."""
    limits_bytes = []
    with contextlib.suppress(OSError, ValueError):  # `max` means no limit
        limits_bytes.append(int(group_file.read_text(encoding="ascii")))
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits_bytes.append(int((proc / "meminfo").read_text(encoding="ascii").split()[1]) * 1024)
    return int(min(limits_bytes, default=0) * DEFAULT_SHARE)


class ProcessFamily:
    """A runner and the processes it has started.

    Includes the processes in its session, its descendants, and the processes in its mount
    namespace, if it has one, because they can't leave it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._namespace = ""
        self._namespace_fd: int | None = None

    def note_namespace(self) -> None:
        """Records the runner's namespace while it is running."""
        with contextlib.suppress(OSError):
            # Kept open so that its number isn't reused before `close`.
            self._namespace_fd = os.open(
                _PROC / str(self._pid) / "ns" / "mnt", os.O_RDONLY | os.O_CLOEXEC
            )
            namespace = _namespace(self._pid)
            self._namespace = namespace if namespace != _namespace(os.getpid()) else ""

    def members(self) -> set[int]:
        members: set[int] = set()
        parents: dict[int, int] = {}
        for name in os.listdir(_PROC):
            if not name.isdigit():
                continue
            pid = int(name)
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent, session = _state(pid)
                if state in "ZX":
                    continue
                parents[pid] = parent
                if pid == self._pid or session == self._pid or self._shares_namespace(pid):
                    members.add(pid)
        return {pid for pid in parents if _descends(pid, members, parents)}

    def _shares_namespace(self, pid: int) -> bool:
        return bool(self._namespace) and _namespace(pid) == self._namespace

    def end(self) -> None:
        """Kills all the processes, including any that they start in the meantime."""
        until_s = time.monotonic() + END_LIMIT_S
        while (members := self.members()) and time.monotonic() < until_s:
            # The runner first. Otherwise, it could still report the deaths of its child processes.
            for member in sorted(members, key=lambda pid: pid != self._pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member, signal.SIGKILL)
            time.sleep(0.005)

    def close(self) -> None:
        held, self._namespace_fd, self._namespace = self._namespace_fd, None, ""
        self._pid = -1  # the system may assign it to another process from now on
        if held is not None:
            os.close(held)


def _state(pid: int) -> tuple[str, int, int]:
    """Returns a process's state, parent, and session."""
    # The program name, in parentheses, may contain spaces.
    stat = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return stat[0], int(stat[1]), int(stat[3])


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    for _ in range(len(parents)):
        if pid in ancestors:
            return True
        if pid not in parents:
            return False
        pid = parents[pid]
    return False


def _namespace(pid: int) -> str:
    try:
        return os.readlink(_PROC / str(pid) / "ns" / "mnt")
    except OSError:
        return ""


def memory_of(pid: int) -> int:
    """Returns a process's private and shared memory in bytes, or 0 if it has exited."""
    with contextlib.suppress(OSError, KeyError, ValueError):  # an exited process has no such lines
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return sum(int(fields[field].split()[0]) * 1024 for field in ("RssAnon", "RssShmem"))
    return 0


def proportional_memory_of(pid: int) -> int:
    """Like memory_of, but divides shared memory among its users, which takes longer."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
        return sum(int(fields[field].split()[0]) * 1024 for field in ("Pss_Anon", "Pss_Shmem"))
    except (OSError, KeyError, ValueError):
        return memory_of(pid)


def resident_bytes_of(pid: int) -> int:
    """Returns a process's resident memory, including shared memory, or 0 if it has exited."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


class DiskUse:
    """Disk use of a runner and its family, beyond the initial contents of the scratch folder.

    Includes the files in its scratch folder, including its `/tmp`, deleted files that are still
    open, and files that the family was seen writing elsewhere, such as in the shared `/tmp` if it
    doesn't have a private one. Counts blocks rather than file sizes, because holes take up no disk
    space.
    """

    def __init__(self, scratch: Path, most_bytes: int) -> None:
        self._scratch = scratch
        self.devices = {scratch.stat().st_dev}
        """Devices of its files. Its view of the class's folder may be on a different device."""
        self._free_bytes, self._free_files = _free_room(scratch)
        self.limit_bytes = min(most_bytes, max(self._free_bytes // 2, MIN_DISK_BYTES))
        self._outside: dict[str, tuple[int, int]] = {}
        """Device and inode of each file that it was seen writing elsewhere, by path."""
        self._before_bytes, self._entries, _ = self._walk_scratch(set())
        self._bytes = 0
        self._first_bytes: int | None = None
        self._counted_s = self._took_s = 0.0
        self._turn = threading.Lock()

    def may_be_above(self) -> bool:
        """True if free disk space has dropped enough since the last count to justify a new one."""
        return self.has_lost_much() and self._compute_rest_s() >= self._took_s / COUNT_SHARE

    def has_lost_much(self) -> bool:
        """True if, since the last count, free space fell by half of the remaining limit.

        Free space means bytes and files. Some file systems don't count free files (Btrfs).
        """
        free_bytes, free_files = _free_room(self._scratch)
        lost_bytes, lost_files = self._free_bytes - free_bytes, self._free_files - free_files
        return (
            lost_bytes > (self.limit_bytes - self._bytes) / 2
            or lost_files > (MAX_ENTRIES - self._entries) / 2
        )

    def is_due(self) -> bool:
        """True if it is time to count again."""
        usual_s = min(self._took_s / USUAL_COUNT_SHARE, MAX_REST_S)
        is_usual = self._compute_rest_s() >= max(usual_s, self._took_s / COUNT_SHARE)
        return is_usual or self.may_be_above()

    def _compute_rest_s(self) -> float:
        return time.monotonic() - self._counted_s

    def count(self, family: set[int]) -> str:
        """Measures disk use. Returns a description of the exceeded limit, or an empty string.

        Args:
            family: processes whose open files are counted.
        """
        with self._turn:
            began_s = time.monotonic()
            self._free_bytes, self._free_files = _free_room(self._scratch)
            seen: set[tuple[int, int]] = set()
            size_bytes, self._entries, reason = self._walk_scratch(seen)
            size_bytes += sum(self._open_bytes(pid, seen) for pid in family)
            size_bytes += self._outside_bytes(seen)
            self._bytes = size_bytes - self._before_bytes
            self._counted_s = time.monotonic()
            self._took_s = self._counted_s - began_s
        if self._bytes > self.limit_bytes:
            return (
                f"it wrote more than the maximum of {self.limit_bytes} bytes to disk "
                "(resources.disk_bytes)"
            )
        return reason

    def is_half_full(self) -> bool:
        """Returns whether half of the space available at the first call has been used."""
        if self._first_bytes is None:
            self.count(set())
            self._first_bytes = max(0, self._bytes)
        elif self.has_lost_much():
            # No matter how recent the last count is. Otherwise, a prediction's leftovers would be
            # counted during the next prediction, which would then fail because of them.
            self.count(set())
        return self._holds_half()

    def may_be_half_full(self) -> bool:
        """True if `is_half_full`, which may count many files, is worth calling."""
        return self._first_bytes is None or self.has_lost_much() or self._holds_half()

    def _holds_half(self) -> bool:
        first_bytes = self._first_bytes or 0
        return self._bytes - first_bytes > (self.limit_bytes - first_bytes) / 2

    def _walk_scratch(self, seen: set[tuple[int, int]]) -> tuple[int, int, str]:
        """Returns the scratch folder's bytes and number of entries, and why it stopped early."""
        waiting, size_bytes, entries = [str(self._scratch)], 0, 0
        while waiting:
            try:
                with os.scandir(waiting.pop()) as folder:
                    for entry in folder:
                        entries += 1
                        if entries > MAX_ENTRIES:
                            reason = f"it has more than the maximum of {MAX_ENTRIES} files"
                            return size_bytes, entries, reason
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            size_bytes += _count_bytes(status, seen)
                            if stat.S_ISDIR(status.st_mode):
                                waiting.append(entry.path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it has since been removed
            except OSError as error:
                return size_bytes, entries, f"it has an unreadable folder: {error.strerror}"
        return size_bytes, entries, ""

    def _open_bytes(self, pid: int, seen: set[tuple[int, int]]) -> int:
        """Returns the size of uncounted files that a process has open for writing."""
        size_bytes, folder = 0, _PROC / str(pid)
        with contextlib.suppress(OSError):
            for name in os.listdir(folder / "fd"):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    status = os.stat(folder / "fd" / name)
                    is_ours = stat.S_ISREG(status.st_mode) and status.st_dev in self.devices
                    identity = (status.st_dev, status.st_ino)
                    if not is_ours or identity in seen or not _is_written(folder, name):
                        continue
                    if status.st_nlink and len(self._outside) < MAX_OUTSIDE:
                        self._outside[os.readlink(folder / "fd" / name)] = identity
                    else:
                        size_bytes += _count_bytes(status, seen)
        return size_bytes

    def _outside_bytes(self, seen: set[tuple[int, int]]) -> int:
        size_bytes = 0
        for path, identity in list(self._outside.items()):
            status = None
            with contextlib.suppress(OSError):
                status = os.stat(path, follow_symlinks=False)
            if status is None or (status.st_dev, status.st_ino) != identity:
                del self._outside[path]
            elif identity not in seen:
                size_bytes += _count_bytes(status, seen)
        return size_bytes


def _free_room(folder: Path) -> tuple[int, int]:
    """Returns the disk's free bytes and free files."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize, system.f_favail


def _count_bytes(status: os.stat_result, seen: set[tuple[int, int]]) -> int:
    """Returns a file's size on disk in bytes, or 0 if it was already counted under another name."""
    identity = (status.st_dev, status.st_ino)
    if identity in seen:
        return 0
    seen.add(identity)
    return status.st_blocks * 512  # always in units of this size (stat(2))


def _is_written(process: Path, descriptor: str) -> bool:
    """True if one of a process's descriptors was opened for writing."""
    lines = (process / "fdinfo" / descriptor).read_text(encoding="ascii").splitlines()
    flags = next(line for line in lines if line.startswith("flags:"))
    return bool(int(flags.split()[1], 8) & os.O_ACCMODE)


class LimitWatch:
    """Watches a runner until it exits or exceeds a limit.

    Args:
        pid: ID of the runner process, which must not be waited for before `close`.
        memory_bytes: limit for all of the runner's processes together. 0 means unlimited.
        disk: limit for all of the runner's processes together.
        exceeded: called once, with a description of the exceeded limit.
    """

    def __init__(
        self,
        pid: int,
        family: ProcessFamily,
        memory_bytes: int,
        disk: DiskUse,
        exceeded: Callable[[str], None],
    ) -> None:
        self._pid = pid
        self._family = family
        self._memory_bytes = memory_bytes
        self.disk = disk
        self._exceeded = exceeded
        self.taken_bytes = 0
        """The family's memory at the last check."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="limits")
        self._thread.start()

    def _run(self) -> None:
        looks = 0
        while not self._is_over.wait(LOOK_EVERY_S):
            looks += 1
            is_due = looks % WHOLE_EVERY == 0
            if self._memory_bytes and resident_bytes_of(self._pid) > self._memory_bytes:
                is_due = True
            reason = ""
            with contextlib.suppress(OSError):  # the class has removed its own scratch folder
                reason = self._broken() if is_due or self.disk.may_be_above() else ""
            if reason:
                self._exceeded(reason)
                return

    def is_above_memory(self) -> bool:
        """Returns whether the runner on its own exceeds its limit.

        Takes 20 µs if it doesn't exceed the limit.
        """
        if not self._memory_bytes or resident_bytes_of(self._pid) <= self._memory_bytes:
            return False
        return proportional_memory_of(self._pid) > self._memory_bytes

    def look(self) -> None:
        self.taken_bytes = sum(map(memory_of, self._family.members()))

    def _broken(self) -> str:
        family = self._family.members()
        if len(family) > MAX_PROCESSES:
            return f"it has {len(family)} processes, which exceeds the maximum of {MAX_PROCESSES}"
        self.taken_bytes = sum(map(memory_of, family))
        if self._memory_bytes and self.taken_bytes > self._memory_bytes:
            used_bytes = sum(map(proportional_memory_of, family))
            if used_bytes > self._memory_bytes:
                return (
                    f"it uses {used_bytes >> 20} MiB of memory, which exceeds the maximum of "
                    f"{self._memory_bytes >> 20} MiB (resources.memory_bytes)"
                )
        return self.disk.count(family) if self.disk.is_due() else ""

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(timeout=LOOK_EVERY_S * 10)
