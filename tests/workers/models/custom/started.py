"""A class in a worker pool's process, driven by tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from shared.errors import PenstockError
from shared.messages import PrintedLogs
from shared.models.catalog import Model
from shared.models.tasks import Result
from shared.models.tasks.custom import PieceChunk, StreamedFile
from tests.limits import WAIT_LIMIT_S
from workers.models.base import PreparedCustom
from workers.models.client import ModelProcessDied
from workers.models.reports import BatchResult, ItemEnded, ItemLogs, Pieces, StepMessage
from workers.runtime.pool import HostedModel, ModelPool

STEP_S = 0.05
Found = TypeVar("Found")
_Message = PieceChunk | list[tuple[StreamedFile, bytes]] | PrintedLogs | BatchResult | PenstockError
StartClass = Callable[..., "StartedClass"]
"""The type of the `start_class` fixture: takes a folder and fields for its entry."""


@dataclass
class StepEnd:
    """The predictions that finished in a step, and their output."""

    results: dict[int, Result | PenstockError] = field(default_factory=dict)
    logs: dict[int, PrintedLogs] = field(default_factory=dict)


class StartedClass:
    """Starts a pool with one process, as a worker does, and feeds it through `PooledProcess`.

    Tests number the predictions. As in a worker, a new batch starts whenever nothing is running,
    and later predictions join the running batch.

    Args:
        entry: catalog entry, with its interface.
        device: same as in a worker's settings.
        startup_s: time limit for the first `setup`.

    Raises:
        PenstockError: the class could not be set up.
    """

    def __init__(
        self, entry: Model, folder: Path, device: str = "cpu", startup_s: float = WAIT_LIMIT_S
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._messages: queue.SimpleQueue[tuple[int, _Message]] = queue.SimpleQueue()
        self._numbers: dict[int, int] = {}
        """The prediction number of each slot in the running batch."""
        self._inside: dict[int, PreparedCustom] = {}
        self._running: asyncio.Task[None] | None = None
        self._chunks: dict[int, PieceChunk] = {}
        self._files: dict[int, list[tuple[StreamedFile, bytes]]] = {}
        self._logs: dict[int, PrintedLogs] = {}
        self._pool = ModelPool(
            [HostedModel(entry, folder)], device=device, processes=1, start_timeout_s=startup_s
        )
        try:
            self._call(self._pool.__aenter__())
        except BaseException:
            self._end_loop()
            raise
        self._process = self._pool.processes[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the process if it is still running. Running predictions get no result."""
        if self._loop.is_closed():
            return
        self._call(self._close())
        self._end_loop()

    def admit(self, number: int, item: PreparedCustom) -> None:
        self._call(self._admit(number, item))

    def drop(self, number: int) -> None:
        """Cancels a prediction. Its result is `Canceled`, unless it has just finished."""
        slots = [slot for slot, one in self._numbers.items() if one == number]
        self._loop.call_soon_threadsafe(self._process.drop, slots)

    def step(self) -> StepEnd:
        """Waits up to STEP_S for the next message.

        Returns the predictions that the message completes.
        """
        end = StepEnd()
        try:
            number, message = self._messages.get(timeout=STEP_S)
        except queue.Empty:
            return end
        if isinstance(message, PieceChunk):
            self._chunks[number] = message
        elif isinstance(message, list):
            self._files.setdefault(number, []).extend(message)
        elif isinstance(message, PrintedLogs):
            self._logs[number] = message
        elif isinstance(message, PenstockError):
            end.results[number] = message
        else:
            end.results[number] = message.outcomes[0]
            if message.logs:
                end.logs[number] = message.logs[0]
        return end

    def steps_until(self, number: int) -> StepEnd:
        """Returns the step that completes a prediction. Predictions completed earlier are left
        out.
        """
        for _ in range(int(WAIT_LIMIT_S / STEP_S)):
            end = self.step()
            if number in end.results:
                return end
        raise AssertionError(f"prediction {number} has no result in time")

    def wait_for_logs(self, number: int) -> PrintedLogs:
        """Returns the first output of a running prediction."""
        for _ in range(int(WAIT_LIMIT_S / STEP_S)):
            assert number not in self.step().results, "it has ended"
            if logs := self.look_at_logs().get(number):
                return logs
        raise AssertionError(f"prediction {number} has printed nothing in time")

    def take_chunks(self) -> dict[int, PieceChunk]:
        """Returns the pieces streamed since the last call, keyed by prediction."""
        chunks, self._chunks = self._chunks, {}
        return chunks

    def take_files(self) -> dict[int, list[tuple[StreamedFile, bytes]]]:
        """Returns the large files streamed since the last call, keyed by prediction."""
        files, self._files = self._files, {}
        return files

    def look_at_logs(self) -> dict[int, PrintedLogs]:
        """Returns the output of running predictions if there is more since the last call."""
        logs, self._logs = self._logs, {}
        return logs

    def run(
        self,
        *batch: PreparedCustom,
        cancels_after_s: float | None = None,
        timeout_s: float = WAIT_LIMIT_S,
    ) -> BatchResult:
        """Computes a batch with a class that has `predict_batch`.

        Args:
            batch: at least one item.
            cancels_after_s: cancels the batch this long after the process received it. None: never.
            timeout_s: time limit, after which the process is killed.

        Raises:
            ModelProcessDied: the process died or took too long.
        """
        return self._call(self._run_batch(batch, timeout_s, cancels_after_s))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def _admit(self, number: int, item: PreparedCustom) -> None:
        self._inside[number] = item
        while self._running is not None and not self._running.done():
            if (slot := self._process.admit([item])) is not None:
                self._numbers[slot] = number
                return
            await asyncio.sleep(0)
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Runs batches until nothing is left.

        A prediction that joined too late runs in the next batch.
        """
        while self._inside:
            self._numbers = dict(enumerate(self._inside))
            try:
                await self._process.run_steps(
                    list(self._inside.values()),
                    timeout_s=WAIT_LIMIT_S,
                    on_message=self._on_message,
                )
            except ModelProcessDied as error:
                for number in list(self._inside):
                    del self._inside[number]
                    self._messages.put((number, error))
                await self._process.ready()

    def _on_message(self, message: StepMessage) -> None:
        if isinstance(message, Pieces):
            for slot, files in message.files.items():
                self._put(slot, [(one.file, one.data) for one in files])
            for slot, chunk in message.chunks.items():
                self._put(slot, chunk)
        elif isinstance(message, ItemLogs):
            self._put(message.slot, message.logs)
        elif isinstance(message, ItemEnded):
            del self._inside[self._numbers[message.slot]]
            self._put(message.slot, message.done)

    def _put(self, slot: int, message: _Message) -> None:
        self._messages.put((self._numbers[slot], message))

    async def _run_batch(
        self, batch: Sequence[PreparedCustom], timeout_s: float, cancels_after_s: float | None
    ) -> BatchResult:
        await self._process.ready()
        running = await self._process.send(batch, timeout_s=timeout_s)
        if cancels_after_s is not None:
            await asyncio.sleep(cancels_after_s)
            running.cancel()
        return await running.done

    async def _close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._pool.__aexit__(None, None, None)

    def _call(self, coroutine: Coroutine[Any, Any, Found]) -> Found:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_LIMIT_S * 2)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class OperatorsLog:
    """Class output in a worker's log.

    Args:
        file: receives the output instead of stderr, because `capfd` loses output written while it
            is being read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def look(self) -> str:
        """Reads everything in the log so far."""
        return self._file.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> str:
        """Waits until the log contains a text, then returns the whole log.

        A worker forwards output after a delay.
        """
        until_s = time.monotonic() + WAIT_LIMIT_S
        while text not in (log := self.look()):
            assert time.monotonic() < until_s, f"{text!r} is not in {log!r}"
            time.sleep(STEP_S)
        return log
