"""Penstock's own runner, driven directly: the process that `penstock predict` starts."""

from __future__ import annotations

import asyncio
import copy
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.class_runners.outcome import Outcome, Request, describe_file, put
from workers.models.custom.process import RunnerProcess, end_of
from workers.models.custom.runner.frames import Frame

WAIT_S = 1.0
START_LIMIT_S = 60.0
PREDICT_LIMIT_S = 30.0


class _Running:
    """A prediction that was sent, and what came of it so far."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.began_s = time.monotonic()
        self.pieces: list[Any] = []
        self.has_files = False
        """True if pieces have files, which the last frame does not repeat."""
        self.pieces_s: list[float] = []
        self.ended: asyncio.Future[Outcome] = loop.create_future()


class PenstockRunner:
    """A class in its runner process, without a model process in between.

    One thread owns the connection, as the model process does. `receive` wakes it for requests.

    Args:
        folder: of the class.
        python: the interpreter that has the class's packages.
        environment: variables of cog.yaml.
        batches: True for a class with `predict_batch`. Each prediction is a batch of its own.
    """

    def __init__(
        self, folder: Path, *, python: str, environment: Mapping[str, str], batches: bool = False
    ) -> None:
        self._folder = folder
        self._python = python
        self._environment = environment
        self._batches = batches
        self._process: RunnerProcess | None = None
        self._pid = 0
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wakes, self._waker = socket.socketpair()
        self._running: dict[int, _Running] = {}
        self._sent: set[int] = set()
        self._is_shared = False
        """True while what the process prints may belong to several predictions."""
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._own, daemon=True)

    @property
    def pids(self) -> list[int]:
        """Process ID of the runner."""
        return [self._pid] if self._pid else []

    async def start(self) -> str:
        """Loads and sets up the class."""
        before = _children()
        self._process = RunnerProcess(
            self._folder, python=self._python, environment=self._environment
        )
        self._pid = max(_children() - before, default=0)
        self._thread.start()
        try:
            return await asyncio.wait_for(self._ready, START_LIMIT_S)
        except TimeoutError:
            return f"not ready in {START_LIMIT_S:g} s"

    async def predict(self, request: Request) -> Outcome:
        """Sends one prediction, and waits for its end."""
        self._count += 1
        number, running = self._count, _Running(self._loop)
        self._running[number] = running
        files = [{"at": file.at, "name": file.name} for file in request.files]
        message = {
            "id": number,
            "input": _without_nulls(request),
            "files": files,
            "context": dict(request.context),
        }
        self._ask(("send", message, [file.data for file in request.files]))
        canceling = None
        if request.cancel_after_s is not None:
            canceling = self._loop.call_later(request.cancel_after_s, self._ask, ("cancel", number))
        try:
            outcome = await asyncio.wait_for(running.ended, PREDICT_LIMIT_S)
        except TimeoutError:
            outcome = Outcome("too late")
        if canceling is not None:
            canceling.cancel()
        return outcome._replace(seconds=time.monotonic() - running.began_s)

    async def stop(self) -> None:
        """Kills the runner and removes its files."""
        if self._process is not None:
            self._process.kill("it is not needed anymore")
            await asyncio.to_thread(self._thread.join)
        self._wakes.close()
        self._waker.close()

    def _ask(self, request: tuple[Any, ...]) -> None:
        self._requests.put(request)
        self._waker.send(b".")

    def _own(self) -> None:
        """Owns the connection until the process ends."""
        runner = self._process
        assert runner is not None, "the thread is started after the process"
        while True:
            frames = runner.receive(WAIT_S, wakes_on=self._wakes)
            if frames is None:
                break
            for frame in frames:
                self._handle(runner, frame)
            if not self._requests.empty():
                self._wakes.recv(1 << 10)
            while not self._requests.empty():
                self._do(runner, *self._requests.get())
        printed = runner.printed.take().text
        words = f"the process {end_of(runner.close())}"
        self._loop.call_soon_threadsafe(self._end_all, words, printed)

    def _do(self, runner: RunnerProcess, action: str, content: Any, blobs: Any = ()) -> None:
        if action == "cancel":
            runner.cancel(content)
            return
        self._is_shared = bool(self._sent)
        if not self._is_shared:
            runner.printed.take()
        self._sent.add(content["id"])
        batch = [({"batch": 1}, ())] if self._batches else []
        runner.send_all([*batch, (content, blobs)])

    def _handle(self, runner: RunnerProcess, frame: Frame) -> None:
        message, now_s = frame.message, time.monotonic()
        if "ready" in message or "failed" in message:
            self._loop.call_soon_threadsafe(_resolve, self._ready, message.get("failed", ""))
            return
        number = message.get("id", next(iter(self._running), 0))
        running = self._running[number]
        if "piece" in message:
            running.pieces.append(_with_files(frame, "piece"))
            running.has_files |= bool(frame.blobs)
            running.pieces_s.append(now_s - running.began_s)
            return
        runner.ended(number)
        del self._running[number]
        printed = runner.printed.take().text
        logs = ("" if self._is_shared else printed) + str(message.get("log", ""))
        self._sent.discard(number)
        self._is_shared = self._is_shared and bool(self._sent)
        outcome = _outcome_of(frame, running)._replace(logs=logs)
        self._loop.call_soon_threadsafe(_resolve, running.ended, outcome)

    def _end_all(self, words: str, printed: str) -> None:
        _resolve(self._ready, words)
        for running in self._running.values():
            _resolve(running.ended, Outcome("died", error=words, logs=printed))


def _without_nulls(request: Request) -> dict[str, Any]:
    """The input as the API sends it: null is the same as leaving an input out."""
    with_files = {file.at[0] for file in request.files}
    values = copy.deepcopy(dict(request.values))
    return {name: one for name, one in values.items() if one is not None or name in with_files}


def _outcome_of(frame: Frame, running: _Running) -> Outcome:
    message = frame.message
    shown = Outcome("", pieces=running.pieces, pieces_s=running.pieces_s)
    if error := message.get("error") or message.get("batch_error"):
        status = {"input": "refused", "canceled": "canceled"}.get(message["kind"], "failed")
        # A caller that cancels gets no error text, whatever the class raised.
        is_canceled = status == "canceled"  # and what its caller has read is known to a worker only
        output = None if is_canceled else running.pieces or None
        return shown._replace(status=status, output=output, error="" if is_canceled else str(error))
    output = running.pieces if running.has_files else _with_files(frame, "output")
    return shown._replace(status="succeeded", output=output, metrics=message["metrics"])


def _with_files(frame: Frame, field: str) -> Any:
    whole = {"value": frame.message[field]}
    for where, data in zip(frame.message["files"], frame.blobs, strict=True):
        at = where["at"][1:] if field == "piece" else where["at"]
        put(whole, ["value", *at], describe_file(data, where["name"]))
    return whole["value"]


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _children() -> set[int]:
    """Process IDs of this process's children (proc(5))."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    listed = (Path(task, "children").read_text().split() for task in tasks.iterdir())
    return {int(one) for words in listed for one in words}
