"""The program in an engine's process: a server on a Unix socket, llama.cpp's or a command's.

It imports none of our code. The first line of its standard input is a JSON object
(`Launch.settings` in workers/models/engines/dialect.py) because other processes could read its
arguments and environment. A command still gets its options as arguments and its key in an
environment variable, because it doesn't support any other way.

If its standard input closes, its parent has exited. It then stops the server, removes the socket's
folder, and kills its whole process group.
"""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

READY = "the engine is ready"
NAME = "penstock-engine"
"""Name of the process in tools such as `ps`."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_QUIET = 1
"""Errors only. The next level would print prompts."""
_LOOK_EVERY_S = 0.1
_END_S = 3.0

_system = ctypes.CDLL(None)


def main() -> None:
    # Other processes run by the same user, such as custom classes, can't read its memory. A
    # command's process can't keep this protection.
    _system.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _system.prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    settings = json.loads(sys.stdin.buffer.readline())
    if "command" in settings:
        _run_command(settings)
    else:
        _run_llama_cpp(settings)


def _run_llama_cpp(settings: dict[str, Any]) -> None:
    _end_with_parent(settings["socket"], lambda: None)
    try:
        server = _serve_llama_cpp(settings)
    except ImportError as error:
        print(f"install the extra `text` to use it (make text): {error}", flush=True)
        sys.exit(1)
    except (RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print(READY, flush=True)
    threading.Event().wait()
    del server


def _serve_llama_cpp(settings: dict[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.hostnames = [settings["socket"]]
    params.api_keys = [settings["key"]]
    params.n_parallel = settings["slots"]
    params.n_ctx, params.kv_unified = settings["cache_tokens"], settings["shares_cache"]
    params.n_batch = params.n_ubatch = settings["batch_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    # Otherwise, a request that names none of the adapters would use all of them.
    params.lora_init_without_apply = True
    params.lora_adapters = [
        xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in settings["adapters"]
    ]
    params.cache_ram_mib, params.cache_idle_slots = 0, False
    params.ctx_shift = params.fit_params = params.ui = False
    params.verbosity = _QUIET
    return xllamacpp.Server(params)


def _run_command(settings: dict[str, Any]) -> None:
    """Runs a command that serves at `--uds` and gets its key in an environment variable."""
    path = settings["socket"]
    server = subprocess.Popen(
        [*settings["command"], "--uds", path],
        stdin=subprocess.DEVNULL,
        env=os.environ | {settings["key_variable"]: settings["key"]},
        preexec_fn=_die_with_parent,
    )
    is_ending = _end_with_parent(path, lambda: _end(server))
    while server.poll() is None and not _is_healthy(path):
        time.sleep(_LOOK_EVERY_S)
    if server.poll() is None:
        print(READY, flush=True)
    status = server.wait() or 1
    if is_ending.is_set():
        threading.Event().wait()  # until the process group is killed
    sys.exit(status)


def _die_with_parent() -> None:
    _system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _is_healthy(path: str) -> bool:
    try:
        connection = http.client.HTTPConnection("engine")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Stops a server and the processes it has started."""
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _end_with_parent(path: str, end: Callable[[], None]) -> threading.Event:
    """Starts a thread that waits for the parent to exit.

    Returns an event that is set when the parent exits.
    """
    is_ending = threading.Event()

    def wait() -> None:
        # Not sys.stdin, because the interpreter needs its lock in order to exit.
        while os.read(0, 4096):
            pass
        is_ending.set()
        end()
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        # The process's whole group is killed too, including a server's processes.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    return is_ending


if __name__ == "__main__":
    main()
