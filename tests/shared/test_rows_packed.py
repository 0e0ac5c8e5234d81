"""Rows during a long outage: compressed on disk, within limits, and each delivered once."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.usage import bigquery as spools
from shared.usage.bigquery import SegmentSize, Spool
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import DATASET, Server, row, writer

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
ROWS, BATCH = 10_000, 100
"""Twenty times the number that stays in memory here, not counting rows that are being sent."""


def spool_with(folder: Path, *counts: int) -> Spool:
    """A folder with released segments, each with this number of rows."""
    spool = Spool(folder, max_bytes=10**9)
    for number, count in enumerate(counts):
        segment = spool.create()
        rows = ({"row_id": f"{number}:{one}", "text": "x" * 100} for one in range(count))
        segment.append([msgspec.json.encode(row) for row in rows])
        spool.release(segment, rows=count)
    return spool


def adopted_ids(spool: Spool) -> list[str]:
    found = []
    while (adopted := spool.adopt()) is not None:
        segment, rows = adopted
        found += [json.loads(row)["row_id"] for row in rows]
        spool.unowned.pop(segment.path, None)
        spool.remove(segment)
    return found


def test_packed_rows_are_counted_without_reading_them(tmp_path: Path) -> None:
    spool = spool_with(tmp_path / "spool", 500, 3, 7)
    before_bytes = spool.unowned_bytes
    spool.pack(2)
    assert spool.unowned_rows == 510
    assert spool.unowned_bytes < before_bytes / 5
    assert len(list((tmp_path / "spool").glob("*.gz"))) == 2
    other = Spool(tmp_path / "spool", max_bytes=1)
    other.scan()
    assert (other.unowned_rows, other.unowned_bytes) == (510, spool.unowned_bytes)
    ids = adopted_ids(other)
    assert ids == [f"{n}:{one}" for n, count in enumerate((500, 3, 7)) for one in range(count)]
    assert list((tmp_path / "spool").iterdir()) == []


def test_segment_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    spool = spool_with(tmp_path / "spool", 5)
    other = Spool(tmp_path / "spool", max_bytes=10**9)
    adopted = other.adopt()
    assert adopted is not None
    spool.pack(10)
    assert list((tmp_path / "spool").glob("*.gz")) == []
    other.remove(adopted[0])
    spool.pack(10)  # it no longer exists
    assert list((tmp_path / "spool").iterdir()) == []


def test_death_while_packing_doubles_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = spool_with(folder, 500)
    (segment,) = folder.glob("*.segment")
    data = segment.read_bytes()
    spool.pack(1)
    segment.write_bytes(data)  # as if it had died before removing the segment
    (folder / f"{segment.stem}.9.gz.new").write_bytes(b"half")
    other = Spool(folder, max_bytes=10**9)
    other.scan()
    assert other.unowned_rows == 500
    assert len(adopted_ids(other)) == 500
    assert list(folder.iterdir()) == []


class Watched(dict[Path, SegmentSize]):
    """Segments, with the minimum row count that another thread could have read."""

    def __init__(self, segments: dict[Path, SegmentSize]) -> None:
        super().__init__(segments)
        self.fewest_rows = self.rows

    @property
    def rows(self) -> int:
        return sum(size.rows for size in self.values())

    def clear(self) -> None:
        super().clear()
        self.fewest_rows = 0

    def pop(self, *args: Any) -> Any:
        removed = super().pop(*args)
        self.fewest_rows = min(self.fewest_rows, self.rows)
        return removed


def test_rows_are_counted_while_segments_are_searched(tmp_path: Path) -> None:
    """The caller waiting for the last row polls from another thread."""
    spool = spool_with(tmp_path / "spool", 5, 6)
    watched = spool.unowned = Watched(spool.unowned)
    spool.scan()
    assert spool.unowned is watched
    assert (watched.fewest_rows, spool.unowned_rows) == (11, 11)


def test_a_line_with_invalid_letters_costs_no_other_row(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool_with(folder, 3)
    (segment,) = folder.glob("*.segment")
    segment.write_bytes(segment.read_bytes().replace(b'"0:1","text":"x', b'"0:1","text":"\xff'))
    assert adopted_ids(Spool(folder, max_bytes=10**9)) == ["0:0", "0:2"]
    assert [path.name for path in folder.iterdir()] == ["rejected.jsonl"]
    (rejected,) = (folder / "rejected.jsonl").read_text().splitlines()
    assert "0:1" in rejected


def test_damaged_packed_segment_is_kept_aside(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool_with(folder, 500, 2).pack(2)
    first, second = sorted(folder.glob("*.gz"))
    first.write_bytes(first.read_bytes()[:-50])
    assert adopted_ids(Spool(folder, max_bytes=10**9)) == ["1:0", "1:1"]
    assert [path.name for path in folder.iterdir()] == [first.name + ".damaged"]
    assert not second.exists()


def test_full_disk_leaves_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "spool"
    spool = spool_with(folder, 500)

    def refuse(path: Path, data: bytes, rows: int) -> tuple[Path, int]:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(spools, "pack", refuse)
        with pytest.raises(OSError, match="no space"):
            spool.pack(1)
    assert len(adopted_ids(spool)) == 500


def test_anybody_can_read_a_packed_segment(tmp_path: Path) -> None:
    spool_with(tmp_path / "spool", 2).pack(1)
    (packed,) = (tmp_path / "spool").glob("*.gz")
    lines = gzip.decompress(packed.read_bytes()).splitlines()
    assert [line.startswith(b'{"row_id":"0:') for line in lines] == [True, True]


async def test_outage_under_load_costs_no_row_and_little_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BigQuery is killed mid-operation and comes back while rows keep arriving."""
    monkeypatch.setattr("shared.usage.writer.MEMORY_ROWS", 500)
    server, spool_dir, number = Server(tmp_path), tmp_path / "spool", 0

    async def write(until: int) -> None:
        nonlocal number
        while number < until:
            for _ in range(BATCH):
                one = row(number, tenant="acme", revision="r" * 40, tokens=number)
                sink.write(one)
                number += 1
            await asyncio.sleep(0)

    async with writer(server, spool_dir) as sink:
        with server.running():
            await write(ROWS // 5)
        await write(4 * ROWS // 5)
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while not list(spool_dir.glob("*.gz")) or len(list(spool_dir.glob("*.segment"))) > 8:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        packed = [path.read_bytes() for path in spool_dir.glob("*.gz")]
        unpacked_bytes = sum(len(gzip.decompress(one)) for one in packed)
        assert sum(map(len, packed)) < unpacked_bytes / 3
        with server.running():
            await write(ROWS)
            assert await sink.flush(WAIT_LIMIT_S)
            query = (
                "SELECT COUNT(*), COUNT(DISTINCT row_id), SUM(tokens) "
                f"FROM {DATASET}.rows_deduplicated WHERE received_at > TIMESTAMP '2020-01-01'"
            )
            with server.client() as client:
                (found,) = client.query(query).result()
    assert found.values() == (ROWS, ROWS, ROWS * (ROWS - 1) // 2)
    assert list(spool_dir.iterdir()) == []
