"""Engines that die at each point in a response.

Their texts must be handed back so that another worker can continue them. A failure would end the
texts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import signal
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from re import compile as pattern
from typing import Any

import pytest

from shared.errors import ConfigurationError, ModelFailed
from shared.models.tasks.text import GenerationResult
from shared.process.process_tree import list_tree
from tests.limits import WAIT_LIMIT_S
from tests.waiting import until
from tests.workers.models.generation import fake_engine, tiny
from tests.workers.models.generation.test_llama_cpp import IDS, Told, later
from tests.workers.models.generation.test_vllm import (
    COMMAND_OF_TEST,
    read_environments,
    wait_until_gone,
)
from workers.models.base import PreparedPrompt
from workers.models.client import ModelProcessDied
from workers.models.engines import process, steps
from workers.models.engines.client import EngineClient
from workers.models.engines.dialect import EngineDialect, Hardware, Launch
from workers.models.engines.llama_cpp import LlamaCpp
from workers.models.engines.process import EngineProcess
from workers.models.engines.steps import Engine, EngineSteps
from workers.models.engines.vllm import Vllm
from workers.models.generation.vocabulary import Vocabulary
from workers.models.reports import StepMessage
from workers.models.step_shares import StepRoom

TOKENS = 12
PART_TOKENS = 1000
"""Longer prompts are read in parts."""
FAKE = (fake_engine.__file__, "vllm", "stream", "")
PLACES_IN_STREAM = (
    "before the head",
    "after the head",
    "between events",
    "in an event",
    "in a chunk",
    "behind an empty stream",
    "behind a stream without an end",
)
PLACES_IN_BODY = ("before the head", "after the head", "in the body")
DIALECTS: dict[str, type[EngineDialect]] = {"llama.cpp": LlamaCpp, "vllm": Vllm}

pytestmark = pytest.mark.slow(about_s=20)


FAILS_ONCE = """
import pathlib, runpy, sys

starts = pathlib.Path(__file__).with_name("starts")
number = starts.write_text(starts.read_text() + "+")
place = "without a context" if number == 2 else ""
sys.argv[1:1] = ["vllm", "body", place]
runpy.run_path({fake_engine!r}, run_name="__main__")
"""
"""A `vllm` whose second start fails."""


RESERVES_ROOM = """
import runpy, sys

sys.argv[1:1] = ["vllm", "body", "room for {tokens}"]
runpy.run_path({fake_engine!r}, run_name="__main__")
"""
"""A `vllm` with room for this many tokens."""
CAUSE = (
    "(EngineCore pid=7) ERROR 11-30 16:00:30 [core.py:1510] ValueError: To serve at least one "
    "request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (5.2 GiB). Based on the available memory, the estimated "
    "maximum model length is 42592."
)
EXPLAINS_EARLY = f"""
import sys

head, _, error = {CAUSE!r}.partition("ValueError")
print(head + "EngineCore failed to start.")
print(head + '  File "core.py", line 1482, in run_engine_core')
print({CAUSE!r})
for line in range(60):
    print(f'  File "core_client.py", line {{line}}, in __init__')
print("RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(1)
"""
"""A `vllm` that fails like version 0.32, in which the cause is far above the last line."""


FLOODS = "while True: print('x' * 5000, flush=True)"
LEAVES_OUTPUT_OPEN = """
import subprocess, sys, time

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
time.sleep(600)
"""
"""Its process is in a different process group, which nothing kills."""


def launch_of(*arguments: str) -> Launch:
    command = {"command": [sys.executable, *arguments], "key_variable": "KEY"}
    return Launch(command, context_path="/", context_keys=(), safe_lines=pattern("a^"))


@asynccontextmanager
async def opened(folder: Path, protocol: str, answer: str, place: str) -> AsyncIterator[Engine]:
    """Starts an engine that dies at a given point in this kind of response.

    If no point is given, the engine survives.
    """
    launch = launch_of(fake_engine.__file__, protocol, answer, place)
    entry = tiny.entry(engine=protocol, precision="auto")
    server = await EngineProcess.start(launch, "key", 1, WAIT_LIMIT_S)
    try:
        dialect = DIALECTS[protocol](entry, Vocabulary(folder))
        yield Engine(server, dialect, 1, PART_TOKENS, shares_with_all=False)
    finally:
        await server.end()


async def compute(engine: Engine, item: PreparedPrompt, told: Told) -> None:
    run = EngineSteps(engine, StepRoom(engine.dialect.entry), 0, told)
    try:
        await run.run([item], WAIT_LIMIT_S)
    finally:
        await asyncio.sleep(0)  # the last messages are delivered


async def test_an_error_on_the_last_result_ends_the_run(folder: Path) -> None:
    def refuse(message: StepMessage) -> None:
        raise LookupError("no such item")

    async with opened(folder, "vllm", "stream", "") as engine:
        run = EngineSteps(engine, StepRoom(engine.dialect.entry), 0, refuse)
        with pytest.raises(LookupError, match="no such item"):
            await run.run([tiny.prompt(IDS, TOKENS)], WAIT_LIMIT_S)


@pytest.mark.parametrize("protocol", DIALECTS)
@pytest.mark.parametrize(
    ("answer", "place"),
    [
        *(("stream", place) for place in PLACES_IN_STREAM),
        *(("body", place) for place in PLACES_IN_BODY),
    ],
)
async def test_a_text_is_given_back_wherever_its_engine_dies(
    folder: Path, protocol: str, answer: str, place: str
) -> None:
    # llama.cpp's stream doesn't include log probabilities, so the text is written in pieces.
    logprobs = 0 if (protocol, answer) == ("llama.cpp", "body") else -1
    item = tiny.prompt(IDS, TOKENS, is_streamed=True, logprobs=logprobs)
    told = Told()
    async with opened(folder, protocol, answer, place) as engine:
        with pytest.raises(ModelProcessDied, match="the engine closed the connection"):
            await compute(engine, item, told)
    assert not told.results
    if logprobs >= 0:
        return
    chunks = told.chunks.get(0, [])
    item, told = (later(item, chunks) if chunks else item), Told()
    async with opened(folder, protocol, answer, "") as engine:
        await compute(engine, item, told)
    result = told.results[0]
    assert isinstance(result, GenerationResult)
    assert result.output_tokens == TOKENS


@pytest.mark.parametrize("protocol", DIALECTS)
async def test_a_text_that_is_complete_survives_its_engine(folder: Path, protocol: str) -> None:
    """All its tokens have arrived, but the stream was not closed properly."""
    item = tiny.prompt(IDS, fake_engine.TOKENS_BEFORE, is_streamed=True)
    told = Told()
    async with opened(folder, protocol, "stream", "behind a stream without an end") as engine:
        await compute(engine, item, told)
    assert told.results[0].output_tokens == fake_engine.TOKENS_BEFORE


async def test_a_text_of_an_engine_that_shuts_down_is_given_back(folder: Path) -> None:
    told = Told()
    async with opened(folder, "vllm", "stream", "as it shuts down") as engine:
        with pytest.raises(ModelProcessDied):
            await compute(engine, tiny.prompt(IDS, TOKENS, is_streamed=True), told)
    assert not told.results


async def test_a_text_can_be_dropped_when_its_engine_has_just_died(folder: Path) -> None:
    told = Told()
    async with opened(folder, "vllm", "stream", "after the head") as engine:
        run = EngineSteps(engine, StepRoom(engine.dialect.entry), 0, told)
        before = asyncio.all_tasks()
        run.admit([tiny.prompt(IDS, TOKENS)])
        (task,) = asyncio.all_tasks() - before
        await asyncio.wait([task])
        run.drop([0])
        await asyncio.sleep(0)
    assert told.results[0].code == "canceled"


async def test_a_text_does_not_wait_for_one_that_has_no_slot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "GATHER_S", 10 * WAIT_LIMIT_S)
    told = Told()
    async with opened(folder, "vllm", "stream", "hang") as engine:
        run = EngineSteps(engine, StepRoom(engine.dialect.entry), 0, told)
        items = [tiny.prompt(IDS, TOKENS, is_streamed=True) for _ in range(2)]
        running = asyncio.create_task(run.run(items, WAIT_LIMIT_S))
        await told.until(0, fake_engine.TOKENS_BEFORE)
        run.drop([0, 1])
        await running


async def end() -> None:
    engine = await EngineProcess.start(launch_of(*FAKE), "key", 1, WAIT_LIMIT_S)
    await engine.end()


async def end_canceled() -> None:
    engine = await EngineProcess.start(launch_of(*FAKE), "key", 1, WAIT_LIMIT_S)
    ending = asyncio.create_task(engine.end())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


async def start_canceled() -> None:
    starting = asyncio.create_task(
        EngineProcess.start(launch_of(*FAKE), "key", 1, WAIT_LIMIT_S),
    )
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


@pytest.mark.parametrize("protocol", DIALECTS)
async def test_a_text_dropped_while_its_prompt_is_read_frees_its_slot(
    folder: Path, tmp_path: Path, protocol: str
) -> None:
    """The engine has one slot, and hangs while it reads the first part of the prompt."""
    told, arrived = Told(), tmp_path / "arrived"
    async with opened(folder, protocol, "body", f"hang after {arrived}") as engine:
        run = EngineSteps(engine, StepRoom(engine.dialect.entry), 0, told)
        long = tiny.prompt(IDS * (2 * PART_TOKENS // len(IDS)), 2, is_streamed=True)
        running = asyncio.create_task(run.run([long], 20))
        await until(arrived.exists)
        run.drop([0])
        slot = run.admit([tiny.prompt(IDS, 3, is_streamed=True)])
        await running
        await asyncio.sleep(0)  # the last messages are delivered
    assert told.results[0].code == "canceled"
    assert slot is not None
    assert told.results[slot].output_tokens == 3


async def test_an_engine_whose_restart_failed_is_started_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vllm(tmp_path, monkeypatch, FAILS_ONCE.format(fake_engine=fake_engine.__file__))
    (tmp_path / "starts").touch()
    client = await EngineClient.start(
        tiny.entry(engine="vllm"),
        Vocabulary(folder),
        {},
        Hardware("cpu", 1),
        WAIT_LIMIT_S,
        no_room,
    )
    serving, told = asyncio.create_task(client.serve(lambda: None)), Told()
    try:
        await client.evict([0], lambda: None)
        async with asyncio.timeout(WAIT_LIMIT_S):
            failed = await client.run_steps([tiny.prompt(IDS, TOKENS)], WAIT_LIMIT_S, told)
            assert failed.failure is not None
            assert "did not report its context size" in failed.failure.message
            assert (client.pid, client.residency.resident) == (0, [])
            ended = await client.run_steps([tiny.prompt(IDS, TOKENS)], WAIT_LIMIT_S, told)
            await told.until(0, TOKENS)
        assert ended.failure is None
        assert told.results[0].output_tokens == TOKENS
        assert client.residency.resident == [0]
        assert (tmp_path / "starts").read_text() == "+++"
    finally:
        await client.close()
        serving.cancel()


def install_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Puts a command `vllm` that runs this code on the PATH."""
    command, program = folder / "vllm", folder / "vllm.py"
    program.write_text(code)
    # A path in a "#!" line can't contain spaces.
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program))} "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


async def start_vllm(folder: Path) -> EngineClient:
    vocabulary = Vocabulary(folder)
    vocabulary.load()
    entry = tiny.entry(engine="vllm")
    return await EngineClient.start(
        entry, vocabulary, {}, Hardware("cpu", 1), WAIT_LIMIT_S, no_room
    )


async def test_a_failed_start_is_explained_by_its_cause(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vllm(tmp_path, monkeypatch, EXPLAINS_EARLY)
    with pytest.raises(ConfigurationError) as caught:
        await start_vllm(folder)
    (_, *lines) = str(caught.value.message).splitlines()
    assert lines == [CAUSE]


@pytest.mark.parametrize(("tokens", "fits"), [(tiny.entry().budget - 1, False), (10**6, True)])
async def test_a_budget_that_exceeds_the_memory_is_refused_with_its_maximum(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, fits: bool
) -> None:
    code = RESERVES_ROOM.format(fake_engine=fake_engine.__file__, tokens=tokens)
    install_vllm(tmp_path, monkeypatch, code)
    if fits:
        await (await start_vllm(folder)).close()
        return
    with pytest.raises(ConfigurationError, match=f"set it to at most {tokens}, or use") as caught:
        await start_vllm(folder)
    assert caught.value.field == "batch.max_tokens"


async def test_an_engine_finds_the_folders_for_its_caches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "kernels"))
    async with opened(folder, "vllm", "stream", "") as engine:
        environment = read_environments(engine.process.pid).split(b"\0")
    assert f"HOME={tmp_path}".encode() in environment
    assert f"VLLM_CACHE_ROOT={tmp_path / 'kernels'}".encode() in environment


async def no_room() -> bool:
    return False


async def fail_to_start(code: str) -> None:
    with pytest.raises(ModelFailed, match="was not ready"):
        await EngineProcess.start(launch_of("-c", code), "key", 1, 0.5)


@pytest.mark.parametrize(
    "use",
    [
        end,
        end_canceled,
        start_canceled,
        partial(fail_to_start, FLOODS),
        partial(fail_to_start, LEAVES_OUTPUT_OPEN),
    ],
)
def test_an_engine_leaves_nothing_open(
    use: Callable[[], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # their paths must be short
        monkeypatch.setattr(process, "SOCKETS", sockets)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asyncio.run(use())
            gc.collect()
        assert os.listdir(sockets) == []
    assert [str(warning.message) for warning in caught] == []


async def test_an_end_is_noticed_though_a_process_of_the_engine_lives_on() -> None:
    """It has inherited the engine's output."""
    engine = await EngineProcess.start(launch_of("-c", COMMAND_OF_TEST), "key", 1, WAIT_LIMIT_S)
    try:
        group = list_tree(engine.pid)
        assert len(group) == 3
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_LIMIT_S):
            assert await engine.wait() == -signal.SIGKILL
        await asyncio.to_thread(wait_until_gone, group)
    finally:
        await engine.end()
