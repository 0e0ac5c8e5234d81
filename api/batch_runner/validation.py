"""Validates the file of a batch, line by line, and plans its segments."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field

from api.batch_runner.lines import BatchLine, Line, LineRefused, LineSplitter, read_line
from api.batches.documents import BatchCreated, BatchPlan, LineBlock, LineError
from api.batches.files import BatchFile, BatchFiles
from shared.catalog import Catalog

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

    def _check(self, found: BatchLine, line: Line) -> None:
        digest = hashlib.blake2b(found.custom_id.encode(), digest_size=16).digest()
        if digest in self.custom_ids:
            reason = f"another line has the custom_id {found.custom_id[:80]!r} too"
            raise LineRefused("duplicate_custom_id", reason, line.number, "custom_id")
        self.custom_ids.add(digest)
        name = found.request.model.name
        self.model = self.model or name
        if name != self.model:
            reason = f"all lines of a batch have one model, here {self.model}"
            raise LineRefused("mismatched_model", reason, line.number, "body.model")
        self.inputs += len(found.request.inputs)
        if self.inputs > MAX_INPUTS:
            reason = f"the lines have more than {MAX_INPUTS} inputs together"
            raise FileRefused([LineError("too_many_inputs", reason, line.number)])
        self._plan_line(found, line)

    def _plan_line(self, found: BatchLine, line: Line) -> None:
        self._reply_bytes += found.request.reply_bytes
        is_full = (
            self._segment_lines >= SEGMENT_LINES
            or self._reply_bytes > SEGMENT_REPLY_BYTES
            or (self.segments and line.offset - self.segments[-1].offset > SEGMENT_INPUT_BYTES)
        )
        if is_full or not self.segments:
            self.segments.append(LineBlock(line.offset, 0, line.number))
            self._segment_lines, self._reply_bytes = 0, found.request.reply_bytes
        self._segment_lines += 1
