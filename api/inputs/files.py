"""Files that callers upload before the predictions that use them.

The object store has the bytes and the metadata of each. It deletes them by the lifecycle rules of
the bucket. The API stops serving a file after KEEP_S.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from typing import Any

import msgspec

from api.errors import NotFound
from shared.errors import BadInput
from shared.stores.objects import ObjectStore, object_key

KEEP_S = 24 * 3600
"""As long as Replicate keeps files."""
LARGEST_BYTES = 64 * 1024 * 1024
MOST_LISTED = 100
_LATEST_S = 9_999_999_999
_METADATA_LIMIT_BYTES = 64 * 1024
_ID = re.compile(r"file_[0-9a-f]{24}")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}")


class File(msgspec.Struct):
    """The metadata of a file. `key` is the object with its bytes."""

    id: str
    tenant: str
    name: str
    content_type: str
    size: int
    sha256: str
    metadata: dict[str, Any]
    key: str
    created_at_s: float

    @property
    def expires_at_s(self) -> float:
        """Unix time after which the file is gone."""
        return self.created_at_s + KEEP_S


_decoder = msgspec.json.Decoder(File)


class Files:
    """The files of all tenants."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    async def add(
        self,
        tenant: str,
        data: bytes,
        *,
        name: str,
        content_type: str,
        metadata: dict[str, Any] | None = None,
    ) -> File:
        """Stores a file.

        Raises:
            BadInput: the metadata is too large.
            Unavailable: the object store is out of reach.
        """
        media_type = (
            content_type if _MEDIA_TYPE.fullmatch(content_type) else "application/octet-stream"
        )
        # On a thread: two digests of 30 MB take 60 ms, during which they release the interpreter.
        sha256, key = await asyncio.to_thread(_digests, data, media_type)
        file = File(
            id=f"file_{secrets.token_hex(12)}",
            tenant=tenant,
            name=name[:255],
            content_type=media_type,
            size=len(data),
            sha256=sha256,
            metadata=metadata or {},
            key=key,
            created_at_s=time.time(),
        )
        encoded = msgspec.json.encode(file)
        if len(encoded) > _METADATA_LIMIT_BYTES:
            raise BadInput(
                f"metadata: name and metadata together are above {_METADATA_LIMIT_BYTES} bytes"
            )
        await self._objects.put(file.key, data, media_type)
        await self._objects.put(_metadata_key(file.id), encoded, "application/json")
        await self._objects.put(_listed_key(file), b"", "application/json")
        return file

    async def newest(self, tenant: str) -> list[File]:
        """The files of this tenant, newest first, MOST_LISTED at most.

        Raises:
            Unavailable: the object store is out of reach.
        """
        found = await self._objects.listing(_folder_of(tenant), MOST_LISTED)
        ids = [one.key.rpartition("_")[2] for one in found]
        files = await asyncio.gather(*(self._found(tenant, f"file_{one}") for one in ids))
        return [file for file in files if file is not None]

    async def _found(self, tenant: str, file_id: str) -> File | None:
        try:
            return await self.find(tenant, file_id)
        except NotFound:
            return None

    async def delete(self, file: File) -> None:
        """Deletes a file. Other files may have the same bytes, which the bucket deletes later.

        Raises:
            Unavailable: the object store is out of reach.
        """
        await self._objects.delete(_listed_key(file))
        await self._objects.delete(_metadata_key(file.id))

    async def find(self, tenant: str, file_id: str) -> File:
        """Finds a file of this tenant.

        Raises:
            NotFound: the tenant has no such file, or it has expired.
            Unavailable: the object store is out of reach.
        """
        unknown = NotFound(f"there is no file {file_id[:80]!r}")
        if not _ID.fullmatch(file_id):
            raise unknown
        try:
            file = _decoder.decode(
                await self._objects.get(_metadata_key(file_id), _METADATA_LIMIT_BYTES)
            )
        except BadInput as error:
            raise unknown from error
        if file.tenant != tenant or file.expires_at_s <= time.time():
            raise unknown
        return file

    async def read(self, file: File) -> bytes:
        """Returns the bytes of a file.

        Raises:
            Unavailable: the object store is out of reach.
        """
        return await self._objects.get(file.key, LARGEST_BYTES)


def _digests(data: bytes, media_type: str) -> tuple[str, str]:
    return hashlib.sha256(data).hexdigest(), object_key("inputs", data, media_type)


def _folder_of(tenant: str) -> str:
    return f"files/of/{hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()}"


def _listed_key(file: File) -> str:
    """Lists begin with the smallest key, so newer files have smaller ones."""
    left_s = _LATEST_S - int(file.created_at_s)
    return f"{_folder_of(file.tenant)}/{left_s:010d}_{file.id.removeprefix('file_')}"


def _metadata_key(file_id: str) -> str:
    return f"files/{file_id}.json"
