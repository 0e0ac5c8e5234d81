"""The template that model processes are forked from: they share it, outlive it, and exit with their
worker.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Literal

import numpy as np
import psutil
import pytest
import torch

from shared.models.tasks.embedding import EmbeddingResult
from shared.models.tasks.image import ImageResult
from tests.limits import START_LIMIT_S
from tests.workers.shipped_models import IMAGE, hosted
from workers.models.base import PreparedText
from workers.models.client import ModelProcessDied
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess
from workers.runtime.server import gpus_hidden
from workers.runtime.template import MODEL_PROCESS_NAME, TEMPLATE_NAME, Template

pytestmark = [pytest.mark.slow(about_s=4), pytest.mark.anyio]

TEXT = PreparedText(key="", length=4, ids=np.array([101, 4937, 4937, 102], "<u4").tobytes())


@pytest.fixture(scope="module")
async def pool(anyio_backend: str) -> AsyncIterator[ModelPool]:
    """Torch on two threads, which start after the fork."""
    async with ModelPool([hosted("embedding")], device="cpu", processes=1, threads=2) as pool:
        yield pool


@pytest.fixture
def template(pool: ModelPool) -> Template:
    assert pool.template is not None
    return pool.template


async def vector(process: PooledProcess) -> bytes:
    (result,) = (await process.run([TEXT], timeout_s=START_LIMIT_S)).results
    assert isinstance(result, EmbeddingResult)
    return result.vector


async def kill(process: PooledProcess) -> None:
    """Kills the process and returns once the next one is ready."""
    assert process.pid is not None
    running = asyncio.create_task(process.run([TEXT], timeout_s=START_LIMIT_S))
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ModelProcessDied):
        await running
    await process.ready()


async def test_the_next_process_is_forked_from_the_same_template(
    process: PooledProcess, template: Template
) -> None:
    before, first = await vector(process), process.pid
    origin = template.pid
    await kill(process)
    assert process.pid != first
    assert psutil.Process(process.pid).ppid() == template.pid == origin
    assert await vector(process) == before


@pytest.mark.parametrize("visible", [None, "0,1", ""])
def test_gpus_are_hidden_from_imports_only(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers looks for GPUs when it is imported, which starts a CUDA or NVML thread."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with gpus_hidden():
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


async def test_processes_are_told_apart_by_name(process: PooledProcess, template: Template) -> None:
    assert psutil.Process(process.pid).name() == MODEL_PROCESS_NAME
    assert psutil.Process(template.pid).name() == TEMPLATE_NAME
    assert template.memory_bytes > 50e6


async def test_what_a_process_computes_outlives_its_template(
    process: PooledProcess, template: Template
) -> None:
    before, first, origin = await vector(process), process.pid, template.pid
    assert origin is not None
    os.kill(origin, signal.SIGKILL)
    assert await vector(process) == before
    assert process.pid == first
    await kill(process)
    assert psutil.Process(process.pid).ppid() == template.pid != origin
    assert await vector(process) == before


@pytest.mark.parametrize(("task", "processes"), [("embedding", 2), ("image", 1)])
async def test_a_template_starts_no_thread_and_loads_the_libraries(
    task: str, processes: int
) -> None:
    async with ModelPool([hosted(task)], device="cpu", processes=processes, threads=2) as pool:
        assert pool.template is not None
        template = psutil.Process(pool.template.pid)
        assert template.num_threads() == 1
        assert any("libtorch" in one.path for one in template.memory_maps())
        assert {psutil.Process(process.pid).ppid() for process in pool.processes} == {template.pid}
        own_bytes = [_memory_bytes(psutil.Process(one.pid), "private") for one in pool.processes]
        assert max(own_bytes) < _memory_bytes(template, "rss") / 2, (
            "libraries and weights are shared"
        )


def _memory_bytes(process: psutil.Process, kind: Literal["private", "rss"]) -> int:
    """A process's memory: either all resident memory, or only what it shares with no other process.

    This excludes the CUDA libraries in a GPU build of torch, because nothing here uses them, and
    the number of touched pages varies between processes.
    """
    maps = [one for one in process.memory_maps() if not _CUDA.search(one.path)]
    return sum(one.rss if kind == "rss" else one.private_clean + one.private_dirty for one in maps)


_CUDA = re.compile(r"/nvidia/|/lib(torch_cuda|c10_cuda|torch_nvshmem|cuda|nccl)[^/]*\.so")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
async def test_an_image_model_on_a_gpu_is_forked_and_draws() -> None:
    """The template must not touch CUDA, although diffusers looks for GPUs when it is imported."""
    entry, folder = hosted("image")[:2]
    image = entry.image.model_copy(update={"join": "never", "compile": "never"})
    model = HostedModel(entry.model_copy(update={"image": image}), folder)
    async with ModelPool([model], device="cuda", processes=1) as pool:
        (process,) = pool.processes
        assert pool.template is not None
        template = psutil.Process(pool.template.pid)
        assert template.num_threads() == 1
        assert process.pid is not None
        forked = psutil.Process(process.pid)
        assert forked.ppid() == template.pid
        # A process that had to restart its program has different arguments.
        assert forked.cmdline() == template.cmdline()
        assert process.device_name == torch.cuda.get_device_name()
        (result,) = (await process.run([IMAGE], timeout_s=START_LIMIT_S)).results
    assert isinstance(result, ImageResult)


@pytest.mark.parametrize(
    ("path", "is_cuda"),
    [
        ("/venv/torch/lib/libtorch_cpu.so", False),
        ("/venv/torch/lib/libtorch_python.so", False),
        ("/usr/lib/libcurl.so.4", False),
        ("[heap]", False),
        ("/venv/torch/lib/libtorch_cuda_linalg.so", True),
        ("/venv/nvidia/cu13/lib/libcublasLt.so.13", True),
        ("/usr/lib/libcuda.so.1", True),
    ],
)
def test_memory_of_libraries_for_gpus_is_told_apart(path: str, *, is_cuda: bool) -> None:
    assert bool(_CUDA.search(path)) == is_cuda


STARTS_A_THREAD = """
import sys, threading, time
from workers.runtime import server as model_process
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
sys.exit(model_process.main())
"""


async def test_from_a_template_with_threads_each_process_starts_anew() -> None:
    command = (sys.executable, "-c", STARTS_A_THREAD)
    async with ModelPool([hosted("embedding")], device="cpu", processes=1, command=command) as pool:
        (process,) = pool.processes
        assert "--device=cpu" in psutil.Process(process.pid).cmdline()[-1]
        assert len(await vector(process)) == 4 * 384


WORKER = """
import asyncio, sys
from tests.workers.shipped_models import hosted
from workers.runtime.pool import ModelPool

async def main():
    async with ModelPool([hosted("embedding")], device="cpu", processes=2) as pool:
        print(pool.template.pid, *(process.pid for process in pool.processes), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_worker_leaves_no_process_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        left = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
        worker.kill()
    assert len(left) == 3
    assert not psutil.wait_procs(left, START_LIMIT_S)[1]


LOADS_FOR_EVER = """
import os, sys, time
from workers.runtime import server as model_process
model_process.model_for = lambda *given, **named: (print(os.getpid(), flush=True), time.sleep(1e6))
sys.exit(model_process.main())
"""
STARTS_IT = """
import asyncio, sys
from tests.workers.shipped_models import hosted
from workers.runtime.pool import ModelPool

async def main():
    command = (sys.executable, "-c", sys.argv[1])
    async with ModelPool([hosted("embedding")], device="cpu", processes=1, command=command):
        pass

asyncio.run(main())
"""


def test_a_template_that_still_loads_ends_with_its_worker() -> None:
    command = [sys.executable, "-c", STARTS_IT, LOADS_FOR_EVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        template = psutil.Process(int(worker.stderr.readline()))
        worker.kill()
    assert not psutil.wait_procs([template], START_LIMIT_S)[1]
