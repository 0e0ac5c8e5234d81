"""Waits for the parts of the local stack to become ready, and restarts parts that die.

Pauses between restarts grow, and the number of restarts is limited. An optional part that has not
been ready since its last start is restarted without a limit, because whatever it needs may become
available.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.local.process import Process
from shared.errors import Unavailable

MAX_DEATHS = 5
WINDOW_S = 600.0
"""A part that dies more than MAX_DEATHS times within this period is not restarted."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pause before a part is restarted. Each death within WINDOW_S doubles it."""
FIRST_START_PAUSE_S, MAX_START_PAUSE_S = 2.0, 300.0
"""Pause before restarting an optional part that died before becoming ready. It doubles each time.
"""
PROGRESS_S = 10.0
"""Time until the first progress line about a part that is not ready yet.

Each interval is twice as long as the previous one.
"""
PATIENCE_S = 60.0
"""Time after which startup no longer waits for a part that is not ready yet."""
WRONG_CONFIGURATION = 2
"""Exit code of a worker that a restart can't fix, because its entry, its package, or a setting is
invalid.
"""


@dataclass(frozen=True)
class SupervisedPart:
    """One of the stack's processes, already started.

    Args:
        is_ready: returns whether it is working.
        limit_s: maximum time to become ready after a start, in seconds.
        was_ready: true if the process has been ready since it was started.
        is_optional: true if the other parts can work without it. Workers are optional.
    """

    process: Process
    is_ready: Callable[[], bool]
    limit_s: float
    was_ready: bool = True
    is_optional: bool = False


def progress_of(process: Process, waited_s: float) -> str:
    """Returns a progress line about a process that is not ready, with its last log line."""
    last_line = f"; last log line: {process.last_line}" if process.last_line else ""
    return f"{process.name} · {waited_s:.0f} s so far{last_line}; log: {process.log_path}"


class Supervisor:
    """Supervises parts that have been started. The owner calls `look` periodically.

    Args:
        report: receives a word and details for each death, start, and recovery.
    """

    def __init__(
        self,
        parts: Iterable[SupervisedPart],
        report: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = [_Watched(part, report, clock) for part in parts]

    @property
    def is_settled(self) -> bool:
        """True if each part has become ready, failed to start, or had PATIENCE_S to start."""
        return all(watched.is_settled for watched in self._watched)

    @property
    def not_ready(self) -> list[str]:
        """Names of the processes that are not working."""
        return [watched.name for watched in self._watched if not watched.is_serving]

    def look(self) -> str | None:
        """Restarts dead parts that are due for a restart.

        Returns:
            None while all parts are running, will be restarted, or are optional. Otherwise, the
            reason the stack can't continue: a part that died too often, with the end of its log.
        """
        for watched in self._watched:
            if failure := watched.look():
                return failure
        return None

    def restart(self, name: str, on_started: Callable[[], None]) -> None:
        """Stops a part as usual and starts it again once it has exited.

        If it doesn't become ready, it stays down until the next restart, because its sources are
        broken and the user is about to fix them.
        """
        for watched in self._watched:
            if watched.name == name:
                watched.restart(on_started)


class _Watched:
    """A part that is running, starting, or waiting for its next start."""

    def __init__(
        self, part: SupervisedPart, report: Callable[[str, str], None], clock: Callable[[], float]
    ) -> None:
        self._part = part
        self._report = report
        self._clock = clock
        self._deaths_s: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        self._failed_starts = 0
        self._start_s: float | None = None
        """Time of the next start. None if the part is running."""
        self._ready_by_s: float | None = None
        """Time by which the part must be ready. None if it has already been ready."""
        self._since_s = 0.0
        """Time at which the part was first started, died, or was asked to stop."""
        self._progress_s = 0.0
        """Time of the next progress line."""
        self._is_first_start = not part.was_ready
        """True if this is its first start, and it has not been ready yet."""
        self._on_started: Callable[[], None] | None = None
        """Called after the next start. None if no restart was requested."""
        self._is_changed = False
        """True if it was restarted and has not become ready since."""
        self._is_down = False
        """True if it stays down until the next restart."""
        if self._is_first_start:
            self._since_s = clock()
            self._expect_ready()

    @property
    def name(self) -> str:
        return self._part.process.name

    @property
    def is_settled(self) -> bool:
        """True if it has become ready, failed to start, or had PATIENCE_S to start."""
        has_failed = bool(self._deaths_s) or self._is_down
        is_slow = self._clock() - self._since_s > PATIENCE_S
        return not self._is_first_start or has_failed or is_slow

    @property
    def is_serving(self) -> bool:
        """True if it was working when last checked."""
        return not self._is_down and self._start_s is None and self._ready_by_s is None

    def restart(self, on_started: Callable[[], None]) -> None:
        self._on_started = on_started
        self._since_s = self._clock()
        self._is_down, self._start_s = False, None
        self._part.process.ask_to_stop()

    def _restart(self) -> str | None:
        """Starts the part again if it has exited, or if it has run out of time to stop."""
        process = self._part.process
        if process.is_running and self._clock() - self._since_s < process.stop_limit_s:
            return None
        if process.is_running:
            process.kill()
        process.stop()  # also kills processes left in its group
        on_started, self._on_started = self._on_started, None
        self._is_changed = True
        failure = self._start()
        if on_started is not None:
            on_started()
        return failure

    def look(self) -> str | None:
        """Does any work that is due. Returns the reason if it gives up, otherwise None."""
        process = self._part.process
        if self._on_started is not None:
            return self._restart()
        if self._is_down:
            return None
        if self._start_s is not None:
            return self._start() if self._clock() >= self._start_s else None
        if not process.is_running:
            return self._handle_death(process.ending)
        if self._ready_by_s is None:
            return None
        if self._part.is_ready():
            self._on_ready()
        elif self._clock() > self._ready_by_s:
            process.stop()  # done first, because output during shutdown may contain the reason
            return self._handle_death(f"was not ready within {self._part.limit_s:g} s")
        elif self._clock() >= self._progress_s:
            waited_s = self._clock() - self._since_s
            self._progress_s = self._clock() + max(waited_s, PROGRESS_S)  # 10 s, 20 s, 40 s, …
            self._report("waiting", progress_of(process, waited_s))
        return None

    def _on_ready(self) -> None:
        name, waited_s = self._part.process.name, self._clock() - self._since_s
        if self._is_first_start:
            self._report("ready", f"{name} · warm")
        else:
            self._report("back", f"{name} · {waited_s:.1f} s later")
        self._ready_by_s, self._is_first_start, self._is_changed = None, False, False
        self._failed_starts = 0

    def _expect_ready(self) -> None:
        now_s = self._clock()
        self._ready_by_s = now_s + self._part.limit_s
        self._progress_s = now_s + PROGRESS_S

    def _handle_death(self, how: str) -> str | None:
        process, now_s = self._part.process, self._clock()
        death = f"{process.name} {how}{process.last_words()}"
        is_hopeless = process.exit_code == WRONG_CONFIGURATION and self._part.is_optional
        # This also kills processes left in its group, which may hold its port or memory.
        process.stop()
        was_ready, self._ready_by_s = self._ready_by_s is None, None
        if self._is_changed:
            self._stay_down(f"{death}\n  restarts when its sources change")
            return None
        self._since_s = now_s
        self._deaths_s.append(now_s)
        deaths = sum(now_s - at_s < WINDOW_S for at_s in self._deaths_s)
        if not was_ready and self._part.is_optional and not is_hopeless:
            self._failed_starts += 1
            # A worker that never starts is restarted for days, so the power has a limit.
            doublings = min(self._failed_starts - 1, 16)
            pause_s = min(FIRST_START_PAUSE_S * 2.0**doublings, MAX_START_PAUSE_S)
            self._start_again(pause_s, death, "the other models are still being served")
            return None
        if is_hopeless or (deaths > MAX_DEATHS and self._part.is_optional):
            self._stay_down(
                f"{death}\n  will not be restarted; the other models are still being served"
            )
            return None
        if deaths > MAX_DEATHS:
            return f"{death}\n{process.name} died {deaths} times within {WINDOW_S:g} s"
        # There is no jitter, because nothing else restarts at the same time.
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (deaths - 1), MAX_PAUSE_S)
        self._start_again(pause_s, death, f"{deaths} of {MAX_DEATHS}")
        return None

    def _start_again(self, pause_s: float, death: str, note: str) -> None:
        self._start_s = self._clock() + pause_s
        self._report("died", f"{death}\n  restarts in {pause_s:g} s ({note})")

    def _stay_down(self, facts: str) -> None:
        self._is_down = True
        self._report("down", facts)

    def _start(self) -> str | None:
        self._start_s = None
        self._expect_ready()
        try:
            self._part.process.start()
        except Unavailable as error:
            return self._handle_death(f"did not start: {error.message}")
        return None
