"""A predictor between Cog's worker and a class, which mends what the bare worker loses.

Run as `python cog_wrapper.py FILE.py:CLASS PIECES_FD PRINTED_FD FILES_DIR`. It streams asynchronous
generators, copies files when they are yielded and keeps their names, checks constraints of inputs,
sends what subprocesses print to a pipe of its own, and runs a synchronous class on the main thread,
where a signal interrupts `time.sleep` and `subprocess.run`. It imports the standard library and cog
only, because it runs among the class's packages.
"""

from __future__ import annotations

import collections.abc
import contextvars
import dataclasses
import datetime
import enum
import inspect
import io
import json
import os
import queue
import shutil
import signal
import struct
import sys
import threading
import traceback
import typing
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import coglet
from cog import _inspector
from cog import predictor as cog_predictor

HEADER = struct.Struct(">I")
WAIT_S = 0.05


class WrongInput(Exception):
    """An input that the class does not take."""


class _Job:
    """A call for the main thread."""

    def __init__(self, call: typing.Callable[[], Any]) -> None:
        self.call, self.context = call, contextvars.copy_context()
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        """Waits in steps, so that Cog's cancellation can be raised in this thread."""
        try:
            while not self.done.wait(WAIT_S):
                pass
        except BaseException:
            if not self.done.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self.done.wait()
            raise
        if self.error is not None:
            raise self.error
        return self.result


class MainThread:
    """Runs the class on the main thread, while Cog's worker runs on another one."""

    def __init__(self, reference: str, pieces: int, printed: int, files: Path) -> None:
        self.reference, self.files = reference, files
        self._pieces, self._printed = pieces, printed
        self._sending = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._may_interrupt = False

    def run(self) -> None:
        """Runs calls until the worker ends."""
        signal.signal(signal.SIGUSR1, self._on_cancel)
        threading.Thread(target=self._run_worker, daemon=True).start()
        while (job := self._jobs.get()) is not None:
            try:
                try:
                    self._may_interrupt = True
                    job.result = job.context.run(job.call)
                finally:
                    self._may_interrupt = False
            except BaseException as error:
                job.error = error
            job.done.set()

    def _run_worker(self) -> None:
        coglet.server._run_worker()
        self._jobs.put(None)

    def _on_cancel(self, number: int, frame: FrameType | None) -> None:
        if self._may_interrupt:
            self._may_interrupt = False
            raise coglet.CancelationException

    def call(self, function: typing.Callable[[], Any]) -> Any:
        """Calls a function on the main thread. Returns its result."""
        job = _Job(function)
        self._jobs.put(job)
        return job.wait()

    def redirect(self) -> None:
        """Sends what subprocesses print to the pipe. Cog's worker has replaced both before."""
        for descriptor in (1, 2):
            os.dup2(self._printed, descriptor)

    def send(self, number: int, value: Any) -> None:
        """Sends a piece of an output, with copies of its files."""
        files: list[dict[str, Any]] = []
        message = {"id": number, "value": encode(value, [], files, self.files), "files": files}
        encoded = json.dumps(message).encode()
        data = memoryview(HEADER.pack(len(encoded)) + encoded)
        with self._sending:
            while data:
                data = data[os.write(self._pieces, data) :]


def encode(value: Any, at: list[Any], files: list[dict[str, Any]], folder: Path) -> Any:
    """Returns an output ready for JSON, with null in place of each file, which is copied."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return encode(value.value, at, files, folder)
    if isinstance(value, os.PathLike | io.IOBase):
        files.append({"at": at, **_copy(value, folder)})
        return None
    if isinstance(value, collections.abc.Mapping):
        return {str(k): encode(one, [*at, str(k)], files, folder) for k, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset) or inspect.isgenerator(value):
        return [encode(one, [*at, n], files, folder) for n, one in enumerate(value)]
    if isinstance(value, datetime.date):
        return value.isoformat()
    if dataclasses.is_dataclass(value):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return encode(fields, at, files, folder)
    names = getattr(type(value), "model_fields", None) or getattr(value, "__dict__", {})
    for method in ("tolist", "item"):
        if callable(convert := getattr(value, method, None)):
            return encode(convert(), at, files, folder)
    return encode({name: getattr(value, name) for name in names}, at, files, folder)


def _copy(value: Any, folder: Path) -> dict[str, str]:
    path = folder / uuid.uuid4().hex
    if isinstance(value, io.IOBase):
        if value.seekable():
            value.seek(0)
        data = value.read()
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return {"path": str(path), "name": Path(str(getattr(value, "name", "file"))).name}
    shutil.copyfile(value, path)
    return {"path": str(path), "name": Path(value).name}


def is_iterator(value: Any) -> bool:
    """Returns whether an output is streamed."""
    return inspect.isgenerator(value) or isinstance(value, collections.abc.Iterator)


class _Author:
    """The author's class, loaded on the main thread."""

    def __init__(self, reference: str) -> None:
        self.instance: Any = cog_predictor.load_predictor_from_ref(reference)
        name = "predict" if hasattr(self.instance, "predict") else "run"
        cls = type(self.instance)
        if cog_predictor._user_method_owner(cls, "run") is not None:
            name = "run"
        is_function = inspect.isfunction(self.instance)
        self.compute = self.instance if is_function else getattr(self.instance, name)
        self.hints = typing.get_type_hints(self.compute, include_extras=True)
        self._fields: Any = self._inspect(cls.__module__, cls.__name__)
        self.is_async = inspect.iscoroutinefunction(self.compute) or inspect.isasyncgenfunction(
            self.compute
        )

    def _inspect(self, module: str, name: str) -> Any:
        """Inputs as Cog's inspector sees them. The type of the output does not matter here."""

        def shim() -> None:
            """Never called."""

        signature = inspect.signature(self.compute)
        shim.__annotations__ = {**self.hints, "return": str}
        shim.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                one.replace(annotation=self.hints.get(one.name, one.annotation))
                for one in signature.parameters.values()
            ],
            return_annotation=str,
        )
        try:
            info = _inspector._create_predictor_info(
                module, name, shim, "predict", is_class_fn=False
            )
        except (ValueError, TypeError) as error:
            print(f"inputs are not checked: {error}", file=sys.stderr)
            return None
        return info.inputs

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Checks constraints and fills in defaults."""
        if self._fields is None:
            return values
        try:
            checked: dict[str, Any] = _inspector.check_input(self._fields, values)
        except (ValueError, TypeError) as error:
            raise WrongInput(str(error)) from error
        return checked

    def set_up(self) -> Any:
        """Calls `setup` as Cog does."""
        setup = getattr(self.instance, "setup", None)
        if setup is None:
            return None
        if cog_predictor.has_setup_weights(self.instance):
            return setup(weights=cog_predictor.extract_setup_weights(self.instance))
        return setup()


def make_wrapper(main: MainThread) -> type:
    """Loads the author's class. Returns the predictor that Cog's worker sees."""
    main.redirect()
    author: _Author = main.call(lambda: _Author(main.reference))
    computing = _Computing(main, author)

    class Sync:
        """Runs a synchronous class on the main thread."""

        def setup(self) -> None:
            """Sets up the class."""
            main.call(author.set_up)

        def predict(self, **values: Any) -> dict[str, Any]:
            """Computes one prediction."""
            with _shown_traceback():
                result: dict[str, Any] = main.call(lambda: computing.compute(values))
                return result

    class Async:
        """Runs an asynchronous class in Cog's loop, in which it is set up as well."""

        async def setup(self) -> None:
            """Sets up the class."""
            done = author.set_up()
            if inspect.isawaitable(done):
                await done

        async def predict(self, **values: Any) -> dict[str, Any]:
            """Computes one prediction."""
            with _shown_traceback():
                return await computing.compute_async(values)

    wrapper: type = Async if author.is_async else Sync
    wrapper.predict.__annotations__ = dict(author.hints)  # type: ignore[attr-defined]
    return wrapper


class _Computing:
    """Calls the class, and sends each piece of its output."""

    def __init__(self, main: MainThread, author: _Author) -> None:
        self._main, self._author = main, author

    def _send(self, value: Any) -> None:
        number = int(coglet._sdk.current_scope().context["number"])
        self._main.send(number, value)

    def compute(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the number of pieces, and whether they are a list."""
        output, count = self._author.compute(**self._author.arguments(values)), 0
        if not is_iterator(output):
            self._send(output)
            return {"pieces": 1, "streams": False}
        for value in output:
            self._send(value)
            count += 1
        return {"pieces": count, "streams": True}

    async def compute_async(self, values: dict[str, Any]) -> dict[str, Any]:
        """Like `compute`."""
        output, count = self._author.compute(**self._author.arguments(values)), 0
        if not hasattr(output, "__aiter__"):
            self._send(await output)
            return {"pieces": 1, "streams": False}
        async for value in output:
            self._send(value)
            count += 1
        return {"pieces": count, "streams": True}


class _shown_traceback:
    """Prints the traceback of an exception of the class."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, WrongInput):
            traceback.print_exception(error)


if __name__ == "__main__":
    sys.path[0] = ""
    MAIN = MainThread(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    MAIN.run()
else:  # the worker imports this file as the predictor
    Wrapper = make_wrapper(sys.modules["__main__"].MAIN)
