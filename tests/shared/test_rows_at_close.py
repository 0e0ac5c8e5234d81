"""Rows that are only in memory when a writer closes, while its thread puts them on disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from shared.usage.spool import Segment, Spool
from shared.usage.writer import Journal, fields_of
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import row

ROWS = 10
SOON_S = 0.3
"""Two threads that do not wait for each other are done by then. More time changes nothing."""


class SlowSpool(Spool):
    """The first segment is made only when `go` is set."""

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
        journal.append([fields_of(row(number))], None)
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
    assert sorted(lines) == sorted(fields_of(row(number))["row_id"] for number in range(ROWS))
