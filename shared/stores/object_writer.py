"""Writes one object in pieces, which memory need not hold together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import obstore

PART_BYTES = 8 * 1024 * 1024
"""Parts are uploaded one at a time. S3 and GCS take no less than 5 MiB, except for the last."""
WRITE_BYTES = 1024 * 1024
"""Pieces are gathered to this size, because each write is a hop to a thread."""
MEMORY_BYTES = 2 * PART_BYTES + WRITE_BYTES
"""What one writer takes: a part that is gathered, and one that is on its way."""


def open_upload(store: Any, key: str, attributes: dict[str, str] | None) -> Any:
    """Opens obstore's writer of a multipart upload. It asks the store for nothing yet."""
    return obstore.open_writer(
        store, key, attributes=attributes, buffer_size=PART_BYTES, max_concurrency=1
    )


class ObjectWriter:
    """Writes one object in pieces: an async context manager.

    The object appears whole when the block ends. It never appears if the block raises.

    Args:
        opening: opens the upload.
        work: runs a call on a thread of the store, and translates its errors.

    Raises:
        Unavailable: from any call, if the store is out of reach or too slow.
    """

    def __init__(
        self,
        opening: Callable[[], Any],
        work: Callable[[Callable[[], Any]], Awaitable[None]],
    ) -> None:
        self._opening = opening
        self._work = work
        self._gathered = bytearray()
        self._upload: Any = None
        self.size_bytes = 0
        """The bytes that were written so far."""

    async def __aenter__(self) -> Self:
        self._upload = self._opening()
        return self

    async def write(self, data: bytes) -> None:
        """Adds a piece of any size."""
        self.size_bytes += len(data)
        self._gathered += data
        if len(self._gathered) >= WRITE_BYTES:
            await self._flush()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        upload = self._upload
        try:
            if error is None:
                await self._flush()
                await self._work(upload.close)
        finally:
            # An upload that is not closed is given up. A folder drops its parts with it, a bucket
            # by the lifecycle rule for incomplete uploads.
            self._upload = None

    async def _flush(self) -> None:
        data, self._gathered = bytes(self._gathered), bytearray()
        if data:
            await self._work(lambda: self._upload.write(data))
