"""The runner: loads a class, sets it up, and computes what comes over its socket.

It gets `{"id", "input", "files"}` with the bytes of the files, and `{"cancel"}`. It sends
`{"ready"}` or `{"failed"}` once, then of each prediction `{"id", "piece", "files"}` for what it
streams, and one of `{"id", "output", …}` and `{"id", "error", "kind"}`.

A synchronous class runs on the main thread, where SIGUSR1 raises Cog's exception of a cancellation.
An asynchronous one runs as tasks, of which one is canceled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import cog
from cog import _adt as adt
from cog import _inspector as inspector

from workers.models.custom.runner import confinement, loading, scope
from workers.models.custom.runner.frames import Frame, FrameReader, encode_frame, read_frame
from workers.models.custom.runner.outputs import MAX_OUTPUT_BYTES, OutputEncoder, WrongOutput

MAX_ERROR_CHARS = 2000


class WrongInput(Exception):
    """An input that the class does not take. The message begins with its name."""


def main(fd: int, folder: str, *, inspects_only: bool = False) -> None:
    """Serves the class of a folder until the socket is closed.

    Args:
        fd: of this end of the socket.
        folder: of the class. It becomes the working directory.
        inspects_only: whether to end when the class is inspected.
    """
    confinement.confine()
    connection = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=connection.close)
    os.chdir(folder)
    scope.install()
    loop = asyncio.new_event_loop()
    try:
        loaded = loading.load(Path(folder))
        interface = loading.interface_of(loaded)
        if not inspects_only:
            done = loading.set_up(loaded)
            if inspect.isawaitable(done):
                loop.run_until_complete(_awaited(done))
    except BaseException as error:
        # The boundary to the code of the class: whatever it raises, the other end is told.
        if not isinstance(error, loading.NotLoadable):
            traceback.print_exc()
        connection.sendall(encode_frame({"failed": words_of(error)}))
        return
    sys.stdout.flush()
    connection.sendall(encode_frame({"ready": interface, "notes": loaded.notes}))
    if inspects_only:
        return
    if loading.is_async(loaded.compute):
        asyncio.set_event_loop(loop)
        loop.run_until_complete(AsyncRunner(connection, loaded).run())
    else:
        SyncRunner(connection, loaded).run()


async def _awaited(one: Any) -> Any:
    return await one


def words_of(error: BaseException) -> str:
    """What an error says, in one piece. Its type, if it says nothing."""
    if isinstance(error, SystemExit):
        return f"the model called sys.exit({error.code!r})"
    return (str(error) or type(error).__name__)[:MAX_ERROR_CHARS]


class _Prediction:
    """One prediction: its inputs, its folder for files, and its output so far."""

    def __init__(self, frame: Frame, info: adt.PredictorInfo) -> None:
        self.id: int = frame.message["id"]
        self._info = info
        self._folder = Path(tempfile.mkdtemp(prefix="prediction-"))
        self._opened: list[Any] = []
        self.encoder = OutputEncoder(info.output)
        self.scope = scope.enter_scope()
        self.pieces: list[Any] = []
        self._size_bytes = 0
        self._frame = frame

    def arguments(self) -> dict[str, Any]:
        """The arguments of the function, with files in place of their bytes.

        Raises:
            WrongInput: the class does not take them.
        """
        values = self._frame.message["input"]
        for number, (where, data) in enumerate(
            zip(self._frame.message["files"], self._frame.blobs, strict=True)
        ):
            path = self._folder / str(number) / (Path(where["name"]).name or "file")
            path.parent.mkdir()
            path.write_bytes(data)
            self._put(values, where["at"], path)
        try:
            arguments: dict[str, Any] = inspector.check_input(self._info.inputs, values)
        except (ValueError, TypeError) as error:
            raise WrongInput(str(error)) from error
        return arguments

    def _put(self, values: dict[str, Any], at: list[str | int], path: Path) -> None:
        """Puts a file where it belongs: its path, or an open file if the class asks for that."""
        kind = self._info.inputs[str(at[0])].type.primitive
        file: Any = cog.Path(path)
        if kind is adt.PrimitiveType.FILE:
            file = path.open("rb")
            self._opened.append(file)
        place: Any = values
        for part in at[:-1]:
            place = place[part]
        place[at[-1]] = file

    def piece(self, value: Any) -> bytes:
        """Takes the next piece of a streamed output. Returns its frame, with its files.

        Raises:
            WrongOutput: it can't be sent, or the output is too large with it.
        """
        encoded = self.encoder.encode(value, (len(self.pieces),))
        self._size_bytes += len(repr(encoded))
        if self._size_bytes > MAX_OUTPUT_BYTES:
            raise WrongOutput(f"output: at most {MAX_OUTPUT_BYTES} bytes are allowed")
        self.pieces.append(encoded)
        files, blobs = self.encoder.take_files()
        return encode_frame({"id": self.id, "piece": encoded, "files": files}, blobs)

    def result(self, output: Any) -> bytes:
        """The frame of the whole output.

        Raises:
            WrongOutput: it is too large, or has numbers that JSON has not.
        """
        message = {
            "id": self.id,
            "output": output,
            "files": self.encoder.files,
            "metrics": self.scope.metrics.nested(),
        }
        try:
            if len(encode_frame({"output": output})) > MAX_OUTPUT_BYTES:
                raise WrongOutput(f"output: at most {MAX_OUTPUT_BYTES} bytes of JSON are allowed")
            return encode_frame(message, self.encoder.blobs)
        except ValueError as error:
            raise WrongOutput(f"output: {error}") from error

    def failure(self, error: BaseException) -> bytes:
        """The frame of an error. What the code raised is printed, for the logs."""
        kind = "model"
        if isinstance(error, WrongInput):
            kind = "input"
        elif isinstance(error, cog.CancelationException | asyncio.CancelledError):
            kind = "canceled"
        elif not isinstance(error, WrongOutput):
            # Without our own frames: the first two are of this file.
            kept = error.__traceback__
            while kept is not None and kept.tb_frame.f_code.co_filename == __file__:
                kept = kept.tb_next
            traceback.print_exception(type(error), error, kept)
        return encode_frame({"id": self.id, "error": words_of(error), "kind": kind})

    def close(self) -> None:
        """Removes its files."""
        for file in self._opened:
            with contextlib.suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class SyncRunner:
    """Runs a synchronous class, one prediction at a time.

    Args:
        connection: to the model process.
        loaded: the class, set up.
    """

    def __init__(self, connection: socket.socket, loaded: loading.Loaded) -> None:
        self._connection = connection
        self._loaded = loaded
        self._pid = os.getpid()
        self._may_interrupt = False
        self._is_canceled = False
        signal.signal(signal.SIGUSR1, self._on_cancel)

    def run(self) -> None:
        """Computes until the socket is closed."""
        reader = FrameReader()
        with contextlib.suppress(ConnectionError):
            while (frame := read_frame(self._connection, reader)) is not None:
                if "id" in frame.message:  # otherwise a cancellation, which the signal has said
                    self._compute(frame)

    def _on_cancel(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt:
            self._may_interrupt = False
            raise cog.CancelationException
        self._is_canceled = True

    def _compute(self, frame: Frame) -> None:
        self._is_canceled = False
        prediction = _Prediction(frame, self._loaded.info)
        try:
            try:
                self._interruptible()
                answer = self._answer(prediction)
            finally:
                self._may_interrupt = False
        except BaseException as error:
            # The boundary to the code of the class: its errors end a prediction, not the process.
            if os.getpid() == self._pid:
                answer = prediction.failure(error)
        if os.getpid() != self._pid:
            os._exit(0)  # a fork of the class that came back here
        prediction.close()
        _flush()
        self._connection.sendall(answer)

    def _answer(self, prediction: _Prediction) -> bytes:
        output = self._loaded.compute(**prediction.arguments())
        if not _is_iterator(self._loaded.info.output):
            return prediction.result(prediction.encoder.encode(output))
        for value in _iterated(output):
            self._send(prediction.piece(value))
        return prediction.result(prediction.pieces)

    def _send(self, frame: bytes) -> None:
        """Sends a frame. A cancellation waits until it is whole."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._may_interrupt = False
        self._connection.sendall(frame)
        self._interruptible()

    def _interruptible(self) -> None:
        """From here on a cancellation interrupts what runs. One that came before does so now."""
        self._may_interrupt = True
        if self._is_canceled:
            raise cog.CancelationException


class AsyncRunner:
    """Runs an asynchronous class, several predictions at a time.

    Args:
        connection: to the model process.
        loaded: the class, set up.
    """

    def __init__(self, connection: socket.socket, loaded: loading.Loaded) -> None:
        self._connection = connection
        self._loaded = loaded
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Computes until the socket is closed."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._connection.setblocking(False)
        loop, reader = asyncio.get_running_loop(), FrameReader()
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(self._connection, 1 << 20):
                reader.feed(piece)
                while (frame := reader.next()) is not None:
                    self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if (canceled := frame.message.get("cancel")) is not None:
            if (task := self._tasks.get(canceled)) is not None:
                task.cancel()
            return
        number = frame.message["id"]
        self._tasks[number] = asyncio.create_task(self._compute(frame))
        self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _compute(self, frame: Frame) -> None:
        prediction = _Prediction(frame, self._loaded.info)
        try:
            answer = await self._answer(prediction)
        except BaseException as error:
            # The boundary to the code of the class, as above.
            answer = prediction.failure(error)
        prediction.close()
        _flush()
        await asyncio.shield(self._send(answer))

    async def _answer(self, prediction: _Prediction) -> bytes:
        output = self._loaded.compute(**prediction.arguments())
        if inspect.isawaitable(output):
            output = await output
        if not _is_iterator(self._loaded.info.output):
            return prediction.result(prediction.encoder.encode(output))
        async for value in _iterated_async(output):
            await self._send(prediction.piece(value))
        return prediction.result(prediction.pieces)

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._connection, frame)


def _is_iterator(output: adt.OutputType) -> bool:
    return output.kind in (adt.OutputKind.ITERATOR, adt.OutputKind.CONCAT_ITERATOR)


def _iterated(output: Any) -> Iterator[Any]:
    if isinstance(output, str | bytes | dict) or not hasattr(output, "__iter__"):
        raise WrongOutput(f"output: a value of type {type(output).__name__} is no iterator")
    return iter(output)


async def _iterated_async(output: Any) -> AsyncIterator[Any]:
    if hasattr(output, "__aiter__"):
        async for value in output:
            yield value
    else:
        for value in _iterated(output):
            yield value


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the class may have closed or replaced them
            stream.flush()
