"""vLLM as the engine of a text model, in a pool like a worker's.

Starting vLLM takes a minute, so the tests share one instance. vLLM's command is on the PATH of an
environment where vLLM is installed, such as `PATH=$PATH:/path/to/vllm-env/bin`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from infra.kubernetes.placement import memory_fraction
from shared.errors import BadInput, ConfigurationError, ModelFailed
from shared.models.entry import Gpu
from shared.models.tasks.text import GenerationInput, GenerationResult
from shared.process.process_tree import list_tree
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny
from tests.workers.models.generation.test_llama_cpp import (
    ENDLESS,
    IDS,
    SCHEMA,
    Told,
    later,
    run,
)
from workers.models.base import PreparedPrompt
from workers.models.client import ModelProcessDied
from workers.models.engines import process, program
from workers.models.engines.dialect import EngineRequest, Hardware, Launch
from workers.models.engines.engine_http import TakePart
from workers.models.engines.generation import EngineGeneration
from workers.models.engines.slots import AdapterPermits, EngineSlots, ReadingPermits
from workers.models.engines.vllm import COMMAND, Vllm
from workers.models.generation.prompts import PromptPreparer
from workers.models.generation.vocabulary import Vocabulary
from workers.models.generation.writing import NO_NUMBERS
from workers.models.reports import ItemEnded, StepMessage
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess

START_LIMIT_S = 600.0
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's CPU attention doesn't support smaller heads."""
LONG = {
    "batch": {"max_tokens": 8192, "max_items": 5},
    "generation": {
        "context_tokens": 4096,
        "default_tokens": 16,
        "longest_tokens": 2000,
        "chunk_tokens": 16,
    },
}
QUEUED = 40
"""More texts than slots, so some are unfinished no matter when the test kills their engine."""
BLOCK = 32
"""Only complete blocks of this many tokens are cached."""

pytestmark = pytest.mark.slow(about_s=240)
needs_vllm = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which(COMMAND) is None, reason="`vllm` is not on the PATH"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.tiny_config(400)
    config.update(WIDE | {"max_position_embeddings": 4096})
    return tiny.write_folder(tmp_path_factory.mktemp("tiny-vllm"), config)


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """The parent folder of the engine's sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "SOCKETS", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A PATH with vLLM but no g++, because compiling takes minutes."""
    folder = tmp_path_factory.mktemp("bin")
    for name in (COMMAND, "lscpu", "uname", "sh", "env"):
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_SECRET", "a-secret-of-ours")
        patch.setenv("PATH", str(folder))
        yield


def entry(**changes: Any) -> Any:
    return tiny.entry(engine="vllm", **LONG | changes)


@pytest.fixture(scope="module")
async def engine(
    folder: Path, sockets: Path, without_compiler: None
) -> AsyncIterator[PooledProcess]:
    models = [HostedModel(entry(), folder)]
    async with ModelPool(models, device="cpu", processes=1, start_timeout_s=START_LIMIT_S) as pool:
        yield pool.processes[0]


def compute_here(folder: Path, *items: PreparedPrompt) -> list[Any]:
    """Returns what our own engine computes."""
    model = tiny.open_model(folder, 0, batch=LONG["batch"], generation=LONG["generation"])
    return tiny.run(model, *items)


def read_environments(pid: int) -> bytes:
    """The environment variables of a process and everything it has started.

    Leaves out processes that deny inspection, unless root runs the tests.
    """
    found = b""
    for below in list_tree(pid):
        with suppress(PermissionError):
            found += Path(f"/proc/{below}/environ").read_bytes()
    return found


class TestEngine:
    """Tests that share one engine. The last test kills it."""

    pytestmark = needs_vllm

    async def test_greedy_texts_and_log_probabilities_are_those_of_our_engine(
        self, engine: PooledProcess, folder: Path
    ) -> None:
        items = [tiny.prompt(IDS[:length], 12, logprobs=2) for length in (1, 5, 20, 40)]
        expected, found = compute_here(folder, *items), await run(engine, *items)
        for text, other in zip(found, expected, strict=True):
            assert (text.text, text.finish_reason) == (other.text, other.finish_reason)
            assert text.input_tokens == other.input_tokens
            assert text.output_tokens == other.output_tokens
            for told, wanted in zip(text.logprobs, other.logprobs, strict=True):
                assert told.token == wanted.token
                assert told.logprob == pytest.approx(wanted.logprob, abs=1e-3)
                assert [top.token for top in told.top] == [top.token for top in wanted.top]

    async def test_sampling_fields_and_echo_are_those_of_our_engine(
        self, engine: PooledProcess, folder: Path
    ) -> None:
        options = {"repetition_penalty": 1.4, "logit_bias": {9: -3.0, 7: 8.0}, "min_p": 0.3}
        options |= {"frequency_penalty": 0.5, "presence_penalty": 0.5, "is_echoed": True}
        items = [tiny.prompt(IDS[:length], 12, logprobs=2, **options) for length in (2, 20, 40)]
        expected, found = compute_here(folder, *items), await run(engine, *items)
        for text, other in zip(found, expected, strict=True):
            assert (text.text, text.prompt_text) == (other.text, other.prompt_text)
            assert text.cached_tokens == 0
            for told, wanted in zip(text.prompt_logprobs, other.prompt_logprobs, strict=True):
                assert told.token == wanted.token
                assert told.logprob == pytest.approx(wanted.logprob, abs=1e-3)

    async def test_a_stop_ends_a_text_before_it(self, engine: PooledProcess) -> None:
        (whole,) = await run(engine, tiny.prompt(IDS, 12))
        stop = whole.text[4:6]
        (found,) = await run(engine, tiny.prompt(IDS, 12, stop=[stop]))
        assert found.text == whole.text[: whole.text.index(stop)]
        assert found.finish_reason == "stop"

    async def test_a_seed_gives_the_same_text_in_company(self, engine: PooledProcess) -> None:
        """Negative seeds are valid, and so is a `top_p` of 0."""
        item = tiny.prompt(IDS, 10, temperature=1.0, seed=-5)
        other = tiny.prompt(IDS, 10, temperature=1.0, seed=6)
        (alone,) = await run(engine, item)
        together = await run(engine, item, other, msgspec.structs.replace(item, top_p=0.0))
        (greedy,) = await run(engine, msgspec.structs.replace(item, temperature=0.0))
        assert together[2].text == greedy.text
        assert together[0].text == alone.text
        assert together[1].text != alone.text

    async def test_only_the_owner_of_a_prompt_finds_it_read(self, engine: PooledProcess) -> None:
        """Owners' names may have characters that vLLM rejects in a salt."""
        ids = [60, *IDS, *IDS]
        cached = [
            (await run(engine, tiny.prompt(ids, 4, owner=owner)))[0].cached_tokens
            for owner in ("a@b/c", "a@b/c", "other", "", "")
        ]
        assert cached == [0, len(ids) // BLOCK * BLOCK, 0, 0, 0]

    async def test_its_cache_is_measured_by_the_worker(self, engine: PooledProcess) -> None:
        labels = {"model": entry().name, "device": "cpu"}

        def read(name: str) -> float:
            value = REGISTRY.get_sample_value(f"penstock_engine_{name}", labels)
            assert value is not None
            return value

        queries = await asyncio.to_thread(read, "prefix_cache_queries_total")
        await run(engine, tiny.prompt([61, *IDS, *IDS], 4))
        assert await asyncio.to_thread(read, "prefix_cache_queries_total") > queries
        assert 0 <= await asyncio.to_thread(read, "kv_cache_usage_perc") < 1
        assert await asyncio.to_thread(read, "num_preemptions_total") == 0

    async def test_long_prompts_of_one_owner_hold_a_short_one_up_for_one_part(
        self, engine: PooledProcess
    ) -> None:
        """Each long prompt has nine parts. In order of arrival, the short one would come last."""
        long = [tiny.prompt([5 + at] * 144, 2, owner="noisy") for at in range(4)]
        quiet = tiny.prompt([60] * 10, 2, owner="quiet")
        ended: list[int] = []

        def note(message: StepMessage) -> None:
            if isinstance(message, ItemEnded):
                ended.append(message.slot)

        await engine.run_steps([*long, quiet], timeout_s=WAIT_LIMIT_S, on_message=note)
        assert ended[0] == 4

    @pytest.mark.parametrize("logprobs", [-1, 0])
    async def test_a_schema_is_followed_and_goes_on_behind_what_was_written(
        self, engine: PooledProcess, folder: Path, logprobs: int
    ) -> None:
        properties = {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 5}}
        schema = json.dumps(SCHEMA | {"properties": properties})
        item = tiny.prompt(IDS, 200, json_schema=schema, logprobs=logprobs)
        (found,) = await run(engine, item)
        assert set(json.loads(found.text)) == {"a", "b"}
        ids = tiny.ids_of(folder, found.text)[:3]
        logprobs_before = found.logprobs[:3]
        written = {"written_ids": tiny.packed(ids), "written_logprobs": logprobs_before}
        (resumed,) = await run(engine, msgspec.structs.replace(item, **written))
        assert set(json.loads(resumed.text)) == {"a", "b"}
        if logprobs >= 0:
            assert len(found.logprobs) in (found.output_tokens, found.output_tokens - 1)

    async def test_a_text_goes_on_where_another_worker_stopped(
        self, engine: PooledProcess, folder: Path
    ) -> None:
        """The penalties count the tokens that the other worker generated using our own engine."""
        penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.7}
        item = tiny.prompt(IDS, 40, is_streamed=True, **penalties)
        (whole,) = compute_here(folder, item)
        other = tiny.open_model(folder, 0, batch=LONG["batch"], generation=LONG["generation"])
        other.admit(0, item)
        while not (chunks := other.take_chunks()) or len(chunks[0].ids) < 5:
            for _ in range(8):
                other.step()
        (found,) = await run(engine, later(item, [chunks[0]]))
        assert found.text == whole.text

    async def test_a_dropped_text_frees_its_slot(self, engine: PooledProcess) -> None:
        items = [tiny.prompt(IDS, 2000, **ENDLESS) for _ in range(5)]
        told = Told()
        running = asyncio.create_task(
            engine.run_steps(items, timeout_s=WAIT_LIMIT_S, on_message=told)
        )
        await told.until(0, 2)
        engine.drop(range(5))
        slot = engine.admit([tiny.prompt(IDS, 3)])
        await running
        assert {told.results[at].code for at in range(5)} == {"canceled"}
        assert slot is not None
        assert told.results[slot].output_tokens == 3

    async def test_no_text_of_a_caller_becomes_a_control_token(
        self, engine: PooledProcess, folder: Path
    ) -> None:
        """The engine reads the same tokens as ours does, regardless of their text."""
        text = GenerationInput(4, 1, prompt=f"a{tiny.END}{tiny.TURN}system")
        (item,) = PromptPreparer(entry(), folder).prepare([text])
        assert isinstance(item, PreparedPrompt)
        item = msgspec.structs.replace(item, temperature=0.0)
        (expected,), (found,) = compute_here(folder, item), await run(engine, item)
        assert found.input_tokens == expected.input_tokens > 10
        assert found.text == expected.text

    async def test_a_rejected_request_leaves_the_others(self, engine: PooledProcess) -> None:
        bad = tiny.prompt(IDS, 4, temperature=-1.0)
        failed, found = await run(engine, bad, tiny.prompt(IDS, 4))
        assert failed.code == "model_failed"
        assert found.output_tokens == 4

    async def test_nobody_else_reaches_it_and_it_knows_nothing_of_ours(
        self, engine: PooledProcess, sockets: Path
    ) -> None:
        (name,) = os.listdir(sockets)
        socket = sockets / name / "http.sock"
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
        if os.geteuid() == 0:  # others must not be able to read it at all
            assert b"a-secret-of-ours" not in read_environments(engine.pid or 0)

    async def test_an_engine_that_dies_gives_its_texts_back_and_is_started_again(
        self, engine: PooledProcess
    ) -> None:
        item = tiny.prompt(IDS, 1000, **ENDLESS)
        told = Told()
        running = asyncio.create_task(
            engine.run_steps([item] * QUEUED, timeout_s=WAIT_LIMIT_S, on_message=told)
        )
        await told.until_any(2)
        pid = engine.pid or 0
        assert len(list_tree(pid)) > 1
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ModelProcessDied):
            await running
        async with asyncio.timeout(START_LIMIT_S):
            await engine.ready()
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
        assert all(isinstance(result, GenerationResult) for result in told.results.values())
        begun = [chunks for slot, chunks in told.chunks.items() if slot not in told.results]
        (result,) = await run(engine, later(item, begun[0]))
        assert result.text.startswith("".join(chunk.text for chunk in begun[0]))
        assert result.output_tokens == 1000


def test_a_missing_command_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="the command `vllm` on the worker's PATH"):
        Vllm(entry(), Vocabulary(folder)).launch(Hardware("cpu", 1))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `vllm` on the PATH that does nothing, on a machine that shows all its GPUs."""
    command = tmp_path / COMMAND
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def option(launch: Launch, name: str) -> str:
    """The value of an option on vLLM's command line."""
    command_line: list[str] = launch.settings["command"]
    return command_line[command_line.index(f"--{name}") + 1]


def test_each_place_sees_its_own_gpu(
    folder: Path, command: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = Vllm(entry(), Vocabulary(folder))
    launch = dialect.launch(Hardware("cuda:1", 1, 0.5))
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert option(launch, "gpu-memory-utilization") == "0.5"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    launch = dialect.launch(Hardware("cuda:1", 1))
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"


@pytest.mark.parametrize("share", [2, 3, 22])
def test_workers_that_share_a_gpu_leave_room_for_their_contexts(
    folder: Path, command: None, share: int
) -> None:
    """With MPS, each worker has an equal part of the GPU, which includes its CUDA context."""
    fraction = memory_fraction(Gpu(type="l4", share=share, sharing="mps"))
    launch = Vllm(entry(), Vocabulary(folder)).launch(Hardware("cuda:0", 1, fraction))
    assert 0.88 / share < float(option(launch, "gpu-memory-utilization")) <= 0.92 / share


def test_nothing_is_compiled_with_nvcc_when_vllm_starts(folder: Path, command: None) -> None:
    launch = Vllm(entry(), Vocabulary(folder)).launch(Hardware("cuda:0", 1))
    assert launch.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_a_model_is_split_between_its_gpus(folder: Path, command: None) -> None:
    dialect = Vllm(entry(gpu={"type": "l4", "count": 2}), Vocabulary(folder))
    launch = dialect.launch(Hardware("cuda:2", 1))
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert option(launch, "tensor-parallel-size") == "2"
    on_cpu = dialect.launch(Hardware("cpu", 1))
    assert "--tensor-parallel-size" not in on_cpu.settings["command"]


def test_a_gpu_decides_how_much_is_kept_and_read_at_a_time(folder: Path, command: None) -> None:
    generation = {name: size for name, size in LONG["generation"].items() if name != "chunk_tokens"}
    dialect = Vllm(entry(generation=generation), Vocabulary(folder))
    gpu, cpu = (dialect.launch(Hardware(device, 1)) for device in ("cuda:0", "cpu"))
    assert "--num-gpu-blocks-override" not in gpu.settings["command"]
    assert "--kv-cache-memory-bytes" not in gpu.settings["command"]
    assert int(option(cpu, "num-gpu-blocks-override")) * BLOCK >= entry().budget
    assert int(option(gpu, "max-num-batched-tokens")) > 2048
    assert int(option(cpu, "max-num-batched-tokens")) < 1024
    chosen = Vllm(entry(), Vocabulary(folder)).launch(Hardware("cuda:0", 1))
    assert int(option(chosen, "max-num-batched-tokens")) < 1024


def test_vllm_has_more_time_to_start_unless_the_entry_sets_it() -> None:
    assert entry().startup_s == 900
    assert entry(startup_s=200).startup_s == 200
    assert tiny.entry().startup_s == 180


@pytest.mark.parametrize("more", [{}, {"engine": "auto"}, {"engine": "vllm"}])
def test_the_entry_of_the_first_release_selects_the_engine(more: dict[str, str]) -> None:
    old = tiny.entry(backend="vllm", **more)
    assert (old.engine, old.backend, old.precision) == ("vllm", "auto", "fp32")


def test_the_entry_of_the_first_release_selects_no_other_engine() -> None:
    with pytest.raises(ValueError, match="Input should be 'auto', 'torch' or 'onnx'"):
        tiny.entry(backend="vllm", engine="llama.cpp")


class Answer:
    """A server's response."""

    def __init__(self, body: object, status: int = 200) -> None:
        self._data = msgspec.json.encode(body)
        self.status = status

    async def read(self) -> bytes:
        return self._data

    async def follow(self, take: TakePart) -> bool:
        return take(b"data: " + self._data + b"\n\ndata: [DONE]\n\n")


class Server:
    """Returns the next canned response to each request and records the requests."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[Mapping[str, Any]] = []

    @asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        assert path == "/v1/completions"
        self.asked.append(body)
        yield self._answers.pop(0)


def written(*tokens: int, prompt: Sequence[int] = (), ends: bool = False) -> dict[str, Any]:
    """A completion with these tokens, and with log probabilities if a prompt is echoed."""
    choice: dict[str, Any] = {"token_ids": tokens, "finish_reason": "stop" if ends else None}
    if prompt:
        names = [f"token_id:{token}" for token in (*prompt, *tokens)]
        chances: list[float | None] = [None, *(-1.0 for _ in names[1:])]
        rows = [None, *({name: -1.0} for name in names[1:])]
        choice["logprobs"] = {"tokens": names, "token_logprobs": chances, "top_logprobs": rows}
    return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}


def asked_of(item: PreparedPrompt, **more: Any) -> EngineRequest:
    return EngineRequest(IDS, 0, "owner", keeps=False, tokens=4, **more)


def ended_by(reason: str) -> dict[str, Any]:
    """A completion without tokens."""
    return {"choices": [{"finish_reason": reason}]}


BAD_SCHEMA = {"error": {"message": "grammar error", "code": 400}}
DEAD = {"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}}
NO_NUMBER = {
    "choices": [
        {
            "token_ids": [5],
            "logprobs": {
                "tokens": ["token_id:5"],
                "token_logprobs": [None],
                "top_logprobs": [{"token_id:5": None}],
            },
        }
    ]
}


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (Answer(DEAD, 500), ConnectionError, "engine's core has exited"),
        (Answer({"detail": "Not Found"}, 404), ModelFailed, "returned status 404"),
        (Answer({"error": {"message": "a prompt"}}, 400), ModelFailed, "rejected the text"),
        (Answer(BAD_SCHEMA, 400), ModelFailed, "rejected the text"),
        (Answer("text"), ModelFailed, "a response that is not valid JSON"),
        (Answer(NO_NUMBER), ModelFailed, NO_NUMBERS),
        (Answer(ended_by("abort")), ConnectionError, "is shutting down"),
        (Answer(ended_by("error")), ModelFailed, "stopped generating the text: error"),
    ],
)
async def test_bad_answers_are_told_apart(
    folder: Path, answer: Answer, error: type[Exception], reason: str
) -> None:
    """A schema can be at fault only if it was sent, which isn't the case for part of a text."""
    item = tiny.prompt(IDS, 4, logprobs=0, json_schema="{}")
    with pytest.raises(error, match=reason):
        await Vllm(entry(), Vocabulary(folder)).ask(Server(answer).post, item, asked_of(item))


async def test_a_schema_that_vllm_rejects_is_the_callers(folder: Path) -> None:
    item = tiny.prompt(IDS, 4, json_schema="{}", schema_field="response_format")
    server = Server(Answer(BAD_SCHEMA, 400))
    dialect = Vllm(entry(), Vocabulary(folder))
    with pytest.raises(BadInput, match="too complex") as caught:
        await dialect.stream(server.post, item, asked_of(item, counts=False), lambda replies: False)
    assert caught.value.field == "response_format"
    assert "grammar" in server.asked[0]["structured_outputs"]


async def compute(folder: Path, item: PreparedPrompt, server: Server) -> EngineGeneration:
    """Generates a text from a server's responses."""
    dialect = Vllm(entry(), Vocabulary(folder))
    text = EngineGeneration(0, item, dialect.vocabulary)
    held = EngineSlots(1), ReadingPermits(1), AdapterPermits()
    await text.compute(dialect, server.post, *held, 1000, lambda *work: None)
    return text


async def test_a_prompt_is_echoed_once_though_its_text_is_written_in_pieces(folder: Path) -> None:
    """The text has penalties and was begun by another worker."""
    item = tiny.prompt(
        IDS[:3], 4, logprobs=0, is_echoed=True, frequency_penalty=0.5, written_ids=tiny.packed([9])
    )
    server = Server(
        Answer(written(7, prompt=[*IDS[:3], 9])),
        *(Answer(written(token)) for token in (20, 21, 22)),
    )
    text = await compute(folder, item, server)
    result = text.result()
    assert isinstance(result, GenerationResult)
    assert len(result.prompt_logprobs) == 3
    assert [body.get("echo", False) for body in server.asked] == [True, False, False, False]


async def test_an_answer_without_tokens_is_not_asked_for_again(folder: Path) -> None:
    with pytest.raises(ModelFailed, match="a response without tokens"):
        await compute(folder, tiny.prompt(IDS[:3], 4), Server(*[Answer(ended_by("length"))] * 2))


COMMAND_OF_TEST = """
import http.server, os, socketserver, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    address_string = log_message = lambda *_: ""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with socketserver.UnixStreamServer(sys.argv[-1], Handler) as server:
    server.serve_forever()
"""


def test_a_command_and_all_it_has_started_end_with_the_worker(tmp_path: Path) -> None:
    """A killed worker can't stop them, but its end of a pipe closes, and the command exits at
    once.
    """
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as parent:
        folder = Path(parent, "engine")
        folder.mkdir()
        settings = {"command": [sys.executable, "-c", COMMAND_OF_TEST], "key_variable": "KEY"}
        settings |= {"socket": str(folder / "http.sock"), "key": "key"}
        with subprocess.Popen(
            [sys.executable, "-I", "-B", program.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as running:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write(msgspec.json.encode(settings) + b"\n")
            running.stdin.flush()
            assert running.stdout.readline().decode().strip() == program.READY
            group = list_tree(running.pid)
            assert len(group) == 3
            running.stdin.close()
            assert running.wait(WAIT_LIMIT_S) == -signal.SIGKILL
        assert not folder.exists()
        wait_until_gone(group)


def wait_until_gone(pids: Sequence[int]) -> None:
    """Waits until killed processes have exited. The process that adopts them may leave zombies."""
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    for pid in pids:
        while (state := process_state(pid)) not in ("", "Z", "X"):
            assert time.monotonic() < deadline_s, state
            time.sleep(0.01)


def process_state(pid: int) -> str:
    """The state letter in /proc. Empty: it has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "int4"}, "int4 is not supported by engine vllm"),
        ({"precision": "bf16", "gpu": {"type": "t4"}}, "bf16 is not supported by t4 GPUs"),
        (
            {"generation": LONG["generation"] | {"lookup_tokens": 4}},
            "generation.lookup_tokens: is not supported by engine vllm",
        ),
        ({"backend": "torch"}, "backend: is not supported by engine vllm"),
    ],
)
def test_what_vllm_has_not_is_refused_with_the_catalog(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        entry(**changes)
