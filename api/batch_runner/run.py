"""Validates one batch, and runs it from its current state until its end or another batch's turn.

The file of a batch is validated line by line, and divided into segments.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from api.batch_runner.execution import LINES, NOT_RUN, LineExecutor, SegmentProgress, group_of
from api.batch_runner.lines import (
    BatchLine,
    Line,
    LineRefused,
    LineSplitter,
    custom_id_of,
    not_run,
    read_line,
)
from api.batch_runner.outputs import Outputs
from api.batch_runner.terms import CurrentTerms
from api.batches.documents import (
    BatchCreated,
    BatchEnded,
    BatchPlan,
    Counts,
    End,
    Finalizing,
    LineAnswer,
    LineBlock,
    LineError,
    counts_after,
    encode_segment,
)
from api.batches.files import BatchFile, BatchFiles
from api.batches.names import owner_of
from api.batches.store import BatchStore
from api.errors import NotFound
from shared.catalog import Catalog
from shared.errors import BadInput, Unavailable
from shared.tenants.plan import Caller

MAX_LINES = 50_000
MAX_INPUTS = 50_000
"""Texts, or images, in all lines together, as in OpenAI's API."""
MAX_ERRORS = 100
"""Maximum number of errors reported. Nothing is read after the last of them."""
SEGMENT_LINES = 1000
SEGMENT_INPUT_BYTES = 4 * 1024 * 1024
SEGMENT_REPLY_BYTES = 16 * 1024 * 1024
"""A segment is held in memory while its lines run, so these bound what a batch takes."""
_LINES_AT_A_TIME = 100


class FileRefused(Exception):
    """The file can't be run. `errors` say why."""

    def __init__(self, errors: list[LineError]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = errors


async def validate(
    batch: BatchCreated, file: BatchFile, files: BatchFiles, catalog: Catalog
) -> BatchPlan:
    """Reads the whole file of a batch once.

    Raises:
        FileRefused: a line, or the file as a whole, is wrong.
        BadInput: the bytes of the file are gone.
        Unavailable: the object store is out of reach.
    """
    checks = _Checks(batch, catalog, file.size_bytes)
    splitter = LineSplitter()
    async for data in files.read(file):
        await checks.add(splitter.feed(data))
    await checks.add(splitter.finish())
    return checks.plan()


@dataclass
class _Checks:
    batch: BatchCreated
    catalog: Catalog
    file_bytes: int
    errors: list[LineError] = field(default_factory=list)
    lines: int = 0
    inputs: int = 0
    model: str = ""
    custom_ids: set[bytes] = field(default_factory=set)
    """Digests of 128 bits, since 50,000 ids may have 512 characters each."""
    segments: list[LineBlock] = field(default_factory=list)
    _segment_lines: int = 0
    _reply_bytes: int = 0

    async def add(self, lines: list[Line]) -> None:
        for index, line in enumerate(lines):
            if index % _LINES_AT_A_TIME == 0:
                await asyncio.sleep(0)
            self.lines += 1
            if self.lines > MAX_LINES:
                reason = f"the file has more than {MAX_LINES} lines"
                raise FileRefused([LineError("too_many_tasks", reason)])
            try:
                self._check(read_line(line, self.batch, self.catalog), line)
            except LineRefused as error:
                self.errors.append(error.shown)
                if len(self.errors) >= MAX_ERRORS:
                    raise FileRefused(self.errors) from error

    def plan(self) -> BatchPlan:
        if self.errors:
            raise FileRefused(self.errors)
        if not self.lines:
            raise FileRefused([LineError("empty_file", "the file has no requests")])
        ends = [*(segment.offset for segment in self.segments[1:]), self.file_bytes]
        for segment, end in zip(self.segments, ends, strict=True):
            segment.size_bytes = end - segment.offset
        return BatchPlan(
            model=self.model,
            total=self.lines,
            segments=self.segments,
            in_progress_at_s=time.time(),
        )

    def _check(self, batch_line: BatchLine, line: Line) -> None:
        digest = hashlib.blake2b(batch_line.custom_id.encode(), digest_size=16).digest()
        if digest in self.custom_ids:
            reason = f"another line has the custom_id {batch_line.custom_id[:80]!r} too"
            raise LineRefused("duplicate_custom_id", reason, line.number, "custom_id")
        self.custom_ids.add(digest)
        name = batch_line.request.model.name
        self.model = self.model or name
        if name != self.model:
            reason = f"all lines of a batch have one model, here {self.model}"
            raise LineRefused("mismatched_model", reason, line.number, "body.model")
        self.inputs += len(batch_line.request.inputs)
        if self.inputs > MAX_INPUTS:
            reason = f"the lines have more than {MAX_INPUTS} inputs together"
            raise FileRefused([LineError("too_many_inputs", reason, line.number)])
        self._plan_line(batch_line, line)

    def _plan_line(self, batch_line: BatchLine, line: Line) -> None:
        self._reply_bytes += batch_line.request.reply_bytes
        is_full = (
            self._segment_lines >= SEGMENT_LINES
            or self._reply_bytes > SEGMENT_REPLY_BYTES
            or (self.segments and line.offset - self.segments[-1].offset > SEGMENT_INPUT_BYTES)
        )
        if is_full or not self.segments:
            self.segments.append(LineBlock(line.offset, 0, line.number))
            self._segment_lines, self._reply_bytes = 0, batch_line.request.reply_bytes
        self._segment_lines += 1


class ItemWindow:
    """Room for items in flight. Each open share has an equal part of it.

    Args:
        items: the room of all shares together.
    """

    def __init__(self, items: int) -> None:
        self._items = items
        self._shares: set[Share] = set()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Opens a share. The others become smaller until the block ends."""
        share = Share(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)
            for other in self._shares:
                other.wake()

    @property
    def part(self) -> int:
        """The items that each share may have in flight."""
        return max(1, self._items // max(1, len(self._shares)))


class Share:
    """The part of one batch."""

    def __init__(self, window: ItemWindow) -> None:
        self._window = window
        self._taken = 0
        self._changed = asyncio.Event()

    async def take(self, items: int) -> None:
        """Waits until the items fit. More than the whole part fit when nothing else is in flight.

        Only one task of a batch calls this.
        """
        while self._taken and self._taken + items > self._window.part:
            self._changed.clear()
            await self._changed.wait()
        self._taken += items

    def give_back(self, items: int) -> None:
        """Ends items that were taken."""
        self._taken -= items
        self.wake()

    def wake(self) -> None:
        """Lets the taker look again."""
        self._changed.set()


BYTES_OF_AN_ITEM = 64 * 1024
"""A line counts as at least one item of the window per BYTES_OF_AN_ITEM of its size."""
log = logging.getLogger(__name__)


class Stop:
    """Stops a batch: no more of its lines are run. Holds the reason."""

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
        """The end of the batch. None if it continues."""
        if self.is_cancelled:
            return "cancelled"
        return "expired" if time.time() >= self._expires_at_s else None

    async def wait_cancelled(self) -> None:
        """Returns once the batch is canceled."""
        await self._cancelled.wait()


@dataclass(frozen=True, slots=True)
class RunTools:
    """Dependencies shared by all runs of batches."""

    store: BatchStore
    files: BatchFiles
    outputs: Outputs
    catalog: Catalog
    terms: CurrentTerms
    executor: LineExecutor


class BatchPermits(Protocol):
    """Other batches that wait for the turn of this one."""

    def is_next_one_due(self) -> bool:
        """Returns whether another batch runs next, after the current segment."""
        ...

    def is_anyone_waiting(self) -> bool:
        """Returns whether any batch could run in place of this one."""
        ...


class Paused(Enum):
    """Why a batch was put down before its end."""

    YIELDED = auto()
    """It is another batch's turn."""
    STUCK = auto()
    """The lines that are left can't be run now."""
    MOVED = auto()
    """The same, but some lines ended in this turn."""


class BatchRun:
    """One batch that this runner runs.

    Args:
        tools: shared by all runs.
        batch: the batch.
        stop: signals that no more lines are run.
        share: bounds the lines in flight.
        turns: other batches that wait.
        attempts: of its lines in earlier turns (`SegmentProgress`).
    """

    def __init__(
        self,
        tools: RunTools,
        batch: BatchCreated,
        stop: Stop,
        share: Share,
        turns: BatchPermits,
        attempts: dict[int, int],
    ) -> None:
        self._tools = tools
        self._batch = batch
        self._owner = owner_of(batch.tenant)
        self._stop = stop
        self._share = share
        self._turns = turns
        self._progress = SegmentProgress(turns.is_anyone_waiting, attempts)

    async def run(self) -> BatchEnded | Paused:
        """Returns the end of the batch, which is stored, or why it continues in a later turn.

        Raises:
            Unavailable: the object store is out of reach. Stored segments are not lost.
        """
        batch, store = self._batch, self._tools.store
        try:
            file = await self._tools.files.find(batch.tenant, batch.input_file_id)
            plan = await self._plan(file)
        except FileRefused as error:
            return await self._fail(error.errors)
        except (NotFound, BadInput):
            reason = "the input file is gone"
            return await self._fail([LineError("invalid_file", reason, param="input_file_id")])
        finalizing = await store.read(self._owner, batch.id, "finalizing", Finalizing)
        if finalizing is None:
            paused = await self._run_segments(plan, file)
            if paused is not None:
                return paused
            _, counts = await self._written()
            end: End = "cancelled" if self._stop.is_cancelled else "completed"
            end = "expired" if counts.not_run and not self._stop.is_cancelled else end
            await store.write(self._owner, batch.id, "finalizing", Finalizing(end, time.time()))
            finalizing = await store.read(self._owner, batch.id, "finalizing", Finalizing)
            assert finalizing is not None, "it was just written; this is a bug"
        return await self._finalize(plan, finalizing)

    async def _plan(self, file: BatchFile) -> BatchPlan:
        batch, store = self._batch, self._tools.store
        plan = await store.read(self._owner, batch.id, "plan", BatchPlan)
        if plan is not None:
            return plan
        plan = await validate(batch, file, self._tools.files, self._tools.catalog)
        await store.write(self._owner, batch.id, "plan", plan)
        log.info("batch validated", extra={"batch": batch.id, "lines": plan.total})
        return await store.read(self._owner, batch.id, "plan", BatchPlan) or plan

    async def _run_segments(self, plan: BatchPlan, file: BatchFile) -> Paused | None:
        """Runs the remaining lines. Returns None once all have ended."""
        store, batch_id = self._tools.store, self._batch.id
        index, counts = await self._written()
        first = index
        while index < len(plan.segments):
            lines = await self._lines_of(file, plan.segments[index])
            kept = await store.half_segment(self._owner, batch_id, index)
            self._progress.segment = index
            answers = await self._answers(lines, kept)
            if self._stop.is_cancelled and index == first:
                await self._cancel_runs([line for line in lines if line.number not in kept])
            done = [answer for answer in answers.values() if answer is not None]
            after = counts_after(counts, done)
            if len(done) < len(lines):
                return await self._set_aside(index, after, answers)
            data = encode_segment(after, done)
            if not await store.add_segment(self._owner, batch_id, index, data):
                # Another runner was faster, so its answers count.
                index, counts = await self._written()
                continue
            await self._tools.executor.limiter.end_operations(group_of(self._batch, index))
            index, counts = index + 1, after
            is_last = index == len(plan.segments)
            if self._turns.is_next_one_due() and not is_last and self._stop.end is None:
                return Paused.YIELDED
        return None

    async def _cancel_runs(self, lines: Sequence[Line]) -> None:
        """Cancels the runs of flows that a runner left which died before the batch was canceled."""
        for line in lines:
            with suppress(LineRefused):
                batch_line = read_line(line, self._batch, self._tools.catalog)
                if batch_line.request.model.flow is None:
                    continue
                attempt = self._progress.attempts.get(line.number, 0)
                await self._tools.executor.cancel_run(self._batch, batch_line, attempt)

    async def _set_aside(
        self, index: int, counts: Counts, answers: Mapping[int, LineAnswer | None]
    ) -> Paused:
        if not self._progress.ended_lines:
            return Paused.STUCK
        done = {number: answer for number, answer in answers.items() if answer is not None}
        store = self._tools.store
        await store.keep_half_segment(self._owner, self._batch.id, index, counts, done)
        return Paused.MOVED

    async def _lines_of(self, file: BatchFile, segment: LineBlock) -> list[Line]:
        splitter = LineSplitter(number=segment.first_line, offset=segment.offset)
        lines: list[Line] = []
        end = segment.offset + segment.size_bytes
        async for data in self._tools.files.read(file, segment.offset, end):
            lines += splitter.feed(data)
        return lines + splitter.finish()

    async def _answers(
        self, lines: Sequence[Line], kept: Mapping[int, LineAnswer]
    ) -> dict[int, LineAnswer | None]:
        """Computes lines in parallel. Those that a stop leaves undone are answered with that.

        Returns:
            The answers by the numbers of the lines, in order. None: it has to wait.
        """
        tasks: dict[int, asyncio.Task[LineAnswer | None]] = {}
        left = [line for line in lines if line.number not in kept]
        computing = asyncio.ensure_future(self._compute(left, tasks))
        canceled = asyncio.ensure_future(self._stop.wait_cancelled())
        try:
            await asyncio.wait([computing, canceled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (computing, canceled, *tasks.values()):
                task.cancel()
            await asyncio.gather(computing, canceled, *tasks.values(), return_exceptions=True)
        if not computing.cancelled():
            computing.result()
        return {
            line.number: kept.get(line.number) or self._end_of(line, tasks.get(line.number))
            for line in lines
        }

    def _end_of(
        self, line: Line, task: asyncio.Task[LineAnswer | None] | None
    ) -> LineAnswer | None:
        if task is not None and not task.cancelled():
            answer = task.result()
            if answer is not None:
                return answer
        return None if self._stop.end is None else self._not_run(line)

    async def _compute(
        self, lines: Sequence[Line], tasks: dict[int, asyncio.Task[LineAnswer | None]]
    ) -> None:
        if await self._tools.terms.is_frozen(self._batch.tenant):
            self._progress.stall()
        caller = await self._tools.terms.caller_of(self._batch)
        for line in lines:
            if self._stop.end is not None or self._progress.is_stalled:
                break
            tasks[line.number] = await self._start(line, caller)
        if tasks:
            await asyncio.wait(tasks.values())

    async def _start(self, line: Line, caller: Caller) -> asyncio.Task[LineAnswer | None]:
        try:
            batch_line = read_line(line, self._batch, self._tools.catalog)
        except LineRefused as error:  # the catalog changed since the file was validated
            return asyncio.ensure_future(self._refuse(line, error))
        items = max(len(batch_line.request.inputs), len(line.data or b"") // BYTES_OF_AN_ITEM)
        await self._share.take(items)
        running = self._tools.executor.run(
            self._batch, caller, batch_line, self._progress, lambda: not self._stop.is_cancelled
        )
        task = asyncio.ensure_future(running)
        task.add_done_callback(lambda _: self._share.give_back(items))
        return task

    async def _refuse(self, line: Line, error: LineRefused) -> LineAnswer | None:
        custom_id = custom_id_of(line)
        data = not_run(self._batch, line.number, custom_id, error.shown.code, error.message)
        return LineAnswer(data, "failed")

    def _not_run(self, line: Line) -> LineAnswer:
        code, message = NOT_RUN[self._stop.end or "cancelled"]
        LINES.labels("not_run").inc()
        data = not_run(self._batch, line.number, custom_id_of(line), code, message)
        return LineAnswer(data, "not_run")

    async def _written(self) -> tuple[int, Counts]:
        """Returns the number of segments written, and the counts at the end of the last one."""
        written = await self._tools.store.segments(self._owner, self._batch.id)
        counts = (await self._tools.store.header(written[-1])).counts if written else Counts()
        return len(written), counts

    async def _fail(self, errors: list[LineError]) -> BatchEnded:
        return await self._end(
            BatchEnded(created=self._batch, end="failed", at_s=time.time(), errors=errors)
        )

    async def _finalize(self, plan: BatchPlan, finalizing: Finalizing) -> BatchEnded:
        batch = self._batch
        written = await self._tools.store.segments(self._owner, batch.id)
        if len(written) < len(plan.segments):
            # Another runner has ended the batch. Its files must not be written over by half ones.
            raise Unavailable("segments of the batch are gone")
        _, counts = await self._written()
        output, error = await self._tools.outputs.compose(batch, plan.model, written)
        return await self._end(
            BatchEnded(
                created=batch,
                end=finalizing.end,
                at_s=time.time(),
                plan_model=plan.model,
                total=plan.total,
                counts=counts,
                in_progress_at_s=plan.in_progress_at_s,
                finalizing_at_s=finalizing.at_s,
                output_file_id=output,
                error_file_id=error,
            )
        )

    async def _end(self, ended: BatchEnded) -> BatchEnded:
        store = self._tools.store
        ended.cancelling_at_s = await store.cancelled_at_s(self._owner, self._batch.id)
        await store.write(self._owner, self._batch.id, "ended", ended)
        return await store.read(self._owner, self._batch.id, "ended", BatchEnded) or ended
