"""Files that callers upload before creating the predictions that use them.

The object store holds each file's data and document. Both count toward the tenant's quota and are
removed after the file has expired (api/inputs/storage.py). Expired files are not served. Calls
raise Unavailable if the object store is unreachable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from contextlib import AbstractAsyncContextManager
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any

import msgspec

from api.errors import DamagedDocument, NotFound
from api.inputs.storage import (
    KEEP_S,
    KEPT_FILES,
    LATEST_S,
    LISTED,
    MAX_FILES,
    Storage,
    StorageQuota,
    StorageReservation,
    owner_of,
)
from shared.errors import BadInput
from shared.stores.objects import ObjectStore

MAX_BYTES = 64 * 1024 * 1024
MAX_LISTED = 100
_METADATA_LIMIT_BYTES = 64 * 1024
_FACTS_BYTES = 1024
"""Bytes allowed for a document in addition to the name and metadata sent by the caller."""
_ID = re.compile(r"file_[0-9a-f]{24}")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}", re.ASCII)

_CHARSETS = frozenset({*aliases, *aliases.values()})

log = logging.getLogger(__name__)


class File(msgspec.Struct):
    """A file's metadata. `key` identifies the object that contains the file's data."""

    id: str
    tenant: str
    name: str
    content_type: str
    size: int
    sha256: str
    metadata: dict[str, Any]
    key: str
    created_at_s: float
    expires_at_s: float
    """Unix time at which the file expires."""


_decoder = msgspec.json.Decoder(File)


def is_media_type(text: str) -> bool:
    """Returns whether `text` is a short, valid media type."""
    return _MEDIA_TYPE.fullmatch(text) is not None


def is_charset(name: str) -> bool:
    """Returns whether a charset may be looked up.

    Python caches even invalid names, and never evicts them.
    """
    return normalize_encoding(name).lower() in _CHARSETS


class Files:
    """All tenants' files.

    Args:
        storage: keeps track of the bytes each tenant has stored.
    """

    def __init__(self, objects: ObjectStore, storage: Storage) -> None:
        self._objects = objects
        self._storage = storage

    async def add(
        self,
        quota: StorageQuota,
        data: bytes,
        *,
        name: str,
        content_type: str,
        metadata: dict[str, Any] | None = None,
        keep_s: float = KEEP_S,
        reservation: StorageReservation | None = None,
    ) -> File:
        """Stores a file.

        Args:
            name: file name set by the caller.
            keep_s: seconds until the file expires, at most KEEP_S.
            reservation: the reservation from `receiving`, or None to reserve room here.

        Raises:
            BadInput: the metadata is too large.
            StorageFull: the tenant's storage quota is used up.
        """
        media_type = content_type if is_media_type(content_type) else "application/octet-stream"
        # Runs in a thread: hashing 30 MB takes 30 ms, and the GIL is released in the meantime.
        sha256 = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        file_id, now_s = f"file_{secrets.token_hex(12)}", time.time()
        file = File(
            id=file_id,
            tenant=quota.tenant,
            name=name[:255],
            content_type=media_type,
            size=len(data),
            sha256=sha256,
            metadata=metadata or {},
            key=f"{_place_of(quota.tenant, file_id)}/data",
            created_at_s=now_s,
            expires_at_s=now_s + min(keep_s, KEEP_S),
        )
        encoded = _encode_within_limit(file)
        size_bytes = len(data) + len(encoded)
        if reservation is None:
            async with self._storage.reserve(quota, size_bytes):
                await self._write(file, data, encoded)
        else:
            await reservation.cover(size_bytes)
            await self._write(file, data, encoded)
        await self._objects.put(_build_listing_key(file), b"", "application/json")
        return file

    def receiving(
        self, quota: StorageQuota, body_bytes: int | None
    ) -> AbstractAsyncContextManager[StorageReservation]:
        """Reserves room for a request's file before its body is read.

        Args:
            body_bytes: size of the request body, including the file. None if not known.

        Raises:
            StorageFull: the tenant's storage quota is used up.
        """
        most_bytes = None if body_bytes is None else body_bytes + _FACTS_BYTES
        return self._storage.reserve(quota, most_bytes)

    async def _write(self, file: File, data: bytes, document: bytes) -> None:
        await self._objects.put(file.key, data, file.content_type)
        await self._objects.put(_document_key(file), document, "application/json")

    async def newest(self, tenant: str) -> list[File]:
        """Returns up to MAX_LISTED of this tenant's files, newest first."""
        listed = await self._objects.listing(_folder_of(tenant), MAX_LISTED)
        ids = [stored_object.key.rpartition("_")[2] for stored_object in listed]
        files = await asyncio.gather(
            *(self._find_readable(tenant, f"file_{digits}") for digits in ids)
        )
        return [file for file in files if file is not None]

    async def _find_readable(self, tenant: str, file_id: str) -> File | None:
        try:
            return await self.find(tenant, file_id)
        except NotFound:
            return None
        except DamagedDocument as error:
            log.error("file not listed", extra={"file": file_id, "reason": error.message})
            return None

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes one of this tenant's files, even if its document is damaged.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
        """
        try:
            listed = [_build_listing_key(await self.find(tenant, file_id))]
        except DamagedDocument:
            stored = await self._objects.listing(_folder_of(tenant), MAX_FILES)
            end = f"_{file_id.removeprefix('file_')}"
            listed = [
                stored_object.key for stored_object in stored if stored_object.key.endswith(end)
            ]
        place = _place_of(tenant, file_id)
        for key in (*listed, f"{place}/file.json", f"{place}/data"):
            await self._objects.delete(key)

    async def find(self, tenant: str, file_id: str) -> File:
        """Finds one of this tenant's files.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
            DamagedDocument: the stored document can't be decoded.
        """
        unknown = NotFound(f"file {file_id[:80]!r} does not exist")
        if not _ID.fullmatch(file_id):
            raise unknown
        key = f"{_place_of(tenant, file_id)}/file.json"
        try:
            file = _decoder.decode(await self._objects.get(key, _METADATA_LIMIT_BYTES))
        except BadInput as error:
            raise unknown from error
        except ValueError as error:
            raise DamagedDocument(f"{key} is damaged: {error}") from error
        if file.tenant != tenant or file.expires_at_s <= time.time():
            raise unknown
        return file

    async def read(self, file: File) -> bytes:
        return await self._objects.get(file.key, MAX_BYTES)


def _encode_within_limit(file: File) -> bytes:
    """Returns a file's document, encoded.

    Raises:
        BadInput: the document is too large.
    """
    encoded = msgspec.json.encode(file)
    if len(encoded) > _METADATA_LIMIT_BYTES:
        raise BadInput(
            f"metadata: name and metadata together must not exceed {_METADATA_LIMIT_BYTES} bytes"
        )
    return encoded


def _folder_of(tenant: str) -> str:
    return f"{LISTED}/{owner_of(tenant)}"


def _place_of(tenant: str, file_id: str) -> str:
    """Returns the folder that contains a file's data and document."""
    return f"{KEPT_FILES}/{owner_of(tenant)}/{file_id}"


def _build_listing_key(file: File) -> str:
    """Listings start with the smallest key, so newer files are given smaller keys."""
    left_s = LATEST_S - int(file.created_at_s)
    return f"{_folder_of(file.tenant)}/{left_s:010d}_{file.id.removeprefix('file_')}"


def _document_key(file: File) -> str:
    return f"{_place_of(file.tenant, file.id)}/file.json"
