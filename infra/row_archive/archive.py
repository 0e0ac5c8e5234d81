"""Takes the rows of a table from the object store, pass by pass.

A pass begins with a list of what it takes, `pending/TABLE.json`. Whoever finds a list goes on with
it, so a pass that was cut off is done again with the same rows, and the same names of files and of
load jobs. Rows leave `incoming` when their Parquet file is there and BigQuery has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from prometheus_client import Counter, Gauge

from infra.row_archive.lines import LineChecker, unpacked
from infra.row_archive.loads import RowLoader
from infra.row_archive.parquet import parquet_of_lines
from shared.errors import BadInput
from shared.stores.objects import ObjectStore
from shared.usage.object_rows import MEDIA_TYPE, incoming

PASS_OBJECTS = 1000
READS = 8
"""Objects that are read at the same time."""
OBJECT_MAX_BYTES = 16 * 1024 * 1024
"""Writers put about 100 KiB into one. A larger one is nobody's, and is left where it is."""
LIST_MAX_BYTES = 1024 * 1024
PARQUET = "application/vnd.apache.parquet"

ARCHIVED = Counter("penstock_row_archive_rows_total", "Rows that were archived", ["table"])
REJECTED = Counter(
    "penstock_row_archive_rejected_total", "Lines that are no rows; kept in rejected/", ["table"]
)
TRIMMED = Counter(
    "penstock_row_archive_trimmed_total",
    "Rows archived without columns that this release lacks",
    ["table"],
)
OLDEST = Gauge(
    "penstock_row_archive_oldest_seconds",
    "Age of the oldest object that is not archived; 0 if there is none",
    ["table"],
)

log = logging.getLogger(__name__)


class _Pass(msgspec.Struct):
    """What a pass takes, as it is kept in the store."""

    keys: list[str]
    is_archived: bool = False

    @property
    def name(self) -> str:
        return hashlib.blake2b("\n".join(self.keys).encode(), digest_size=16).hexdigest()


class RowArchive:
    """The archive of one table.

    Args:
        objects: the store.
        table: whose rows.
        loader: puts them into BigQuery too. None: nobody does.
    """

    def __init__(self, objects: ObjectStore, table: str, loader: RowLoader | None) -> None:
        self._objects = objects
        self._table = table
        self._loader = loader
        self._checker = LineChecker(table)

    @property
    def _list_key(self) -> str:
        return f"pending/{self._table}.json"

    async def run_once(self) -> bool:
        """Archives some objects. Returns whether there may be more.

        Raises:
            Unavailable: the store or BigQuery is out of reach. Nothing is lost.
        """
        begun = await self._begun()
        if begun is None:
            return False
        if not begun.is_archived:
            rows = await self._archive(begun)
            begun.is_archived = True
            await self._objects.put(self._list_key, msgspec.json.encode(begun), "application/json")
            ARCHIVED.labels(self._table).inc(rows)
        for key in begun.keys:
            await self._objects.delete(key)
        await self._objects.delete(self._list_key)
        return len(begun.keys) == PASS_OBJECTS

    async def _begun(self) -> _Pass | None:
        """The pass that was begun before, or a new one. None if there are no rows."""
        found = await self._objects.listing(incoming(self._table), PASS_OBJECTS)
        waiting = [one.key for one in found if one.size_bytes <= OBJECT_MAX_BYTES]
        if len(waiting) < len(found):
            log.error("objects are too large for rows", extra={"count": len(found) - len(waiting)})
        OLDEST.labels(self._table).set(_age_s(waiting[0]) if waiting else 0.0)
        if (kept := await self._kept()) is not None or not waiting:
            return kept
        begun = _Pass(waiting)
        data = msgspec.json.encode(begun)
        is_ours = await self._objects.create(self._list_key, data, "application/json")
        return begun if is_ours else await self._kept()

    async def _kept(self) -> _Pass | None:
        try:
            data = await self._objects.get(self._list_key, LIST_MAX_BYTES)
        except BadInput:
            return None
        try:
            return msgspec.json.decode(data, type=_Pass)
        except msgspec.DecodeError as error:
            # Somebody else wrote it. What it listed is in `incoming`, and maybe in files too.
            log.error("a damaged list is dropped", extra={"key": self._list_key}, exc_info=error)
            await self._objects.delete(self._list_key)
            return None

    async def _archive(self, begun: _Pass) -> int:
        """Writes the rows of a pass. Returns how many they are."""
        with tempfile.TemporaryDirectory(prefix="penstock-rows-") as name:
            folder = Path(name)
            lines = folder / "rows.jsonl"
            rows = await self._gather(begun, lines)
            if not rows:
                return 0
            files = await asyncio.to_thread(parquet_of_lines, self._table, lines, folder)
            for day, path in files.by_day.items():
                key = f"{archive_folder(self._table, day)}/{begun.name}.parquet"
                async with self._objects.writer(key, PARQUET) as writer:
                    await writer.write(await asyncio.to_thread(path.read_bytes))
            if self._loader is not None:
                await asyncio.to_thread(self._loader.load, self._table, files.whole, begun.name)
        return rows

    async def _gather(self, begun: _Pass, lines: Path) -> int:
        """Writes the good lines of all objects into a file. Returns how many they are."""
        rows, bad = 0, list[bytes]()
        with lines.open("wb") as file:
            for first in range(0, len(begun.keys), READS):
                for data in await asyncio.gather(
                    *(self._lines(key) for key in begun.keys[first : first + READS])
                ):
                    checked = await asyncio.to_thread(self._checker.check, data)
                    file.writelines(line + b"\n" for line in checked.good)
                    rows += len(checked.good)
                    bad += checked.bad
                    TRIMMED.labels(self._table).inc(checked.trimmed)
        if bad:
            await self._reject(begun.name, bad)
        return rows

    async def _lines(self, key: str) -> list[bytes]:
        """The lines of an object. A damaged one has none, and is kept under `rejected/`."""
        try:
            data = await self._objects.get(key, OBJECT_MAX_BYTES)
        except BadInput:
            # Somebody deleted it, or another process has archived it meanwhile.
            log.warning("rows are gone", extra={"key": key})
            return []
        try:
            return await asyncio.to_thread(unpacked, data)
        except ValueError as error:
            log.error("rows are damaged", extra={"key": key, "reason": str(error)})
            REJECTED.labels(self._table).inc()
            await self._objects.put(f"rejected/{key}", data, MEDIA_TYPE)
            return []

    async def _reject(self, name: str, bad: Sequence[bytes]) -> None:
        key = f"rejected/{self._table}/{name}.jsonl"
        log.error("lines are no rows", extra={"key": key, "lines": len(bad)})
        REJECTED.labels(self._table).inc(len(bad))
        await self._objects.put(key, b"\n".join(bad), "application/jsonl")


def archive_folder(table: str, day: str) -> str:
    """The folder of the Parquet files of a day, as Hive, Spark and DuckDB name partitions."""
    return f"archive/{table}/day={day}"


def _age_s(key: str) -> float:
    """The age of an object by its name. 0 if somebody else has named it."""
    try:
        at = datetime.strptime(key.rpartition("/")[2][:22], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - at).total_seconds())
