"""The program of an engine's process: the server of llama.cpp on a Unix socket.

It imports nothing of ours and gets no setting by its arguments or its environment, which others
could read. The first line of its standard input is a JSON object (`Settings` in
workers/models/engines/llama_cpp.py). The end of its standard input is the end of its parent: it
removes the folder of its socket and leaves.
"""

import ctypes
import json
import os
import shutil
import sys
import threading
from typing import Any

READY = "the engine is ready"
NAME = "penstock-engine"
"""Name of its process in tools such as `ps`."""
_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15
_QUIET = 1
"""Errors only. The next level prints prompts."""


def main() -> None:
    # Others of the same user, such as custom classes, may not read its memory.
    system = ctypes.CDLL(None)
    system.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    system.prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(settings["socket"],), daemon=True).start()
    try:
        server = _serve(settings)
    except ImportError as error:
        print(f"install the extra `text` to use it (make text): {error}", flush=True)
        sys.exit(1)
    except (RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print(READY, flush=True)
    threading.Event().wait()
    del server


def _end_with_parent(socket: str) -> None:
    # Not sys.stdin, whose lock the interpreter wants at its end.
    while os.read(0, 4096):
        pass
    shutil.rmtree(os.path.dirname(socket), ignore_errors=True)
    os._exit(0)


def _serve(settings: dict[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.hostnames = [settings["socket"]]
    params.api_keys = [settings["key"]]
    params.n_parallel = settings["slots"]
    params.n_ctx, params.kv_unified = settings["cache_tokens"], settings["shares_cache"]
    params.n_batch = params.n_ubatch = settings["batch_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_ram_mib, params.cache_idle_slots = 0, False
    params.ctx_shift = params.fit_params = params.ui = False
    params.verbosity = _QUIET
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
