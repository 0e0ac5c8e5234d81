"""Runs many unmodified pipelines concurrently and batches their calls to shared modules.

Each item runs in a greenlet. When its pipeline calls a module that all items share, the greenlet
hands the call to the hub and pauses. The hub joins compatible calls from all items, computes them
together, and resumes each item with its own rows. Items can therefore join and leave between any
two calls, regardless of their schedulers, step counts, and tasks, and each image is the same as
when it is drawn on its own.

Everything runs on one thread, so compiled graphs, CUDA graphs, and gradient modes stay valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import greenlet
import torch

from shared.errors import ModelFailed
from workers.models.base import OutOfMemory
from workers.models.device import memory_errors
from workers.models.image.calls import Call, Digests, Part, UnsplittableError, join, split

PYTHON_LIMIT_S = 60.0
"""How long Python code may run between calls. A scheduler takes about a millisecond."""
MAX_CALLS = 64
"""Maximum encoder calls that an item makes per step before other items get their turn."""
RECOVERS_AFTER = 64
"""Number of batches that must fit in memory before a larger one is tried again."""
MAX_LIMITS = 256
"""Maximum number of call kinds whose limits are remembered."""

_NEVER_S = float("inf")
_LOOKS, _IDLE_LOOKS = 4, 8
"""How many times per limit the watchdog checks, and how many idle checks end its thread."""

_NO_AUTOCAST: _Autocast = ()

log = logging.getLogger(__name__)


class StuckError(Exception):
    """A pipeline was interrupted because it ran too long between calls."""

    def __str__(self) -> str:
        return "the pipeline took too long between two steps"


class Batching:
    """Decides which calls to run together, and runs them."""

    def prepare(self, call: Call) -> None:
        """Changes a call once, before it is computed."""

    def key(self, call: Call) -> Hashable:
        """Returns a key. Calls with the same key can share a batch."""
        return call.key

    def cover(self, calls: Sequence[Call]) -> Sequence[int]:
        """Returns how many of these calls to run at a time.

        All of the calls must have the same key. The numbers add up to the number of calls.
        """
        return [len(calls)]

    def compute(self, calls: Sequence[Call]) -> Sequence[Any]:
        """Computes calls that have the same key. Returns each call's results."""
        batch = join(calls)
        return split(calls[0].part.compute(**batch.values), batch)

    def spare_memory(self, part: Part) -> bool:
        """Makes a part use less memory from now on. Returns False if the part can't do so."""
        return False


class Run:
    """A running pipeline.

    Args:
        draw: runs the pipeline. The pipeline's return value is the item's result.
        owner: the owner assigned to the item's calls.
    """

    def __init__(self, hub: Hub, name: int, draw: Callable[[], Any], owner: Any) -> None:
        self.hub = hub
        self.name = name
        self.owner = owner
        self.call: Call | None = None
        """The call the pipeline is waiting for. None if the pipeline has not started."""
        self.digests = Digests()
        self.autocast = _NO_AUTOCAST
        self._draw = draw
        self.greenlet: Any = greenlet.greenlet(self._run)
        self.greenlet.image_run = self

    def _run(self) -> Any:
        with memory_errors():
            return self._draw()


_Autocast = tuple[tuple[str, torch.dtype], ...]


def _take_autocast() -> _Autocast:
    """Returns the devices and dtypes of the pipeline's active autocast contexts, and exits them."""
    active = []
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            active.append((kind, torch.get_autocast_dtype(kind)))
            torch.set_autocast_enabled(kind, False)
    return tuple(active)


def _set_autocast(autocast: _Autocast) -> None:
    for kind, dtype in autocast:
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, dtype)


class Hub:
    """The items being drawn.

    Args:
        batching: decides which calls are computed together.
        python_limit_s: how long a pipeline may run Python code between calls.
    """

    def __init__(
        self, batching: Batching | None = None, *, python_limit_s: float = PYTHON_LIMIT_S
    ) -> None:
        self._batching = batching or Batching()
        self._runs: dict[int, Run] = {}
        self._ended: dict[int, Any] = {}
        self._limits = _RowLimits()
        self._watchdog = _Watchdog(python_limit_s)
        self.work: list[tuple[Any, int]] = []
        """The owners of the denoiser calls in the last step, with each call's number of rows."""

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def names(self) -> list[int]:
        """The running items, in order of arrival."""
        return list(self._runs)

    def add(self, name: int, draw: Callable[[], Any], owner: Any = None) -> None:
        """Adds an item, which starts at the next step."""
        self._runs[name] = Run(self, name, draw, owner)

    def drop(self, name: int) -> None:
        """Stops an item at the call it is waiting for, if the item is still running."""
        run = self._runs.pop(name, None)
        if run is not None:
            self.end(run)

    def set_aside(self, name: int) -> Run:
        """Removes an item while it is waiting for a call. Its pipeline keeps its state."""
        return self._runs.pop(name)

    def put_back(self, name: int, run: Run) -> None:
        """Puts back an item that was set aside. It continues with the call it is waiting for."""
        run.name = name
        self._runs[name] = run

    def step(self) -> dict[int, Any]:
        """Computes one denoiser call for each item, plus everything before and after it.

        Returns:
            Finished items' results, keyed by name. A failed item's result is an exception.
        """
        self.work = []
        for run in list(self._runs.values()):
            if run.call is None:
                self._resume(run)
        self._settle()
        steps = [run for run in self._runs.values() if run.call and run.call.part.is_denoiser]
        for group in self._groups(steps):
            self._compute(group)
        self._settle()
        ended, self._ended = self._ended, {}
        return ended

    def ask(self, part: Part, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Called by pipelines in place of a part. Returns the results for the caller's rows."""
        run: Run | None = getattr(greenlet.getcurrent(), "image_run", None)
        if run is None or run.hub is not self:
            return Batching().compute([Call(part, args, kwargs, Digests())])[0]
        call = Call(part, args, kwargs, run.digests, run.owner)
        self._batching.prepare(call)
        return run.greenlet.parent.switch(call)

    def _settle(self) -> None:
        """Computes other calls until all items are waiting for the denoiser or have finished."""
        calls_left = dict.fromkeys(self._runs, MAX_CALLS)
        while True:
            waiting = [
                run
                for name, run in self._runs.items()
                if run.call is not None and not run.call.part.is_denoiser and calls_left[name]
            ]
            if not waiting:
                return
            group = next(self._groups(waiting))
            for run in group:
                calls_left[run.name] -= 1
            self._compute(group)

    def _groups(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Yields groups of runs whose calls are computed together, oldest first."""
        groups: dict[Hashable, list[Run]] = {}
        for run in runs:
            assert run.call is not None
            groups.setdefault((self._batching.key(run.call), run.autocast), []).append(run)
        for group in groups.values():
            at = 0
            for size in self._batching.cover([run.call for run in group if run.call]):
                yield from self._limits.cut(group[at : at + size])
                at += size

    def _compute(self, runs: Sequence[Run]) -> None:
        """Runs several items' calls together.

        On failure, halves the group until one call is left.
        """
        calls = [run.call for run in runs if run.call is not None]
        try:
            with memory_errors(), _autocast(runs[0].autocast):
                results = self._batching.compute(calls)
        except Exception as error:
            self._compute_parts(runs, error)
            return
        self._limits.note_success(calls)
        if calls[0].part.is_denoiser:
            self.work += [(call.owner, call.rows) for call in calls]
        for run, result in zip(runs, results, strict=True):
            self._resume(run, result)

    def _compute_parts(self, runs: Sequence[Run], error: Exception) -> None:
        call = runs[0].call
        assert call is not None
        if isinstance(error, OutOfMemory):
            log.warning("memory is low", extra={"part": call.part.name, "items": len(runs)})
            if len(runs) > 1:
                self._limits.lower([run.call for run in runs if run.call])
            elif self._batching.spare_memory(call.part):
                self._compute(runs)
                return
        if isinstance(error, UnsplittableError) and len(runs) > 1:
            self._limits.forbid(call)
            for run in runs:
                self._compute([run])
            return
        if len(runs) == 1:
            self._resume(runs[0], error=error)
            return
        middle = len(runs) // 2
        self._compute(runs[:middle])
        self._compute(runs[middle:])

    def _resume(self, run: Run, value: Any = None, *, error: Exception | None = None) -> None:
        """Lets a run continue until its next call or until it completes."""
        outcome: Any
        _set_autocast(run.autocast)
        self._watchdog.begin()
        try:
            if error is not None:
                outcome = run.greenlet.throw(error)
            else:
                outcome = run.greenlet.switch(*([] if run.call is None else [value]))
        except SystemExit:
            outcome = ModelFailed("the pipeline exited the process")
        except Exception as raised:
            outcome = raised
        finally:
            self._watchdog.end()
            run.autocast = _take_autocast()
        if run.greenlet.dead:
            self._runs.pop(run.name, None)
            self._ended[run.name] = outcome
        else:
            run.call = outcome

    def end(self, run: Run) -> None:
        """Stops a run at the call it is waiting for, so that its pipeline cleans up."""
        _set_autocast(run.autocast)
        self._watchdog.begin()
        try:
            # A pipeline that keeps running despite the interruption is abandoned.
            with contextlib.suppress(Exception, SystemExit):
                run.greenlet.throw()
        finally:
            self._watchdog.end()
            _take_autocast()


@contextlib.contextmanager
def _autocast(autocast: _Autocast) -> Iterator[None]:
    _set_autocast(autocast)
    try:
        yield
    finally:
        _take_autocast()


class _RowLimits:
    """The maximum number of rows that fit in memory, per kind of call."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, int] = {}
        self._successes: dict[Hashable, int] = {}
        self._unbatched_keys: set[Hashable] = set()

    def cut(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Splits runs with the same key into groups that fit in memory."""
        assert runs[0].call is not None
        key = runs[0].call.key
        max_rows = 0 if key in self._unbatched_keys else self._rows.get(key)
        part: list[Run] = []
        rows = 0
        for run in runs:
            assert run.call is not None
            if part and max_rows is not None and rows + run.call.rows > max_rows:
                yield part
                part, rows = [], 0
            part.append(run)
            rows += run.call.rows
        yield part

    def lower(self, calls: Sequence[Call]) -> None:
        """Halves the limit, because this many rows did not fit in memory."""
        if len(self._rows) >= MAX_LIMITS:
            self._rows.clear()
        self._rows[calls[0].key] = max(1, sum(call.rows for call in calls) // 2)
        self._successes[calls[0].key] = 0

    def forbid(self, call: Call) -> None:
        """Makes calls of this kind run one at a time from now on."""
        if len(self._unbatched_keys) >= MAX_LIMITS:
            self._unbatched_keys.clear()
        self._unbatched_keys.add(call.key)

    def note_success(self, calls: Sequence[Call]) -> None:
        """Raises the limit again after a while, because others may have been using the memory."""
        key = calls[0].key
        if key not in self._rows:
            return
        self._successes[key] += 1
        if self._successes[key] >= RECOVERS_AFTER:
            self._successes[key] = 0
            self._rows[key] += calls[0].rows


class _Watchdog:
    """Interrupts a pipeline's Python code if it doesn't return."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s = _NEVER_S
        self._thread_id = 0
        self._lock = threading.Lock()
        self._has_fired = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread_id = threading.get_ident()
        self._since_s = time.monotonic()
        # A forked process doesn't inherit its parent's threads.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Records that the pipeline returned. Cancels an interruption that was not delivered."""
        with contextlib.suppress(StuckError), self._lock:
            self._since_s = _NEVER_S
            if self._has_fired:
                self._has_fired = False
                _interrupt(self._thread_id, None)

    def _watch(self) -> None:
        """Checks a few times per limit, and exits once no pipeline is running."""
        idle = 0
        while idle < _IDLE_LOOKS:
            time.sleep(self._limit_s / _LOOKS)
            with self._lock:
                since_s = self._since_s
                idle = idle + 1 if since_s == _NEVER_S else 0
                if time.monotonic() - since_s < self._limit_s or self._has_fired:
                    continue
                self._has_fired = True
                log.warning("pipeline interrupted", extra={"limit_s": self._limit_s})
                _interrupt(self._thread_id, StuckError)


def _interrupt(thread_id: int, error: type[Exception] | None) -> None:
    """Raises an error in a thread's Python code.

    If None, cancels an error that has not been raised yet.
    """
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)
