"""Rows reach the archive and the table exactly once, no matter what dies in between."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.row_archive.archive import CALLS, PASS_OBJECTS, RowArchive
from shared.errors import Unavailable
from shared.stores.objects import ObjectStore
from shared.usage.bigquery import Fields
from shared.usage.senders import ObjectSender, incoming
from tests.infra.row_archive.stores import (
    FragileStore,
    KilledError,
    TableOfRows,
    archive_all,
    archived,
    keys,
    put,
    row,
)
from tests.tiers import examples

pytestmark = pytest.mark.anyio
DAY_S = 86_400.0


class Kept(NamedTuple):
    """The places where rows are stored."""

    in_table: dict[str, int]
    """How often each row is in the table."""
    in_files: list[str]
    on_the_way: list[str]


async def kept(objects: FragileStore, table: TableOfRows, folder: Path) -> Kept:
    """Returns the rows in each place. `folder` holds the files."""
    rows = await archived(objects, folder)
    on_the_way = [*await keys(objects, "incoming"), *await keys(objects, "pending")]
    return Kept(table.row_ids, sorted(one["row_id"] for one in rows), on_the_way)


def each_once(count: int) -> Kept:
    """Each of `count` rows exactly once, with nothing left in transit."""
    wanted = [f"r:{number}" for number in range(count)]
    return Kept(dict.fromkeys(wanted, 1), sorted(wanted), [])


async def test_rows_of_a_pass_are_in_a_file_for_each_day(tmp_path: Path) -> None:
    objects, table = FragileStore(), TableOfRows()
    await put(objects, [row(0), row(1)], "a")
    await put(objects, [row(2), row(3, 1_790_000_000.0 + DAY_S)], "b")
    assert not await RowArchive(objects, "rows", table).run_once()
    assert await kept(objects, table, tmp_path) == each_once(4)
    days = [one.split("/")[2] for one in await keys(objects, "archive/rows")]
    assert days == ["day=2026-09-21", "day=2026-09-22"]


@pytest.mark.slow(about_s=8)
@pytest.mark.parametrize("is_done", [False, True])
async def test_pass_that_is_killed_anywhere_is_finished_by_the_next(
    tmp_path: Path, is_done: bool
) -> None:
    killed = 0
    for kill_after in range(100):
        objects, table = FragileStore(), TableOfRows()
        await put(objects, [row(0), row(1)], "a")
        await put(objects, [row(2), row(3, 1_790_000_000.0 + DAY_S)], "b")
        objects.kill_after, objects.is_done = kill_after, is_done
        try:
            await RowArchive(objects, "rows", table).run_once()
        except KilledError:
            killed += 1
        else:
            break
        await put(objects, [row(4)], "c")  # arrives in the meantime
        await archive_all(RowArchive(objects, "rows", table))
        await archive_all(RowArchive(objects, "rows", table))
        folder = tmp_path / str(kill_after)
        folder.mkdir()
        assert await kept(objects, table, folder) == each_once(5)
    assert killed > 8


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 15), st.booleans()), max_size=6))
def test_any_sequence_of_deaths_loses_and_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[int, int, bool]]
) -> None:
    async def live() -> None:
        objects, table, count = FragileStore(), TableOfRows(), 0
        for number, (rows, kill_after, is_done) in enumerate(deaths):
            await put(objects, [row(one) for one in range(count, count + rows)], f"n{number}")
            count += rows
            objects.kill_after, objects.is_done = kill_after, is_done
            with suppress(KilledError):
                await archive_all(RowArchive(objects, "rows", table))
            objects.kill_after = None
        for _ in range(2):
            await archive_all(RowArchive(objects, "rows", table))
        assert await kept(objects, table, tmp_path_factory.mktemp("archive")) == each_once(count)

    asyncio.run(live())


async def test_another_archive_goes_on_with_what_one_began(tmp_path: Path) -> None:
    """Two run at a time, as when a pod is replaced: at each step, one is a whole pass ahead."""
    objects, tables = FragileStore(), TableOfRows()
    await put(objects, [row(0), row(1)], "a")

    class Overtaking(TableOfRows):
        """Before each load, another archive process completes the whole pass."""

        def load(self, table: str, path: Path, name: str) -> None:
            asyncio.run(archive_all(RowArchive(objects, "rows", tables)))
            tables.load(table, path, name)

    await archive_all(RowArchive(objects, "rows", Overtaking()))
    await archive_all(RowArchive(objects, "rows", tables))
    assert await kept(objects, tables, tmp_path) == each_once(2)


async def test_archive_that_is_overtaken_while_it_reads_shortens_no_file(tmp_path: Path) -> None:
    """The first object in a pass is read after another process has archived and removed all
    objects.
    """
    table, count = TableOfRows(), 3 * CALLS

    class Overtaken(FragileStore):
        reads = 0

        async def get(self, key: str, max_bytes: int) -> bytes:
            self.reads += key.startswith(incoming("rows"))
            if self.reads == CALLS + 1 and key.startswith(incoming("rows")):
                await archive_all(RowArchive(self, "rows", table))
            return await super().get(key, max_bytes)

    objects = Overtaken()
    for number in range(count):
        await put(objects, [row(number)], f"{number:06}")
    await archive_all(RowArchive(objects, "rows", table))
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(count)


@pytest.mark.parametrize("away", ["store", "BigQuery"])
async def test_rows_wait_while_something_is_away(tmp_path: Path, away: str) -> None:
    objects, table = FragileStore(), TableOfRows()
    await put(objects, [row(0)], "a")
    archive = RowArchive(objects, "rows", table)
    server: FragileStore | TableOfRows = objects if away == "store" else table
    server.is_away = True
    with pytest.raises(Unavailable):
        await archive.run_once()
    server.is_away = False
    await put(objects, [row(1)], "b")
    await archive_all(archive)
    await archive_all(archive)
    assert await kept(objects, table, tmp_path) == each_once(2)


async def test_rows_sent_twice_are_archived_once(tmp_path: Path) -> None:
    """A writer that did not get the response sends the rows again."""
    objects, table = FragileStore(), TableOfRows()
    for name in ("a", "b"):
        await put(objects, [row(0), row(1)], name)
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(2)


async def test_without_bigquery_the_files_are_all(tmp_path: Path) -> None:
    objects = FragileStore()
    await put(objects, [row(0, tenant="acme", cost_usd=0.25, spot=True)], "a")
    await archive_all(RowArchive(objects, "rows", None))
    (found,) = await archived(objects, tmp_path)
    assert found["tenant"] == "acme"
    assert found["cost_usd"] == 0.25
    assert found["spot"] is True
    assert found["received_at"] == 1_790_000_000.0


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"row_id": "x"}',
        b'{"row_id": 1, "request_id": "r", "item": 0, "model": "m", "received_at": 1,'
        b' "status": "s"}',
        b'{"row_id": "x", "request_id": "r", "item": 9223372036854775808, "model": "m",'
        b' "received_at": 1, "status": "s"}',
        b'{"row_id": "x", "request_id": "r", "item": 0, "model": "m", "received_at": "now",'
        b' "status": "s"}',
        b'{"row_id": "x", "request_id": "r", "item": 0, "model": "m", "received_at": 1e300,'
        b' "status": "s"}',
        b'{"row_id": "x", "request_id": "r", "item": 0, "model": "m", "received_at": 1e18,'
        b' "status": "s"}',
        b'{"row_id": "x", "request_id": "r", "item": 0, "model": "m", "received_at": 1,'
        b' "status": "s", "mood": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_line_that_is_no_row_is_put_aside(tmp_path: Path, line: bytes) -> None:
    objects, table = FragileStore(), TableOfRows()
    await put(objects, [row(0), line, row(1)], "a")
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(2)
    (rejected,) = await keys(objects, "rejected")
    assert await objects.get(rejected, 10**6) == line


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"no gzip", b"\x1f\x8b\x08\x00", b"\x1f\x8b" + b"\0" * 50),
        gzip.compress(b"{}\n", mtime=0) + gzip.compress(b"{}\n", mtime=0),
    ],
)
async def test_damaged_object_is_put_aside(tmp_path: Path, data: bytes) -> None:
    objects, table = FragileStore(), TableOfRows()
    await put(objects, [row(0)], "a")
    await objects.put(f"{incoming('rows')}/b.jsonl.gz", data, "application/gzip")
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(1)
    assert await objects.get("rejected/incoming/rows/b.jsonl.gz", 100) == data


async def test_damaged_list_is_dropped(tmp_path: Path) -> None:
    objects, table = FragileStore(), TableOfRows()
    await put(objects, [row(0)], "a")
    await objects.put("pending/rows.json", b"{", "application/json")
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(1)


async def test_column_of_a_newer_release_is_left_out(tmp_path: Path) -> None:
    objects, table = FragileStore(), TableOfRows()
    await put(objects, [row(0, mood="good"), row(1)], "a")
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(2)
    assert all("mood" not in one for one in await archived(objects, tmp_path))


async def test_column_that_a_line_has_twice_holds_up_no_other_row(tmp_path: Path) -> None:
    objects, table = FragileStore(), TableOfRows()
    twice = msgspec.json.encode(row(1))[:-1] + b', "model": "maxi"}'
    await put(objects, [row(0), twice, row(2)], "a")
    await archive_all(RowArchive(objects, "rows", table))
    assert await kept(objects, table, tmp_path) == each_once(3)
    models = [fields["model"] for fields in await archived(objects, tmp_path)]
    assert models.count("maxi") == 1


async def test_backlog_takes_several_passes(tmp_path: Path) -> None:
    objects, table = FragileStore(), TableOfRows()
    for number in range(PASS_OBJECTS + 1):
        await put(objects, [row(number)], f"{number:06}")
    archive = RowArchive(objects, "rows", table)
    assert await archive.run_once()
    assert len(await keys(objects, "incoming")) == 1
    assert not await archive.run_once()
    assert await kept(objects, table, tmp_path) == each_once(PASS_OBJECTS + 1)


async def test_pass_has_a_bound_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.row_archive.archive.PASS_MAX_BYTES", 300)
    objects, table = FragileStore(), TableOfRows()
    for number in range(5):
        await put(objects, [row(number)], f"{number:06}")
    archive = RowArchive(objects, "rows", table)
    assert await archive.run_once()
    assert 0 < len(await keys(objects, "incoming")) < 5
    await archive_all(archive)
    assert await kept(objects, table, tmp_path) == each_once(5)


async def test_what_a_sender_puts_is_what_the_archive_takes(tmp_path: Path) -> None:
    sender = ObjectSender(f"file://{tmp_path}/store", "worker_hours")
    hour: Fields = {"row_id": "w:1", "worker": "w", "deployment": "d", "models": "m"}
    hour |= dict.fromkeys(("hour", "since", "reported_at", "started_at"), 1_790_000_000.125)
    hour |= {"busy_s": 1.5, "idle_s": 2.5, "loading_s": 0.0}
    hour |= {"batches": 1, "items": 2, "cold_starts": 0}
    assert await asyncio.to_thread(sender.send, [msgspec.json.encode(hour)]) == []
    objects, table = ObjectStore(f"file://{tmp_path}/store"), TableOfRows()
    await archive_all(RowArchive(objects, "worker_hours", table))
    (found,) = await archived(objects, tmp_path, "worker_hours")
    assert found["hour"] == 1_790_000_000.125
    assert found["idle_s"] == 2.5
    assert table.row_ids == {"w:1": 1}
