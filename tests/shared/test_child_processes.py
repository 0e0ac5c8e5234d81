"""Processes started by the API and the workers while gRPC calls are running."""

import asyncio
import importlib
import os
import sys

import pytest
import uvloop

from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
STARTS = 100
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


async def start_beside_calls() -> None:
    """Starts processes while gRPC calls are running, and prints the output of each."""
    importlib.import_module("shared")  # imported before gRPC, as in all our processes
    import grpc

    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/a/b", request_serializer=bytes, response_deserializer=bytes)

        async def calling() -> None:
            while True:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"")

        callers = [asyncio.create_task(calling()) for _ in range(4)]
        for _ in range(STARTS):
            process = await asyncio.create_subprocess_exec(
                *("/bin/echo", "it ran"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await asyncio.wait_for(process.communicate(), WAIT_LIMIT_S)
            print(said.decode().strip())
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    await server.stop(None)


async def test_processes_start_while_calls_run() -> None:
    """Runs in a separate process, because gRPC reads its settings only once."""
    environment = {name: value for name, value in os.environ.items() if name != FORK_SUPPORT}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.shared.test_child_processes"),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_LIMIT_S)
    assert said.decode().splitlines() == ["it ran"] * STARTS


if __name__ == "__main__":
    uvloop.run(start_beside_calls())
