"""Two batches in flight, in real model processes: kills, cancellations, deadlines, poison items."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from bench import async_device
from tests.limits import WAIT_LIMIT_S
from tests.workers.test_deadlines import SHORT_S
from tests.workers.worker_harness import MODEL, WorkerHarness, running_worker
from workers.models.base import PreparedText
from workers.models.client import ModelProcessDied, RunningBatch
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = [pytest.mark.slow(about_s=15), pytest.mark.anyio]

LETTERS = """
import os, signal, sys, time
from pathlib import Path
from shared.models.tasks.embedding import EmbeddingResult
from workers.models.base import GpuLost
from workers.runtime import server as model_process

FOLDER = Path(sys.argv.pop(1))

def note(kind, texts):
    with open(FOLDER / "calls", "a") as file:
        file.write(f"{kind} {' '.join(texts)}\\n")

class Letters:
    device_name, pads, overlaps = "letters", False, True
    def setup(self): pass
    def warmup(self): pass
    def groups(self, batch): return [list(range(len(batch)))]
    def computed_work(self, lengths): return sum(lengths)
    def predict(self, batch, on_step):
        texts = [item.ids.decode() for item in batch]
        note("begin", texts)
        while any("hold" in text for text in texts) and not (FOLDER / "open").exists():
            time.sleep(0.002)
        if any("poison" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("lost" in text for text in texts) and (FOLDER / "sick").exists():
            (FOLDER / "sick").unlink()
            raise GpuLost("CUDA error: uncorrectable ECC error encountered")
        if any("!" in text for text in texts):
            raise ValueError("a bang")
        note("end", texts)
        on_step(1, 1)
        return [EmbeddingResult(4 * text.encode(), len(text)) for text in texts]

model_process.model_for = lambda *given, **named: Letters()
sys.exit(model_process.main())
"""
FULL = MODEL.batch.max_items


def full(name: str) -> list[str]:
    """The texts of a full batch."""
    return [f"{name}-{letter}" for letter in "abcdefgh"[:FULL]]


@dataclass
class Overlapping:
    """A worker with an overlapping model, and the folder that controls the model."""

    harness: WorkerHarness
    pool: ModelPool
    folder: Path

    def calls(self, kind: str = "") -> list[str]:
        """The calls that have started or finished so far, such as `begin hold-a hold-b`."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(kind)]

    def open(self) -> None:
        """Creates the file that held calls are waiting for."""
        (self.folder / "open").touch()

    async def hold_two(self, **second: float) -> None:
        """Sends two full batches, `first` and `second`, and waits until both have started."""
        await self.harness.send(*full("hold-first"), request_id="first")
        await self.harness.until(lambda: len(self.calls("begin")) == 1)
        await self.harness.send(*full("hold-second"), request_id="second", **second)  # type: ignore[arg-type]
        await self.harness.until(lambda: len(self.calls("begin")) == 2)

    async def statuses(self, count: int) -> dict[str, set[str]]:
        """Waits for `count` replies. Returns each job's item statuses."""
        replies = [await self.harness.reply() for _ in range(count)]
        return {
            reply.request_id: {item.status for item in reply.body.outcomes} for reply in replies
        }


@asynccontextmanager
async def overlapping(redis_url: str, folder: Path) -> AsyncIterator[Overlapping]:
    command = (sys.executable, "-c", LETTERS, str(folder))
    hosted = [HostedModel(MODEL, folder)]
    async with (
        ModelPool(hosted, device="cpu", processes=1, command=command) as pool,
        running_worker(redis_url, folder, pool=pool) as harness,
    ):
        yield Overlapping(harness, pool, folder)


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"penstock_worker_{name}") or 0.0


async def test_the_next_full_batch_begins_before_the_last_one_ends(
    redis_url: str, tmp_path: Path
) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        await worker.harness.send(*full("hold-a"), *full("hold-b"), *full("hold-c"))
        await worker.harness.until(lambda: len(worker.calls("begin")) == 2)
        assert worker.harness.consumer is not None
        assert worker.harness.consumer.queue.waiting == FULL
        assert metric("busy_ratio") <= 1
        worker.open()
        assert await worker.statuses(1) == {"req": {"succeeded"}}
        kinds = [line.split()[0] for line in worker.calls()]
        assert kinds[:3] == ["begin", "begin", "end"], "the third has to wait"
        await worker.harness.until(lambda: len(worker.harness.rows) == 3 * FULL)


async def test_a_batch_that_is_not_full_is_formed_once_the_last_one_has_ended(
    redis_url: str, tmp_path: Path
) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        await worker.harness.send(*full("hold-a"), "hold-late", request_id="first")
        await worker.harness.until(lambda: bool(worker.calls("begin")))
        await worker.harness.send("hold-later", request_id="second")
        await worker.harness.queued(2)
        worker.open()
        await worker.statuses(2)
        kinds = [line.split()[0] for line in worker.calls()]
        assert kinds == ["begin", "end", "begin", "end"]
        assert worker.calls("begin")[1] == "begin hold-late hold-later"


async def test_a_killed_process_fails_both_and_both_are_tried_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        await worker.hold_two()
        deaths, pid = metric("model_process_deaths_total"), worker.pool.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        worker.open()
        assert await worker.statuses(2) == {"first": {"succeeded"}, "second": {"succeeded"}}
        assert metric("model_process_deaths_total") - deaths == 1, "one process died"
        assert await worker.harness.ask("after", request_id="after") == [
            ("succeeded", 4 * b"after")
        ]


@pytest.mark.parametrize("batch", ["first", "second"])
async def test_a_canceled_batch_ends_and_the_other_one_succeeds(
    redis_url: str, tmp_path: Path, batch: str
) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        await worker.hold_two()
        await worker.harness.stores.records.cancel(batch)
        registry = worker.harness.registry
        assert registry is not None
        await worker.harness.until(lambda: registry.find(batch)[0].is_canceled)
        worker.open()
        other = "second" if batch == "first" else "first"
        assert await worker.statuses(2) == {batch: {"canceled"}, other: {"succeeded"}}


async def test_a_deadline_ends_the_second_batch_alone(redis_url: str, tmp_path: Path) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        await worker.hold_two(left_s=SHORT_S)
        registry = worker.harness.registry
        assert registry is not None
        await worker.harness.until(lambda: registry.find("second")[0].is_late)
        worker.open()
        assert await worker.statuses(2) == {"first": {"succeeded"}, "second": {"expired"}}


async def test_a_poison_item_is_found_among_two_batches(redis_url: str, tmp_path: Path) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        names = [*full("hold-a")[:-1], "poison", *full("hold-b"), *full("hold-c")]
        worker.open()
        await worker.harness.send(*names)
        outcomes = (await worker.harness.reply()).body.outcomes
        failed = [names[item.index] for item in outcomes if item.status != "succeeded"]
        assert failed == ["poison"]
        error = outcomes[names.index("poison")].error
        assert error is not None
        assert re.match(
            r"\d model processes died while processing this item, [23] of them", error.message
        )


async def test_an_item_that_the_model_fails_on_fails_alone(redis_url: str, tmp_path: Path) -> None:
    async with overlapping(redis_url, tmp_path) as worker:
        names = [*full("a")[:-1], "bang!", *full("b"), *full("c")]
        await worker.harness.send(*names)
        outcomes = (await worker.harness.reply()).body.outcomes
        assert [names[item.index] for item in outcomes if item.status != "succeeded"] == ["bang!"]


async def test_a_gpu_that_fails_with_two_batches_counts_once(
    redis_url: str, tmp_path: Path
) -> None:
    """Two failures in a row make a worker exit, so one failure must not count for each batch."""
    (tmp_path / "sick").touch()
    lost = metric("lost_gpus_total")
    async with overlapping(redis_url, tmp_path) as worker:
        worker.open()
        await worker.harness.send(*full("hold-lost"), *full("hold-b"))
        assert await worker.statuses(1) == {"req": {"succeeded"}}
    assert metric("lost_gpus_total") - lost == 1


def one_token() -> list[PreparedText]:
    return [PreparedText(key="", length=1, ids=bytes(4))]


@asynccontextmanager
async def on_device(folder: Path, call_s: float) -> AsyncIterator[ModelPool]:
    """A model process whose device takes `call_s` per call."""
    command = async_device.command(call_s, overlaps=True)
    hosted = [HostedModel(MODEL, folder)]
    async with ModelPool(hosted, device="cpu", processes=1, command=command) as pool:
        yield pool


async def start(pool: ModelPool, timeout_s: float = WAIT_LIMIT_S) -> RunningBatch:
    return await pool.processes[0].send(one_token(), timeout_s=timeout_s)


async def test_a_process_that_hangs_fails_both_at_the_limit_of_the_first(tmp_path: Path) -> None:
    async with on_device(tmp_path, 0.001) as pool:
        pid = pool.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        first, second = await start(pool, 0.2), await start(pool)
        for batch in (first, second):
            with pytest.raises(ModelProcessDied, match=r"did not finish within 0\.2 s"):
                await batch.done


async def test_the_time_of_a_batch_is_that_of_the_device(tmp_path: Path) -> None:
    """A batch's time doesn't include the time the device spent computing the previous batch."""
    call_s = 0.2
    async with on_device(tmp_path, call_s) as pool:
        running = [await start(pool) for _ in range(4)]
        done = [await batch.done for batch in running]
        for earlier, later in pairwise(done):
            assert later.started_at_s >= earlier.finished_at_s - 1e-3
        assert not any(batch.has_failed for batch in done)
        total_s = sum(batch.inference_ms for batch in done) / 1000
        assert total_s >= 4 * call_s
        assert total_s <= done[-1].finished_at_s - done[0].started_at_s + 1e-3


async def test_a_load_during_the_wait_for_an_eviction_is_counted(tmp_path: Path) -> None:
    async with on_device(tmp_path, 0.05) as pool:
        process = pool.processes[0]
        await process._evict(0)
        assert process.residency.resident == []
        running = await start(pool)  # loads the model
        await process._evict(0)
        assert running.done.done()
        assert process.residency.loads == 1


async def test_an_eviction_waits_for_both_batches(tmp_path: Path) -> None:
    async with on_device(tmp_path, 0.05) as pool:
        running: Sequence[RunningBatch] = [await start(pool) for _ in range(2)]
        process = pool.processes[0]
        await process._evict(0)
        assert all(batch.done.done() for batch in running)
        assert process.residency.resident == []
        done = await process.run(one_token(), timeout_s=WAIT_LIMIT_S)
        assert done.switched is not None
        assert done.switched.loads == 1
