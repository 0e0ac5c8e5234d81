"""Every second of a worker's time is reported as busy, idle or loading, and no report spans two
clock hours.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infra import bigquery
from shared.usage.bigquery import BigQuerySender
from shared.usage.worker_hour import HOUR_S, TABLE, WorkerHour
from shared.usage.writer import RowWriter, fields_by_name
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import DATASET, PROJECT, Server
from tests.workers.worker_harness import MODEL, running_worker
from workers.identity import WorkerInfo
from workers.metrics import ProcessTimes, State, TimeReport, UtilizationReports, hour_of
from workers.models.reports import BatchResult, ResidencyReport

pytestmark = pytest.mark.anyio
START_S = 1_790_000_000.5
TYPES = {"STRING": str, "INTEGER": int, "FLOAT": float, "TIMESTAMP": float, "BOOLEAN": bool}


class Clock:
    def __init__(self, now_s: float = START_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Sink:
    def __init__(self) -> None:
        self.rows: list[WorkerHour] = []

    def write_report(self, row: WorkerHour) -> None:
        self.rows.append(row)


def batch(items: int = 2, switch_s: float = 0.0) -> BatchResult:
    return BatchResult(
        results=[None] * items,  # type: ignore[list-item]
        started_at_s=0.0,
        finished_at_s=0.0,
        inference_ms=1.0,
        real_work=1,
        padded_work=1,
        switched=ResidencyReport([0], loads=1, switch_s=switch_s) if switch_s else None,
    )


def reports_of(times: ProcessTimes, sink: Sink) -> UtilizationReports:
    return UtilizationReports(
        times, sink, [MODEL], WorkerInfo("w", "here", "NVIDIA L4", "l4", False)
    )


def test_schema_and_row_agree() -> None:
    hints = get_type_hints(WorkerHour)
    fields = {field.encode_name: hints[field.name] for field in msgspec.structs.fields(WorkerHour)}
    described = {field["name"]: field for field in bigquery.schema(TABLE)}
    assert fields.keys() == described.keys()
    for name, hint in fields.items():
        kinds = set(get_args(hint) or (hint,))
        assert TYPES[described[name]["type"]] in kinds, name
        assert not (described[name]["mode"] == "REQUIRED" and type(None) in kinds), name


def test_time_is_split_by_state_over_all_processes() -> None:
    clock = Clock()
    times = ProcessTimes(clock)
    clock.now_s += 10  # the pool starts
    times.start(2)
    times.enter(0, "busy")
    clock.now_s += 4
    times.batch_ended(batch(items=3, switch_s=1.0))
    times.enter(0, "idle")
    clock.now_s += 6
    (report,) = times.take()
    assert report.seconds == {"busy": 1.5, "idle": 8.0, "loading": 10.5}
    assert (report.batches, report.items, report.until_s - report.since_s) == (1, 3, 20)


def test_reports_end_with_the_hour() -> None:
    clock = Clock(hour_of(START_S) + HOUR_S - 1)
    times = ProcessTimes(clock)
    times.start(1)
    clock.now_s += 2 * HOUR_S + 2  # as if a timer fired two hours late
    sink = Sink()
    reports_of(times, sink).write()
    assert [row.reported_at_s - row.since_s for row in sink.rows] == [1, HOUR_S, HOUR_S, 1]
    assert [row.hour_s % HOUR_S for row in sink.rows] == [0] * 4
    assert [row.row_id for row in sink.rows] == ["w:1", "w:2", "w:3", "w:4"]
    assert sum(row.idle_s for row in sink.rows) == 2 * HOUR_S + 2


class Lifetime(RuleBasedStateMachine):
    """For any sequence of events, the reports cover the lifetime exactly once."""

    @initialize(at_s=st.floats(0, 2 * HOUR_S), processes=st.integers(1, 4))
    def start(self, at_s: float, processes: int) -> None:
        self.clock = Clock(START_S + at_s)
        self.times = ProcessTimes(self.clock)
        self.reports: list[TimeReport] = []
        self.times.start(processes)

    @rule(elapsed_s=st.floats(0, 3 * HOUR_S))
    def wait(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s

    @rule(index=st.integers(0, 3), state=st.sampled_from(get_args(State)))
    def enter(self, index: int, state: State) -> None:
        self.times.enter(index % self.times.processes, state)

    @rule(switch_s=st.floats(0, 100))
    def end_batch(self, switch_s: float) -> None:
        self.times.batch_ended(batch(switch_s=switch_s))

    @rule()
    def report(self) -> None:
        self.reports += self.times.take()
        if self.reports:
            assert self.reports[-1].until_s == self.clock.now_s

    @invariant()
    def no_second_is_missing_or_told_twice(self) -> None:
        at_s = getattr(self, "times", None) and self.times.started_at_s
        for one in getattr(self, "reports", []):
            assert one.since_s == at_s < one.until_s <= hour_of(one.since_s) + HOUR_S
            assert sum(one.seconds.values()) == pytest.approx(one.until_s - one.since_s, abs=1e-5)
            assert min(one.seconds.values()) >= -1e-9
            at_s = one.until_s


TestLifetime = Lifetime.TestCase


async def test_worker_tells_of_its_batches_and_of_its_end(redis_url: str, tmp_path: Path) -> None:
    clock, sink = Clock(), Sink()
    times = ProcessTimes(clock)
    reports = reports_of(times, sink)
    async with reports, running_worker(redis_url, tmp_path, times=times) as harness:
        await harness.ask("first")
        clock.now_s += 5
        harness.process.started.clear()
        harness.process.gate.clear()
        await harness.send("a", "b")
        await harness.process.started.wait()
        clock.now_s += 2
        harness.process.gate.set()
        await harness.reply()
        clock.now_s += 3
    (row,) = sink.rows
    assert (row.idle_s, row.busy_s, row.loading_s) == (8, 2, 0)
    assert (row.batches, row.items, row.deployment, row.models) == (2, 3, "letters", "letters")


async def test_reports_come_without_being_asked_for(tmp_path: Path) -> None:
    sink, clock = Sink(), Clock()
    times = ProcessTimes(clock)
    info = WorkerInfo("w", "here", "")
    async with UtilizationReports(times, sink, [MODEL], info, every_s=0.01):
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len(sink.rows) < 2:
                clock.now_s += 1.5
                await asyncio.sleep(0)
    assert {row.loading_s for row in sink.rows[:1]} != {0.0}


@pytest.mark.slow
async def test_bigquery_takes_hours_once(tmp_path: Path) -> None:
    server, clock = Server(tmp_path), Clock()
    times = ProcessTimes(clock)
    with server.running():
        async with RowWriter(
            BigQuerySender(PROJECT, f"{DATASET}.{TABLE}", server.endpoint),
            spool_dir=tmp_path / "spool",
        ) as writer:
            sink = Sink()
            async with reports_of(times, sink):
                clock.now_s += 60
            (row,) = sink.rows
            for _ in range(2):
                writer.write_report(row)
                assert await writer.flush(WAIT_LIMIT_S)
        query = f"SELECT * FROM {DATASET}.{TABLE}_deduplicated WHERE hour > TIMESTAMP '2020-01-01'"
        with server.client() as client:
            (found,) = client.query(query).result()
    shown: dict[str, Any] = {
        name: value.timestamp() if hasattr(value, "timestamp") else value
        for name, value in found.items()
    }
    assert shown == fields_by_name(row)
