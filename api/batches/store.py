"""Stores batches: their documents, segments, and answer logs, and markers for open batches.

Calls raise Unavailable if the object store is unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from api.batches.admissions import Admissions
from api.batches.documents import (
    HEADER_BYTES,
    BatchCreated,
    BatchEnded,
    BatchPlan,
    BatchState,
    Counts,
    Finalizing,
    LineAnswer,
    SegmentHeader,
    decode_answers,
    decode_answers_header,
    decode_header,
    encode_answers,
)
from api.batches.names import OPEN, RUNS, is_batch_id, owner_of
from api.errors import DamagedDocument, NotFound
from shared.errors import MALFORMED, BadInput
from shared.stores.objects import ObjectStore, StoredObject

MAX_OPEN_OF_ALL = 20_000
"""Number of markers read at a time."""
MAX_SEGMENTS = 50_000
_DOCUMENT_MAX_BYTES = 16 * 1024 * 1024
MAX_LOGS = 10**8 - 1
_ANSWERS_MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of a log that is read. If a log is larger, its lines are run again."""
_BEGUN, _ANSWERS = "begun", "answers"
_SEGMENT_NAME = re.compile(r"[0-9]{5}")
_LOG_NAME = re.compile(r"([0-9]{8})-.+")
_JSON = "application/json"
D = TypeVar("D", bound=msgspec.Struct)

log = logging.getLogger(__name__)


class _Cancellation(msgspec.Struct):
    """The content of a `cancel` marker."""

    at_s: float


class StoredLog(NamedTuple):
    """A stored answer log."""

    number: int
    key: str


class OpenBatch(NamedTuple):
    """An open batch, or a batch whose markers still exist."""

    owner: str
    id: str
    is_cancelled: bool


class BatchStore:
    """All tenants' batches in the object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._admissions = Admissions(objects, self._list_marked)

    async def create(self, created: BatchCreated, most_open: int) -> bool:
        """Stores a new batch unless its tenant already has `most_open` open batches.

        Returns whether it was stored.

        The marker is written first, because a batch that no runner finds would never finish.

        Raises:
            Overloaded: too many batches are being created at once.
        """
        owner = owner_of(created.tenant)
        marker = f"{OPEN}/{owner}/{created.id}/open"

        async def mark() -> None:
            await self._objects.create(marker, b"{}", _JSON)

        if not await self._admissions.admit(owner, created.id, most_open, mark):
            await self._objects.delete(marker)
            return False
        await self.write(owner, created.id, "created", created)
        return True

    async def write(self, owner: str, batch_id: str, name: str, document: msgspec.Struct) -> bool:
        """Writes a document unless it already exists. Returns whether it was written."""
        key = _document_key(owner, batch_id, name)
        return await self._objects.create(key, msgspec.json.encode(document), _JSON)

    async def read(self, owner: str, batch_id: str, name: str, kind: type[D]) -> D | None:
        """Reads a document. Returns None if the document does not exist.

        Raises:
            DamagedDocument: the document can't be decoded.
        """
        key = _document_key(owner, batch_id, name)
        try:
            data = await self._objects.get(key, _DOCUMENT_MAX_BYTES)
        except BadInput:
            return None
        with _report_damage(key):
            return msgspec.json.decode(data, type=kind)

    async def find(self, tenant: str, batch_id: str) -> BatchState:
        """Finds one of this tenant's batches.

        Raises:
            NotFound: the tenant has no such batch.
        """
        owner = owner_of(tenant)
        state = await self.state(owner, batch_id) if is_batch_id(batch_id) else None
        if state is None:
            raise NotFound(f"batch {batch_id[:80]!r} does not exist", field="batch_id")
        return state

    async def state(self, owner: str, batch_id: str) -> BatchState | None:
        """Returns a batch's state, or None if the batch does not exist."""
        ended = await self.read(owner, batch_id, "ended", BatchEnded)
        if ended is not None:
            return BatchState(ended.created, counts=ended.counts, ended=ended)
        created, plan, finalizing, cancelled_at_s, counts = await asyncio.gather(
            self.read(owner, batch_id, "created", BatchCreated),
            self.read(owner, batch_id, "plan", BatchPlan),
            self.read(owner, batch_id, "finalizing", Finalizing),
            self.read_cancelled_at_s(owner, batch_id),
            self._counts(owner, batch_id),
        )
        if created is None:
            return None
        return BatchState(created, plan, cancelled_at_s, finalizing, counts)

    async def ids(self, tenant: str) -> list[str]:
        """Returns the IDs of a tenant's batches, newest first."""
        return await self._objects.folders(f"{RUNS}/{owner_of(tenant)}")

    async def cancel(self, owner: str, batch_id: str) -> None:
        """Marks a batch as canceled. Only the first call has an effect."""
        data = msgspec.json.encode(_Cancellation(time.time()))
        await self._objects.create(f"{OPEN}/{owner}/{batch_id}/cancel", data, _JSON)

    async def read_cancelled_at_s(self, owner: str, batch_id: str) -> float:
        """Returns the Unix time when a batch was canceled, or 0.

        Raises:
            DamagedDocument: the marker can't be decoded.
        """
        key = f"{OPEN}/{owner}/{batch_id}/cancel"
        try:
            data = await self._objects.get(key, 1024)
        except BadInput:
            return 0.0
        with _report_damage(key):
            return msgspec.json.decode(data, type=_Cancellation).at_s

    async def open(self, owner: str = "") -> list[OpenBatch]:
        """Returns open batches for one owner or all owners, newest first within each owner."""
        folder = f"{OPEN}/{owner}" if owner else OPEN
        marks: dict[tuple[str, str], set[str]] = {}
        for stored_object in await self._objects.listing(folder, MAX_OPEN_OF_ALL):
            *_, of, batch_id, mark = stored_object.key.split("/")
            marks.setdefault((of, batch_id), set()).add(mark)
        return [
            OpenBatch(of, batch_id, "cancel" in kinds) for (of, batch_id), kinds in marks.items()
        ]

    async def close(self, owner: str, batch_id: str) -> None:
        """Removes a finished batch's segments and markers, deleting the markers last."""
        for segment in await self.segments(owner, batch_id):
            await self._objects.delete(segment.key)
        for folder in (_BEGUN, _ANSWERS):
            logs = await self._objects.listing(f"{RUNS}/{owner}/{batch_id}/{folder}", MAX_LOGS)
            for stored_object in logs:
                await self._objects.delete(stored_object.key)
        await self._objects.delete(_half_segment_key(owner, batch_id))
        for mark in ("cancel", "open"):
            await self._objects.delete(f"{OPEN}/{owner}/{batch_id}/{mark}")

    async def segments(self, owner: str, batch_id: str) -> list[StoredObject]:
        """Returns the segments written so far, in order and without gaps."""
        return await self._objects.listing(f"{RUNS}/{owner}/{batch_id}/segments", MAX_SEGMENTS)

    async def count_written(self, owner: str, batch_id: str) -> tuple[int, Counts]:
        """Returns the number of segments written, and the counts at the end of the last one."""
        written = await self.segments(owner, batch_id)
        return len(written), (await self.header(written[-1])).counts if written else Counts()

    async def add_segment(self, owner: str, batch_id: str, index: int, data: bytes) -> bool:
        """Writes a segment unless it already exists. Returns whether it was written."""
        key = f"{RUNS}/{owner}/{batch_id}/segments/{index:05d}"
        return await self._objects.create(key, data, "application/octet-stream")

    async def begin_segment(self, owner: str, batch_id: str, index: int) -> None:
        """Records that a segment's lines are about to run."""
        key = f"{RUNS}/{owner}/{batch_id}/{_BEGUN}/{index:05d}"
        await self._objects.create(key, b"", "application/octet-stream")

    async def count_begun_segments(self, owner: str, batch_id: str) -> int:
        """Returns the number of segments whose lines may have run."""
        marks = await self._objects.listing(f"{RUNS}/{owner}/{batch_id}/{_BEGUN}", MAX_SEGMENTS)
        names = [mark.key.rpartition("/")[2] for mark in marks]
        indices = [int(name) for name in names if _SEGMENT_NAME.fullmatch(name)]
        return indices[-1] + 1 if indices else 0

    async def log_answers(
        self,
        owner: str,
        batch_id: str,
        number: int,
        holder: str,
        counts: Counts,
        answers: Mapping[int, LineAnswer],
    ) -> str:
        """Stores answers whose segments are not yet written. Returns the key.

        Args:
            number: log number, from 0.
            holder: runner ID, which is needed because two runners may use the same number.
            counts: counts for all finished lines.
        """
        # Newest first, because code that reads the counts needs only the newest log.
        key = f"{RUNS}/{owner}/{batch_id}/{_ANSWERS}/{MAX_LOGS - number:08d}-{holder}"
        await self._objects.put(key, encode_answers(counts, answers), "application/octet-stream")
        return key

    async def answer_logs(self, owner: str, batch_id: str) -> list[StoredLog]:
        """Returns the answer logs, oldest first."""
        folder = f"{RUNS}/{owner}/{batch_id}/{_ANSWERS}"
        logs = []
        for stored_object in await self._objects.listing(folder, MAX_LOGS):
            name = _LOG_NAME.fullmatch(stored_object.key.rpartition("/")[2])
            if name is not None:  # otherwise not ours
                logs.append(StoredLog(MAX_LOGS - int(name[1]), stored_object.key))
        return logs[::-1]

    async def read_logged_answers(self, key: str) -> dict[int, LineAnswer]:
        """Reads a log. Returns the log's answers, keyed by line number.

        Returns no answers if the log can't be decoded, so its lines are run again.
        """
        try:
            return decode_answers(await self._objects.get(key, _ANSWERS_MAX_BYTES))
        except BadInput:  # another runner already wrote out the log's lines and deleted it
            return {}
        except MALFORMED as error:
            log.error("answer log not read", extra={"key": key, "reason": str(error)})
            return {}

    async def delete_log(self, key: str) -> None:
        """Deletes a log whose lines are all in written segments."""
        await self._objects.delete(key)

    async def half_segment(self, owner: str, batch_id: str, segment: int) -> dict[int, LineAnswer]:
        """Returns the answers in a segment that a release 0.1.0 runner set aside."""
        try:
            data = await self._objects.get(_half_segment_key(owner, batch_id), _ANSWERS_MAX_BYTES)
            return decode_answers(data) if decode_answers_header(data).segment == segment else {}
        except (BadInput, *MALFORMED):
            return {}

    async def header(self, segment: StoredObject) -> SegmentHeader:
        """Reads the header of a segment.

        Raises:
            DamagedDocument: the header can't be decoded.
        """
        data = await self._objects.get_range(segment.key, 0, HEADER_BYTES)
        with _report_damage(segment.key):
            return decode_header(data)

    async def _list_marked(self, owner: str) -> set[str]:
        return {batch.id for batch in await self.open(owner)}

    async def _counts(self, owner: str, batch_id: str) -> Counts:
        try:
            segments = await self.segments(owner, batch_id)
            counts = (await self.header(segments[-1])).counts if segments else Counts()
        except BadInput:  # the batch has since ended, and its segments have been deleted
            return Counts()
        folder = f"{RUNS}/{owner}/{batch_id}/{_ANSWERS}"
        newest = await self._objects.listing(folder, 1)
        key = newest[0].key if newest else _half_segment_key(owner, batch_id)
        try:
            logged = decode_answers_header(await self._objects.get_range(key, 0, HEADER_BYTES))
        except (BadInput, *MALFORMED):  # a log that can't be decoded is not used
            return counts
        return max(counts, logged.counts, key=lambda candidate: candidate.ended)


@contextmanager
def _report_damage(key: str) -> Iterator[None]:
    """Turns errors from decoding an object into DamagedDocument."""
    try:
        yield
    except MALFORMED as error:
        raise DamagedDocument(f"{key} is damaged: {error}") from error


def _half_segment_key(owner: str, batch_id: str) -> str:
    return f"{RUNS}/{owner}/{batch_id}/half-segment"


def _document_key(owner: str, batch_id: str, name: str) -> str:
    return f"{RUNS}/{owner}/{batch_id}/{name}.json"
