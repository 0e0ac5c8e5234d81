"""Whole days of the archive: small files become one, and lost tables come back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from infra.row_archive.archive import PARQUET, archive_folder
from infra.row_archive.loads import RowLoader
from infra.row_archive.parquet import different_rows, merge
from shared.stores.objects import ObjectStore, StoredObject

SMALL_BYTES = 32 * 1024 * 1024
"""A file above it stays as it is."""
MERGED_BYTES = 256 * 1024 * 1024
"""What is merged at a time, before DuckDB drops equal rows."""
FILE_MAX_BYTES = 1024**3
DAY_FILES_MAX = 10_000

log = logging.getLogger(__name__)


class ArchivedDays:
    """The days of one table.

    Args:
        objects: the store.
        table: whose rows.
    """

    def __init__(self, objects: ObjectStore, table: str) -> None:
        self._objects = objects
        self._table = table

    async def days(self) -> list[str]:
        """The days that have files, in order, as `2026-11-23`.

        Raises:
            Unavailable: the store is out of reach.
        """
        folders = await self._objects.folders(f"archive/{self._table}")
        return [name.removeprefix("day=") for name in folders]

    async def merge_until(self, day: str) -> int:
        """Merges the small files of each day up to and with `day`. Returns how many files went.

        A process that dies in between leaves both the merged file and its parts. The next call
        merges them, and drops rows that are equal.

        Raises:
            Unavailable: the store is out of reach.
        """
        merged = 0
        for one in await self.days():
            if one <= day:
                merged += await self._merge(one)
        return merged

    async def _merge(self, day: str) -> int:
        small = [one for one in await self._files(day) if one.size_bytes <= SMALL_BYTES]
        parts: list[str] = []
        size_bytes = 0
        for one in small:
            if size_bytes + one.size_bytes > MERGED_BYTES:
                break
            parts.append(one.key)
            size_bytes += one.size_bytes
        if len(parts) < 2:
            return 0
        name = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
        async with self._fetched(parts) as files:
            path = files[0].parent / "merged.parquet"
            rows = await asyncio.to_thread(merge, files, path)
            key = f"{archive_folder(self._table, day)}/{name}.parquet"
            async with self._objects.writer(key, PARQUET) as writer:
                await writer.write(await asyncio.to_thread(path.read_bytes))
        for part in parts:
            await self._objects.delete(part)
        log.info("day merged", extra={"day": day, "files": len(parts), "rows": rows})
        return len(parts)

    async def restore(
        self, loader: RowLoader, there: Mapping[str, int], since: str, until: str
    ) -> list[str]:
        """Loads days into BigQuery again, after its table has lost rows.

        Rows that it still has are then there twice, and the views drop them.

        Args:
            loader: puts files into the table.
            there: how many different rows the table has, by day. Days that have all are left alone.
            since: the first day.
            until: the last day, included.

        Returns:
            The days that were loaded.

        Raises:
            Unavailable: the store or BigQuery is out of reach. Days before it are done.
        """
        restored = []
        for day in await self.days():
            if not since <= day <= until:
                continue
            keys = [one.key for one in await self._files(day)]
            async with self._fetched(keys) as files:
                if await asyncio.to_thread(different_rows, files) <= there.get(day, 0):
                    continue
                for key, path in zip(keys, files, strict=True):
                    name = f"restored-{secrets.token_hex(4)}-{Path(key).stem}"
                    await asyncio.to_thread(loader.load, self._table, path, name)
            restored.append(day)
        return restored

    async def _files(self, day: str) -> list[StoredObject]:
        return await self._objects.listing(archive_folder(self._table, day), DAY_FILES_MAX)

    @asynccontextmanager
    async def _fetched(self, keys: Sequence[str]) -> AsyncIterator[list[Path]]:
        with tempfile.TemporaryDirectory(prefix="penstock-rows-") as folder:
            paths = [Path(folder) / f"{number}.parquet" for number in range(len(keys))]
            for key, path in zip(keys, paths, strict=True):
                data = await self._objects.get(key, FILE_MAX_BYTES)
                await asyncio.to_thread(path.write_bytes, data)
            yield paths
