"""A class's client as a worker uses it: which items join a run, and which finish with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadInput, Canceled, ModelFailed
from shared.models.tasks.custom import CustomResult
from tests.limits import WAIT_LIMIT_S
from tests.waiting import until
from tests.workers.models.custom.classes import entry_of, prepared, write_class
from workers.models.custom.client import ClassClient
from workers.models.reports import ItemEnded, ItemLogs, StepMessage

pytestmark = pytest.mark.anyio

ECHOES = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        if text == "exit":
            os._exit(3)
        return text
"""


HOSTILE = """
import signal, threading

def write_frame(text):
    data = text.encode()
    for fd in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
        try:
            os.write(fd, len(data).to_bytes(4, "little") + data)
        except OSError:
            pass

class Predictor(BasePredictor):
    def setup(self) -> None:
        if os.path.exists("dies"):
            threading.Timer(0.01, os._exit, [3]).start()

    def predict(self, how: str) -> Iterator[str]:
        if how == "leave a child that sends without end":
            if os.fork():
                os._exit(3)
            while True:
                write_frame('{"id": 0, "piece": 1, "files": [], "blobs": []}')
        elif how == "die of a signal without a name":
            os.kill(os.getpid(), 40)
        elif how == "send wrong metrics":
            write_frame('{"id": 1, "output": [], "files": [], "metrics": 5, "blobs": []}')
        elif how == "exit":
            os._exit(3)
        yield how
"""
WAITS = """
class Predictor(BasePredictor):
    @concurrent(max=2)
    async def predict(self, how: str) -> str:
        print("begin")
        try:
            await asyncio.sleep(60 if how == "crash" else 0.5)
        except asyncio.CancelledError:
            os._exit(3)
        return how
"""
STUBBORN = """
class Predictor(BasePredictor):
    def predict(self, how: str) -> str:
        print("begin")
        until_s = time.monotonic() + (3600 if how == "stubborn" else 0)
        while time.monotonic() < until_s:
            try:
                time.sleep(0.01)
            except BaseException:
                until_s = time.monotonic() + 1.5
        return how
"""
StartClient = Callable[[str], Awaitable[ClassClient]]


async def keep_all() -> bool:
    return False


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartClient]:
    clients: list[ClassClient] = []

    async def start_client(body: str) -> ClassClient:
        entry = entry_of(write_class(tmp_path, body))
        client = await ClassClient.start(entry, tmp_path, "cpu", 1, WAIT_LIMIT_S, keep_all)
        clients.append(client)
        return client

    yield start_client
    for client in clients:
        await client.close()


@pytest.fixture
async def client(start: StartClient) -> ClassClient:
    return await start(ECHOES)


async def compute(client: ClassClient, **values: Any) -> object:
    """Returns one prediction's output or error."""
    ended: list[ItemEnded] = []

    def on_message(message: StepMessage) -> None:
        if isinstance(message, ItemEnded):
            ended.append(message)

    async with asyncio.timeout(WAIT_LIMIT_S):
        await client.run_steps([prepared(values, is_streamed=True)], WAIT_LIMIT_S, on_message)
    (result,) = ended[0].done.outcomes
    return result.output if isinstance(result, CustomResult) else result


CANCELS_ITSELF = """
class Predictor(BasePredictor):
    @concurrent(max=2)
    async def predict(self, how: str) -> AsyncIterator[str]:
        if how == "cancel":
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            yield "x" * 900_000  # more than a socket takes at once
        yield str(os.getpid())
"""


async def test_a_piece_is_sent_whole_though_its_prediction_is_canceled(start: StartClient) -> None:
    client = await start(CANCELS_ITSELF)
    before = await compute(client, how="well")
    await compute(client, how="cancel")
    assert await compute(client, how="well") == before, "the process goes on"


STREAMS_LONG = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> Iterator[str]:
        yield text * 600_000
"""


async def test_a_stream_is_limited_in_bytes(start: StartClient) -> None:
    client = await start(STREAMS_LONG)
    assert await compute(client, text="e") == ["e" * 600_000]
    failed = await compute(client, text="é")
    assert isinstance(failed, ModelFailed)
    assert "may contain at most 1048576 bytes" in failed.message


REFUSES_ODDLY = """
from dataclasses import dataclass

class Odd(ValueError):
    def errors(self):
        return [5]

@dataclass
class Given:
    text: str

    def __post_init__(self):
        raise Odd("too dark")

class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[str]:
        return [one.text for one in inputs]
"""


async def test_an_error_that_looks_like_pydantics_is_the_inputs(start: StartClient) -> None:
    client = await start(REFUSES_ODDLY)
    done = await client.run([prepared({"text": "a"})], WAIT_LIMIT_S)
    (refused,) = done.outcomes
    assert isinstance(refused, BadInput)
    assert "too dark" in refused.message


ECHOES_BATCHES = """
class Given(BaseModel):
    text: str

class Predictor(BasePredictor):
    def predict_batch(self, inputs: list[Given]) -> list[str]:
        if inputs[0].text == "slow":
            time.sleep(60)
        return [one.text for one in inputs]
"""


async def test_a_batch_whose_caller_is_canceled_ends_before_the_next(
    start: StartClient,
) -> None:
    client = await start(ECHOES_BATCHES)
    pid = client.pid
    for moment in ("before it is sent", "while it is computed"):
        calling = asyncio.create_task(
            client.run([prepared({"text": "slow"}), prepared({"text": "b"})], WAIT_LIMIT_S)
        )
        await asyncio.sleep(0 if moment == "before it is sent" else 0.5)
        calling.cancel()
        async with asyncio.timeout(WAIT_LIMIT_S):
            done = await client.run([prepared({"text": "next"})], WAIT_LIMIT_S)
        (result,) = done.outcomes
        assert isinstance(result, CustomResult), result
        assert result.output == "next"
    assert client.pid == pid, "it was interrupted, not killed"


@pytest.mark.parametrize("first", ["text 0", "exit"])
async def test_items_admitted_at_an_end_join_the_run(client: ClassClient, first: str) -> None:
    """Admits another item when one ends, either normally or with its process, as a worker does."""
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


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("leave a child that sends without end", "exited with status 3"),
        ("die of a signal without a name", "was killed by signal 40"),
        ("send wrong metrics", "it sent an invalid response"),
    ],
)
async def test_what_a_class_does_fails_its_prediction_alone(
    start: StartClient, how: str, reason: str
) -> None:
    client = await start(HOSTILE)
    failed = await compute(client, how=how)
    assert isinstance(failed, ModelFailed)
    assert reason in failed.message
    assert await compute(client, how="well") == ["well"]


async def test_an_item_ends_though_its_process_dies_as_soon_as_it_is_set_up(
    start: StartClient, tmp_path: Path
) -> None:
    """The process dies before, with or just after the item, which fails unless it finished
    first.
    """
    client = await start(HOSTILE)
    (tmp_path / "dies").touch()
    assert isinstance(await compute(client, how="exit"), ModelFailed)
    for _ in range(3):
        outcome = await compute(client, how="well")
        assert outcome == ["well"] or isinstance(outcome, ModelFailed), outcome
    (tmp_path / "dies").unlink()
    while isinstance(await compute(client, how="well"), ModelFailed):
        pass  # it was already being set up


async def cancel_first(client: ClassClient, first: str) -> dict[int, ItemEnded]:
    """Computes `first` and then "well", canceling the first once it has begun."""
    ended: dict[int, ItemEnded] = {}
    has_begun = asyncio.Event()

    def on_message(message: StepMessage) -> None:
        if isinstance(message, ItemEnded):
            ended[message.slot] = message
        elif isinstance(message, ItemLogs):
            has_begun.set()

    batch = [prepared({"how": first})]
    running = asyncio.create_task(client.run_steps(batch, WAIT_LIMIT_S, on_message))
    await asyncio.wait_for(has_begun.wait(), WAIT_LIMIT_S)
    client.admit([prepared({"how": "well"})])
    await asyncio.sleep(0)  # a class that processes several at a time has both
    client.drop([0])
    await asyncio.wait_for(running, WAIT_LIMIT_S)
    return ended


async def test_a_crash_of_a_canceled_prediction_is_not_blamed_on_another(
    start: StartClient,
) -> None:
    ended = await cancel_first(await start(WAITS), "crash")
    (first,), (other,) = (ended[slot].done.outcomes for slot in (0, 1))
    assert isinstance(first, Canceled)
    assert isinstance(other, CustomResult), other


async def test_nobody_pays_for_a_canceled_prediction_that_goes_on(start: StartClient) -> None:
    done = (await cancel_first(await start(STUBBORN), "stubborn"))[1].done
    took_s = done.finished_at_s - done.started_at_s
    assert took_s > 1.4, "the first goes on for 1.5 s after it was canceled"
    assert done.inference_ms / 1000 < took_s / 2


SET_UP_ONCE = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        if os.path.exists("was_set_up"):
            time.sleep(3600)

    def predict(self, how: str) -> str:
        return how
"""


@pytest.mark.slow(about_s=9)
async def test_closing_during_a_setup_can_be_canceled(start: StartClient, tmp_path: Path) -> None:
    client = await start(SET_UP_ONCE)
    await client.evict([0], lambda: None)
    (tmp_path / "was_set_up").touch()
    computing = asyncio.create_task(compute(client, how="well"))
    await until(lambda: client.pid != 0)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)  # it waits until the setup has been canceled
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert client.pid == 0
    computing.cancel()
    await asyncio.wait([computing])


class _Gated(ThreadPoolExecutor):
    """Holds back each result until `gate` is set. `done` is set once a result is held back."""

    def __init__(self) -> None:
        super().__init__()
        self.done, self.gate = threading.Event(), threading.Event()

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def call_gated() -> Any:
            try:
                return call(*args, **options)
            finally:
                self.done.set()
                self.gate.wait(WAIT_LIMIT_S)

        return super().submit(call_gated)


def _children() -> set[str]:
    files = Path("/proc/self/task").glob("*/children")
    return {pid for file in files for pid in file.read_text().split()}


async def test_a_start_that_is_canceled_twice_leaves_no_process(tmp_path: Path) -> None:
    entry = entry_of(write_class(tmp_path, ECHOES))
    children, tasks, executor = _children(), asyncio.all_tasks(), _Gated()
    asyncio.get_running_loop().set_default_executor(executor)
    starting = asyncio.create_task(
        ClassClient.start(entry, tmp_path, "cpu", 1, WAIT_LIMIT_S, keep_all)
    )
    await until(executor.done.is_set)
    assert _children() - children
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
    executor.gate.set()
    while others := asyncio.all_tasks() - tasks:
        await asyncio.wait(others)
    assert starting.cancelled()
    assert _children() == children
