"""A contender's processes: measures their cost, and pauses them while others are measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_VERSIONED = re.compile(r"python[\d.]*$")
_END_LIMIT_S = 5.0


class Tree:
    """The processes in `roots` and all their descendants, whenever they start and end."""

    def __init__(self, roots: list[psutil.Process]) -> None:
        self._roots = roots

    def cpu_s(self) -> dict[str, float]:
        """Returns CPU seconds so far, by program, including exited processes that were reaped."""
        totals: defaultdict[str, float] = defaultdict(float)

        def add(process: psutil.Process) -> None:
            times = process.cpu_times()
            totals[label(process.cmdline())] += sum(times[:4])

        self._for_each(add)
        return totals

    def memory_bytes(self) -> int:
        """Returns their total resident memory, counting shared pages once (Linux: PSS).

        For processes that deny inspection, an ordinary user sees only the resident memory, which
        includes all shared pages.
        """
        sizes: list[int] = []

        def add(process: psutil.Process) -> None:
            try:
                sizes.append(process.memory_full_info().pss)
            except psutil.AccessDenied:
                sizes.append(process.memory_info().rss)

        self._for_each(add)
        return sum(sizes)

    def freeze(self) -> None:
        self._for_each(lambda process: process.suspend())

    def thaw(self) -> None:
        self._for_each(lambda process: process.resume())

    def end(self) -> None:
        living = list(self._living())
        for process in living:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(living, _END_LIMIT_S)

    def remember(self) -> None:
        """Adds all living processes to the roots, so that orphaned processes are not lost."""
        self._roots = list(self._living())

    def _for_each(self, do: Callable[[psutil.Process], object]) -> None:
        for process in self._living():
            try:
                do(process)
            except psutil.NoSuchProcess:
                continue

    def _living(self) -> Iterator[psutil.Process]:
        seen = set()
        for root in self._roots:
            try:
                family = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in family:
                if process not in seen and process.is_running():
                    seen.add(process)
                    yield process


def label(command: list[str]) -> str:
    """Returns a short name for a program, or for the module or script that Python runs."""
    if not command:
        return "ended"
    program = Path(command[0]).name
    if not _VERSIONED.search(program):
        return program.split(":")[0].split(" ")[0]
    words = [word for word in command[1:] if word in ("-m", "-c") or not word.startswith("-")]
    if words[:1] == ["-m"]:
        return words[1]
    if words[:1] == ["-c"]:
        return "spawned" if "multiprocessing" in command[command.index("-c") + 1] else "python -c"
    return Path(words[0]).name if words else "python"
