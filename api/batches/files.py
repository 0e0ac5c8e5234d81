"""Files in OpenAI's API: uploads, and batch outputs and errors.

An upload contains batch requests, or any other input that requests refer to (`user_data`, or `ocr`
from Mistral clients).

The object store holds the data and one document per file. A file does not exist until its document
does, so an interrupted upload does not leave a file behind.

Calls raise Unavailable if the object store is unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

import msgspec

from api.batches.names import FILES, is_file_id, new_file_id, owner_of
from api.errors import DamagedDocument, NotFound
from api.inputs.storage import MAX_FILES, Storage, StorageQuota, StorageReservation
from shared.errors import BadInput
from shared.stores.objects import ObjectStore, ObjectWriter, StoredObject

FILE_MAX_BYTES = 200 * 1024 * 1024
"""OpenAI's limit for a batch file."""
KEEP_S = 30 * 24 * 3600
"""OpenAI's default for batch files."""
MIN_KEEP_S = 3600
READ_BYTES = 1024 * 1024
PAGE = 100
MAX_LEFT_OUT = 50_000
"""Maximum number of files to remember as excluded from listings, so that they are not read again.
They take 15 MB.
"""
JSONL = "application/jsonl"
_DOCUMENT_MAX_BYTES = 16 * 1024
_HEAD_BYTES = 1024
_BOM = b"\xef\xbb\xbf"

UploadPurpose = Literal["batch", "user_data", "ocr"]
FilePurpose = Literal["batch", "batch_output", "user_data", "ocr"]

log = logging.getLogger(__name__)


class BatchFile(msgspec.Struct, kw_only=True):
    """A file's document. Times are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    size_bytes: int
    created_at_s: float
    expires_at_s: float
    model: str = ""
    """The model used by the batch that wrote the file. Empty if it was uploaded."""

    @property
    def data_key(self) -> str:
        """The object with the file's data."""
        return data_key(self.tenant, self.id)


_decoder = msgspec.json.Decoder(BatchFile)


def is_of(models: Collection[str] | None, model: str) -> bool:
    """Returns whether `model` is in `models`. True if `models` is None or `model` is unknown."""
    return models is None or not model or model in models


class _Facts(NamedTuple):
    """The properties that determine whether a listing includes a file."""

    purpose: FilePurpose
    model: str
    expires_at_s: float


class FilePage(msgspec.Struct):
    """One page of a listing, and whether another page follows."""

    files: list[BatchFile]
    has_more: bool


class BatchFiles:
    """All tenants' files.

    Args:
        storage: keeps track of the bytes each tenant has stored. Outputs count toward that total
            but are never rejected.
    """

    def __init__(self, objects: ObjectStore, storage: Storage) -> None:
        self._objects = objects
        self._storage = storage
        self._left_out: dict[StoredObject, _Facts] = {}
        """Facts about excluded files, keyed by document. The document changes whenever a file is
        rewritten.
        """

    @asynccontextmanager
    async def upload(self, quota: StorageQuota, body_bytes: int | None) -> AsyncIterator[Upload]:
        """Receives a file's data in pieces. The file exists once the block exits.

        The block sets the upload's `purpose`, `filename`, and `keep_s`.

        Args:
            body_bytes: size of the request body, including the file. None if unknown.

        Raises:
            BadInput: the file is not a valid batch file.
            StorageFull: the tenant's storage quota is used up.
        """
        created_at_s = time.time()
        file_id = new_file_id(created_at_s)
        async with self._storage.reserve(quota, body_bytes) as reservation:
            async with self._objects.writer(data_key(quota.tenant, file_id), JSONL) as writer:
                upload = Upload(writer, reservation, file_id, created_at_s)
                yield upload
                upload.check_content()
            await self.add(upload.to_file(quota.tenant))

    async def add(self, file: BatchFile) -> None:
        """Adds the document for a file whose data is already stored."""
        data = msgspec.json.encode(file)
        await self._objects.put(_document_key(file.tenant, file.id), data, "application/json")

    async def find(self, tenant: str, file_id: str) -> BatchFile:
        """Finds one of this tenant's files.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
            DamagedDocument: the stored document can't be decoded.
        """
        file = await self._read_document(tenant, file_id) if is_file_id(file_id) else None
        if file is None or file.expires_at_s <= time.time():
            raise NotFound(f"file {file_id[:80]!r} does not exist", field="file_id")
        return file

    async def page(
        self,
        tenant: str,
        *,
        after: str,
        limit: int,
        is_ascending: bool,
        purpose: str,
        models: Collection[str] | None = None,
    ) -> FilePage:
        """Returns a page of a tenant's files by creation time, newest first.

        Args:
            after: ID of the last file on the previous page. If empty, the listing starts at the
                beginning.
            limit: maximum number of files, up to PAGE.
            is_ascending: True to list the oldest files first.
            purpose: list only files with this purpose. Empty means all files.
            models: list only uploads and files written by batches that use these models. None means
                all files.
        """
        now_s, stored = time.time(), _documents_of(await self._list_stored(tenant))

        def is_listed(file: BatchFile | _Facts) -> bool:
            return (
                file.expires_at_s > now_s
                and purpose in ("", file.purpose)
                and is_of(models, file.model)
            )

        ids = sorted(stored, reverse=is_ascending)
        if after:
            ids = [
                file_id for file_id in ids if (file_id < after if is_ascending else file_id > after)
            ]
        files: list[BatchFile] = []
        wanted = window = min(limit, PAGE) + 1
        while ids and len(files) < wanted:
            some, ids, window = ids[:window], ids[window:], max(window, PAGE)
            files += await self._read_listed(
                tenant, {file_id: stored[file_id] for file_id in some}, is_listed
            )
        return FilePage(files[: wanted - 1], len(files) >= wanted)

    async def _read_listed(
        self,
        tenant: str,
        documents: Mapping[str, StoredObject],
        is_listed: Callable[[BatchFile | _Facts], bool],
    ) -> list[BatchFile]:
        """Returns the files among `documents` that belong in a listing.

        Files that don't belong are read only once.
        """
        known = {file_id: self._left_out.get(document) for file_id, document in documents.items()}
        ids = [file_id for file_id, facts in known.items() if facts is None or is_listed(facts)]
        read = await asyncio.gather(*(self._read_readable(tenant, file_id) for file_id in ids))
        files = [file for file in read if file is not None]
        for file in files:
            if not is_listed(file):
                facts = _Facts(file.purpose, file.model, file.expires_at_s)
                self._left_out[documents[file.id]] = facts
        while len(self._left_out) > MAX_LEFT_OUT:
            del self._left_out[next(iter(self._left_out))]
        return [file for file in files if is_listed(file)]

    async def keep_until(self, file: BatchFile, until_s: float) -> None:
        """Extends a file's lifetime to at least `until_s` (Unix time)."""
        if file.expires_at_s < until_s:
            await self.add(msgspec.structs.replace(file, expires_at_s=until_s))

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file, document first, so that no caller finds an incomplete file."""
        await self._objects.delete(_document_key(tenant, file_id))
        await self._objects.delete(data_key(tenant, file_id))

    async def read(
        self, file: BatchFile, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields a file's data from `start` up to `end`, or to the end of the file.

        Raises:
            BadInput: the data no longer exists.
        """
        stop = file.size_bytes if end is None else min(end, file.size_bytes)
        while start < stop:
            length = min(READ_BYTES, stop - start)
            yield await self._objects.get_range(file.data_key, start, length)
            start += length

    def has_id(self, name: str) -> bool:
        """Returns whether `name` looks like a file ID."""
        return is_file_id(name)

    async def load(self, tenant: str, file_id: str, max_bytes: int) -> tuple[bytes, str]:
        """Returns the data and name of one of the tenant's files.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
            BadInput: the file belongs to a batch, the file is larger than `max_bytes`, or its data
                no longer exists.
        """
        file = await self.find(tenant, file_id)
        if file.purpose in ("batch", "batch_output"):
            raise BadInput(
                f"the purpose of {file_id} is {file.purpose}; upload inputs with purpose "
                "user_data or ocr"
            )
        if file.size_bytes > max_bytes:
            raise BadInput(
                f"{file_id} is {file.size_bytes} bytes, which exceeds the maximum of {max_bytes}"
            )
        return await self._objects.get(file.data_key, max_bytes), file.filename

    async def _list_stored(self, tenant: str) -> list[StoredObject]:
        # Two objects per file, plus room for outputs, which are never rejected.
        return await self._objects.listing(f"{FILES}/{owner_of(tenant)}", 4 * MAX_FILES)

    async def _read_document(self, tenant: str, file_id: str) -> BatchFile | None:
        key = _document_key(tenant, file_id)
        try:
            return _decoder.decode(await self._objects.get(key, _DOCUMENT_MAX_BYTES))
        except BadInput:
            return None
        except ValueError as error:
            raise DamagedDocument(f"{key} is damaged: {error}") from error

    async def _read_readable(self, tenant: str, file_id: str) -> BatchFile | None:
        """Returns a file's document, or None if the file does not exist or is damaged."""
        try:
            return await self._read_document(tenant, file_id)
        except DamagedDocument as error:
            log.error("file not listed", extra={"file": file_id, "reason": error.message})
            return None


class Upload:
    """A file whose data is still being received."""

    def __init__(
        self,
        writer: ObjectWriter,
        reservation: StorageReservation,
        file_id: str,
        created_at_s: float,
    ) -> None:
        self.id = file_id
        self.created_at_s = created_at_s
        self.filename = "file"
        """File name set by the caller."""
        self.purpose: UploadPurpose = "batch"
        self.keep_s = KEEP_S
        """Seconds until the file expires."""
        self._writer = writer
        self._reservation = reservation
        self._head = b""

    @property
    def size_bytes(self) -> int:
        """Number of bytes received."""
        return self._writer.size_bytes

    async def write(self, data: bytes, *, is_batch: bool = False) -> None:
        """Adds a piece. Set `is_batch` if the file is already known to contain batch requests.

        Raises:
            BadInput: the file is too large, or its beginning does not look like JSONL.
            StorageFull: the tenant's storage quota is used up.
        """
        if self.size_bytes + len(data) > FILE_MAX_BYTES:
            raise BadInput(f"file: must be at most {FILE_MAX_BYTES} bytes", field="file")
        if len(self._head) < _HEAD_BYTES:
            self._head += data[: _HEAD_BYTES - len(self._head)]
            if len(self._head) == _HEAD_BYTES and is_batch:
                self._check_head()
        await self._reservation.cover(self.size_bytes + len(data))
        await self._writer.write(data)

    def to_file(self, tenant: str) -> BatchFile:
        return BatchFile(
            id=self.id,
            tenant=tenant,
            filename=self.filename[:255],
            purpose=self.purpose,
            size_bytes=self.size_bytes,
            created_at_s=self.created_at_s,
            expires_at_s=self.created_at_s + self.keep_s,
        )

    def check_content(self) -> None:
        """Checks the content after the whole file has been written.

        Raises:
            BadInput: the file is empty, or it is for a batch but its beginning does not look like
                JSONL.
        """
        if self.purpose == "batch":
            self._check_head()
        if self.size_bytes < _HEAD_BYTES and not self._head.removeprefix(_BOM).strip():
            raise BadInput("file: must not be empty", field="file")

    def _check_head(self) -> None:
        text = self._head.removeprefix(_BOM).lstrip()
        if text and not text.startswith(b"{"):
            raise BadInput(
                "file: the first line is not a JSON object; a file with purpose batch must be "
                "JSONL",
                field="file",
            )


def data_key(tenant: str, file_id: str) -> str:
    """Returns the key of the object with a file's data."""
    return f"{FILES}/{owner_of(tenant)}/{file_id}/data"


def _document_key(tenant: str, file_id: str) -> str:
    return f"{FILES}/{owner_of(tenant)}/{file_id}/file.json"


def _documents_of(stored: Sequence[StoredObject]) -> dict[str, StoredObject]:
    """Returns file documents, keyed by file ID."""
    return {
        stored_object.key.split("/")[3]: stored_object
        for stored_object in stored
        if stored_object.key.endswith("/file.json")
    }
