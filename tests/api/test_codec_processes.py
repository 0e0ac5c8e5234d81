"""The pool of image processes when processes are slow, expensive or missing."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from api.inputs import codec_pool
from api.inputs.codec_pool import CodecClient, CodecPool
from api.inputs.codec_protocol import PrepareSource, SourceLimits
from shared.errors import BadInput, Unavailable
from tests.api.test_codec_pool_states import FakeProcess
from tests.waiting import until

pytestmark = pytest.mark.anyio
LIMITS = SourceLimits(64, 64, 8, 4096)
FAR_S = 4e9

FAKE = """
import os, socket, sys
sys.path.insert(0, {root!r})
from api.inputs.codec_protocol import HeaderRead, SourcePrepared, CodecError, frame_header
from api.inputs.codec_server import _read
connection = socket.socket(fileno=int(sys.argv[1]))
lock = {folder!r} + "/decoding"
try:
    while True:
        order, data = _read(connection)
        connection.sendall(frame_header(HeaderRead(order.size[0])))
        _read(connection)
        if data == b"too long":
            os.kill(os.getpid(), {too_long})
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            connection.sendall(frame_header(CodecError("invalid_input", "two at once")))
            continue
        sum(range(200_000))
        os.unlink(lock)
        connection.sendall(frame_header(SourcePrepared(*order.size, order.size)))
except ConnectionError:
    pass
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes whose cost is the image's width, and that notice when another process is
    decoding.
    """
    script = tmp_path / "fake.py"
    root = str(Path(__file__).parents[2])
    script.write_text(FAKE.format(root=root, folder=str(tmp_path), too_long=int(signal.SIGXCPU)))
    monkeypatch.setattr(codec_pool, "COMMAND", (sys.executable, str(script)))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("cost_bytes", [51, 1000])
async def test_no_more_is_decoded_at_once_than_the_budget_has_room_for(cost_bytes: int) -> None:
    async with CodecPool(3, budget_bytes=100) as pool:
        order = PrepareSource((cost_bytes, 1), LIMITS)
        await asyncio.gather(
            *[pool.run(order, b"", deadline_s=FAR_S, is_new=True) for _ in range(24)]
        )


@pytest.mark.slow(about_s=5)
@pytest.mark.usefixtures("fake")
async def test_image_that_takes_too_long_is_no_fault_of_ours() -> None:
    """No matter how many processes finish at once, each one reports the right reason."""
    async with CodecPool(4, budget_bytes=400) as pool:

        def prepare(data: bytes) -> Coroutine[Any, Any, Any]:
            return pool.run(PrepareSource((1, 1), LIMITS), data, deadline_s=FAR_S, is_new=True)

        ends = await asyncio.gather(
            *(prepare(b"too long") for _ in range(24)), return_exceptions=True
        )
        assert {type(end) for end in ends} == {BadInput}
        assert all("too much CPU time" in str(end) for end in ends)
        await prepare(b"")


async def test_small_image_does_not_wait_for_memory_of_another_tenant() -> None:
    """Small images don't wait, even while one image uses the entire budget and the next needs all
    of it.
    """
    running: list[FakeProcess] = []

    async def start() -> CodecClient:
        return FakeProcess(running)

    async def prepare(tenant: str, cost_bytes: int) -> None:
        order, data = PrepareSource((1, 1), LIMITS), bytes(cost_bytes)
        await pool.run(order, data, deadline_s=FAR_S, is_new=True, tenant=tenant)

    async with CodecPool(2, budget_bytes=100, start=start) as pool:
        large = [asyncio.create_task(prepare("busy", 1000)) for _ in range(2)]
        await until(lambda: len(running) == 2)
        small = asyncio.create_task(prepare("quiet", 25))
        await until(lambda: len(running) == 3)
        running[2].finish()
        await small
        assert not any(one.done() for one in large)
        for _ in large:
            running[0].finish()
            await asyncio.wait(large, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*large)


async def test_process_that_cannot_be_started_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(codec_pool, "COMMAND", (os.fspath(tmp_path / "nothing"),))
    async with CodecPool(1, budget_bytes=100) as pool:
        for _ in range(2):
            with pytest.raises(Unavailable, match="failed to start"):
                await pool.run(PrepareSource((1, 1), LIMITS), b"", deadline_s=FAR_S, is_new=True)
