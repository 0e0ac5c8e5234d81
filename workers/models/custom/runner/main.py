"""The runner: loads a class, sets it up, and computes the requests that arrive on its socket.

It receives `{"id", "input", "files", "context"}` with the files' bytes, and `{"cancel"}`. It sends
`{"ready"}` or `{"failed", "is_final"}` once. For each prediction, it then sends `{"id", "piece",
"files"}` for streamed output, followed by either `{"id", "output", …}` or `{"id", "error",
"kind"}`.

A class with `predict_batch` receives `{"batch"}` with the number of predictions whose frames
follow. It responds to all of them together, or with `{"batch_error", "kind"}` if the batch failed
as a whole.

A runner started only to answer questions does not set up the class. It responds to an input with
its `work`, and to `{"id", "outputs", "files"}` with whether the two outputs are `close`.

A synchronous class runs on the main thread, where SIGUSR1 raises Cog's cancellation exception. An
asynchronous class runs as tasks, and a cancellation cancels one of them.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import operator
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from workers.models.custom.runner import confinement, loading, printing, scope
from workers.models.custom.runner.batch_form import METHOD
from workers.models.custom.runner.cog_import import adt, cog
from workers.models.custom.runner.frames import (
    BATCH,
    MAX_INLINE_BYTES,
    MAX_OUTPUT_BYTES,
    Frame,
    FrameReader,
    encode_frame,
    encode_json,
    read_frame,
)
from workers.models.custom.runner.outputs import (
    MAX_STREAMED_BYTES,
    OutputEncoder,
    WrongOutput,
)
from workers.models.custom.runner.signatures import Signature, check_values

if TYPE_CHECKING:
    import asyncio

MAX_ERROR_CHARS = 2000
MAX_LOG_CHARS = 8000
MAX_SHOWN_CHARS = 80
INVALID_INPUT = "InvalidInput"
"""Name of an exception class, from any module, that blames the caller's input."""
DISK_SETTING = "resources.disk_bytes"
MAX_WORK = 2**53
"""Larger values are capped at this number, which already far exceeds any limit."""


class WrongInput(Exception):
    """An input that the class rejects. The message starts with the input's name, if it has one."""


def main(
    fd: int,
    folder: str,
    scratch: str,
    denied_ports: Sequence[int] = (),
    disk_bytes: int = 0,
    *,
    inspects_only: bool = False,
    is_aside: bool = False,
) -> None:
    """Serves a folder's class until the socket is closed.

    Args:
        scratch: the folder under which the process may write. It contains the view of the class's
            folder, which becomes the working directory.
        denied_ports: TCP ports to which it may not connect.
        disk_bytes: maximum size of a file the process writes. 0 means unlimited.
        inspects_only: True to exit once the class has been inspected.
        is_aside: True to call `work` and `is_close` instead of computing predictions.
    """
    confined = _confine(folder, scratch, denied_ports, disk_bytes)
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    os.chdir(confined.view)
    device = Path(confined.view).stat().st_dev
    beginning = {
        "unconfined": confined.missing,
        "view": confined.view,
        "device": device,
        "mark": printing.install(),
    }
    connection.sendall(encode_frame(beginning))
    scope.install()
    loaded = _load(connection, Path(confined.view), sets_up=not (inspects_only or is_aside))
    if loaded is not None and not inspects_only:
        _serve(connection, loaded, is_aside=is_aside)


def _confine(
    folder: str, scratch: str, denied_ports: Sequence[int], disk_bytes: int
) -> confinement.Confined:
    """Confines this process.

    The process can read its packages and the targets of links in the folder.
    """
    weights = os.environ.get("COG_WEIGHTS")
    return confinement.confine(
        scratch,
        read_only=(sys.prefix, sys.base_prefix, sys.executable, *os.get_exec_path()),
        followed=(folder, weights) if weights else (folder,),
        denied_ports=denied_ports,
        max_file_bytes=disk_bytes,
        folder=folder,
    )


def _load(connection: socket.socket, view: Path, *, sets_up: bool) -> loading.Loaded | None:
    """Loads the class and sets it up.

    Sends the class's interface; on failure, sends the reason and returns None.
    """
    try:
        loaded = loading.load(view)
        interface = loading.interface_of(loaded)
        if sets_up:
            done = loading.set_up(loaded)
            if inspect.isawaitable(done):
                _event_loop().run_until_complete(_await_value(done))
    except BaseException as error:
        # The boundary with the class's code, where all exceptions are reported to the other end.
        is_final = isinstance(error, loading.NotLoadable)
        if not is_final:
            traceback.print_exc()
        connection.sendall(encode_frame({"failed": words_of(error), "is_final": is_final}))
        return None
    sys.stdout.flush()
    # A cancellation may arrive before SyncRunner or AsyncRunner handles it.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    connection.sendall(encode_frame({"ready": interface, "notes": loaded.notes}))
    return loaded


def _serve(connection: socket.socket, loaded: loading.Loaded, *, is_aside: bool) -> None:
    if is_aside:
        AsideRunner(connection, loaded).run()
    elif loading.is_async(loaded.compute):
        loop = _event_loop()
        runner: AsyncRunner = AsyncRunner(connection, loaded, loop)
        if loaded.element is not None:
            runner = AsyncListRunner(connection, loaded, loop, loaded.element)
        loop.run_until_complete(runner.run())
    elif loaded.element is not None:
        ListRunner(connection, loaded, loaded.element).run()
    else:
        SyncRunner(connection, loaded).run()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns this process's event loop.

    A synchronous class doesn't have one, because it starts faster without asyncio.
    """
    import asyncio

    loop = asyncio.new_event_loop()
    printing.log_apart(loop)
    asyncio.set_event_loop(loop)
    return loop


async def _await_value(awaitable: Any) -> Any:
    return await awaitable


def words_of(error: BaseException) -> str:
    """Returns an error's type and text. Our own errors have only text."""
    if isinstance(error, SystemExit):
        return f"the model called sys.exit({_describe(error.code)})"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return f"it wrote more than the maximum of {limit_bytes} bytes to a file ({DISK_SETTING})"
    kind, text = type(error).__name__, text_of(error)
    if isinstance(error, WrongInput | WrongOutput | loading.NotLoadable):
        return text
    return f"{kind}: {text}"[:MAX_ERROR_CHARS] if text else kind


def _describe(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        # The boundary with the class's code.
        text = f"a value of type {type(value).__name__}"
    return encodable(text[:MAX_SHOWN_CHARS])


def text_of(error: BaseException) -> str:
    """Returns an error's text, without its type. Empty if its `__str__` also fails."""
    try:
        text = str(error)
    except Exception:
        # The boundary with the class's code.
        return ""
    return encodable(text[:MAX_ERROR_CHARS])


def encodable(text: str) -> str:
    """Makes text encodable as UTF-8. Replaces unpaired surrogates with question marks."""
    return text.encode(errors="replace").decode()


class _Prediction:
    """One prediction: its inputs, its folder for files, and its output so far."""

    def __init__(self, frame: Frame, signature: Signature) -> None:
        self.id: int = frame.message["id"]
        self._signature = signature
        self._fields = signature.inputs
        self._folder: Path | None = None
        self._opened: list[Any] = []
        self.encoder = OutputEncoder(signature.output)
        self.scope = scope.enter_scope()
        self.scope.context = frame.message.get("context", {})
        self.pieces: list[Any] = []
        self._size_bytes = 0
        self._frame = frame

    def arguments(self) -> dict[str, Any]:
        """Returns the function's arguments, with files in place of their bytes.

        Raises:
            WrongInput: the class rejects the inputs.
        """
        values = self._frame.message["input"]
        for at, path in self._write_files():
            _put(values, at, self._file_of(at, path))
        try:
            for where, data in self._receive_parts():
                if where.get("is_json"):
                    _put(values, where["at"], json.loads(data))
            return check_values(self._signature, values)
        except (ValueError, TypeError) as error:
            raise WrongInput(str(error)) from error

    def outputs(self) -> list[Any] | None:
        """Returns the two outputs to compare, with the paths of their files.

        None for an input.
        """
        outputs: list[Any] | None = self._frame.message.get("outputs")
        if outputs is not None:
            for at, path in self._write_files():
                _put(outputs, at, cog.Path(path))
        return outputs

    def _write_files(self) -> Iterator[tuple[list[str | int], Path]]:
        """Writes the received files. Yields the place and path of each file."""
        if self._frame.blobs:
            self._folder = Path(tempfile.mkdtemp(prefix="prediction-"))
        for number, (where, data) in enumerate(self._receive_parts()):
            if where.get("is_json"):
                continue
            assert self._folder is not None, "the folder for files is missing; this is a bug"
            path = self._folder / str(number) / (Path(where["name"]).name or "file")
            path.parent.mkdir()
            path.write_bytes(data)
            yield where["at"], path

    def _receive_parts(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Returns the received files and large values, with their places."""
        return zip(self._frame.message["files"], self._frame.blobs, strict=True)

    def _file_of(self, at: list[str | int], path: Path) -> Any:
        """Returns a file in the form the class requests: its path, or an open file."""
        if self._fields[str(at[0])].type.primitive is not adt.PrimitiveType.FILE:
            return cog.Path(path)
        file = path.open("rb")
        self._opened.append(file)
        return file

    def piece(self, value: Any) -> bytes:
        """Encodes the next piece of a streamed output. Returns its frame, with its files.

        Raises:
            WrongOutput: the piece can't be sent, or makes the output too large.
        """
        encoded = self.encoder.encode(value, (len(self.pieces),))
        self._size_bytes += len(encode_json(encoded))
        if self._size_bytes > MAX_STREAMED_BYTES:
            raise WrongOutput(
                f"output: a stream may contain at most {MAX_STREAMED_BYTES} bytes of JSON"
            )
        self.pieces.append(encoded)
        files, blobs = self.encoder.take_files()
        piece = self.encoder.format_for_stream(encoded)
        return encode_frame({"id": self.id, "piece": piece, "files": files}, blobs)

    def result(self, output: Any) -> bytes:
        """Returns the frame for the whole output.

        Raises:
            WrongOutput: the output is too large, or contains numbers that JSON can't represent.
        """
        message = {
            "id": self.id,
            "output": output,
            "files": self.encoder.files,
            "metrics": self.scope.metrics.nest(),
        }
        blobs = self.encoder.blobs
        try:
            written = encode_json(output)
            if len(written) > MAX_OUTPUT_BYTES:
                raise WrongOutput(f"output: must be at most {MAX_OUTPUT_BYTES} bytes of JSON")
            if len(written) > MAX_INLINE_BYTES and not self._signature.output.streams:
                message |= {"output": None, "is_packed": True}
                blobs = [written, *blobs]
            return encode_frame(message, blobs)
        except ValueError as error:
            raise WrongOutput(f"output: {error}") from error

    def failure(self, error: BaseException) -> bytes:
        """Encodes an error, with the traceback of an exception raised by the class.

        The traceback is not printed, because other predictions may be running in this process, and
        the author may hide it from callers.
        """
        error = self.classify_error(error)
        log = _traceback_of(error)[-MAX_LOG_CHARS:]
        return encode_frame(
            {"id": self.id, "error": words_of(error), "kind": _kind_of(error), "log": log}
        )

    def classify_error(self, error: BaseException) -> BaseException:
        """Returns the error, as a WrongInput if the class blames its caller's input.

        A class does so with an attribute `field` that names an input, or through the name of the
        exception's class, so it doesn't need to import anything from Penstock.
        """
        field = None
        with contextlib.suppress(Exception):  # it may be a property, which may raise any error
            field = getattr(error, "field", None)
        if isinstance(field, str) and field in self._fields:
            return WrongInput(f"{field}: {text_of(error)}")
        if any(kind.__name__ == INVALID_INPUT for kind in type(error).__mro__):
            return WrongInput(text_of(error))
        return error

    def close(self) -> None:
        for file in self._opened:
            with contextlib.suppress(OSError):
                file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _put(values: Any, at: list[str | int], file: Any) -> None:
    for part in at[:-1]:
        values = values[part]
    values[at[-1]] = file


def _kind_of(error: BaseException) -> str:
    if isinstance(error, WrongInput):
        return "input"
    # Code that raises asyncio's exception has already imported asyncio.
    of_tasks = getattr(sys.modules.get("asyncio"), "CancelledError", ())
    is_canceled = isinstance(error, (cog.CancelationException, of_tasks))
    return "canceled" if is_canceled else "model"


def _traceback_of(error: BaseException) -> str:
    """Returns the traceback of an exception raised by a class's code.

    Empty if it was raised by other code.
    """
    if _kind_of(error) != "model" or isinstance(error, WrongOutput):
        return ""
    # Excludes our own frames; the first ones are from this file.
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return encodable("".join(traceback.format_exception(type(error), error, frames)))


class SyncRunner:
    """Runs a synchronous class, one prediction at a time."""

    def __init__(self, connection: socket.socket, loaded: loading.Loaded) -> None:
        self._connection = connection
        self._loaded = loaded
        self._pid = os.getpid()
        self._may_interrupt = False
        self._is_canceled = False
        self._reader = FrameReader()
        self._ahead: deque[Frame] = deque()
        """Frames that were read while looking for a cancellation."""
        signal.signal(signal.SIGUSR1, self._on_cancel)

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):
            while (frame := self._read_frame()) is not None:
                if "id" in frame.message:  # otherwise it is a cancellation that arrived too late
                    self._compute(frame)

    def _read_frame(self) -> Frame | None:
        """Waits for the next frame. Returns None once the connection is closed."""
        return self._ahead.popleft() if self._ahead else read_frame(self._connection, self._reader)

    def _has_cancel(self, number: int) -> bool:
        """True if this prediction's cancellation is among the received frames.

        Its signal may have arrived before the prediction's frame was read. The cancellation itself
        is always sent before its signal.
        """
        with contextlib.suppress(BlockingIOError):
            while piece := self._connection.recv(1 << 20, socket.MSG_DONTWAIT):
                self._reader.feed(piece)
        while (frame := self._reader.next()) is not None:
            self._ahead.append(frame)
        return any(frame.message.get("cancel") == number for frame in self._ahead)

    def _on_cancel(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt:
            self._may_interrupt = False
            raise cog.CancelationException
        self._is_canceled = True

    def _compute(self, frame: Frame) -> None:
        prediction = _Prediction(frame, self._loaded.signature)
        answer = partial(self._answer, prediction)
        self._answer_with(prediction.id, answer, prediction.failure, [prediction])

    def _answer_with(
        self,
        number: int,
        answer: Callable[[], bytes],
        failure: Callable[[BaseException], bytes],
        predictions: Sequence[_Prediction],
    ) -> None:
        """Runs predictions and sends the response, or the failure if the class raises an exception.

        Args:
            answer: runs them and returns the response's frames.
            failure: returns the frame for an error.
        """
        self._is_canceled = False
        try:
            try:
                self._is_canceled |= self._has_cancel(number)
                self._interruptible()
                sent = answer()
            finally:
                self._may_interrupt = False
        except BaseException as error:
            # The boundary with the class's code. Its errors fail a prediction, not the process.
            if os.getpid() == self._pid:
                sent = failure(error)
        if os.getpid() != self._pid:
            os._exit(0)  # a fork created by the class has returned here
        for prediction in predictions:
            prediction.close()
        _flush()
        self._connection.sendall(sent)

    def _answer(self, prediction: _Prediction) -> bytes:
        output = self._loaded.compute(**prediction.arguments())
        if not self._loaded.signature.output.streams:
            return prediction.result(prediction.encoder.encode(output))
        for value in _iterate(output):
            self._send(prediction.piece(value))
        return prediction.result(prediction.pieces)

    def _send(self, frame: bytes) -> None:
        """Sends a frame. A cancellation waits until this block is done."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._may_interrupt = False
        self._connection.sendall(frame)
        self._interruptible()

    def _interruptible(self) -> None:
        """From here on, a cancellation interrupts the class.

        A cancellation that arrived earlier takes effect now.
        """
        self._may_interrupt = True
        if self._is_canceled:
            raise cog.CancelationException


class AsideRunner(SyncRunner):
    """Reports the work of inputs, and whether outputs are close. Runs no predictions."""

    def _answer(self, prediction: _Prediction) -> bytes:
        if (outputs := prediction.outputs()) is not None:
            assert self._loaded.is_close is not None, "specified in the interface; this is a bug"
            return encode_frame(
                {"id": prediction.id, "close": bool(self._loaded.is_close(*outputs))}
            )
        assert self._loaded.weigh is not None, "specified in the interface; this is a bug"
        arguments = prediction.arguments()
        element = self._loaded.element or SimpleNamespace
        value = self._loaded.weigh(_make_object(element, arguments))
        try:
            work = operator.index(value)
        except TypeError as error:
            reason = f"must return a whole number, got {_describe(value)}"
            raise WrongOutput(reason) from error
        return encode_frame({"id": prediction.id, "work": max(-MAX_WORK, min(work, MAX_WORK))})


class ListRunner(SyncRunner):
    """Runs a class with `predict_batch`, one batch at a time.

    Args:
        element: creates an element of the list that it takes.
    """

    def __init__(
        self, connection: socket.socket, loaded: loading.Loaded, element: Callable[..., Any]
    ) -> None:
        super().__init__(connection, loaded)
        self._element = element

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):
            while (frame := self._read_frame()) is not None:
                if "batch" in frame.message:
                    frames = [self._read_frame() for _ in range(frame.message["batch"])]
                    self._compute_batch([frame for frame in frames if frame is not None])

    def _compute_batch(self, frames: Sequence[Frame]) -> None:
        predictions = [_Prediction(frame, self._loaded.signature) for frame in frames]
        failure = partial(_batch_failure, predictions)
        answer = partial(self._answer_all, predictions)
        self._answer_with(BATCH, answer, failure, predictions)

    def _answer_all(self, predictions: Sequence[_Prediction]) -> bytes:
        batch = _Batch(predictions, self._element)
        return batch.encode_answers(self._loaded.compute(batch.inputs) if batch.inputs else [])


class _Batch:
    """A batch's predictions, and the list the class receives for them.

    Invalid inputs fail individually.

    Args:
        element: creates an element of the list that the class takes.
    """

    def __init__(self, predictions: Sequence[_Prediction], element: Callable[..., Any]) -> None:
        self.inputs: list[Any] = []
        self._predictions = predictions
        self._inside: list[_Prediction] = []
        """The predictions whose inputs were passed to the class, in order."""
        self._answers: list[bytes] = []
        for prediction in predictions:
            try:
                self.inputs.append(_make_object(element, prediction.arguments()))
                self._inside.append(prediction)
            except WrongInput as error:
                self._answers.append(prediction.failure(error))
        self._recorded = scope.enter_scope()
        if len(predictions) == 1:
            self._recorded.context = predictions[0].scope.context

    def encode_answers(self, outputs: Any) -> bytes:
        """Returns the frames for all predictions. Invalid outputs fail individually.

        Raises:
            WrongOutput: the number of outputs does not match the number of inputs.
        """
        if not isinstance(outputs, list | tuple) or len(outputs) != len(self.inputs):
            raise WrongOutput(
                f"output: {METHOD} returned {_count_outputs(outputs)} for {len(self.inputs)} "
                "inputs; it must return a list with one output per input"
            )
        if len(self._predictions) == 1:
            self._predictions[0].scope = self._recorded
        answers = map(_answer_alone, self._inside, outputs)
        return b"".join([*self._answers, *answers])


def _make_object(element: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Returns an input as a single object.

    Raises:
        WrongInput: the object's type does not accept these fields.
    """
    try:
        return element(**arguments)
    except (ValueError, TypeError) as error:
        raise WrongInput(_first_mistake(error)) from error


def _answer_alone(prediction: _Prediction, output: Any) -> bytes:
    """Returns the frame for one of a batch's outputs.

    An exception in place of an output fails that prediction.
    """
    if isinstance(output, BaseException):
        return prediction.failure(output)
    try:
        return prediction.result(prediction.encoder.encode(output))
    except Exception as error:
        # The boundary with the class's code, as elsewhere in this file.
        return prediction.failure(error)


def _batch_failure(predictions: Sequence[_Prediction], error: BaseException) -> bytes:
    """Returns the frame for an error that affects a whole batch.

    If the batch has only one input, that input may be the cause.
    """
    if len(predictions) == 1 and isinstance(predictions[0].classify_error(error), WrongInput):
        return predictions[0].failure(error)
    log = _traceback_of(error)[-MAX_LOG_CHARS:]
    return encode_frame({"batch_error": words_of(error), "kind": _kind_of(error), "log": log})


def _count_outputs(outputs: Any) -> str:
    is_list = isinstance(outputs, list | tuple)
    return f"{len(outputs)} outputs" if is_list else f"a value of type {type(outputs).__name__}"


def _first_mistake(error: Exception) -> str:
    """Returns the first error that a pydantic model or dataclass reports about a field."""
    try:
        first = error.errors()[0]  # type: ignore[attr-defined]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except Exception:
        # The boundary with the class's code, whose own errors may have any attributes.
        return text_of(error)
    return encodable(text[:MAX_ERROR_CHARS])


class AsyncRunner:
    """Runs an asynchronous class, several predictions at a time."""

    def __init__(
        self, connection: socket.socket, loaded: loading.Loaded, loop: asyncio.AbstractEventLoop
    ) -> None:
        import asyncio

        self._connection = connection
        self._loaded = loaded
        self._loop = loop
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._send_lock = asyncio.Lock()

    async def run(self) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._connection.setblocking(False)
        reader = FrameReader()
        with contextlib.suppress(ConnectionError):
            while piece := await self._loop.sock_recv(self._connection, 1 << 20):
                reader.feed(piece)
                while (frame := reader.next()) is not None:
                    self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if (canceled := frame.message.get("cancel")) is not None:
            if (task := self._tasks.get(canceled)) is not None:
                # After the task's first step, because a task that is canceled before it starts
                # would end without a response.
                self._loop.call_soon(task.cancel)
            return
        self._begin(frame.message["id"], self._compute(frame))

    def _begin(self, number: int, computing: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[number] = self._loop.create_task(computing)
        task.add_done_callback(partial(self._note_end, number))

    def _note_end(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:  # not a newer task with the same number
            del self._tasks[number]

    async def _compute(self, frame: Frame) -> None:
        prediction = _Prediction(frame, self._loaded.signature)
        printing.mark_with(prediction.id)
        try:
            answer = await self._answer(prediction)
        except BaseException as error:
            # The boundary with the class's code, as above.
            answer = prediction.failure(error)
        prediction.close()
        _flush()
        await self._send_whole(answer)

    async def _answer(self, prediction: _Prediction) -> bytes:
        output = self._loaded.compute(**prediction.arguments())
        if inspect.isawaitable(output):
            output = await output
        if not self._loaded.signature.output.streams:
            return prediction.result(prediction.encoder.encode(output))
        # Closed in this context so that its final output is attributed to the right prediction.
        async with contextlib.aclosing(_iterate_async(output)) as values:
            async for value in values:
                await self._send_whole(prediction.piece(value))
        return prediction.result(prediction.pieces)

    async def _send_whole(self, frame: bytes) -> None:
        """Sends a frame, even if the task is canceled before it is complete.

        The rest of a partial frame would be read from the next prediction's frames.
        """
        import asyncio

        await asyncio.shield(self._send(frame))

    async def _send(self, frame: bytes) -> None:
        async with self._send_lock:
            await self._loop.sock_sendall(self._connection, frame)


class AsyncListRunner(AsyncRunner):
    """Runs a class with an asynchronous `predict_batch`, one batch at a time.

    Args:
        element: creates an element of the list that it takes.
    """

    def __init__(
        self,
        connection: socket.socket,
        loaded: loading.Loaded,
        loop: asyncio.AbstractEventLoop,
        element: Callable[..., Any],
    ) -> None:
        super().__init__(connection, loaded, loop)
        self._element = element
        self._frames: list[Frame] = []
        self._missing = 0
        """How many of the batch's frames have not arrived yet."""

    def _handle(self, frame: Frame) -> None:
        if "batch" in frame.message:
            self._frames, self._missing = [], frame.message["batch"]
        elif "id" not in frame.message:
            super()._handle(frame)
        else:
            self._frames.append(frame)
            self._missing -= 1
            if not self._missing:
                self._begin(BATCH, self._compute_batch(self._frames))

    async def _compute_batch(self, frames: Sequence[Frame]) -> None:
        predictions = [_Prediction(frame, self._loaded.signature) for frame in frames]
        try:
            batch = _Batch(predictions, self._element)
            outputs = await self._loaded.compute(batch.inputs) if batch.inputs else []
            answer = batch.encode_answers(outputs)
        except BaseException as error:
            # The boundary with the class's code, as above.
            answer = _batch_failure(predictions, error)
        for prediction in predictions:
            prediction.close()
        _flush()
        await self._send_whole(answer)


def _iterate(output: Any) -> Iterator[Any]:
    """Yields the pieces of an output declared as streamed.

    As in Cog, a single value counts as one piece.
    """
    if output is None:
        return iter(())
    if isinstance(output, str | bytes | Mapping) or not hasattr(output, "__iter__"):
        return iter([output])
    return iter(output)


async def _iterate_async(output: Any) -> AsyncGenerator[Any, None]:
    if not hasattr(output, "__aiter__"):
        for value in _iterate(output):
            yield value
        return
    try:
        async for value in output:
            yield value
    finally:
        if inspect.isasyncgen(output):
            await output.aclose()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the class may have closed or replaced these streams
            stream.flush()
