"""Requests that no client would send: a short run of `malformed.py`."""

from pathlib import Path

import grpc
import pytest

from pubsub_emulator.protocols.methods import PUBLISHER
from pubsub_emulator.server import serve
from tests import malformed

pytestmark = pytest.mark.anyio
COUNT = 2000
"""To send thousands more: `python -m tests.malformed 25000`."""


async def test_malformed_requests_are_refused_with_a_reason_and_leave_nothing(
    tmp_path: Path,
) -> None:
    assert "memory" in await malformed.main(tmp_path, COUNT, seed=17)


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x12"])
async def test_bytes_that_are_no_request_are_an_invalid_argument(data: bytes) -> None:
    async with serve() as server, grpc.aio.insecure_channel(server.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/{PUBLISHER}/CreateTopic", None, None)(data)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid google.pubsub.v1.Topic" in str(refused.value.details())
