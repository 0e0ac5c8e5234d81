"""The files of OpenAI's clients: uploads, and the outputs and errors of batches.

An upload has requests of a batch, or is an input of any kind (`user_data`, or `ocr` of Mistral's
clients) that others name.

The object store has the bytes and one document for each. A file is there once its document is, so
an upload that breaks off leaves no file.

Calls raise Unavailable if the object store is unreachable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

import msgspec

from api.batches.names import FILES, is_file_id, new_file_id, owner_of
from api.errors import NotFound
from api.inputs.storage import MAX_FILES, Storage, StorageQuota, StorageReservation
from shared.errors import BadInput
from shared.stores.objects import ObjectStore, ObjectWriter, StoredObject

FILE_MAX_BYTES = 200 * 1024 * 1024
"""OpenAI's limit for the file of a batch."""
KEEP_S = 30 * 24 * 3600
"""OpenAI's default for files of batches."""
MIN_KEEP_S = 3600
READ_BYTES = 1024 * 1024
PAGE = 100
MAX_LEFT_OUT = 50_000
"""Files that listings have left out and need not read again. They take about 15 MB."""
JSONL = "application/jsonl"
_DOCUMENT_MAX_BYTES = 16 * 1024
_HEAD_BYTES = 1024
_BOM = b"\xef\xbb\xbf"

UploadPurpose = Literal["batch", "user_data", "ocr"]
FilePurpose = Literal["batch", "batch_output", "user_data", "ocr"]


class BatchFile(msgspec.Struct, kw_only=True):
    """The document of a file. Times are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    size_bytes: int
    created_at_s: float
    expires_at_s: float
    model: str = ""
    """The model of the batch that wrote it. Empty: it was uploaded."""

    @property
    def data_key(self) -> str:
        """The object with its bytes."""
        return data_key(self.tenant, self.id)


_decoder = msgspec.json.Decoder(BatchFile)


def is_of(models: Collection[str] | None, model: str) -> bool:
    """Returns whether `model` is among `models`, if these are limited and it is known."""
    return models is None or not model or model in models


class _Facts(NamedTuple):
    """What decides whether a listing has a file."""

    purpose: FilePurpose
    model: str
    expires_at_s: float


class FilePage(msgspec.Struct):
    """One page of a listing, and whether another one follows."""

    files: list[BatchFile]
    has_more: bool


class BatchFiles:
    """The files of all tenants.

    Args:
        storage: counts what a tenant stores. Outputs count, but are never refused.
    """

    def __init__(self, objects: ObjectStore, storage: Storage) -> None:
        self._objects = objects
        self._storage = storage
        self._left_out: dict[StoredObject, _Facts] = {}
        """By their documents, which are others once they were written again."""

    @asynccontextmanager
    async def upload(self, quota: StorageQuota, body_bytes: int | None) -> AsyncIterator[Upload]:
        """Receives the bytes of a file in pieces. At the end of the block it is a file.

        The block sets `purpose`, `filename` and `keep_s` of the upload.

        Args:
            body_bytes: the size of the request's body, with the file in it. None: not known.

        Raises:
            BadInput: the data is not a valid batch file.
            StorageFull: the tenant has no room for it.
        """
        created_at_s = time.time()
        file_id = new_file_id(created_at_s)
        async with self._storage.reserved(quota, body_bytes) as reservation:
            async with self._objects.writer(data_key(quota.tenant, file_id), JSONL) as writer:
                upload = Upload(writer, reservation, file_id, created_at_s)
                yield upload
                upload.check_content()
            await self.add(upload.to_file(quota.tenant))

    async def add(self, file: BatchFile) -> None:
        """Adds the document of a file whose bytes are stored."""
        data = msgspec.json.encode(file)
        await self._objects.put(_document_key(file.tenant, file.id), data, "application/json")

    async def find(self, tenant: str, file_id: str) -> BatchFile:
        """Finds a file of this tenant.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
        """
        file = await self._read_document(tenant, file_id) if is_file_id(file_id) else None
        if file is None or file.expires_at_s <= time.time():
            raise NotFound(f"there is no file {file_id[:80]!r}", field="file_id")
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
        """Returns a page of a tenant's files by time of creation, the newest first.

        Args:
            after: the id of the last file of the page before. Empty: from the start.
            limit: maximum number of files, PAGE at most.
            is_ascending: the oldest first.
            purpose: only files of this purpose. Empty: all.
            models: only uploads, and what batches of these models wrote. None: all.
        """
        now_s, stored = time.time(), _documents_of(await self._stored(tenant))

        def is_listed(file: BatchFile | _Facts) -> bool:
            return (
                file.expires_at_s > now_s
                and purpose in ("", file.purpose)
                and is_of(models, file.model)
            )

        ids = sorted(stored, reverse=is_ascending)
        if after:
            ids = [one for one in ids if (one < after if is_ascending else one > after)]
        files: list[BatchFile] = []
        wanted = window = min(limit, PAGE) + 1
        while ids and len(files) < wanted:
            some, ids, window = ids[:window], ids[window:], max(window, PAGE)
            files += await self._listed(tenant, {one: stored[one] for one in some}, is_listed)
        return FilePage(files[: wanted - 1], len(files) >= wanted)

    async def _listed(
        self,
        tenant: str,
        documents: Mapping[str, StoredObject],
        is_listed: Callable[[BatchFile | _Facts], bool],
    ) -> list[BatchFile]:
        """Returns the files of a listing among some. Those that it leaves out are read once."""
        known = {one: self._left_out.get(document) for one, document in documents.items()}
        ids = [one for one, facts in known.items() if facts is None or is_listed(facts)]
        read = await asyncio.gather(*(self._read_document(tenant, one) for one in ids))
        files = [file for file in read if file is not None]
        for file in files:
            if not is_listed(file):
                facts = _Facts(file.purpose, file.model, file.expires_at_s)
                self._left_out[documents[file.id]] = facts
        while len(self._left_out) > MAX_LEFT_OUT:
            del self._left_out[next(iter(self._left_out))]
        return [file for file in files if is_listed(file)]

    async def keep_until(self, file: BatchFile, until_s: float) -> None:
        """Lets a file expire no earlier than `until_s` (Unix time)."""
        if file.expires_at_s < until_s:
            await self.add(msgspec.structs.replace(file, expires_at_s=until_s))

    async def delete(self, file: BatchFile) -> None:
        """Removes a file: first its document, so that no caller finds half of it."""
        await self._objects.delete(_document_key(file.tenant, file.id))
        await self._objects.delete(file.data_key)

    async def read(
        self, file: BatchFile, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the bytes of a file from `start` up to `end`, or to its end.

        Raises:
            BadInput: the bytes are gone.
        """
        stop = file.size_bytes if end is None else min(end, file.size_bytes)
        while start < stop:
            length = min(READ_BYTES, stop - start)
            yield await self._objects.get_range(file.data_key, start, length)
            start += length

    def has_id(self, name: str) -> bool:
        """Returns whether this has the form of the id of a file."""
        return is_file_id(name)

    async def load(self, tenant: str, file_id: str, max_bytes: int) -> tuple[bytes, str]:
        """Returns the bytes of a file of this tenant, and its name.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
            BadInput: it is of a batch, has more than `max_bytes`, or they are gone.
        """
        file = await self.find(tenant, file_id)
        if file.purpose in ("batch", "batch_output"):
            raise BadInput(
                f"{file_id} has purpose {file.purpose}; upload inputs as user_data or ocr"
            )
        if file.size_bytes > max_bytes:
            raise BadInput(
                f"{file_id} has {file.size_bytes} bytes; at most {max_bytes} are allowed"
            )
        return await self._objects.get(file.data_key, max_bytes), file.filename

    async def _stored(self, tenant: str) -> list[StoredObject]:
        # Two objects for each file, and room for outputs, which are never refused.
        return await self._objects.listing(f"{FILES}/{owner_of(tenant)}", 4 * MAX_FILES)

    async def _read_document(self, tenant: str, file_id: str) -> BatchFile | None:
        key = _document_key(tenant, file_id)
        try:
            return _decoder.decode(await self._objects.get(key, _DOCUMENT_MAX_BYTES))
        except BadInput:
            return None


class Upload:
    """The bytes of a file while they are received."""

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
        """As the caller named it."""
        self.purpose: UploadPurpose = "batch"
        self.keep_s = KEEP_S
        """Seconds after which it is gone."""
        self._writer = writer
        self._reservation = reservation
        self._head = b""

    @property
    def size_bytes(self) -> int:
        """The bytes so far."""
        return self._writer.size_bytes

    async def write(self, data: bytes, *, is_batch: bool = False) -> None:
        """Adds a piece. `is_batch`: whether it is known already that its purpose is a batch.

        Raises:
            BadInput: the file is too large, or does not begin as JSONL.
            StorageFull: the tenant has no room for more.
        """
        if self.size_bytes + len(data) > FILE_MAX_BYTES:
            raise BadInput(f"file: larger than {FILE_MAX_BYTES} bytes", field="file")
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
        """Checks the content, once the whole file was written.

        Raises:
            BadInput: it is empty, or is for a batch and does not begin as JSONL.
        """
        if self.purpose == "batch":
            self._check_head()
        if self.size_bytes < _HEAD_BYTES and not self._head.removeprefix(_BOM).strip():
            raise BadInput("file: it is empty", field="file")

    def _check_head(self) -> None:
        text = self._head.removeprefix(_BOM).lstrip()
        if text and not text.startswith(b"{"):
            raise BadInput(
                "file: the first line is not a JSON object; a file with purpose batch is JSONL",
                field="file",
            )


def data_key(tenant: str, file_id: str) -> str:
    """Returns the object with the bytes of a file."""
    return f"{FILES}/{owner_of(tenant)}/{file_id}/data"


def _document_key(tenant: str, file_id: str) -> str:
    return f"{FILES}/{owner_of(tenant)}/{file_id}/file.json"


def _documents_of(stored: Sequence[StoredObject]) -> dict[str, StoredObject]:
    """Returns the documents of files, by their ids."""
    return {one.key.split("/")[3]: one for one in stored if one.key.endswith("/file.json")}
