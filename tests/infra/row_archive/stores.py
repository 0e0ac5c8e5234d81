"""Stores that fail on demand, a table that is a set of rows, and helpers that read an archive."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

from infra.row_archive.archive import RowArchive
from infra.row_archive.loads import BigQueryLoader
from shared.errors import Unavailable
from shared.stores.objects import ObjectStore
from shared.usage.bigquery import Fields
from shared.usage.senders import incoming


class KilledError(BaseException):
    """Simulates the process's death. Nothing handles it."""


class FragileStore(ObjectStore):
    """An in-memory store. After `kill_after` calls, the caller dies before it gets the response.

    If `is_done`, that call still takes effect.
    """

    def __init__(self) -> None:
        super().__init__("memory://")
        self.kill_after: int | None = None
        self.is_done = False
        self.is_away = False

    async def _work(self, key: str, call: Any) -> Any:
        if self.is_away:
            raise Unavailable("the store is away")
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                self.kill_after = None
                if self.is_done:
                    with suppress(Exception):
                        await super()._work(key, call)
                raise KilledError
        return await super()._work(key, call)


class TableOfRows(BigQueryLoader):
    """A loader whose table is in memory. Each name is loaded only once."""

    def __init__(self) -> None:
        self.loaded: dict[str, list[Fields]] = {}
        self.is_away = False

    def load(self, table: str, path: Path, name: str) -> None:
        if self.is_away:
            raise Unavailable("BigQuery is away")
        self.loaded.setdefault(f"{table} {name}", read_parquet([path]))

    @property
    def row_ids(self) -> Counter[str]:
        return Counter(row["row_id"] for rows in self.loaded.values() for row in rows)


def read_parquet(paths: Iterable[Path]) -> list[Fields]:
    """The rows in some files, without NULL values. Times are Unix seconds."""
    listed = [str(path) for path in paths]
    with duckdb.connect() as connection:
        read = f"read_parquet({listed}, union_by_name = true)"
        columns = connection.execute(f"DESCRIBE SELECT * FROM {read}").fetchall()
        chosen = ", ".join(
            f'epoch_us("{name}") / 1e6' if kind == "TIMESTAMP WITH TIME ZONE" else f'"{name}"'
            for name, kind, *_ in columns
        )
        names = [name for name, *_ in columns]
        found = connection.execute(f"SELECT {chosen} FROM {read}")
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def row(number: int, at_s: float = 1_790_000_000.0, **fields: Any) -> Fields:
    known = {"row_id": f"r:{number}", "request_id": "r", "item": number, "model": "mini"}
    return known | {"received_at": at_s + number / 7, "status": "succeeded"} | fields


async def put(
    objects: ObjectStore, rows: Iterable[Fields | bytes], name: str, table: str = "rows"
) -> None:
    """Stores rows as a writer does, under a name chosen by the test. Bytes are stored unchanged."""
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in rows]
    packed = gzip.compress(b"\n".join(lines) + b"\n")
    await objects.put(f"{incoming(table)}/{name}.jsonl.gz", packed, "application/gzip")


async def archived(objects: ObjectStore, folder: Path, table: str = "rows") -> list[Fields]:
    """All rows in a table's Parquet files."""
    paths = []
    for one in await objects.listing(f"archive/{table}", 10_000):
        path = folder / one.key.replace("/", "_")
        path.write_bytes(await objects.get(one.key, 10**9))
        paths.append(path)
    return read_parquet(paths) if paths else []


async def archive_all(archive: RowArchive) -> None:
    while await archive.run_once():
        pass


async def keys(objects: ObjectStore, folder: str) -> list[str]:
    return [one.key for one in await objects.listing(folder, 10_000)]
