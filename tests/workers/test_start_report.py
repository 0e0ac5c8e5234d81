"""A start is reported once, with its phases: after the first batch, or when it ends early."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.usage.bigquery import BigQuerySender
from shared.usage.worker_start import TABLE, WorkerStart
from shared.usage.writer import RowWriter, fields_by_name
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import DATASET, PROJECT, Server
from tests.workers.test_utilization import START_S, Clock
from tests.workers.worker_harness import MODEL, running_worker
from workers.identity import WorkerInfo
from workers.start_report import (
    NODE_IS_NEW_S,
    POD_INFO,
    PodTimes,
    StartReport,
    process_started_at_s,
    read_pod_times,
)

pytestmark = pytest.mark.anyio
INFO = WorkerInfo("w", "here", "NVIDIA L4", "l4", False)
BOOTED_S = 1_790_000_000


class Sink:
    def __init__(self) -> None:
        self.rows: list[WorkerStart] = []

    def write_report(self, row: WorkerStart) -> None:
        self.rows.append(row)


def report_to(sink: Any, clock: Clock) -> StartReport:
    return StartReport(INFO, [MODEL], sink, START_S, PodTimes(40.0, 20.0), clock)


def start_up(report: StartReport, clock: Clock) -> None:
    with report.measure("weights"):
        clock.now_s += 2
    with report.measure("weights"):  # of a second model
        clock.now_s += 3
    with report.measure("backend"):
        clock.now_s += 7
    with report.measure("load"):
        clock.now_s += 11
    report.note_compiled(5)
    report.note_ready()


async def test_first_batch_completes_the_row(redis_url: str, tmp_path: Path) -> None:
    sink, clock = Sink(), Clock()
    with report_to(sink, clock) as report:
        start_up(report, clock)
        async with running_worker(redis_url, tmp_path, start=report) as harness:
            assert not sink.rows
            await harness.ask("first")
            (row,) = sink.rows
            await harness.ask("second")
    assert sink.rows == [row]
    assert (row.weights_s, row.backend_s, row.load_s, row.compile_s) == (5, 7, 6, 5)
    assert (row.node_s, row.image_s, row.ready_s) == (40, 20, 23)
    assert row.first_batch_s is not None
    assert (row.row_id, row.deployment, row.models) == ("w", "letters", "letters")


async def test_start_that_fails_is_reported_up_to_there() -> None:
    sink, clock = Sink(), Clock()
    with suppress(OSError), report_to(sink, clock) as report:
        with report.measure("weights"):
            clock.now_s += 2
        with report.measure("backend"):
            raise OSError
    (row,) = sink.rows
    assert (row.weights_s, row.backend_s, row.ready_s, row.first_batch_s) == (2, None, None, None)


def pod(folder: Path, mounted_s: float) -> tuple[Path, Path]:
    """A pod's volume, mounted `mounted_s` after the boot, and its /proc."""
    info, proc = folder / "info", folder / "proc"
    data = info / "..2026_11_30_08_14_18.123456789"
    data.mkdir(parents=True)
    os.utime(data, (BOOTED_S + mounted_s,) * 2)
    (info / "..data").symlink_to(data.name)
    proc.mkdir()
    (proc / "stat").write_text(f"cpu 1 2 3\nbtime {BOOTED_S}\nprocesses 7\n")
    return info, proc


def test_node_and_image_are_measured_by_the_first_process_of_a_pod(tmp_path: Path) -> None:
    info, proc = pod(tmp_path, 45.0)
    seen = tmp_path / "spool" / "seen"
    first = read_pod_times(BOOTED_S + 75.5, seen, info, proc)
    assert first == (45.0, 30.5)
    assert read_pod_times(BOOTED_S + 900, seen, info, proc) == (None, None)


def test_node_that_ran_before_has_no_time(tmp_path: Path) -> None:
    info, proc = pod(tmp_path, NODE_IS_NEW_S + 1)
    times = read_pod_times(BOOTED_S + NODE_IS_NEW_S + 3, tmp_path / "seen", info, proc)
    assert times == (None, 2.0)


def test_pods_have_the_volume_that_tells_the_times() -> None:
    deployment = yaml.safe_load(Path("infra/kubernetes/worker/deployment.yaml").read_text())
    pod_spec = deployment["spec"]["template"]["spec"]
    (mount,) = (
        mount
        for mount in pod_spec["containers"][0]["volumeMounts"]
        if mount["mountPath"] == str(POD_INFO)
    )
    (volume,) = (volume for volume in pod_spec["volumes"] if volume["name"] == mount["name"])
    # The pod's name never changes, so the kubelet writes the volume only once.
    assert [item["fieldRef"]["fieldPath"] for item in volume["downwardAPI"]["items"]] == [
        "metadata.name"
    ]


def test_nothing_is_measured_outside_of_kubernetes(tmp_path: Path) -> None:
    assert read_pod_times(BOOTED_S, tmp_path / "seen", tmp_path / "none") == (None, None)
    assert not (tmp_path / "seen").exists()


def test_process_started_before_it_asks(tmp_path: Path) -> None:
    stat = "7 (a ) b) S " + " ".join(["0"] * 18) + f" {30 * os.sysconf('SC_CLK_TCK')} 0 0"
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text(stat)
    (tmp_path / "uptime").write_text("100.00 1.00\n")
    started = [process_started_at_s(folder) for folder in (Path("/proc"), tmp_path, tmp_path / "x")]
    assert started[1] == pytest.approx(started[2] - 70, abs=1)
    assert started[0] <= started[2]


@pytest.mark.slow
async def test_bigquery_takes_a_start_once(tmp_path: Path) -> None:
    server, clock, sink = Server(tmp_path), Clock(), Sink()
    with report_to(sink, clock) as report:
        start_up(report, clock)
    (row,) = sink.rows
    with server.running():
        sender = BigQuerySender(PROJECT, f"{DATASET}.{TABLE}", server.endpoint)
        async with RowWriter(sender, spool_dir=tmp_path / "spool") as writer:
            for _ in range(2):
                writer.write_report(row)
                assert await writer.flush(WAIT_LIMIT_S)
        query = f"SELECT * FROM {DATASET}.{TABLE}_deduplicated WHERE started_at > '2020-01-01'"
        with server.client() as client:
            (found,) = client.query(query).result()
    columns = {
        name: value.timestamp() if hasattr(value, "timestamp") else value
        for name, value in found.items()
        if value is not None
    }
    assert columns == fields_by_name(row)
