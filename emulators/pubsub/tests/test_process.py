"""The processes that tests start."""

import asyncio
import sys
from pathlib import Path

from pubsub_emulator.protos import message_class
from tests.process import Process
from tests.wire import TOPIC, Wire, until

STARTS = 100


async def test_processes_start_while_calls_of_grpc_run(wire: Wire, tmp_path: Path) -> None:
    """Without the setting in tests/__init__.py, 1 in 20 processes dies or hangs in gRPC threads."""
    request = message_class("GetTopicRequest")(topic=TOPIC)

    async def calling() -> None:
        while True:
            await wire.call("Publisher", "GetTopic", request, "Topic")

    callers = [asyncio.create_task(calling()) for _ in range(4)]
    process = Process("program", [sys.executable, "-S", "-c", "print('it ran')"], tmp_path)
    for _ in range(STARTS):
        await asyncio.to_thread(process.start)
        await until(lambda: not process.is_running)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    assert process.log_path.read_text().splitlines() == ["it ran"] * STARTS
