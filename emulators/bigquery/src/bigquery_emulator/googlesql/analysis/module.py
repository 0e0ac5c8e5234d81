"""The WebAssembly module with Google's analyzer: loads it, calls it, and replaces it if it breaks.

The package `zetasql` contains Google's ZetaSQL (GoogleSQL). No statement that it analyzes can
affect this process: the module has its own memory, limits on its stack and running time, and no
access to files except the time zone files.
"""

from __future__ import annotations

import ctypes
import json
import logging
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import wasmtime
from google.protobuf.message import Message

CALL_LIMIT_S = 10.0
_LOOK_EVERY_S = 1.0
_SIZE_BYTES = 4
_LEAST_REQUEST_BYTES = 16 * 1024
_STACK_BYTES = 1_536 * 1024  # wasmtime itself takes less than 2 MiB
_MACHINES = ("x86_64", "aarch64")

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)


class AnalyzerRefusedError(Exception):
    """The analyzer returned an error. The message is the analyzer's."""


class AnalyzerTrappedError(Exception):
    """The call ran out of stack space or time, or hit a bug in the analyzer."""


def _config() -> wasmtime.Config:
    config = wasmtime.Config()
    config.shared_memory = True
    config.epoch_interruption = True
    config.max_wasm_stack = _STACK_BYTES
    if sys.platform == "linux" and platform.machine() in _MACHINES:
        # Generates code that runs on every CPU of this architecture, so it can be included in a
        # container image.
        config.target = f"{platform.machine()}-unknown-linux-gnu"
    _enable_cache(config)
    return config


def _enable_cache(config: wasmtime.Config) -> None:
    """Caches machine code in the user's cache, or in the virtual environment if home is missing."""
    try:
        config.cache = True
        return
    except wasmtime.WasmtimeError:
        folder = Path(sys.prefix, "cache", "wasmtime")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
            file.write(f"[cache]\ndirectory = {json.dumps(str(folder), ensure_ascii=False)}\n")
            file.flush()
            config.cache = file.name
    except (OSError, wasmtime.WasmtimeError) as error:
        log.warning("no cache for the SQL analyzer", extra={"reason": str(error)})


class AnalyzerModule:
    """The loaded module and an instance of it. Accepts calls from any thread, one at a time.

    wasmtime stores the machine code in the user's cache (22 MB): the first load on a machine takes
    10 s and 1.1 GB of memory, and later loads take 0.2 s. Running this package as a program
    triggers the first load.
    """

    def __init__(self) -> None:
        self._engine = wasmtime.Engine(_config())
        source = files("zetasql.wasi").joinpath("zetasql.wasm")
        self._module = wasmtime.Module.from_file(self._engine, str(source))
        self._lock = threading.Lock()
        self._watchdog = _Watchdog(self._engine.increment_epoch)
        self._instance: _Instance | None = None
        self.generation = 0
        """The number of instances that have broken. Everything registered in them is gone."""

    def call(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        """Calls a method of ZetaSQL's local service.

        Args:
            method: for example `Analyze`.

        Raises:
            AnalyzerRefusedError: the method returned an error.
            AnalyzerTrappedError: the method did not finish. The call has no lasting effects.
        """
        with self._lock:
            if self._instance is None:
                self._instance = _Instance(self._engine, self._module)
            self._watchdog.begin()
            try:
                data = self._instance.call(method, request.SerializeToString())
            except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
                self._instance = None
                self.generation += 1
                raise AnalyzerTrappedError(str(error).splitlines()[-1].strip()) from error
            finally:
                self._watchdog.end()
        reply = answer()
        reply.ParseFromString(data)
        return reply


class _Watchdog:
    """Stops calls that take too long. Only one call runs at a time.

    A single thread watches all calls, and exits once there have been none for a while. A timer for
    each call would start a thread for each call.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._is_watching = False

    def begin(self) -> None:
        with self._lock:
            self._began_s = time.monotonic()
            if self._is_watching:
                return
            self._is_watching = True
        threading.Thread(target=self._watch, name="sql-watchdog", daemon=True).start()

    def end(self) -> None:
        self._began_s = None

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self._lock:
                if self._began_s is None:
                    self._is_watching = False
                    return
                is_late = time.monotonic() - self._began_s > CALL_LIMIT_S
            if is_late:
                self._stop()


class _Instance:
    def __init__(self, engine: wasmtime.Engine, module: wasmtime.Module) -> None:
        system = wasmtime.WasiConfig()
        system.preopen_dir(str(files("tzdata").joinpath("zoneinfo")), "/usr/share/zoneinfo")
        self._store = wasmtime.Store(engine)
        self._store.set_wasi(system)
        self._store.set_epoch_deadline(1)
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        self._exports = linker.instantiate(self._store, module).exports(self._store)
        self._run("_initialize")
        self._size_at = self._run("wasm_malloc", _SIZE_BYTES)
        self._request_at = self._request_bytes = 0

    def call(self, method: str, request: bytes) -> bytes:
        """Returns the encoded response.

        Raises:
            AnalyzerRefusedError: the method returned an error. Contains its message.
        """
        self._store.set_epoch_deadline(1)
        self._reserve(len(request))
        ctypes.memmove(self._base() + self._request_at, request, len(request))
        method = f"ZetaSqlLocalService_{method}"
        address = self._run(method, self._request_at, len(request), self._size_at)
        if not address:
            size_bytes = self._run("wasm_get_last_error_size")
            message = self._read(self._run("wasm_get_last_error"), size_bytes)
            raise AnalyzerRefusedError(message.decode(errors="replace"))
        size_bytes = int.from_bytes(self._read(self._size_at, _SIZE_BYTES), "little")
        data = self._read(address, size_bytes)
        self._run("wasm_free", address)
        return data

    def _reserve(self, size_bytes: int) -> None:
        """Makes room for a request.

        The space is reused, because each call into the module has a cost.
        """
        if size_bytes > self._request_bytes:
            if self._request_at:
                self._run("wasm_free", self._request_at)
            self._request_bytes = max(size_bytes, _LEAST_REQUEST_BYTES)
            self._request_at = self._run("wasm_malloc", self._request_bytes)

    def _run(self, name: str, *args: int) -> int:
        function: Any = self._exports[name]
        return int(function(self._store, *args) or 0)

    def _base(self) -> int:
        """Address of the module's memory. The memory may grow but never moves."""
        memory: Any = self._exports["memory"]
        return ctypes.addressof(memory.data_ptr().contents)

    def _read(self, at: int, size_bytes: int) -> bytes:
        return ctypes.string_at(self._base() + at, size_bytes)
