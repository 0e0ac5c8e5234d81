"""The client of a class as a worker drives it: what joins a run, and what ends with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.tasks.custom import CustomResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import entry_of, prepared, write_class
from workers.models.custom.client import ClassClient
from workers.models.reports import ItemEnded, StepMessage

pytestmark = pytest.mark.anyio

ECHOES = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        if text == "exit":
            os._exit(3)
        return text
"""


async def keep_all() -> bool:
    return False


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ClassClient]:
    entry = entry_of(write_class(tmp_path, ECHOES))
    started = await ClassClient.start(entry, tmp_path, "cpu", 1, WAIT_LIMIT_S, keep_all)
    yield started
    await started.close()


@pytest.mark.parametrize("first", ["text 0", "exit"])
async def test_items_admitted_at_an_end_join_the_run(client: ClassClient, first: str) -> None:
    """As a worker admits them: when it hears that an item has ended, well or with its process."""
    outputs: dict[int, object] = {}

    def on_message(message: StepMessage) -> None:
        if isinstance(message, ItemEnded):
            (result,) = message.done.outcomes
            outputs[message.slot] = result.output if isinstance(result, CustomResult) else "exit"
            if len(outputs) < 4:
                slot = client.admit([prepared({"text": f"text {message.slot + 1}"})])
                assert slot == message.slot + 1

    await client.run_steps([prepared({"text": first})], WAIT_LIMIT_S, on_message)
    assert outputs == {0: first, 1: "text 1", 2: "text 2", 3: "text 3"}
    assert client.admit([prepared({"text": "late"})]) is None, "nothing runs any more"


async def test_what_a_worker_raises_ends_the_run(client: ClassClient) -> None:
    def on_message(message: StepMessage) -> None:
        raise RuntimeError("20 batches in a row failed")

    with pytest.raises(RuntimeError, match="in a row"):
        await client.run_steps([prepared({"text": "a"})], WAIT_LIMIT_S, on_message)
    ended: list[StepMessage] = []
    await client.run_steps([prepared({"text": "b"})], WAIT_LIMIT_S, ended.append)
    assert any(isinstance(one, ItemEnded) for one in ended), "the process goes on"
