"""A day's small files are merged into one, and a table that lost rows gets them back."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.row_archive.archive import ArchivedDays, RowArchive
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

pytestmark = pytest.mark.anyio
DAY, NEXT_DAY = "2026-09-21", "2026-09-22"
NEXT_DAY_S = 1_790_000_000.0 + 86_400


async def three_files(objects: FragileStore, table: TableOfRows) -> None:
    """Two files for one day and one for the next, with four rows."""
    archive = RowArchive(objects, "rows", table)
    await put(objects, [row(0), row(1)], "a")
    await archive_all(archive)
    await put(objects, [row(2), row(3, NEXT_DAY_S)], "b")
    await archive_all(archive)


async def test_files_of_a_finished_day_become_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    objects = FragileStore()
    await three_files(objects, TableOfRows())
    days = ArchivedDays(objects, "rows")
    before = await archived(objects, tmp_path_factory.mktemp("before"))
    assert await days.days() == [DAY, NEXT_DAY]
    assert await days.merge_until(DAY) == 2
    assert await days.merge_until(NEXT_DAY) == 0, "one file of a day stays as it is"
    assert len(await keys(objects, "archive/rows")) == 2
    after = await archived(objects, tmp_path_factory.mktemp("after"))
    assert sorted(after, key=lambda one: str(one["row_id"])) == sorted(
        before, key=lambda one: str(one["row_id"])
    )


@pytest.mark.slow(about_s=8)
@pytest.mark.parametrize("is_done", [False, True])
async def test_merge_that_is_killed_anywhere_is_finished_by_the_next(
    tmp_path: Path, is_done: bool
) -> None:
    killed = 0
    for kill_after in range(100):
        objects = FragileStore()
        await three_files(objects, TableOfRows())
        objects.kill_after, objects.is_done = kill_after, is_done
        try:
            await ArchivedDays(objects, "rows").merge_until(DAY)
        except KilledError:
            killed += 1
        else:
            break
        await ArchivedDays(objects, "rows").merge_until(DAY)
        folder = tmp_path / str(kill_after)
        folder.mkdir()
        rows = await archived(objects, folder)
        assert sorted(str(one["row_id"]) for one in rows) == ["r:0", "r:1", "r:2", "r:3"]
        assert len(await keys(objects, "archive/rows")) == 2
    assert killed > 4


async def test_days_that_a_table_has_lost_come_back() -> None:
    objects, lost = FragileStore(), TableOfRows()
    await three_files(objects, TableOfRows())
    days = ArchivedDays(objects, "rows")
    assert await days.restore(lost, {}, "2000-01-01", DAY) == [DAY]
    assert lost.row_ids == {"r:0": 1, "r:1": 1, "r:2": 1}
    assert await days.restore(lost, {DAY: 3}, "2000-01-01", "9999-12-31") == [NEXT_DAY]
    assert lost.row_ids == {f"r:{number}": 1 for number in range(4)}


async def test_day_of_which_a_table_has_a_part_is_loaded_whole() -> None:
    """The table lost its rows at noon and continued; the views then drop the duplicates."""
    objects, table = FragileStore(), TableOfRows()
    await three_files(objects, TableOfRows())
    days = ArchivedDays(objects, "rows")
    assert await days.restore(table, {DAY: 2, NEXT_DAY: 1}, "2000-01-01", "9999-12-31") == [DAY]
    assert set(table.row_ids) == {"r:0", "r:1", "r:2"}
