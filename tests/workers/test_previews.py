"""Previews on their way from a model process to their prediction's stream."""

import asyncio
import io
from pathlib import Path

import pytest
from PIL import Image

from tests.limits import WAIT_LIMIT_S
from tests.workers.worker_harness import WorkerHarness, running_worker
from workers.models.base import RgbImage
from workers.models.reports import Previews

pytestmark = pytest.mark.anyio

GREEN = RgbImage(4, 2, b"\0\xff\0" * 8)


async def drawing(worker: WorkerHarness, name: str) -> None:
    """Has a worker compute a prediction that has reported progress but not finished."""
    await worker.stores.predictions.create(name, "t", b"{}", deadline_s=2e9, keep_s=60)
    worker.process.gate.clear()
    worker.process.started.clear()
    worker.process.step_told = (3, 20)
    await worker.send(name, f"{name} too", request_id=name, prediction="1")
    await worker.process.started.wait()


async def ended(worker: WorkerHarness) -> None:
    worker.process.gate.set()
    await worker.reply()


async def test_only_watched_predictions_are_drawn(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as worker:
        await drawing(worker, "pred_a")
        await ended(worker)
        assert worker.process.watched == []
        await worker.stores.previews.watch("pred_b")
        await drawing(worker, "pred_b")
        assert worker.process.on_step is not None
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not worker.process.watched:
                worker.process.on_step(4, 20)
                await asyncio.sleep(0.01)
        assert worker.process.watched[0] == [0, 1]
        await ended(worker)


async def test_preview_is_in_the_stream_until_the_end(redis_url: str, tmp_path: Path) -> None:
    async with running_worker(redis_url, tmp_path) as worker:
        await drawing(worker, "pred_a")
        show = worker.process.on_previews
        assert show is not None
        show(Previews(1, 5, 20, {1: GREEN}))
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not (found := await worker.stores.previews.after("pred_a", "")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (preview,) = found
        assert (preview.index, preview.step, preview.steps) == (1, 5, 20)
        with Image.open(io.BytesIO(preview.image)) as image:
            assert (image.format, image.size) == ("WEBP", (4, 2))
        assert await worker.stores.previews.after("pred_a", preview.cursor) == []
        await ended(worker)
        show(Previews(1, 19, 20, {1: GREEN}))
        await worker.stores.previews.add("pred_a", 1, 19, 20, b"late")
        assert await worker.stores.previews.after("pred_a", "") == [preview]
