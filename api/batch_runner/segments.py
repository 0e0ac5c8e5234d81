"""Runs a batch's lines for one turn.

Lines start in order, within a window of items, and finish in any order, so a slow line does not
hold up the others. Segments are written in order, each as soon as it and all earlier segments are
complete. Until then, answers are logged (api/batch_runner/answers.py).

If a batch is canceled or expires, a runner that took it over returns whatever answers from earlier
runners it can still find. The other lines are not run and cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from api.batch_runner.answers import AnswerLog
from api.batch_runner.attempt import group_of, skip_line
from api.batch_runner.execution import LineExecutor
from api.batch_runner.lines import (
    Line,
    LineRefused,
    LineSplitter,
    custom_id_of,
    encode_not_run,
    read_line,
)
from api.batch_runner.outputs import Outputs
from api.batch_runner.terms import CurrentTerms
from api.batch_runner.turn_progress import TurnProgress
from api.batch_runner.window import Share
from api.batches.documents import (
    BatchCreated,
    BatchPlan,
    End,
    LineAnswer,
    counts_after,
    encode_segment,
)
from api.batches.files import BatchFile, BatchFiles
from api.batches.names import owner_of
from api.batches.store import BatchStore
from shared.errors import Unavailable
from shared.models.catalog import Catalog
from shared.tenants.plan import Caller

FLUSH_S = 1.0
"""Pause between answer logs."""
BYTES_OF_AN_ITEM = 64 * 1024
"""In the window, a line counts as at least one item per BYTES_OF_AN_ITEM bytes of its request and
answer.
"""
RECOVERED_AT_ONCE = 16
log = logging.getLogger(__name__)


class Stop:
    """Stops a batch so that no more of its lines run. Holds the reason."""

    def __init__(self, expires_at_s: float) -> None:
        self._expires_at_s = expires_at_s
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """Stops the batch because its caller canceled it."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Returns whether the caller canceled the batch."""
        return self._cancelled.is_set()

    @property
    def end(self) -> End | None:
        """The reason the batch is ending, or None if it continues."""
        if self.is_cancelled:
            return "cancelled"
        return "expired" if time.time() >= self._expires_at_s else None

    async def wait_cancelled(self) -> None:
        """Returns once the batch is canceled."""
        await self._cancelled.wait()


@dataclass(frozen=True, slots=True)
class RunTools:
    """Dependencies shared by all of a runner's batches."""

    store: BatchStore
    files: BatchFiles
    outputs: Outputs
    catalog: Catalog
    terms: CurrentTerms
    executor: LineExecutor


@dataclass(slots=True)
class WaitingBatches:
    """Other batches waiting for a batch's turn to end."""

    is_next_due: bool = False
    """True if another batch runs after the current segment, because more tenants wait than can run,
    or an older batch of this tenant does.
    """
    is_any_waiting: bool = False
    """True if another batch could run in place of this one."""


class Paused(Enum):
    """Reasons a batch was suspended before it finished."""

    YIELDED = auto()
    """It is another batch's turn."""
    STUCK = auto()
    """The remaining lines can't be run now."""
    MOVED = auto()
    """Like STUCK, but some lines finished in this turn."""


@dataclass(frozen=True, slots=True)
class BatchLines:
    """A batch's input."""

    batch: BatchCreated
    plan: BatchPlan
    file: BatchFile
    files: BatchFiles

    async def read(self, index: int) -> list[Line]:
        """Returns the lines in a segment."""
        segment = self.plan.segments[index]
        splitter = LineSplitter(number=segment.first_line, offset=segment.offset)
        lines: list[Line] = []
        end = segment.offset + segment.size_bytes
        async for data in self.files.read(self.file, segment.offset, end):
            lines += splitter.feed(data)
        return lines + splitter.finish()


@dataclass(slots=True)
class _OpenSegment:
    """A segment with unfinished lines, or one waiting for an earlier segment."""

    numbers: list[int]
    unanswered: set[int]
    """Numbers of the lines that don't have an answer yet."""
    started: set[int] = field(default_factory=set)


class SegmentRun:
    """One turn of a batch.

    Args:
        stop: set when no more lines should be run.
        share: limits the items in flight.
    """

    def __init__(
        self,
        tools: RunTools,
        source: BatchLines,
        stop: Stop,
        share: Share,
        others: WaitingBatches,
    ) -> None:
        self._tools = tools
        self._source = source
        self._batch = source.batch
        self._owner = owner_of(source.batch.tenant)
        self._stop = stop
        self._share = share
        self._others = others
        self._open: dict[int, _OpenSegment] = {}
        """Open segments, keyed by index. Segments below `_next` have been written."""
        self._next = 0
        self._begun = 0
        """Segments below this index may have lines that an earlier runner started."""
        self._tasks: set[asyncio.Task[LineAnswer | None]] = set()
        self._has_waiting = False
        """True if a line is waiting for a later turn."""
        self._yields = False
        self._failure: BaseException | None = None
        self._moved = asyncio.Event()

    async def run(self, progress: TurnProgress) -> Paused | None:
        """Runs the remaining lines. Returns None once all lines are finished.

        Raises:
            Unavailable: the object store is unreachable. Logged answers are not lost.
        """
        store, names = self._tools.store, (self._owner, self._batch.id)
        self._next, counts = await store.count_written(*names)
        self._begun = max(await store.count_begun_segments(*names), self._next + 1)
        segments = self._source.plan.segments
        if self._next == len(segments):
            return None
        answers = AnswerLog(store, *names, counts)
        earlier = await store.half_segment(*names, self._next)
        await answers.open(earlier, segments[self._next].first_line)
        async with _flush_often(answers):
            await self._run_lines(answers, progress)
            if self._stop.end is not None:
                await self._end_rest(answers, progress.attempts)
        await answers.flush()
        if self._next == len(segments):
            return None
        if self._yields and not (self._has_waiting or progress.is_stalled):
            return Paused.YIELDED
        return Paused.MOVED if progress.ended_lines else Paused.STUCK

    async def _run_lines(self, answers: AnswerLog, progress: TurnProgress) -> None:
        """Runs lines until all are finished, the batch is stopped, or the turn is over."""
        if await self._tools.terms.is_frozen(self._batch.tenant):
            progress.stall()
        caller = await self._tools.terms.caller_of(self._batch)
        starting = asyncio.ensure_future(self._start_all(answers, caller, progress))
        canceled = asyncio.ensure_future(self._stop.wait_cancelled())
        for event in (starting, canceled):
            event.add_done_callback(lambda _: self._moved.set())
        try:
            while not self._stop.is_cancelled:
                self._moved.clear()
                unwritten = await self._try_to_write(answers)
                if self._failure is not None:
                    raise self._failure
                if starting.done() and not self._tasks:
                    if unwritten is not None:
                        raise unwritten
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if unwritten is None else FLUSH_S):
                        await self._moved.wait()
        finally:
            for task in (starting, canceled, *self._tasks):
                task.cancel()
            await asyncio.gather(starting, canceled, *self._tasks, return_exceptions=True)
        if not starting.cancelled():
            starting.result()

    async def _start_all(self, answers: AnswerLog, caller: Caller, progress: TurnProgress) -> None:
        """Starts lines in order as long as there is room in the window."""
        first = self._next
        for index in range(first, len(self._source.plan.segments)):
            if self._stop.end is not None or progress.is_stalled or self._has_waiting:
                return
            if index > first and self._others.is_next_due:
                self._yields = True
                return
            lines = await self._open_segment(index, answers)
            for line in lines:
                if self._stop.end is not None or progress.is_stalled:
                    return
                if answers.is_due:
                    await answers.flush()
                await self._start(index, line, answers, caller, progress)

    async def _open_segment(self, index: int, answers: AnswerLog) -> list[Line]:
        """Opens a segment. Returns the segment's lines that have no answer."""
        if index >= self._begun:
            await self._tools.store.begin_segment(self._owner, self._batch.id, index)
        lines = await self._source.read(index)
        unanswered = [line for line in lines if line.number not in answers]
        numbers = [line.number for line in lines]
        self._open[index] = _OpenSegment(numbers, {line.number for line in unanswered})
        self._moved.set()
        return unanswered

    async def _start(
        self, index: int, line: Line, answers: AnswerLog, caller: Caller, progress: TurnProgress
    ) -> None:
        try:
            batch_line = read_line(line, self._batch, self._tools.catalog)
        except LineRefused as error:  # the catalog has changed since the file was validated
            self._end_line(index, line.number, answers, self._refuse(line, error))
            return
        request, size_bytes = batch_line.request, len(line.data or b"")
        size_bytes = max(size_bytes, request.reply_bytes)
        items = max(len(request.inputs), size_bytes // BYTES_OF_AN_ITEM)
        await self._share.take(items)
        running = self._tools.executor.run(
            self._batch, caller, batch_line, progress, index, lambda: not self._stop.is_cancelled
        )
        task = asyncio.ensure_future(running)
        self._tasks.add(task)
        self._open[index].started.add(line.number)

        def on_done(_: asyncio.Task[LineAnswer | None]) -> None:
            self._share.give_back(items)
            self._tasks.discard(task)
            self._moved.set()
            if not task.cancelled():
                self._note(index, line.number, answers, task)

        task.add_done_callback(on_done)

    def _note(
        self, index: int, number: int, answers: AnswerLog, task: asyncio.Task[LineAnswer | None]
    ) -> None:
        """Records the result of running a line."""
        if (failure := task.exception()) is not None:
            self._failure = failure
        elif (answer := task.result()) is not None:
            self._end_line(index, number, answers, answer)
        else:
            self._has_waiting = True

    def _end_line(self, index: int, number: int, answers: AnswerLog, answer: LineAnswer) -> None:
        segment = self._open.get(index)  # another runner may have written it in the meantime
        if segment is not None and number in segment.unanswered:
            segment.unanswered.discard(number)
            answers.add(number, answer)
            self._moved.set()

    async def _try_to_write(self, answers: AnswerLog) -> Unavailable | None:
        """Writes complete segments.

        If the object store is unreachable, returns the error instead of raising it, because other
        lines are still in flight.
        """
        try:
            await self._write_complete(answers)
        except Unavailable as error:
            facts = {"batch": self._batch.id, "reason": error.message}
            log.warning("batch segment not written yet", extra=facts)
            return error
        return None

    async def _write_complete(self, answers: AnswerLog) -> None:
        """Writes complete segments as long as all earlier segments are complete."""
        store, names = self._tools.store, (self._owner, self._batch.id)
        written, counts = self._next, None
        while (segment := self._open.get(self._next)) is not None and not segment.unanswered:
            if counts is None:
                written, counts = await store.count_written(*names)
            if written == self._next:
                done = await answers.read(segment.numbers)
                counts = counts_after(counts, done)
                data = encode_segment(counts, done)
                if await store.add_segment(*names, self._next, data):
                    group = group_of(self._batch, self._next)
                    await self._tools.executor.limiter.end_operations(group)
                    written += 1
                else:  # another runner wrote it first, so that runner's answers are used
                    written, counts = await store.count_written(*names)
            await self._skip_written(answers, written)

    async def _skip_written(self, answers: AnswerLog, written: int) -> None:
        skipped = [self._open.pop(index, None) for index in range(self._next, written)]
        self._next = written
        for segment in skipped:
            if segment is not None:
                await answers.forget(segment.numbers)

    async def _end_rest(self, answers: AnswerLog, attempts: Mapping[int, int]) -> None:
        """Finishes the remaining lines when the batch stops, and writes all segments."""
        while self._next < len(self._source.plan.segments):
            index, started = self._next, set[int]()
            lines = await self._source.read(index)
            if (known := self._open.get(index)) is not None:
                started = known.started
            unanswered = [line for line in lines if line.number not in answers]
            self._open[index] = _OpenSegment(
                [line.number for line in lines], {line.number for line in unanswered}
            )
            for at in range(0, len(unanswered), RECOVERED_AT_ONCE):
                some = unanswered[at : at + RECOVERED_AT_ONCE]
                ends = [
                    self._end_undone(line, index, attempts, is_started=line.number in started)
                    for line in some
                ]
                for line, answer in zip(some, await _gather_or_cancel(ends), strict=True):
                    self._end_line(index, line.number, answers, answer)
            await self._write_complete(answers)

    async def _end_undone(
        self, line: Line, index: int, attempts: Mapping[int, int], *, is_started: bool
    ) -> LineAnswer:
        """Returns an answer from an earlier run, or records that the line was not run."""
        with suppress(LineRefused):
            batch_line = read_line(line, self._batch, self._tools.catalog)
            # A flow run continues on its own, even if this runner started it.
            is_run = is_started and batch_line.request.is_run
            if is_run or (index < self._begun and not is_started):
                tools, attempt = self._tools, attempts.get(line.number, 0)
                caller = await tools.terms.caller_of(self._batch)
                recovered = await tools.executor.recover(
                    self._batch, caller, batch_line, index, attempt
                )
                if recovered is not None:
                    return recovered
        end = self._stop.end or "cancelled"
        return skip_line(self._batch, line.number, custom_id_of(line), end)

    def _refuse(self, line: Line, error: LineRefused) -> LineAnswer:
        custom_id = custom_id_of(line)
        data = encode_not_run(self._batch, line.number, custom_id, error.shown.code, error.message)
        return LineAnswer(data, "failed")


async def _gather_or_cancel(ends: Sequence[Coroutine[None, None, LineAnswer]]) -> list[LineAnswer]:
    """Waits for all tasks. If one of the tasks fails, cancels the others before returning."""
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _flush_often(answers: AnswerLog) -> AsyncIterator[None]:
    """Logs new answers every FLUSH_S while the block runs, and once more if the block fails."""

    async def flush_often() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await answers.flush()
            except Unavailable as error:
                log.warning("batch responses not logged", extra={"reason": error.message})

    flushing = asyncio.create_task(flush_often())
    try:
        yield
    except Exception:
        with suppress(Unavailable):
            await answers.flush()
        raise
    finally:
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
