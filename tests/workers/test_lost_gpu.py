"""A worker whose GPU fails does not return errors.

It exits, and another worker computes everything it held.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from shared.broker.in_memory import InMemoryBroker
from shared.errors import ModelFailed
from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import MODEL, running_worker
from workers.runtime.pool import HostedModel, ModelPool

pytestmark = pytest.mark.anyio

BROKEN = """
import sys
from pathlib import Path
from shared.models.tasks.embedding import EmbeddingResult
from workers.models.base import GpuLost
from workers.runtime import server as model_process

TIMES = Path(sys.argv.pop(1))

class Letters:
    device_name, pads = "letters", False
    def setup(self): pass
    def warmup(self): pass
    def groups(self, batch): return [list(range(len(batch)))]
    def computed_work(self, lengths): return sum(lengths)
    def predict(self, batch, on_step):
        if left := TIMES.read_text():
            TIMES.write_text(left[1:])
            raise GpuLost("CUDA error: uncorrectable ECC error encountered")
        return [EmbeddingResult(4 * item.ids, len(item.ids)) for item in batch]

model_process.model_for = lambda *given, **named: Letters()
sys.exit(model_process.main())
"""
"""Fails as many times as there are letters in a file."""
NAMES = [f"n{letter}" for letter in "abcdefgh"]


def lost() -> float:
    return REGISTRY.get_sample_value("penstock_worker_lost_gpus_total") or 0.0


async def test_what_a_worker_with_a_broken_gpu_held_is_computed_by_another(
    redis_url: str, tmp_path: Path
) -> None:
    times, broker, before = tmp_path / "times", InMemoryBroker(), lost()
    times.write_text("x" * 1000)
    command = (sys.executable, "-c", BROKEN, str(times))
    async with (
        ModelPool(
            [HostedModel(MODEL, tmp_path)], device="cpu", processes=1, command=command
        ) as pool,
        running_worker(redis_url, tmp_path, drain_s=0, pool=pool, broker=broker) as sick,
    ):
        for name in NAMES:
            await sick.send(name * 3, request_id=name)
        assert sick.running is not None
        with pytest.raises(ModelFailed, match="its GPU is failing"):
            await asyncio.wait_for(asyncio.shield(sick.running), WAIT_LIMIT_S)
        assert len(sick.rows) == 0, "nobody got an error"
    assert lost() - before == 2
    async with running_worker(redis_url, tmp_path, broker=broker) as healthy:
        ends = {}
        for _ in NAMES:
            reply = await healthy.reply()
            ends[reply.request_id] = reply.body.outcomes[0].status
    assert ends == dict.fromkeys(NAMES, "succeeded")


async def test_a_gpu_that_fails_once_is_tried_again(redis_url: str, tmp_path: Path) -> None:
    """If a single input corrupts the GPU context, the worker survives."""
    times = tmp_path / "times"
    times.write_text("x")
    command = (sys.executable, "-c", BROKEN, str(times))
    async with (
        ModelPool(
            [HostedModel(MODEL, tmp_path)], device="cpu", processes=1, command=command
        ) as pool,
        running_worker(redis_url, tmp_path, pool=pool) as harness,
    ):
        for name in NAMES:
            assert await harness.ask(name, request_id=name) == [("succeeded", 4 * name.encode())]
        times.write_text("x")
        assert await harness.ask("last", request_id="last") == [("succeeded", 4 * b"last")]
