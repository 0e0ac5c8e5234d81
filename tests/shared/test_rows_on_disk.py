"""No row is lost when its process is killed or its disk fails: tested with real processes, real
files and a real embedded BigQuery.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from infra.local.process import free_port
from shared.usage.bigquery import Spool
from shared.usage.writer import BATCH_ROWS
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import Server, row, segments, writer, writer_to

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

POLL_S = 0.01
SAFE_ROWS = 700
"""More than one segment, so that some are full and one is open when the process is killed."""
WRITES_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
from tests.shared.embedded_bigquery import row, writer_to

async def main(endpoint: str, spool_dir: str) -> None:
    async with writer_to(endpoint, Path(spool_dir)) as rows:
        number = 0
        while True:
            for number in range(number, number + 16):
                rows.write(row(number), on_safe=lambda number=number: print(number, flush=True))
            number += 1
            await asyncio.sleep(0)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("bigquery"))
    with made.running():
        yield made


NUMBERS = iter(range(90_000, 99_999))


def unused() -> int:
    """A row number that no other test in this file uses."""
    return next(NUMBERS)


def metric(name: str) -> float:
    value = REGISTRY.get_sample_value(name)
    assert value is not None
    return value


def row_id(number: int) -> str:
    return row(number).row_id


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(round(WAIT_LIMIT_S / POLL_S)):
        if is_so():
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"not so after {WAIT_LIMIT_S:g} s")


async def test_rows_said_to_be_safe_survive_sigkill(server: Server, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        WRITES_UNTIL_KILLED,
        f"http://127.0.0.1:{free_port()}",
        str(tmp_path / "spool"),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_LIMIT_S):
        said = [await process.stdout.readline() for _ in range(SAFE_ROWS)]
        process.kill()
        said += (await process.stdout.read()).splitlines()
        await process.wait()
    safe = {row_id(int(line)) for line in said if line.strip()}
    assert len(safe) >= SAFE_ROWS
    async with writer(server, tmp_path / "spool") as rows:
        assert await rows.flush(WAIT_LIMIT_S)
    assert safe - set(server.row_ids("rows_deduplicated")) == set()
    assert segments(tmp_path / "spool") == 0


async def test_rows_of_a_living_process_are_left_to_it(server: Server, tmp_path: Path) -> None:
    number, nowhere = unused(), f"http://127.0.0.1:{free_port()}"
    spool_dir = tmp_path / "spool"
    async with writer_to(nowhere, spool_dir) as owner:
        owner.write(row(number))
        async with writer(server, spool_dir) as other:
            assert other.pending == 0
            assert await other.flush(WAIT_LIMIT_S)
        assert row_id(number) not in server.row_ids()
        assert owner.pending == 1
    async with writer(server, spool_dir) as other:
        assert await other.flush(WAIT_LIMIT_S)
    assert server.row_ids().count(row_id(number)) == 1


async def test_disk_that_fails_makes_rows_safe_only_in_bigquery_until_it_works(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool_dir = tmp_path / "spool"
    spool_dir.write_text("no folder")
    caplog.set_level("INFO", "shared.usage.writer")
    async with writer(server, spool_dir) as rows:
        failing = [unused() for _ in range(20)]
        safe: list[int] = []
        for number in failing:
            rows.write(row(number), on_safe=lambda number=number: safe.append(number))  # type: ignore[misc]
        assert safe == []
        await until(lambda: len(safe) == len(failing))
        assert {row_id(number) for number in failing} <= set(server.row_ids())
        assert metric("penstock_rows_disk_up") == 0

        spool_dir.unlink()

        def is_on_disk() -> bool:
            rows.write(row(unused()))
            return metric("penstock_rows_disk_up") == 1

        await until(is_on_disk)
        rows.write(row(unused()))
        assert segments(spool_dir) >= 1
    said = [record.message for record in caplog.records if record.name == "shared.usage.writer"]
    assert said == [
        "can't write rows to disk; keeping them in memory",
        "rows can be written to disk again",
    ]


async def test_rows_that_are_written_together_are_safe_together(
    server: Server, tmp_path: Path
) -> None:
    spool_dir = tmp_path / "spool"
    spool_dir.write_text("no folder")
    many = [unused() for _ in range(2 * BATCH_ROWS + 1)]
    safe: list[str] = []
    async with writer(server, spool_dir) as rows:
        rows.write(*map(row, many), on_safe=lambda: safe.append("in BigQuery"))
        await until(lambda: bool(safe))
        assert {row_id(number) for number in many} <= set(server.row_ids())
        spool_dir.unlink()

        def is_on_disk() -> bool:
            rows.write(row(unused()))
            return metric("penstock_rows_disk_up") == 1

        await until(is_on_disk)
        rows.write(*(row(unused()) for _ in range(BATCH_ROWS)), on_safe=lambda: safe.append("here"))
        await until(lambda: len(safe) == 2)
        assert await rows.flush(WAIT_LIMIT_S)
        assert safe == ["in BigQuery", "here"]


async def test_slow_disk_is_left_to_the_thread(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.usage.writer.SLOW_DISK_S", 0.0)
    told: list[int] = []
    written = [unused() for _ in range(100)]
    async with writer(server, tmp_path / "spool") as rows:
        for number in written:
            rows.write(row(number), on_safe=lambda number=number: told.append(number))  # type: ignore[misc]
        assert metric("penstock_rows_disk_up") == 0
        await until(lambda: len(told) == len(written))
        assert sorted(told) == written
        monkeypatch.setattr("shared.usage.writer.SLOW_DISK_S", WAIT_LIMIT_S)
        rows.write(row(unused()))
        await until(lambda: metric("penstock_rows_disk_up") == 1)
        assert await rows.flush(WAIT_LIMIT_S)
    found = server.row_ids()
    assert [found.count(row_id(number)) for number in written] == [1] * len(written)


async def test_rows_wait_in_memory_while_neither_works_and_go_to_whichever_is_first(
    server: Server, tmp_path: Path
) -> None:
    spool_dir = tmp_path / "spool"
    spool_dir.write_text("no folder")
    nowhere = f"http://127.0.0.1:{free_port()}"
    number = unused()
    async with writer_to(nowhere, spool_dir) as rows:
        safe = asyncio.Event()
        rows.write(row(number), on_safe=safe.set)
        assert not await rows.flush(0.3)
        assert not safe.is_set()
        assert rows.pending == 1
        spool_dir.unlink()
        await asyncio.wait_for(safe.wait(), WAIT_LIMIT_S)
        assert segments(spool_dir) == 1
    async with writer(server, spool_dir) as rows:
        assert await rows.flush(WAIT_LIMIT_S)
    assert row_id(number) in server.row_ids()


async def test_rows_beyond_the_bound_of_memory_are_lost_except_those_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.usage.writer.MEMORY_ROWS", 50)
    # The writer's thread takes no rows until it closes, so all of them count.
    monkeypatch.setattr("shared.usage.writer.HURRY_S", WAIT_LIMIT_S)
    spool_dir = tmp_path / "spool"
    spool_dir.write_text("no folder")
    before = metric("penstock_rows_lost_total")
    of_jobs = [unused() for _ in range(5)]
    with socket.create_server(("127.0.0.1", 0)) as hung:  # accepts connections but never responds
        nowhere = f"http://127.0.0.1:{hung.getsockname()[1]}"
        async with writer_to(nowhere, spool_dir) as rows:
            for _ in range(60):
                rows.write(row(unused()))
            for number in of_jobs:
                rows.write(row(number), on_safe=lambda: None)
            assert metric("penstock_rows_lost_total") - before == 10
            assert rows.pending == 55
            spool_dir.unlink()
    # When the writer closed, the disk worked again, so it wrote the rows in memory to it.
    lines = [line for path in spool_dir.glob("*.segment") for line in path.read_text().splitlines()]
    kept = {json.loads(line)["row_id"] for line in lines}
    assert len(kept) == 55
    assert {row_id(number) for number in of_jobs} <= kept


async def test_full_disk_costs_no_row(server: Server, tmp_path: Path) -> None:
    """A process may write 2,000 bytes to a file: the write that crosses the limit is torn, and
    later writes fail.
    """
    wanted = [unused() for _ in range(40)]
    program = WRITES_UNTIL_KILLED.replace(
        "async def main",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\nasync def main",
    ).replace(
        "number = 0\n        while True:",
        "number = int(sys.stdin.readline())\n        for _ in range(1):",
    )
    program = program.replace("number + 16", f"number + {len(wanted)}").replace(
        "await asyncio.sleep(0)", f"assert await rows.flush({WAIT_LIMIT_S})"
    )
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", program, server.endpoint, str(tmp_path / "spool")],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(f"{wanted[0]}\n".encode()), WAIT_LIMIT_S)
    assert process.returncode == 0
    assert [int(line) for line in sorted(said.split())] == wanted
    assert {row_id(number) for number in wanted} <= set(server.row_ids())
    assert segments(tmp_path / "spool") == 0


async def test_torn_and_unreadable_lines_harm_no_other(server: Server, tmp_path: Path) -> None:
    spool_dir = tmp_path / "spool"
    spool_dir.mkdir()
    whole, torn = unused(), unused()
    lines = [
        json.dumps(
            {
                "row_id": row_id(n),
                "request_id": "req",
                "item": n,
                "model": "mini",
                "received_at": 1.8e9,
                "status": "succeeded",
            }
        )
        for n in (whole, torn)
    ]
    (spool_dir / "1-1-1.segment").write_bytes(
        f"{lines[0]}\n".encode() + b"\0\0\0\n" + lines[1][:40].encode()
    )
    async with writer(server, spool_dir) as rows:
        assert await rows.flush(WAIT_LIMIT_S)
    found = server.row_ids()
    assert row_id(whole) in found
    assert row_id(torn) not in found
    assert segments(spool_dir) == 0
    (rejected,) = [
        json.loads(line) for line in (spool_dir / "rejected.jsonl").read_text().splitlines()
    ]
    assert "unreadable" in rejected["reason"]


async def test_pending_rows_are_measured(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    spool_dir = tmp_path / "spool"
    for more in range(2):
        async with writer_to(nowhere, spool_dir) as rows:
            rows.write(row(more))
            on_disk = sum(path.stat().st_size for path in spool_dir.glob("*.segment"))
            assert metric("penstock_rows_pending") == rows.pending == more + 1
            assert metric("penstock_rows_pending_bytes") == on_disk > 0
            oldest_s = (
                min(int(path.name.split("-")[0]) for path in spool_dir.glob("*.segment")) / 1e9
            )
            at_least_s = time.time() - oldest_s
            assert at_least_s <= metric("penstock_rows_oldest_seconds") <= time.time() - oldest_s


def test_folder_takes_no_more_than_its_bound(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", max_bytes=1000)
    while spool.unowned_bytes < 1000:
        segment = spool.create()
        segment.append([b'{"row_id":"%s"}' % (b"r" * 100)])
        spool.release(segment, rows=1)
    with pytest.raises(OSError, match="reached the limit"):
        spool.create()
    adopted = spool.adopt()
    assert adopted is not None
    spool.unowned.pop(adopted[0].path)
    spool.remove(adopted[0])
    spool.create().release()
