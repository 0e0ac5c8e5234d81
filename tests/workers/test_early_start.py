"""A worker imports libraries while its weights are being downloaded, which it does in parallel."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from bench.slow_store import SlowStore
from shared.errors import Unavailable
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from tests.infra.running_up import wait_until
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.waiting import until
from tests.workers.shipped_models import IMAGE, hosted
from workers.models.source import (
    CONNECTIONS,
    PART_BYTES,
    READ_BYTES,
    read_ahead,
    resolve,
    resolve_file,
)
from workers.runtime.pool import ModelPool, early_template
from workers.runtime.template import IMPORT_FIRST, TEMPLATE_NAME

pytestmark = pytest.mark.anyio


def entry(task: str) -> Model:
    return read_catalog(Path("models.yaml")).default(task)


def test_parts_of_a_bucket_are_downloaded_at_the_same_time(tmp_path: Path) -> None:
    """Each response waits until all connections are in use."""
    barrier = threading.Barrier(CONNECTIONS)
    large = bytes(range(256)) * (3 * PART_BYTES // 2 // 256)
    objects = {"model/large": large} | {
        f"model/{number}": b"%d" % number for number in range(CONNECTIONS - 2)
    }
    store = SlowStore(objects | {"model/empty": b""}, on_get=lambda: _wait(barrier))
    with store.running() as client:
        folder = resolve("gs://weights/model", "1", tmp_path, open_bucket=lambda name: client)
    assert (folder / "empty").read_bytes() == b""
    for key, data in objects.items():
        assert (folder / key.removeprefix("model/")).read_bytes() == data


def _wait(barrier: threading.Barrier) -> None:
    barrier.wait(WAIT_LIMIT_S)


def test_file_of_several_parts_is_put_together(tmp_path: Path) -> None:
    data = os.urandom(2 * PART_BYTES + 7)
    with SlowStore({"model/file": data}).running() as client:
        file = resolve_file("gs://weights/model/file", "1", tmp_path, open_bucket=lambda _: client)
    assert file.read_bytes() == data


def test_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = SlowStore({"model/a": b"a", "model/b": b"b"})
    with store.running() as client:
        store.on_get = store.objects.clear  # type: ignore[attr-defined]
        with pytest.raises(Unavailable):
            resolve("gs://weights/model", "1", tmp_path, open_bucket=lambda name: client)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_weights_on_a_mounted_bucket_are_read_ahead(tmp_path: Path) -> None:
    """Variants, checkpoints in one file, and the safety checker are not loaded, so not read."""
    sizes_bytes = {
        "unet/diffusion_pytorch_model.safetensors": READ_BYTES + 1,
        "unet/diffusion_pytorch_model.fp16.safetensors": 3,
        "text_encoder/model-00001-of-00002.safetensors": 5,
        "text_encoder/model-00002-of-00002.safetensors": 7,
        "safety_checker/model.safetensors": 11,
        "v1-5-pruned.safetensors": 13,
        "unet/config.json": 17,
    }
    for name, size_bytes in sizes_bytes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size_bytes))
    loaded_bytes = READ_BYTES + 1 + 5 + 7
    assert read_ahead(tmp_path, room_bytes=loaded_bytes) == loaded_bytes
    assert read_ahead(tmp_path, room_bytes=loaded_bytes - 1) == 0
    (tmp_path / "unet" / "model.safetensors").mkdir()  # can't be opened as a file
    assert read_ahead(tmp_path, room_bytes=2**40) == 0


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in file.path for file in process.memory_maps())


def find_early_process() -> psutil.Process:
    (found,) = filter(_imports_first, psutil.Process().children())
    return found


def _imports_first(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # another test's process may have exited
        return any(IMPORT_FIRST in argument for argument in process.cmdline())
    return False


@pytest.mark.slow(about_s=15)
async def test_process_that_imported_early_becomes_the_template() -> None:
    early = early_template([entry("image")], 1)
    assert early is not None
    async with early:
        child = find_early_process()
        await until(lambda: has_torch(child))
        async with ModelPool([hosted("image")], device="cpu", processes=1, early=early) as pool:
            assert pool.template is not None
            assert pool.template.pid == child.pid
            assert child.num_threads() == 1
            (result,) = (await pool.processes[0].run([IMAGE], timeout_s=START_LIMIT_S)).results
            assert not isinstance(result, Exception)
    assert not child.is_running()


@pytest.mark.slow(about_s=10)
async def test_process_that_died_early_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    early = early_template([entry("image")], 1)
    assert early is not None
    async with early:
        child = find_early_process()
        child.kill()
        await until(lambda: not psutil.pid_exists(child.pid))
        async with ModelPool([hosted("image")], device="cpu", processes=1, early=early) as pool:
            assert pool.template is not None
            assert pool.template.pid != child.pid
    assert [record.message for record in caplog.records if "early" in record.message] == [
        "the early template exited"
    ]


def test_nothing_is_imported_early_if_a_backend_is_measured() -> None:
    assert early_template([entry("embedding")], 1) is None
    assert early_template([entry("image"), entry("embedding")], 1) is None


@contextmanager
def silent_hub() -> Iterator[tuple[str, threading.Event]]:
    """A Hub that never answers, and an event for its first request."""
    requested, closing = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.set()
            closing.wait(START_LIMIT_S)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Keeps requests out of the output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


@pytest.mark.slow(about_s=10)
def test_worker_imports_libraries_before_it_has_its_weights(tmp_path: Path) -> None:
    """The Hub doesn't answer, so the libraries can't have waited for the weights."""
    document = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))
    (image,) = (model for model in document["models"] if model["task"] == "image")
    image |= {"source": "hf:org/name", "revision": "main"}
    image.pop("canary", None)
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": [image]}))
    with silent_hub() as (url, requested):
        environment = os.environ | {
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path / "hub"),
            "PENSTOCK_HEALTH_PORT": "0",
            "PENSTOCK_MODEL": image["name"],
            "PENSTOCK_MODELS_FILE": str(tmp_path / "models.yaml"),
            "PENSTOCK_MODELS_DIR": str(tmp_path / "models"),
            "PENSTOCK_SPOOL_DIR": str(tmp_path / "spool"),
        }
        worker = subprocess.Popen([sys.executable, "-m", "workers"], env=environment)
        try:
            assert requested.wait(START_LIMIT_S)
            process = psutil.Process(worker.pid)
            wait_until(lambda: any(map(_is_template_with_torch, process.children())), START_LIMIT_S)
        finally:
            worker.kill()
            worker.wait()


def _is_template_with_torch(process: psutil.Process) -> bool:
    return process.name() == TEMPLATE_NAME and has_torch(process)
