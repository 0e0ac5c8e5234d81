"""Bounds on a runner and all that it has started: memory and processes. And how to end them all.

A limit of the system on addresses (RLIMIT_AS) is no use: CUDA reserves more than the machine has.
A control group is not ours to make in a container. So a thread looks ten times a second. What a
process holds alone or shares in memory counts, files that are mapped do not: the system takes their
pages back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 0.1
WHOLE_EVERY = 20
"""Of so many looks, one is at all that the runner has started. The others are at itself."""
MAX_PROCESSES = 512
DEFAULT_SHARE = 0.8
"""Of the machine's memory, or of its control group's, if the entry does not say."""
END_LIMIT_S = 2.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def usual_memory_bytes(
    group_file: Path = Path("/sys/fs/cgroup/memory.max"), proc: Path = _PROC
) -> int:
    """The memory that a runner may take if its entry does not say it. 0: no bound."""
    limits_bytes = []
    with contextlib.suppress(OSError, ValueError):  # `max` means no limit
        limits_bytes.append(int(group_file.read_text(encoding="ascii")))
    with contextlib.suppress(OSError, ValueError, IndexError):
        limits_bytes.append(int((proc / "meminfo").read_text(encoding="ascii").split()[1]) * 1024)
    return int(min(limits_bytes, default=0) * DEFAULT_SHARE)


class Family:
    """A runner and the processes that it has started.

    Known are those of its session, its descendants, and those in its namespace of mounts, if it
    has one: they can't leave that.

    Args:
        pid: of the runner.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._namespace = ""
        self._held: int | None = None

    def note_namespace(self) -> None:
        """Notes which namespace the runner is in, while it runs."""
        with contextlib.suppress(OSError):
            # Open, so that its number is not used again before `close`.
            self._held = os.open(_PROC / str(self._pid) / "ns" / "mnt", os.O_RDONLY | os.O_CLOEXEC)
            namespace = _namespace(self._pid)
            self._namespace = namespace if namespace != _namespace(os.getpid()) else ""

    def members(self) -> set[int]:
        """The processes that run now."""
        members: set[int] = set()
        parents: dict[int, int] = {}
        for name in os.listdir(_PROC):
            if not name.isdigit():
                continue
            one = int(name)
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent, session = _state(one)
                if state in "ZX":
                    continue
                parents[one] = parent
                if one == self._pid or session == self._pid or self._shares_namespace(one):
                    members.add(one)
        return {one for one in parents if _descends(one, members, parents)}

    def _shares_namespace(self, pid: int) -> bool:
        return bool(self._namespace) and _namespace(pid) == self._namespace

    def end(self) -> None:
        """Kills all, and those that they start meanwhile."""
        until_s = time.monotonic() + END_LIMIT_S
        while (members := self.members()) and time.monotonic() < until_s:
            for one in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one, signal.SIGKILL)
            time.sleep(0.005)

    def close(self) -> None:
        """Lets go of it."""
        held, self._held, self._namespace = self._held, None, ""
        self._pid = -1  # the system may give it to another process from now on
        if held is not None:
            os.close(held)


def _state(pid: int) -> tuple[str, int, int]:
    """State, parent and session of a process."""
    # The name of the program, in parentheses, may have spaces.
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
    """The bytes that a process holds alone or shares in memory. 0: it has ended."""
    with contextlib.suppress(OSError):
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return sum(int(fields[one].split()[0]) * 1024 for one in ("RssAnon", "RssShmem"))
    return 0


def proportional_memory_of(pid: int) -> int:
    """As memory_of, with what several processes share divided among them. It takes longer."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
        return sum(int(fields[one].split()[0]) * 1024 for one in ("Pss_Anon", "Pss_Shmem"))
    except (OSError, KeyError, ValueError):
        return memory_of(pid)


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


class LimitWatch:
    """Looks at a runner until it has ended or is above a limit.

    Args:
        pid: of the runner, which must not be waited for before `close`.
        family: of the runner.
        memory_bytes: of all its processes together. 0: no bound.
        exceeded: called once, with what is above its limit, in words.
    """

    def __init__(
        self, pid: int, family: Family, memory_bytes: int, exceeded: Callable[[str], None]
    ) -> None:
        self._pid = pid
        self._family = family
        self._memory_bytes = memory_bytes
        self._exceeded = exceeded
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="limits")
        self._thread.start()

    def _run(self) -> None:
        looks = 0
        while not self._is_over.wait(LOOK_EVERY_S):
            looks += 1
            is_due = looks % WHOLE_EVERY == 0
            if self._memory_bytes and _resident_bytes(self._pid) > self._memory_bytes:
                is_due = True
            if is_due and (reason := self._broken()):
                self._exceeded(reason)
                return

    def is_above_memory(self) -> bool:
        """Returns whether the runner by itself takes more than it may, in 20 µs if it does not."""
        if not self._memory_bytes or _resident_bytes(self._pid) <= self._memory_bytes:
            return False
        return proportional_memory_of(self._pid) > self._memory_bytes

    def _broken(self) -> str:
        family = self._family.members()
        if len(family) > MAX_PROCESSES:
            return f"it has {len(family)} processes; at most {MAX_PROCESSES} are allowed"
        if self._memory_bytes and sum(map(memory_of, family)) > self._memory_bytes:
            taken = sum(map(proportional_memory_of, family))
            if taken > self._memory_bytes:
                return (
                    f"it takes {taken >> 20} MiB of memory; at most {self._memory_bytes >> 20} MiB "
                    "are allowed (resources.memory_bytes)"
                )
        return ""

    def close(self) -> None:
        """Ends the looks."""
        self._is_over.set()
        self._thread.join(timeout=LOOK_EVERY_S * 10)
