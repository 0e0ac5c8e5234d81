"""The row journal as a state machine: rows are written, sent, kept and killed in any order, with a
disk that may fail.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.settings import SPOOL_MAX_BYTES
from shared.usage.bigquery import RowLine, Segment, Spool
from shared.usage.writer import Journal, RowBatch
from tests.tiers import examples

SMALL = {"BATCH_ROWS": 3, "MEMORY_ROWS": 6, "FIRST_PAUSE_S": 0.0, "MAX_PAUSE_S": 0.0}
"""Limits that a few rows reach, and a disk that is retried immediately."""


class Mortal(Spool):
    """A spool that can die: its locks are released, as the kernel does for a killed process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_bytes=SPOOL_MAX_BYTES)
        self._made: list[Segment] = []

    def create(self) -> Segment:
        self._made.append(super().create())
        return self._made[-1]

    def adopt(self) -> tuple[Segment, list[RowLine]] | None:
        adopted = super().adopt()
        if adopted is not None:
            self._made.append(adopted[0])
        return adopted

    def die(self) -> None:
        for segment in self._made:
            segment.release()


class Rows(RuleBasedStateMachine):
    """Rows by number, compared with a model: rows written by the live process, rows confirmed to
    their writers, and rows sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._place = tempfile.TemporaryDirectory()
        self._folder = Path(self._place.name) / "spool"
        self._numbers = itertools.count()
        self._in_flight: list[RowBatch] = []
        self.alive: set[int] = set()
        self.safe: set[int] = set()
        self.sent: set[int] = set()
        self._start()

    def _start(self) -> None:
        self._spool = Mortal(self._folder)
        self._journal = Journal(self._spool)
        self._journal.open()

    def _turn(self) -> None:
        """Lets the event loop resume the writers that are waiting for confirmation."""
        self._loop.run_until_complete(asyncio.sleep(0))

    @property
    def _is_broken(self) -> bool:
        return self._folder.is_file()

    @rule(count=st.integers(1, 5))
    def write(self, count: int) -> None:
        async def append() -> None:
            for number in itertools.islice(self._numbers, count):
                self.alive.add(number)
                self._journal.append(
                    [json.dumps({"row_id": number}).encode()], partial(self.safe.add, number)
                )

        self._loop.run_until_complete(append())
        self._turn()

    @precondition(lambda self: len(self._in_flight) < 3)
    @rule(takes_open=st.booleans())
    def take(self, takes_open: bool) -> None:
        if (batch := self._journal.next_batch(takes_open)) is not None:
            self._in_flight.append(batch)

    @precondition(lambda self: self._in_flight)
    @rule(is_sent=st.booleans(), which=st.integers(0, 2))
    def end(self, is_sent: bool, which: int = 0) -> None:
        batch = self._in_flight.pop(which % len(self._in_flight))
        assert batch.rows
        if is_sent:
            self.sent |= {json.loads(row)["row_id"] for row in batch.rows}
            self._journal.mark_sent(batch)
        else:
            self._journal.requeue(batch)
        self._turn()

    @rule()
    def save(self) -> None:
        self._journal.save()
        self._turn()

    @precondition(lambda self: not self._is_broken)
    @rule()
    def disk_breaks(self) -> None:
        if self._folder.exists():
            self._folder.rename(self._folder.with_name("kept"))
        self._folder.write_text("no folder")

    @precondition(lambda self: self._is_broken)
    @rule()
    def disk_heals(self) -> None:
        self._folder.unlink()
        kept = self._folder.with_name("kept")
        if kept.exists():
            kept.rename(self._folder)

    @rule()
    def pack(self) -> None:
        self._journal.pack()

    @precondition(lambda self: not self._is_broken)
    @rule()
    def is_killed_while_it_packs(self) -> None:
        """Both exist afterward: the segment that could no longer be removed, and the packed one."""
        segments = {path: path.read_bytes() for path in self._folder.glob("*.segment")}
        self._journal.pack()
        for path, data in segments.items():
            path.write_bytes(data)
            path.with_name(f"{path.stem}.1.gz.new").write_bytes(b"half")
        self.is_killed()

    @rule()
    def is_killed(self) -> None:
        self._spool.die()
        self._in_flight = []
        self.alive &= self.sent
        self._start()

    @precondition(lambda self: not self._is_broken)
    @rule()
    def stops(self) -> None:
        self._journal.close()
        self._turn()
        assert self.alive - self.sent <= self.safe
        self.is_killed()

    @invariant()
    def nothing_alive_is_forgotten(self) -> None:
        assert self._journal.rows >= len(self.alive - self.sent)
        assert self._journal.oldest_s > 0
        assert self._journal.size_bytes >= 0

    def teardown(self) -> None:
        try:
            self._send_all()
        finally:
            self._spool.die()
            self._loop.close()
            self._place.cleanup()

    def _send_all(self) -> None:
        """Checks that every row that is still held or was confirmed to its writer can be sent."""
        if self._is_broken:
            self.disk_heals()
        while self._in_flight:
            self.end(is_sent=False, which=0)
        self._drain()
        assert self.alive - self.sent == set()
        self.is_killed()  # another process removes what this one leaves behind
        self._drain()
        assert self.safe - self.sent == set()
        assert self._journal.rows == 0
        assert [*self._folder.glob("*.segment"), *self._folder.glob("*.gz*")] == []

    def _drain(self) -> None:
        while (batch := self._journal.next_batch(takes_open=True)) is not None:
            self._in_flight.append(batch)
            self.end(is_sent=True, which=0)


@pytest.mark.hypothesis
def test_no_row_is_lost_in_any_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"shared.usage.writer.{name}", value)
    run_state_machine_as_test(
        Rows, settings=settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
    )
