"""A call that never returns to Python, in a step of a real image model's process."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from shared.messages import Item
from shared.models.catalog import Catalog
from shared.models.tasks.image import ImageResult
from tests.workers.models.test_image import TEXT
from tests.workers.worker_harness import MODEL, running_worker
from workers.jobs import step_run
from workers.runtime.pool import HostedModel, ModelPool
from workers.tasks import preparer_for

pytestmark = [pytest.mark.slow(about_s=60), pytest.mark.anyio]

SERVER = """
import ctypes, functools, sys
import diffusers
from workers.runtime import server

draw = diffusers.UNet2DConditionModel.forward

@functools.wraps(draw)
def forward(self, sample, *given, **named):
    if sample.shape[-1] != sample.shape[-2]:
        ctypes.PyDLL(None).sleep(3600)
    return draw(self, sample, *given, **named)

diffusers.UNet2DConditionModel.forward = forward
sys.exit(server.main())
"""
"""A model process that hangs, without releasing the interpreter lock, if an image isn't square."""
SILENT_S = 5.0


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The shipped image model's files, next to which a worker may store objects."""
    for part in tiny_folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    return tmp_path


async def test_an_image_that_hangs_in_native_code_fails_alone(
    redis_url: str, catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_run, "TIMEOUT_S", SILENT_S)
    entry = catalog.default("image").model_copy(update={"name": MODEL.name})
    values = [TEXT, msgspec.structs.replace(TEXT, width=72, height=48)]
    async with (
        ModelPool(
            [HostedModel(entry, folder)],
            device="cpu",
            processes=1,
            command=(sys.executable, "-c", SERVER),
        ) as pool,
        running_worker(
            redis_url,
            folder,
            pool=pool,
            model=entry,
            preparer=preparer_for(entry, folder),
        ) as harness,
    ):
        pid = pool.processes[0].pid
        await harness.send_items(
            [Item(at, value, None) for at, value in enumerate(values)], request_id="both"
        )
        square, other = (await harness.reply()).body.outcomes
        assert isinstance(square.result, ImageResult)
        assert other.error is not None
        assert re.match(r"\d model processes died while processing", other.error.message)
        assert pool.processes[0].pid != pid
