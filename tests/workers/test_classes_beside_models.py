"""A worker that serves a custom class and another model, which take turns on one device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shared.errors import Canceled
from shared.models.catalog_file import read_catalog
from shared.models.tasks.custom import CustomResult
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import entry_of, prepared, write_class
from workers.models.base import Prepared
from workers.models.client import MakeRoom, ModelProcessDied
from workers.models.custom.client import ClassClient
from workers.models.reports import ItemEnded, StepMessage
from workers.models.source import resolve
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess
from workers.tasks import preparer_for

pytestmark = [pytest.mark.slow(about_s=10), pytest.mark.anyio]

CLASS, TEXTS = 0, 1
SAYS_ITS_PROCESS = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        while text == "loop":
            time.sleep(0.01)
        return f"{text} {os.getpid()}"
"""
NEEDS_ROOM = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        if not os.path.exists("room"):
            raise MemoryError("the device is full")

    def predict(self, text: str) -> str:
        return text
"""
LOSES_ITS_GPU = """
class AcceleratorError(RuntimeError):
    pass

class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        if text == "break":
            raise AcceleratorError("CUDA error: an illegal memory access was encountered")
        if text == "blame":
            raise ValueError("AcceleratorError: CUDA error: as a caller may write it")
        return f"{text} {os.getpid()}"
"""


@pytest.fixture
def hosted(tmp_path: Path) -> list[HostedModel]:
    folder = write_class(tmp_path, SAYS_ITS_PROCESS)
    texts = read_catalog(Path("models.yaml")).find("all-MiniLM-L6-v2")
    weights = resolve(texts.source, texts.revision, Path("unused"))
    return [HostedModel(entry_of(folder), folder), HostedModel(texts, weights)]


@pytest.fixture(params=[0, 1], ids=["together", "one at a time"])
async def process(
    request: pytest.FixtureRequest, hosted: list[HostedModel]
) -> AsyncIterator[PooledProcess]:
    """With a budget of one byte, each model exceeds it, so only one stays in memory at a time."""
    budget_bytes = request.param
    async with ModelPool(
        hosted, device="cpu", processes=1, memory_budget_bytes=budget_bytes
    ) as pool:
        yield pool.processes[0]


async def say(process: PooledProcess | ClassClient, text: str) -> object:
    """Runs the class on a text and returns its output."""
    ended: list[StepMessage] = []
    if isinstance(process, ClassClient):
        await process.run_steps([prepared({"text": text})], WAIT_LIMIT_S, ended.append)
    else:
        await process.run_steps(
            [prepared({"text": text})],
            timeout_s=WAIT_LIMIT_S,
            on_message=ended.append,
            model=CLASS,
        )
    (outcome,) = [one.done.outcomes[0] for one in ended if isinstance(one, ItemEnded)]
    return outcome.output if isinstance(outcome, CustomResult) else outcome


async def embed(process: PooledProcess, hosted: list[HostedModel]) -> bytes:
    texts = preparer_for(hosted[TEXTS].entry, hosted[TEXTS].folder).prepare([TextInput("a cat")])
    batch = [one for one in texts if isinstance(one, Prepared)]
    done = await process.run(batch, timeout_s=WAIT_LIMIT_S, model=TEXTS)
    (result,) = done.results
    assert isinstance(result, EmbeddingResult)
    return result.vector


async def test_both_answer_in_turn_within_the_budget(
    process: PooledProcess, hosted: list[HostedModel], request: pytest.FixtureRequest
) -> None:
    is_shared = "together" in request.node.name
    assert process.residency.loads == 2, "checks of the budget do not take them from the worker"
    first_pid, vector = "", b""
    for _ in range(2):
        said = str(await say(process, "hello"))
        pid = said.removeprefix("hello ")
        assert sorted(process.residency.resident) == ([CLASS, TEXTS] if is_shared else [CLASS])
        found = await embed(process, hosted)
        assert vector in (b"", found)
        assert first_pid in ("", pid) or not is_shared
        first_pid, vector = pid, found
        if is_shared:
            assert psutil.pid_exists(int(pid))
        else:
            assert process.residency.resident == [TEXTS]
            assert not psutil.pid_exists(int(pid)), "an evicted class has no process"
    assert process.residency.load_s.keys() == {CLASS, TEXTS}
    assert process.residency.size_bytes[CLASS] > 1_000_000


async def test_an_item_that_is_dropped_while_others_are_evicted_does_not_run(
    process: PooledProcess,
) -> None:
    saying = asyncio.create_task(say(process, "loop"))
    await asyncio.sleep(0)  # it has started, and may be waiting for the other model to be evicted
    process.drop([0])
    assert isinstance(await asyncio.wait_for(saying, WAIT_LIMIT_S), Canceled)


async def start(folder: Path, body: str, device: str, make_room: MakeRoom) -> ClassClient:
    entry = entry_of(write_class(folder, body))
    return await ClassClient.start(entry, folder, device, 1, WAIT_LIMIT_S, make_room)


async def test_a_class_without_room_is_set_up_once_others_have_made_some(tmp_path: Path) -> None:
    asked = []

    async def make_room() -> bool:
        asked.append(True)
        (tmp_path / "room").touch()
        return True

    client = await start(tmp_path, NEEDS_ROOM, "cpu", make_room)
    try:
        assert await say(client, "hello") == "hello"
        (tmp_path / "room").unlink()
        await client.evict([0], lambda: None)
        assert (client.residency.resident, client.pid) == ([], 0)
        assert await say(client, "hello") == "hello"
        assert client.residency.resident == [0]
    finally:
        await client.close()
    assert len(asked) == 2


async def keep_all() -> bool:
    return False


async def test_a_lost_gpu_ends_the_process_and_its_items_are_tried_again(tmp_path: Path) -> None:
    client = await start(tmp_path, LOSES_ITS_GPU, "cuda:0", keep_all)
    try:
        before = await say(client, "hello")
        assert "as a caller may write it" in str(await say(client, "blame"))
        assert await say(client, "hello") == before
        with pytest.raises(ModelProcessDied, match=r"lost its GPU \(status 87\)"):
            await say(client, "break")
        assert str(await say(client, "hello")).startswith("hello ")
        assert await say(client, "hello") != before
    finally:
        await client.close()
