"""llama.cpp as the engine of a text model, in a pool like a worker's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import BadInput, ConfigurationError
from shared.models.tasks.text import GenerationInput, TokenChunk
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny
from workers.models.base import PreparedPrompt
from workers.models.client import ModelProcessDied
from workers.models.engines import process, steps
from workers.models.engines.dialect import Hardware
from workers.models.engines.llama_cpp import LlamaCpp
from workers.models.generation import vocabulary
from workers.models.generation.prompts import PromptPreparer
from workers.models.generation.vocabulary import Vocabulary
from workers.models.reports import Chunks, Failure, ItemEnded, Preempted, StepMessage
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess

pytestmark = [
    pytest.mark.slow(about_s=60),
    pytest.mark.anyio,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="the extra `text` is not installed"
    ),
]

IDS = list(range(5, 45))
LONG = {
    "batch": {"max_tokens": 8192, "max_items": 1},
    "generation": {
        "context_tokens": 4096,
        "default_tokens": 16,
        "longest_tokens": 2000,
        "chunk_tokens": 16,
    },
}
"""Texts that are still running when they are interrupted."""
ENDLESS = {"logit_bias": {0: -100.0}, "is_streamed": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string", "minLength": 900},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def weights(folder: Path) -> Path:
    from tests.workers.models.generation.gguf_file import write_gguf

    write_gguf(folder)
    return folder


def entry(**changes: Any) -> Any:
    return tiny.entry(engine="llama.cpp", precision="auto", **changes)


@asynccontextmanager
async def opened(folder: Path, **changes: Any) -> AsyncIterator[PooledProcess]:
    models = [HostedModel(entry(**changes), folder)]
    async with ModelPool(models, device="cpu", processes=1, start_timeout_s=WAIT_LIMIT_S) as pool:
        yield pool.processes[0]


@pytest.fixture
async def engine(weights: Path) -> AsyncIterator[PooledProcess]:
    async with opened(weights) as process:
        yield process


class Told:
    """The results and chunks of the items in a run."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.chunks: dict[int, list[TokenChunk]] = {}
        self.preempted: list[int] = []
        self.changed = asyncio.Event()

    def __call__(self, message: StepMessage) -> None:
        if isinstance(message, ItemEnded):
            self.results[message.slot] = message.done.results[0]
        elif isinstance(message, Chunks | Preempted):
            for slot, chunk in message.chunks.items():
                self.chunks.setdefault(slot, []).append(chunk)
        if isinstance(message, Preempted):
            self.preempted += message.slots
        self.changed.set()

    def written(self, slot: int) -> int:
        """Number of an item's tokens that have been reported."""
        return sum(len(chunk.ids) for chunk in self.chunks.get(slot, ()))

    async def until(self, slot: int, tokens: int) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while self.written(slot) < tokens and slot not in self.results:
                self.changed.clear()
                await self.changed.wait()

    async def until_any(self, tokens: int) -> None:
        """Waits until an unfinished item has reported this many tokens."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not any(
                slot not in self.results and self.written(slot) >= tokens for slot in self.chunks
            ):
                self.changed.clear()
                await self.changed.wait()


async def run(engine: PooledProcess, *items: PreparedPrompt) -> list[Any]:
    """Returns the outcomes of items that are admitted together."""
    told = Told()
    await engine.run_steps(items, timeout_s=WAIT_LIMIT_S, on_message=told)
    return [told.results[slot] for slot in range(len(items))]


def later(item: PreparedPrompt, chunks: Sequence[TokenChunk]) -> PreparedPrompt:
    """Returns the item as a different worker would receive it."""
    return msgspec.structs.replace(
        item,
        written_ids=tiny.packed([token for chunk in chunks for token in chunk.ids]),
        written_text="".join(chunk.text for chunk in chunks),
        written_cached_tokens=chunks[0].cached_tokens,
        written_logprobs=[one for chunk in chunks for one in chunk.logprobs],
    )


async def test_it_writes_what_transformers_writes(
    engine: PooledProcess, folder: Path, reference: tiny.Generate
) -> None:
    wanted, _ = reference(IDS, 20)
    text = Vocabulary(folder)
    outcomes = await run(engine, *[tiny.prompt(IDS[at:], 20) for at in (0, 0, 3)])
    plain = b"".join(map(text.token_bytes, wanted)).decode(errors="replace")
    assert [one.text for one in outcomes[:2]] == [plain, plain]
    assert outcomes[0].output_tokens == len(wanted)


async def test_log_probabilities_are_those_of_the_model_whole_characters_or_not(
    engine: PooledProcess, reference: tiny.Generate
) -> None:
    """The model's tokens are bytes, most of which are not complete characters."""
    wanted, chances = reference(IDS, 12)
    (result,) = await run(engine, tiny.prompt(IDS, 12, logprobs=2))
    assert len(result.logprobs) == len(wanted)
    for at, (token, told) in enumerate(zip(wanted, result.logprobs, strict=True)):
        assert told.logprob == pytest.approx(float(chances[at][token]), abs=0.05)
        assert len(told.top) == 2
        assert told.top[0].logprob == pytest.approx(float(chances[at].max()), abs=0.05)


@pytest.mark.parametrize("logprobs", [-1, 0])
async def test_a_schema_is_followed_and_goes_on_behind_what_was_written(
    weights: Path, logprobs: int
) -> None:
    async with opened(weights, **LONG) as engine:
        await _interrupt_schema(engine, logprobs)


async def _interrupt_schema(engine: PooledProcess, logprobs: int) -> None:
    item = tiny.prompt(
        IDS,
        400,
        json_schema=json.dumps(SCHEMA),
        is_streamed=True,
        temperature=1.0,
        logprobs=logprobs,
        seed=5,
    )
    told = Told()
    running = asyncio.create_task(engine.run_steps([item], timeout_s=WAIT_LIMIT_S, on_message=told))
    await told.until(0, 1)
    engine.preempt([0])
    await running
    assert told.preempted == [0]
    (result,) = await run(engine, later(item, told.chunks[0]))
    begun = "".join(chunk.text for chunk in told.chunks[0])
    assert begun
    assert result.text.startswith(begun)
    if result.finish_reason == "stop":
        assert set(json.loads(result.text)) == {"a", "b"}
    if logprobs >= 0:
        assert len(result.logprobs) == result.output_tokens


async def test_huge_lists_in_a_schema_take_no_memory(engine: PooledProcess) -> None:
    """The engine's library would make a rule for each element that a list may have."""
    schema = {
        "type": "array",
        "minItems": 2,
        "maxItems": 10**6,
        "items": {"type": "array", "maxItems": 10**6, "items": {"const": 1}},
        "default": {"minItems": -(10**9)},
    }
    given = {"json_schema": json.dumps(schema), "is_streamed": True, "temperature": 1.0}
    await run(engine, tiny.prompt(IDS, 4, **given | {"json_schema": '{"type": "array"}'}))
    before_mb = peak_mb(engine)
    (result,) = await run(engine, tiny.prompt(IDS, 40, **given))
    assert result.text.lstrip().startswith("[")
    assert peak_mb(engine) - before_mb < 200


def peak_mb(engine: PooledProcess) -> float:
    status = Path(f"/proc/{engine.pid}/status").read_text(encoding="utf-8")
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


async def test_penalties_count_what_was_written_only(
    engine: PooledProcess, reference: tiny.Generate
) -> None:
    """The first token is in the prompt, but the model generates it anyway."""
    wanted, _ = reference(IDS, 1)
    prompt = [*IDS, *wanted, *IDS]
    (plain,) = await run(engine, tiny.prompt(prompt, 1))
    (first,) = await run(engine, tiny.prompt(prompt, 1, presence_penalty=2.0))
    assert first.text == plain.text
    (often,) = await run(engine, tiny.prompt([7], 30))
    (less,) = await run(engine, tiny.prompt([7], 30, frequency_penalty=2.0, presence_penalty=2.0))
    assert often.text != less.text


async def test_a_negative_seed_is_valid(engine: PooledProcess) -> None:
    (result,) = await run(engine, tiny.prompt(IDS, 4, temperature=1.0, seed=-5))
    assert result.output_tokens == 4


async def test_only_the_owner_of_a_prompt_finds_it_read(engine: PooledProcess) -> None:
    mine = tiny.prompt(IDS, 4, owner="a")
    theirs = tiny.prompt(IDS, 4, owner="b")
    assert [one.cached_tokens for one in await run(engine, mine)] == [0]
    assert [one.cached_tokens for one in await run(engine, theirs)] == [0]
    assert [one.cached_tokens for one in await run(engine, mine)] == [len(IDS) - 1]
    for _ in range(6):  # every slot has been used
        (result,) = await run(engine, tiny.prompt(IDS, 2, owner="c"))
    assert result.cached_tokens == len(IDS) - 1
    (nobodys,) = await run(engine, tiny.prompt(IDS, 2))
    assert nobodys.cached_tokens == 0


async def test_other_choices_of_a_prompt_count_as_cached(engine: PooledProcess) -> None:
    item = tiny.prompt(IDS, 6, owner="a", temperature=1.0)
    other = msgspec.structs.replace(item, seed=9)
    first, second = await run(engine, item, other)
    assert (first.cached_tokens, second.cached_tokens) == (0, len(IDS) - 1)


async def test_long_prompts_of_one_owner_hold_a_short_one_up_for_one_part(
    weights: Path,
) -> None:
    """Each long prompt has nine parts. In order of arrival, the short one would come last."""
    generation = {"context_tokens": 200, "default_tokens": 8, "longest_tokens": 20}
    many = {"max_tokens": 1000, "max_items": 5}
    changes = {"generation": generation | {"chunk_tokens": 16}, "batch": many}
    async with opened(weights, **changes) as engine:
        long = [tiny.prompt([5 + at] * 144, 2, owner="noisy", is_streamed=True) for at in range(4)]
        quiet = tiny.prompt([60] * 10, 2, owner="quiet", is_streamed=True)
        ended: list[int] = []

        def note(message: StepMessage) -> None:
            if isinstance(message, ItemEnded):
                ended.append(message.slot)

        await engine.run_steps([*long, quiet], timeout_s=WAIT_LIMIT_S, on_message=note)
    assert ended[0] == 4


@pytest.mark.parametrize(("slots", "context_tokens"), [(4, 256), (8, 768)])
async def test_each_slot_has_its_own_cache_if_the_budget_has_room(
    weights: Path, slots: int, context_tokens: int
) -> None:
    """A text may take up 160 of 640 tokens. Sizes are multiples of 256."""
    changed = entry(batch={"max_tokens": 640, "max_items": slots})
    launch = LlamaCpp(changed, Vocabulary(weights)).launch(Hardware("cpu", 1))
    server = await process.EngineProcess.start(launch, "a-key", 1, WAIT_LIMIT_S)
    try:
        assert await server.context_tokens() == context_tokens
    finally:
        await server.end()


@pytest.mark.parametrize("slots", [4, 8])
async def test_all_of_the_budget_is_of_use_whatever_the_slots_have_kept(
    weights: Path, slots: int
) -> None:
    """With 8 slots, the slots share a single cache."""
    changes = {"batch": {"max_tokens": 640, "max_items": slots}}
    async with opened(weights, **changes) as engine:
        for number in range(6):
            items = [
                tiny.prompt([5 + number + at] * 140, 20, owner=f"{number}{at}") for at in range(4)
            ]
            outcomes = await run(engine, *items)
            assert not [one for one in outcomes if isinstance(one, Failure)]


async def test_a_dropped_text_frees_its_slot(weights: Path) -> None:
    async with opened(weights, **LONG) as engine:
        told = Told()
        running = asyncio.create_task(
            engine.run_steps(
                [tiny.prompt(IDS, 2000, **ENDLESS)], timeout_s=WAIT_LIMIT_S, on_message=told
            )
        )
        await told.until(0, 2)
        engine.drop([0])
        slot = engine.admit([tiny.prompt(IDS, 3)])
        await running
        assert told.results[0].code == "canceled"
        assert slot is not None
        assert told.results[slot].output_tokens == 3


@pytest.mark.parametrize("texts", [1, 2])
async def test_the_first_tokens_of_all_texts_are_reported_together(
    weights: Path, monkeypatch: pytest.MonkeyPatch, texts: int
) -> None:
    """The first tokens wait only for one another."""
    monkeypatch.setattr(steps, "GATHER_S", 10 * WAIT_LIMIT_S)
    batch = {"max_tokens": 8192, "max_items": texts}
    async with opened(weights, **LONG | {"batch": batch}) as engine:
        reports: list[set[int]] = []

        def note(message: StepMessage) -> None:
            if isinstance(message, Chunks) and not reports:
                reports.append(set(message.chunks))
                engine.drop(range(texts))

        items = [tiny.prompt(IDS[:5], 2000, **ENDLESS) for _ in range(texts)]
        await engine.run_steps(items, timeout_s=WAIT_LIMIT_S, on_message=note)
    assert reports == [set(range(texts))]


async def test_an_engine_that_dies_gives_its_texts_back_and_is_started_again(
    weights: Path,
) -> None:
    async with opened(weights, **LONG) as engine:
        await _kill(engine)


async def test_no_vocabulary_is_loaded_while_a_worker_runs(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would block the event loop: for 3 s if the model has 150,000 tokens."""
    async with opened(weights, **LONG) as engine:
        monkeypatch.setattr(vocabulary, "Tokenizer", None)
        monkeypatch.setattr(vocabulary, "LLTokenizer", None)
        await _kill(engine)


async def _kill(engine: PooledProcess) -> None:
    told = Told()
    item = tiny.prompt(IDS, 2000, **ENDLESS)
    running = asyncio.create_task(engine.run_steps([item], timeout_s=WAIT_LIMIT_S, on_message=told))
    await told.until(0, 2)
    pid = engine.pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ModelProcessDied):
        await running
    async with asyncio.timeout(WAIT_LIMIT_S):
        await engine.ready()
    assert engine.pid != pid
    (result,) = await run(engine, later(item, told.chunks[0]))
    assert result.text.startswith("".join(chunk.text for chunk in told.chunks[0]))
    assert result.output_tokens == 2000


async def test_a_model_of_no_numbers_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from tests.workers.models.generation.gguf_file import write_gguf

    tiny.write_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    write_gguf(tmp_path)
    with pytest.raises(ConfigurationError, match="invalid numbers"):
        async with opened(tmp_path):
            pass


async def test_a_context_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    from tests.workers.models.generation.gguf_file import write_gguf

    tiny.write_folder(tmp_path)
    write_gguf(tmp_path, context_tokens=100)
    with pytest.raises(
        ConfigurationError, match=r"context_tokens: 160 exceeds the model's maximum of 100"
    ):
        async with opened(tmp_path):
            pass


async def test_a_folder_without_a_gguf_file_is_refused_with_what_to_give(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path)
    with pytest.raises(ConfigurationError, match="set one of this model's GGUF files"):
        async with opened(tmp_path):
            pass


def test_what_it_cannot_do_is_refused_by_name(folder: Path) -> None:
    echo = GenerationInput(2, 1, prompt="a", is_echoed=True, logprobs=0)
    (refused,) = PromptPreparer(entry(), folder).prepare([echo])
    assert isinstance(refused, BadInput)
    assert refused.field == "echo"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "torch"}, "backend: is not supported by engine llama.cpp"),
        ({"precision": "int4"}, "precision: is determined by the model file with engine llama.cpp"),
    ],
)
def test_entries_say_what_an_engine_decides_itself(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny.entry(**{"engine": "llama.cpp", "precision": "auto"} | changes)


async def test_nobody_else_reaches_it_and_it_knows_nothing_of_ours(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # so that socket paths are short
    monkeypatch.setattr(process, "SOCKETS", str(folder))
    monkeypatch.setenv("PENSTOCK_SECRET", "a-secret-of-ours")
    async with opened(weights) as engine:
        proc = Path(f"/proc/{engine.pid}")
        await run(engine, tiny.prompt(IDS, 4))
        if os.geteuid() == 0:  # others must not be able to read it at all
            assert b"a-secret-of-ours" not in (proc / "environ").read_bytes()
        command = (proc / "cmdline").read_bytes()
        assert command.split(b"\0")[3].endswith(b"program.py")
        assert command.count(b"\0") == 4
        (name,) = os.listdir(folder)
        socket = folder / name / "http.sock"
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(b"GET /slots HTTP/1.0\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
    assert os.listdir(folder) == []
    os.rmdir(folder)


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.workers.models.generation.test_llama_cpp import opened

async def main():
    async with opened(Path(sys.argv[1])) as engine:
        print(engine.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_it_ends_with_its_parent(weights: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(weights)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.kill()
    assert select.select([pidfd], [], [], WAIT_LIMIT_S)[0], "it runs without its parent"
    os.close(pidfd)
