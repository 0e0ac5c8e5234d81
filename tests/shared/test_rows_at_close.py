"""Rows that a writer still holds when it closes, while its thread is working."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from shared.errors import Unavailable
from shared.usage.bigquery import RowLine, Segment, Spool
from shared.usage.writer import BATCH_ROWS, Journal, RowWriter
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import row

ROWS = 10
SOON_S = 0.3
"""By then, two threads that don't wait for each other are done. More time changes nothing."""


class SlowSpool(Spool):
    """A spool whose first segment is created only after `go` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1_000_000)
        self.began, self.go = threading.Event(), threading.Event()

    def create(self) -> Segment:
        if not self.began.is_set():
            self.began.set()
            assert self.go.wait(WAIT_LIMIT_S)
        return super().create()


@pytest.mark.anyio
async def test_each_row_is_on_disk_once_if_the_writer_closes_while_rows_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.usage.writer.BATCH_ROWS", ROWS // 2)
    folder = tmp_path / "spool"
    spool = SlowSpool(folder)
    journal = Journal(spool)
    folder.write_text("no folder")
    spool.go.set()
    spool.began.set()
    for number in range(ROWS):
        journal.append([msgspec.json.encode(row(number))], None)
    in_flight = journal.next_batch(takes_open=True)
    assert in_flight is not None
    assert len(in_flight.rows) == ROWS // 2
    folder.unlink()
    spool.go.clear()
    spool.began.clear()
    saving = threading.Thread(target=journal.save)
    saving.start()
    assert spool.began.wait(WAIT_LIMIT_S)
    closing = threading.Thread(target=journal.close)
    closing.start()
    closing.join(SOON_S)
    spool.go.set()
    for thread in (saving, closing):
        thread.join(WAIT_LIMIT_S)
        assert not thread.is_alive()
    lines = [
        json.loads(line)["row_id"]
        for path in folder.glob("*.segment")
        for line in path.read_text().splitlines()
    ]
    assert sorted(lines) == sorted(row(number).row_id for number in range(ROWS))


class KeptRows:
    """A sender that keeps the rows it receives."""

    linger_s = WAIT_LIMIT_S

    def __init__(self) -> None:
        self.rows: list[RowLine] = []

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        self.rows += rows
        return []


class FailingOnce(KeptRows):
    """Rejects the first row it receives, and fails once, on the second request."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        self.requests += 1
        if self.requests == 2:
            raise Unavailable("not now")
        self.rows += rows
        return [(rows[0], "no")] if rows[0] == self.rows[0] else []


@pytest.mark.anyio
async def test_rejected_rows_are_kept_once_though_their_batch_is_sent_twice(tmp_path: Path) -> None:
    sender = FailingOnce()
    async with RowWriter(sender, spool_dir=tmp_path / "spool") as rows:
        rows.write(*map(row, range(BATCH_ROWS + 1)))
        assert await rows.flush(WAIT_LIMIT_S)
    assert sender.requests == 4
    assert len((tmp_path / "spool" / "rejected.jsonl").read_text().splitlines()) == 1


@pytest.mark.anyio
async def test_rows_are_sent_that_come_while_the_last_look_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a pod exits, its folder disappears with it, so the rows would be lost."""
    looks, go, adopt = threading.Event(), threading.Event(), Spool.adopt

    def slow_adopt(spool: Spool) -> tuple[Segment, list[RowLine]] | None:
        found = adopt(spool)
        looks.set()
        assert go.wait(WAIT_LIMIT_S)
        return found

    monkeypatch.setattr(Spool, "adopt", slow_adopt)
    monkeypatch.setattr("shared.usage.writer.CLOSE_S", WAIT_LIMIT_S)
    sender = KeptRows()
    async with RowWriter(sender, spool_dir=tmp_path / "spool") as rows:
        assert await asyncio.to_thread(looks.wait, WAIT_LIMIT_S)
        rows.write(row(1))
        asyncio.get_running_loop().call_soon(go.set)  # once the writer has started to close
    assert [json.loads(one)["row_id"] for one in sender.rows] == [row(1).row_id]
