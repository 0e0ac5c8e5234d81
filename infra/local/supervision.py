"""Starts parts of the local stack again that died, with growing pauses and a limit on how often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.local.process import Process
from shared.errors import Unavailable

MAX_DEATHS = 5
WINDOW_S = 600.0
"""A part that dies more often than MAX_DEATHS times within this time is not started again."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Before a part is started again. Each death within WINDOW_S doubles it."""


@dataclass(frozen=True)
class SupervisedPart:
    """One process of the stack.

    Args:
        process: started, and ready.
        is_ready: returns whether it does its work.
        limit_s: time limit to get ready after a start, in seconds.
    """

    process: Process
    is_ready: Callable[[], bool]
    limit_s: float


class Supervisor:
    """Supervises parts that run. Its owner calls `look` again and again.

    Args:
        parts: the parts to supervise.
        report: gets a word and facts about each death, start and return.
        clock: seconds.
    """

    def __init__(
        self,
        parts: Iterable[SupervisedPart],
        report: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = [_Watched(part, report, clock) for part in parts]

    def look(self) -> str | None:
        """Starts what died and is due.

        Returns:
            None while everything runs or will run again. Else why it won't: a part that died too
            often, with the end of its log.
        """
        for watched in self._watched:
            if failure := watched.look():
                return failure
        return None

    def restart(self, name: str, on_started: Callable[[], None]) -> None:
        """Has a part stop as ever, and starts it again when it has ended.

        If it does not get ready then, it stays down until the next restart: what it needs is wrong,
        and a person is about to mend it.

        Args:
            name: of the process.
            on_started: called when it was started again.
        """
        for watched in self._watched:
            if watched.name == name:
                watched.restart(on_started)


class _Watched:
    """One part: it runs, or it waits for its next start, or it was started and is not ready."""

    def __init__(
        self, part: SupervisedPart, report: Callable[[str, str], None], clock: Callable[[], float]
    ) -> None:
        self._part = part
        self._report = report
        self._clock = clock
        self._deaths_s: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        self._start_s: float | None = None
        """The time of its next start. None: it runs."""
        self._ready_by_s: float | None = None
        """The time by which it must be ready. None: it was ready."""
        self._since_s = 0.0
        """When it died, or was asked to stop."""
        self._on_started: Callable[[], None] | None = None
        """To be called after its next start. None: nobody asked for a restart."""
        self._is_changed = False
        """Whether it was restarted and was not ready since."""
        self._is_down = False
        """Whether it stays down until the next restart."""

    @property
    def name(self) -> str:
        """The name of its process."""
        return self._part.process.name

    def restart(self, on_started: Callable[[], None]) -> None:
        """As Supervisor.restart."""
        self._on_started = on_started
        self._since_s = self._clock()
        self._is_down, self._start_s = False, None
        self._part.process.ask_to_stop()

    def _restart(self) -> str | None:
        """Starts it again, if it has ended, or had its time to."""
        process = self._part.process
        if process.is_running and self._clock() - self._since_s < process.stop_limit_s:
            return None
        if process.is_running:
            process.kill()
        process.stop()  # also ends what it left in its group
        on_started, self._on_started = self._on_started, None
        self._is_changed = True
        failure = self._start()
        if on_started is not None:
            on_started()
        return failure

    def look(self) -> str | None:
        """Does what is next. Returns why it gives up, or None."""
        process = self._part.process
        if self._on_started is not None:
            return self._restart()
        if self._is_down:
            return None
        if self._start_s is not None:
            return self._start() if self._clock() >= self._start_s else None
        if not process.is_running:
            return self._died(process.ending)
        if self._ready_by_s is None:
            return None
        if self._part.is_ready():
            self._ready_by_s = None
            self._is_changed = False
            self._report("back", f"{process.name} · {self._clock() - self._since_s:.1f} s later")
        elif self._clock() > self._ready_by_s:
            return self._died(f"was not ready within {self._part.limit_s:g} s")
        return None

    def _died(self, how: str) -> str | None:
        process, now_s = self._part.process, self._clock()
        death = f"{process.name} {how}{process.last_words()}"
        # Also ends what it left in its group, which may hold its port or its memory.
        process.stop()
        if self._is_changed:
            self._is_down = True
            self._report("down", f"{death}\n  starts again when its sources change")
            return None
        self._since_s = now_s
        self._deaths_s.append(now_s)
        deaths = sum(now_s - at_s < WINDOW_S for at_s in self._deaths_s)
        if deaths > MAX_DEATHS:
            return f"{death}\n{process.name} died {deaths} times within {WINDOW_S:g} s"
        # Without jitter: nobody else comes back at the same time.
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (deaths - 1), MAX_PAUSE_S)
        self._start_s = now_s + pause_s
        self._report("died", f"{death}\n  starts again in {pause_s:g} s ({deaths} of {MAX_DEATHS})")
        return None

    def _start(self) -> str | None:
        self._start_s = None
        try:
            self._part.process.start()
        except Unavailable as error:
            return self._died(f"did not start: {error.message}")
        self._ready_by_s = self._clock() + self._part.limit_s
        return None
