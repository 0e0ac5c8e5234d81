"""Validates one batch and runs it from its current state until it finishes or another batch is due.

The batch's file is validated line by line and divided into segments.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field

from api.batch_runner.lines import BatchLine, Line, LineRefused, LineSplitter, read_line
from api.batch_runner.segments import (
    BatchLines,
    Paused,
    RunTools,
    SegmentRun,
    Stop,
    WaitingBatches,
)
from api.batch_runner.turn_progress import TurnProgress
from api.batch_runner.window import Share
from api.batches.documents import (
    BatchCreated,
    BatchEnded,
    BatchPlan,
    End,
    Finalizing,
    LineBlock,
    LineError,
)
from api.batches.files import BatchFile, BatchFiles
from api.batches.names import owner_of
from api.errors import NotFound
from shared.errors import BadInput, Unavailable
from shared.models.catalog import Catalog

MAX_LINES = 50_000
MAX_INPUTS = 50_000
"""Maximum total number of texts or images across all lines, as in OpenAI's API."""
MAX_ERRORS = 100
"""Maximum number of errors reported. Reading stops once this many errors have been found."""
SEGMENT_LINES = 1000
SEGMENT_INPUT_BYTES = 4 * 1024 * 1024
SEGMENT_REPLY_BYTES = 16 * 1024 * 1024
"""A segment is read and written as a whole, so these limits bound the memory that a batch needs."""
_LINES_AT_A_TIME = 100
log = logging.getLogger(__name__)


class FileRefused(Exception):
    """The file can't be run. `errors` contains the reasons."""

    def __init__(self, errors: list[LineError]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = errors


async def validate(
    batch: BatchCreated, file: BatchFile, files: BatchFiles, catalog: Catalog
) -> BatchPlan:
    """Reads a batch's whole file once.

    Raises:
        FileRefused: a line or the whole file is invalid.
        BadInput: the file's data no longer exists.
        Unavailable: the object store is unreachable.
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
    """128-bit digests, because there may be 50,000 IDs of 512 characters each."""
    segments: list[LineBlock] = field(default_factory=list)
    _segment_lines: int = 0
    _reply_bytes: int = 0

    async def add(self, lines: list[Line]) -> None:
        for index, line in enumerate(lines):
            if index % _LINES_AT_A_TIME == 0:
                await asyncio.sleep(0)
            self.lines += 1
            if self.lines > MAX_LINES:
                reason = f"the file exceeds the maximum of {MAX_LINES} lines"
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
            raise FileRefused([LineError("empty_file", "the file does not contain any requests")])
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
            reason = f"custom_id {batch_line.custom_id[:80]!r} is already used by another line"
            raise LineRefused("duplicate_custom_id", reason, line.number, "custom_id")
        self.custom_ids.add(digest)
        name = batch_line.request.model.name
        self.model = self.model or name
        if name != self.model:
            reason = f"all lines in a batch must use the same model, here {self.model}"
            raise LineRefused("mismatched_model", reason, line.number, "body.model")
        self.inputs += len(batch_line.request.inputs)
        if self.inputs > MAX_INPUTS:
            reason = f"the lines exceed the maximum of {MAX_INPUTS} inputs in total"
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


class BatchRun:
    """A batch run by this runner.

    Args:
        stop: set when no more lines should be run.
        share: limits the items in flight.
        attempts: failed attempts of the batch's lines in earlier turns (see `TurnProgress`).
    """

    def __init__(
        self,
        tools: RunTools,
        batch: BatchCreated,
        stop: Stop,
        share: Share,
        others: WaitingBatches,
        attempts: dict[int, int],
    ) -> None:
        self._tools = tools
        self._batch = batch
        self._owner = owner_of(batch.tenant)
        self._stop = stop
        self._share = share
        self._others = others
        self._progress = TurnProgress(lambda: others.is_any_waiting, attempts)

    async def run(self) -> BatchEnded | Paused:
        """Returns the batch's stored final state, or the reason it will continue on a later turn.

        Raises:
            Unavailable: the object store is unreachable. Stored segments are not lost.
        """
        batch, store = self._batch, self._tools.store
        try:
            file = await self._tools.files.find(batch.tenant, batch.input_file_id)
            plan = await self._plan(file)
        except FileRefused as error:
            return await self._fail(error.errors)
        except (NotFound, BadInput):
            reason = "the input file no longer exists"
            return await self._fail([LineError("invalid_file", reason, param="input_file_id")])
        finalizing = await store.read(self._owner, batch.id, "finalizing", Finalizing)
        if finalizing is None:
            paused = await self._run_segments(plan, file)
            if paused is not None:
                return paused
            _, counts = await store.count_written(self._owner, batch.id)
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
        """Runs the remaining lines. Returns None once all lines are finished."""
        source = BatchLines(self._batch, plan, file, self._tools.files)
        running = SegmentRun(self._tools, source, self._stop, self._share, self._others)
        return await running.run(self._progress)

    async def _fail(self, errors: list[LineError]) -> BatchEnded:
        return await self._end(
            BatchEnded(created=self._batch, end="failed", at_s=time.time(), errors=errors)
        )

    async def _finalize(self, plan: BatchPlan, finalizing: Finalizing) -> BatchEnded:
        batch = self._batch
        written = await self._tools.store.segments(self._owner, batch.id)
        if len(written) < len(plan.segments):
            # Another runner has finished the batch. Don't overwrite that runner's files with
            # incomplete ones.
            raise Unavailable("some of the batch's segments no longer exist")
        _, counts = await self._tools.store.count_written(self._owner, batch.id)
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
        ended.cancelling_at_s = await store.read_cancelled_at_s(self._owner, self._batch.id)
        await store.write(self._owner, self._batch.id, "ended", ended)
        return await store.read(self._owner, self._batch.id, "ended", BatchEnded) or ended
