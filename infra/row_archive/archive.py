"""Moves a table's rows from the object store into Parquet files and BigQuery, in passes.

A pass starts by writing a list of its objects, `pending/TABLE.json`. Any process that finds a list
resumes it, so an interrupted pass is repeated with the same rows, file names, and load job names.
Lines are checked against their table's schema. Rows are removed from `incoming` once their Parquet
file exists and BigQuery has them. Later, a day's small files are merged into one, and lost tables
are restored from these files.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from prometheus_client import Counter, Gauge
from pydantic import Field

from infra.bigquery import schema
from infra.row_archive.loads import BigQueryLoader
from infra.row_archive.parquet import count_different_rows, merge, parquet_of_lines
from shared.errors import MALFORMED, BadInput
from shared.settings import Settings
from shared.stores.objects import ObjectStore, StoredObject
from shared.usage.senders import MEDIA_TYPE, incoming

UNPACKED_MAX_BYTES = 64 * 1024 * 1024
"""Maximum unpacked size of one object. Writers put about half a MiB in each."""
_GZIP = 31
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_UnixSeconds = Annotated[float, msgspec.Meta(ge=-62_135_596_800, le=253_402_300_799)]
"""Range of Unix times, from year 1 to year 9999, as in BigQuery."""
_TYPES: dict[str, Any] = {
    "STRING": str,
    "INTEGER": _Int64,
    "FLOAT": float,
    "BOOLEAN": bool,
    "TIMESTAMP": _UnixSeconds,
}

PASS_OBJECTS = 2000
PASS_MAX_BYTES = 64 * 1024 * 1024
"""Maximum compressed size of a pass.

Its rows take up about ten times that much space, in a folder that may be in memory.
"""
CALLS = 8
"""Number of objects read or removed concurrently."""
OBJECT_MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of an object. Writers put about 100 KiB in each.

A larger object was not created by a writer and is left in place.
"""
LIST_MAX_BYTES = 1024 * 1024
PARQUET = "application/vnd.apache.parquet"

ARCHIVED = Counter("penstock_row_archive_rows_total", "Rows that were archived", ["table"])
REJECTED = Counter(
    "penstock_row_archive_rejected_total", "Lines that are not rows; kept in rejected/", ["table"]
)
TRIMMED = Counter(
    "penstock_row_archive_trimmed_total",
    "Rows archived without columns that this release does not have",
    ["table"],
)
OLDEST = Gauge(
    "penstock_row_archive_oldest_seconds",
    "Age of the oldest object that is not archived; 0 if all are archived",
    ["table"],
)

SMALL_BYTES = 32 * 1024 * 1024
"""Larger Parquet files are not merged again."""
MERGED_BYTES = 256 * 1024 * 1024
"""Maximum total size of the files merged at a time, before DuckDB drops duplicate rows."""
FILE_MAX_BYTES = 1024**3
DAY_FILES_MAX = 10_000

log = logging.getLogger(__name__)


class CheckedLines(NamedTuple):
    """An object's lines, after checking."""

    good: list[bytes]
    """The rows, each encoded again, so that DuckDB reads the values that were checked."""
    trimmed: int
    """Number of rows with a column unknown to this release."""
    bad: list[bytes]
    """Lines that are not rows of the table."""


class LineChecker:
    """Separates lines that are rows of a table from all other lines."""

    def __init__(self, table: str) -> None:
        fields = [
            (column["name"], _TYPES[column["type"]])
            if column["mode"] == "REQUIRED"
            else (column["name"], _TYPES[column["type"]] | None, None)
            for column in schema(table)
        ]
        known = msgspec.defstruct("Known", fields, kw_only=True)
        strict = msgspec.defstruct("Strict", [], bases=(known,), forbid_unknown_fields=True)
        self._known = msgspec.json.Decoder(known)
        self._strict = msgspec.json.Decoder(strict)

    def check(self, lines: Iterable[bytes]) -> CheckedLines:
        """Sorts the lines. An unknown column does not make a line invalid."""
        checked = CheckedLines([], 0, [])
        trimmed = 0
        for line in lines:
            row = self._decode(self._strict, line)
            if row is None and (row := self._decode(self._known, line)) is not None:
                trimmed += 1
            if row is None:
                checked.bad.append(line)
            else:
                checked.good.append(msgspec.json.encode(row))
        return checked._replace(trimmed=trimmed)

    def _decode(
        self, decoder: msgspec.json.Decoder[msgspec.Struct], line: bytes
    ) -> msgspec.Struct | None:
        """Returns the row. None if the line does not fit."""
        try:
            return decoder.decode(line)
        except MALFORMED:
            return None


def decompress_lines(data: bytes) -> list[bytes]:
    """Decompresses an object. Returns its lines.

    Raises:
        ValueError: the data is not in gzip format, is truncated or followed by other data, or
            exceeds UNPACKED_MAX_BYTES.
    """
    unpacking = zlib.decompressobj(_GZIP)
    try:
        lines = unpacking.decompress(data, UNPACKED_MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacking.eof:
        raise ValueError("truncated or too large")
    if unpacking.unused_data:
        raise ValueError("followed by other data")
    return lines.splitlines()


class _Pass(msgspec.Struct):
    """The objects in a pass, as stored."""

    keys: list[str]
    is_archived: bool = False
    has_more: bool = False
    """True if objects were left for the next pass."""

    @property
    def name(self) -> str:
        return hashlib.blake2b("\n".join(self.keys).encode(), digest_size=16).hexdigest()


class _TakenOverError(Exception):
    """Another process has already archived and removed these objects."""


class RowArchive:
    """The archive of one table.

    Two processes may briefly run at the same time, such as the old and new ones during a
    deployment. They do the same work under the same names, and the slower one yields to the other.

    Args:
        loader: also loads the rows into BigQuery. If None, they are not loaded.
    """

    def __init__(self, objects: ObjectStore, table: str, loader: BigQueryLoader | None) -> None:
        self._objects = objects
        self._table = table
        self._loader = loader
        self._checker = LineChecker(table)

    @property
    def _list_key(self) -> str:
        return f"pending/{self._table}.json"

    async def run_once(self) -> bool:
        """Archives some objects. Returns whether there may be more rows.

        Raises:
            Unavailable: the store or BigQuery is unreachable. Nothing is lost.
        """
        archive_pass = await self._begin_pass()
        if archive_pass is None:
            return False
        if not archive_pass.is_archived:
            try:
                rows = await self._archive(archive_pass)
            except _TakenOverError:
                log.info("another process has archived these rows", extra={"table": self._table})
                return False
            archive_pass.is_archived = True
            await self._objects.put(
                self._list_key, msgspec.json.encode(archive_pass), "application/json"
            )
            ARCHIVED.labels(self._table).inc(rows)
        for first in range(0, len(archive_pass.keys), CALLS):
            await asyncio.gather(
                *map(self._objects.delete, archive_pass.keys[first : first + CALLS])
            )
        await self._objects.delete(self._list_key)
        return archive_pass.has_more

    async def _begin_pass(self) -> _Pass | None:
        """Returns an earlier unfinished pass, a new one, or None if there are no rows."""
        objects = await self._objects.listing(incoming(self._table), PASS_OBJECTS)
        waiting = [
            stored_object
            for stored_object in objects
            if stored_object.size_bytes <= OBJECT_MAX_BYTES
        ]
        if len(waiting) < len(objects):
            log.error(
                "objects are too large to store as rows",
                extra={"count": len(objects) - len(waiting)},
            )
        OLDEST.labels(self._table).set(_age_s(waiting[0].key) if waiting else 0.0)
        if (saved_pass := await self._find_unfinished()) is not None or not waiting:
            return saved_pass
        keys = _up_to(PASS_MAX_BYTES, waiting)
        archive_pass = _Pass(
            keys, has_more=len(keys) < len(waiting) or len(objects) == PASS_OBJECTS
        )
        data = msgspec.json.encode(archive_pass)
        is_ours = await self._objects.create(self._list_key, data, "application/json")
        return archive_pass if is_ours else await self._find_unfinished()

    async def _find_unfinished(self) -> _Pass | None:
        try:
            data = await self._objects.get(self._list_key, LIST_MAX_BYTES)
        except BadInput:
            return None
        try:
            return msgspec.json.decode(data, type=_Pass)
        except MALFORMED as error:
            # The list was written by some other program. The objects listed there are still in
            # `incoming`, and may also be in files.
            log.error("dropping a damaged list", extra={"key": self._list_key}, exc_info=error)
            await self._objects.delete(self._list_key)
            return None

    async def _archive(self, archive_pass: _Pass) -> int:
        """Writes the rows in a pass. Returns the number of rows."""
        with tempfile.TemporaryDirectory(prefix="penstock-rows-") as name:
            folder = Path(name)
            lines = folder / "rows.jsonl"
            rows = await self._gather(archive_pass, lines)
            if not rows:
                return 0
            files = await asyncio.to_thread(parquet_of_lines, self._table, lines, folder)
            for day, path in files.by_day.items():
                key = f"{archive_folder(self._table, day)}/{archive_pass.name}.parquet"
                async with self._objects.writer(key, PARQUET) as writer:
                    await writer.write(await asyncio.to_thread(path.read_bytes))
            if self._loader is not None:
                await asyncio.to_thread(
                    self._loader.load, self._table, files.whole, archive_pass.name
                )
        return rows

    async def _gather(self, archive_pass: _Pass, lines: Path) -> int:
        """Writes the valid lines of all objects into a file. Returns the number of lines."""
        rows, bad = 0, list[bytes]()
        with lines.open("wb") as file:
            for first in range(0, len(archive_pass.keys), CALLS):
                for data in await asyncio.gather(
                    *(
                        self._lines(archive_pass, key)
                        for key in archive_pass.keys[first : first + CALLS]
                    )
                ):
                    checked = await asyncio.to_thread(self._checker.check, data)
                    file.writelines(line + b"\n" for line in checked.good)
                    rows += len(checked.good)
                    bad += checked.bad
                    TRIMMED.labels(self._table).inc(checked.trimmed)
        if bad:
            await self._reject(archive_pass.name, bad)
        return rows

    async def _lines(self, archive_pass: _Pass, key: str) -> list[bytes]:
        """Returns an object's lines.

        A damaged object yields no lines and is kept under `rejected/`.

        Raises:
            _TakenOverError: another process has archived the pass. The rows collected here are then
            incomplete and must not replace the other process's files.
        """
        try:
            data = await self._objects.get(key, OBJECT_MAX_BYTES)
        except BadInput:
            if await self._find_unfinished() != archive_pass:
                raise _TakenOverError from None
            log.warning("rows are gone", extra={"key": key})  # they were deleted by something else
            return []
        try:
            return await asyncio.to_thread(decompress_lines, data)
        except ValueError as error:
            log.error("rows are damaged", extra={"key": key, "reason": str(error)})
            REJECTED.labels(self._table).inc()
            await self._objects.put(f"rejected/{key}", data, MEDIA_TYPE)
            return []

    async def _reject(self, name: str, bad: Sequence[bytes]) -> None:
        key = f"rejected/{self._table}/{name}.jsonl"
        log.error("some lines are not valid rows", extra={"key": key, "lines": len(bad)})
        REJECTED.labels(self._table).inc(len(bad))
        await self._objects.put(key, b"\n".join(bad), "application/jsonl")


def _up_to(max_bytes: int, objects: Sequence[StoredObject]) -> list[str]:
    """Returns the keys of the first objects, up to `max_bytes` in total, but at least one."""
    keys: list[str] = []
    for stored_object in objects:
        max_bytes -= stored_object.size_bytes
        if max_bytes < 0 and keys:
            break
        keys.append(stored_object.key)
    return keys


def archive_folder(table: str, day: str) -> str:
    """Returns the folder for a day's Parquet files.

    Hive, Spark, and DuckDB recognize this naming scheme.
    """
    return f"archive/{table}/day={day}"


def _age_s(key: str) -> float:
    """Returns an object's age based on its name, or 0 if the name is in a different format."""
    try:
        at = datetime.strptime(key.rpartition("/")[2][:22], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - at).total_seconds())


class ArchivedDays:
    """One table's days."""

    def __init__(self, objects: ObjectStore, table: str) -> None:
        self._objects = objects
        self._table = table

    async def days(self) -> list[str]:
        """Returns the days that have files, such as `2026-11-23`, in order.

        Raises:
            Unavailable: the store is unreachable.
        """
        folders = await self._objects.folders(f"archive/{self._table}")
        return [name.removeprefix("day=") for name in folders]

    async def merge_until(self, day: str) -> int:
        """Merges each day's small files, up to and including `day`.

        Returns how many files were removed.

        A process that dies partway through leaves both the merged file and its parts. The next call
        merges them and drops duplicate rows.

        Raises:
            Unavailable: the store is unreachable.
        """
        merged = 0
        for archived_day in await self.days():
            if archived_day <= day:
                merged += await self._merge(archived_day)
        return merged

    async def _merge(self, day: str) -> int:
        small = [file for file in await self._files(day) if file.size_bytes <= SMALL_BYTES]
        parts: list[str] = []
        size_bytes = 0
        for file in small:
            if size_bytes + file.size_bytes > MERGED_BYTES:
                break
            parts.append(file.key)
            size_bytes += file.size_bytes
        if len(parts) < 2:
            return 0
        name = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
        async with self._fetch_files(parts) as files:
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
        self, loader: BigQueryLoader, row_counts: Mapping[str, int], since: str, until: str
    ) -> list[str]:
        """Reloads days into BigQuery after its table has lost rows.

        Rows that are still in the table are then duplicated, and the views drop the duplicates.

        Args:
            row_counts: number of distinct rows in the table, keyed by day. Complete days are
                skipped.

        Raises:
            Unavailable: the store or BigQuery is unreachable. Earlier days are done.
        """
        restored = []
        for day in await self.days():
            if not since <= day <= until:
                continue
            keys = [file.key for file in await self._files(day)]
            async with self._fetch_files(keys) as files:
                if await asyncio.to_thread(count_different_rows, files) <= row_counts.get(day, 0):
                    continue
                for key, path in zip(keys, files, strict=True):
                    name = f"restored-{secrets.token_hex(4)}-{Path(key).stem}"
                    await asyncio.to_thread(loader.load, self._table, path, name)
            restored.append(day)
        return restored

    async def _files(self, day: str) -> list[StoredObject]:
        return await self._objects.listing(archive_folder(self._table, day), DAY_FILES_MAX)

    @asynccontextmanager
    async def _fetch_files(self, keys: Sequence[str]) -> AsyncIterator[list[Path]]:
        with tempfile.TemporaryDirectory(prefix="penstock-rows-") as folder:
            paths = [Path(folder) / f"{number}.parquet" for number in range(len(keys))]
            for key, path in zip(keys, paths, strict=True):
                data = await self._objects.get(key, FILE_MAX_BYTES)
                await asyncio.to_thread(path.write_bytes, data)
            yield paths


class RowArchiveSettings(Settings):
    """Settings of the process that archives rows from the object store."""

    archive_every_s: float = Field(30.0, ge=1, le=3600)
    """Seconds between passes. Each pass writes a Parquet file per table and day."""
    archive_loads: bool = True
    """True if rows are also loaded into BigQuery. Reports need that."""
    health_host: str = "127.0.0.1"
    health_port: int = Field(8089, ge=0, le=65535)
    """Port of /metrics. The port opens as soon as the process is running."""
