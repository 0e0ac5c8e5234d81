"""Penstock's own runner, driven directly: the process that a worker starts for a class."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.class_runners.outcome import Outcome, Request, describe_file, put
from workers.models.custom.process import RunnerProcess, end_of
from workers.models.custom.runner.frames import Frame

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
    """A class in its runner process, driven from the event loop as a worker does.

    Args:
        python: the interpreter that has the class's packages.
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
        self._running: dict[int, _Running] = {}
        self._sent: set[int] = set()
        self._is_shared = False
        """True while what the process prints may belong to several predictions."""
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[str] = self._loop.create_future()

    @property
    def pids(self) -> list[int]:
        """Process ID of the runner."""
        return [] if self._process is None else [self._process.pid]

    async def start(self) -> str:
        """Loads and sets up the class."""
        self._process = RunnerProcess(
            self._folder, python=self._python, environment=self._environment
        )
        self._loop.add_reader(self._process.fileno(), self._on_readable, self._process)
        self._loop.add_reader(self._process.pidfd, self._on_end, self._process)
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
        process = self._process
        assert process is not None, "it is started before"
        self._send(process, message, [file.data for file in request.files])
        canceling = None
        if request.cancel_after_s is not None:
            canceling = self._loop.call_later(request.cancel_after_s, process.cancel, number)
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
            self._on_end(self._process)

    def _on_readable(self, runner: RunnerProcess) -> None:
        may_come = runner.read()
        for frame in runner.take_frames():
            self._handle(runner, frame)
        if not may_come:
            self._on_end(runner)

    def _on_end(self, runner: RunnerProcess) -> None:
        """The process has ended: what it was computing has died."""
        if self._process is not runner:
            return
        self._process = None
        self._loop.remove_reader(runner.fileno())
        self._loop.remove_reader(runner.pidfd)
        while runner.may_read() and runner.read():
            for frame in runner.take_frames():
                self._handle(runner, frame)
        printed = runner.printed.take().text
        self._end_all(f"the process {end_of(runner.close())}", printed)

    def _send(self, runner: RunnerProcess, message: dict[str, Any], blobs: list[bytes]) -> None:
        self._is_shared = bool(self._sent)
        if not self._is_shared:
            runner.printed.take()
        self._sent.add(message["id"])
        batch = [({"batch": 1}, ())] if self._batches else []
        runner.send_all([*batch, (message, blobs)])
        if runner.flush():
            self._loop.add_writer(runner.fileno(), self._on_writable, runner)

    def _on_writable(self, runner: RunnerProcess) -> None:
        if not runner.flush():
            self._loop.remove_writer(runner.fileno())

    def _handle(self, runner: RunnerProcess, frame: Frame) -> None:
        message, now_s = frame.message, time.monotonic()
        if "ready" in message or "failed" in message:
            _resolve(self._ready, message.get("failed", ""))
            return
        number = message.get("id", next(iter(self._running), 0))
        running = self._running[number]
        if "piece" in message:
            running.pieces.append(_with_files(frame, "piece"))
            running.has_files |= bool(frame.blobs)
            running.pieces_s.append(now_s - running.began_s)
            return
        del self._running[number]
        printed = runner.printed.take().text
        logs = ("" if self._is_shared else printed) + str(message.get("log", ""))
        self._sent.discard(number)
        self._is_shared = self._is_shared and bool(self._sent)
        outcome = _outcome_of(frame, running)._replace(logs=logs)
        _resolve(running.ended, outcome)

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
