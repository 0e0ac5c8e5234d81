import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.tasks import Input
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from tests.limits import WAIT_LIMIT_S
from workers.models.base import Prepared, PreparedText
from workers.models.client import ModelProcessDied
from workers.models.reports import Ready
from workers.models.source import resolve
from workers.runtime.child_process import child_environment
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess
from workers.runtime.protocol import HEADER, decode_server_message, encode_run
from workers.tasks import preparer_for

pytestmark = [pytest.mark.slow(about_s=3), pytest.mark.anyio]

UNHEARD_OF = 10**6
"""A token id that no model has.

No preparer accepts it, so it represents any item that breaks a model.
"""


@pytest.fixture(scope="module")
def entry() -> Model:
    return read_catalog(Path("models.yaml")).default("embedding")


@pytest.fixture(scope="module")
def folder(entry: Model) -> Path:
    return resolve(entry.source, entry.revision, Path("unused"))


@pytest.fixture(scope="module")
async def pool(anyio_backend: str, entry: Model, folder: Path) -> AsyncIterator[ModelPool]:
    """One pool for all tests.

    If a test kills a process, the process is restarted for the next test.
    """
    async with ModelPool([HostedModel(entry, folder)], device="cpu", processes=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def texts(entry: Model, folder: Path) -> list[PreparedText]:
    inputs: Sequence[Input] = [
        TextInput("a cat"),
        TextInput("the mill wheel turns " * 9),
        TextInput("a dog"),
    ]
    return [
        item
        for item in preparer_for(entry, folder).prepare(inputs)
        if isinstance(item, PreparedText)
    ]


def text_of(*ids: int) -> PreparedText:
    return PreparedText(key="", length=len(ids), ids=np.array(ids, "<u4").tobytes())


def long_batch() -> list[Prepared]:
    """About ten seconds of work on one core."""
    return [text_of(*[4937] * 256) for _ in range(128)]


async def test_a_batch_comes_back_in_order_with_its_figures(
    process: PooledProcess, texts: list[PreparedText]
) -> None:
    together = await process.run(texts, timeout_s=WAIT_LIMIT_S)
    alone = [(await process.run([text], timeout_s=WAIT_LIMIT_S)).results[0] for text in texts]
    for one, other, text in zip(together.results, alone, texts, strict=True):
        assert isinstance(one, EmbeddingResult)
        assert isinstance(other, EmbeddingResult)
        assert one.tokens == text.length
        assert np.allclose(
            np.frombuffer(one.vector, "<f4"), np.frombuffer(other.vector, "<f4"), atol=1e-5
        )
    assert together.real_work == sum(text.length for text in texts)
    assert (
        together.real_work <= together.padded_work < len(texts) * max(text.length for text in texts)
    )
    assert 0 < together.inference_ms < 1000 * WAIT_LIMIT_S
    assert together.started_at_s < together.finished_at_s
    assert not together.out_of_memory


async def test_the_pool_tells_what_it_runs_on(pool: ModelPool, process: PooledProcess) -> None:
    assert pool.device_name == "cpu"
    # The amount depends on the torch build.
    resident_bytes = sum(psutil.Process(one.pid).memory_info().rss for one in pool.processes)
    assert pool.memory_bytes > 50e6
    assert pool.memory_bytes == pytest.approx(resident_bytes, rel=0.3)


async def test_callers_at_once_take_turns(
    process: PooledProcess, texts: list[PreparedText]
) -> None:
    done = await asyncio.gather(*(process.run(texts, timeout_s=WAIT_LIMIT_S) for _ in range(4)))
    spans = sorted((batch.started_at_s, batch.finished_at_s) for batch in done)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


async def test_a_bad_item_fails_alone(process: PooledProcess, texts: list[PreparedText]) -> None:
    first, error, last = (
        await process.run([texts[0], text_of(UNHEARD_OF), texts[2]], timeout_s=WAIT_LIMIT_S)
    ).outcomes
    assert isinstance(error, ModelFailed)
    assert isinstance(first, EmbeddingResult)
    assert isinstance(last, EmbeddingResult)


async def test_signals_to_the_group_end_no_batch(
    process: PooledProcess, texts: list[PreparedText]
) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    assert len((await process.run(texts, timeout_s=WAIT_LIMIT_S)).results) == len(texts)


async def test_a_killed_process_fails_its_batch_and_comes_back(
    process: PooledProcess, texts: list[PreparedText]
) -> None:
    pid = process.pid
    assert pid is not None
    running = asyncio.create_task(process.run(long_batch(), timeout_s=WAIT_LIMIT_S))
    behind = asyncio.create_task(process.run(texts, timeout_s=WAIT_LIMIT_S))
    await asyncio.sleep(0)  # both have started
    os.kill(pid, signal.SIGKILL)
    for task in (running, behind):
        with pytest.raises(ModelProcessDied, match="status -9"):
            await task
    await process.ready()
    assert process.pid != pid
    assert len((await process.run(texts, timeout_s=WAIT_LIMIT_S)).results) == len(texts)


async def test_a_hanging_process_is_ended_at_the_limit(
    process: PooledProcess, texts: list[PreparedText]
) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ModelProcessDied, match=r"did not finish within 0\.2 s"):
        await process.run(texts, timeout_s=0.2)


async def test_a_limit_holds_though_the_caller_is_gone(
    process: PooledProcess, texts: list[PreparedText]
) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    running = asyncio.create_task(process.run(texts, timeout_s=0.2))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(ModelProcessDied):
        await process.run(texts, timeout_s=WAIT_LIMIT_S)


async def test_a_wrong_folder_is_a_configuration_error(entry: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        async with ModelPool([HostedModel(entry, tmp_path)], device="cpu", processes=1):
            pass


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('no room left'); raise SystemExit(3)", r"status 3\)(.|\n)*no room left"),
        (
            "import time; print('loading', flush=True); time.sleep(60)",
            r"not ready within 2 s(.|\n)*loading",
        ),
    ],
    ids=["dies", "hangs"],
)
async def test_a_failed_start_tells_what_was_printed(
    entry: Model, folder: Path, code: str, reason: str
) -> None:
    pool = ModelPool(
        [HostedModel(entry, folder)],
        device="cpu",
        processes=1,
        start_timeout_s=2,
        command=(sys.executable, "-c", code),
    )
    with pytest.raises(ModelFailed, match=reason):
        async with pool:
            pass


async def test_a_command_that_is_not_there(entry: Model, folder: Path) -> None:
    with pytest.raises(ModelFailed, match="could not be started"):
        async with ModelPool(
            [HostedModel(entry, folder)], device="cpu", processes=1, command=("/no/such/program",)
        ):
            pass


ANSWERS_ODDLY = """
import socket, sys
from workers.runtime import server as model_process
from workers.models.reports import BatchResult, Ready, StepDone
from workers.runtime.protocol import Refused, encode_server_message, read_client_message

def serve(given, loaded):
    connection = socket.socket(fileno=given.fd)
    connection.sendall(encode_server_message(Ready("odd", 0.0, 0.0, 1)))
    number = read_client_message(connection).number
    done = BatchResult(number=number, results=[], started_at_s=0.0, finished_at_s=0.0,
                       inference_ms=0.0, real_work=0, padded_work=0, out_of_memory=False,
                       memory_bytes=1)
    connection.sendall({"few": encode_server_message(done),
                        "turn": encode_server_message(StepDone(number + 1, 1, 2)),
                        "noise": bytes([4, 0, 0, 0]) + b"nono",
                        "letters": encode_server_message(Refused("?", "xx")).replace(
                            b"xx", b"\\xff\\xfe")}[kind])
    connection.recv(1)

kind = sys.argv.pop(1)
model_process.serve = serve
model_process.model_for = {}.__getitem__  # there is no model to load ahead
sys.exit(model_process.main())
"""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("few", "0 results for 3 items"),
        ("turn", "it sent an unexpected"),
        ("noise", "invalid message"),
        ("letters", "invalid message"),
    ],
)
async def test_an_answer_that_does_not_fit_ends_the_process(
    entry: Model, folder: Path, texts: list[PreparedText], kind: str, reason: str
) -> None:
    command = (sys.executable, "-c", ANSWERS_ODDLY, kind)
    async with ModelPool(
        [HostedModel(entry, folder)], device="cpu", processes=1, command=command
    ) as pool:
        with pytest.raises(ModelProcessDied, match=reason):
            await pool.processes[0].run(texts, timeout_s=WAIT_LIMIT_S)


async def test_after_the_pool_nothing_runs(
    entry: Model, folder: Path, texts: list[PreparedText]
) -> None:
    async with ModelPool(
        [HostedModel(entry, folder)],
        device="cpu",
        processes=2,
        command=(sys.executable, "-c", ANSWERS_ODDLY, "few"),
    ) as pool:
        pids = [process.pid for process in pool.processes]
    for process, pid in zip(pool.processes, pids, strict=True):
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(PenstockError):
            await process.ready()
        with pytest.raises(ModelProcessDied):
            await process.run(texts, timeout_s=1)


def test_a_model_process_leaves_with_its_parent_in_the_middle_of_a_batch(
    entry: Model, folder: Path
) -> None:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "workers.runtime.server",
        f"--fd={theirs.fileno()}",
        "--device=cpu",
    ]
    command += [f"--model={entry.model_dump_json()}", f"--folder={folder}"]
    with theirs:
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=child_environment(1))
    with child, ours:
        ours.settimeout(WAIT_LIMIT_S)
        with ours.makefile("rb") as stream:
            (length,) = HEADER.unpack(stream.read(HEADER.size))
            assert isinstance(decode_server_message(stream.read(length)), Ready)
        ours.sendall(encode_run(1, long_batch()))
        ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        assert child.wait(timeout=WAIT_LIMIT_S) == 0
