"""LoRA adapters in both engines, in pools like a worker's. The reference is the merged model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigurationError
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.generation import tiny
from tests.workers.models.generation.test_llama_cpp import ENDLESS, IDS, SCHEMA, Told, later, run
from tests.workers.models.generation.test_vllm import START_LIMIT_S, WIDE
from tests.workers.models.generation.text_adapters import merge_greedily, write_adapter
from workers.models.client import ModelProcessDied
from workers.models.engines.adapters import CONFIG, WEIGHTS, find_adapters
from workers.models.engines.vllm import COMMAND
from workers.models.reports import ItemEnded, StepMessage
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess

pytestmark = [
    pytest.mark.slow(about_s=120),
    pytest.mark.anyio,
    # PEFT reads an attribute that transformers has deprecated.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

NAMES = ("", "tiny-law", "tiny-poems")
"""The model itself, and its adapters."""
TOKENS = 20
LIMITS = {
    "batch": {"max_tokens": 16384, "max_items": 4},
    "generation": {
        "context_tokens": 4096,
        "default_tokens": 16,
        "longest_tokens": 3000,
        "chunk_tokens": 64,
    },
}


class Adapted:
    """A model folder, with its adapters for each engine."""

    def __init__(self, folder: Path) -> None:
        self.weights = folder / "weights"
        self.weights.mkdir()
        config = tiny.tiny_config(400)
        config.update(WIDE | {"max_position_embeddings": 4096})
        tiny.write_folder(self.weights, config)
        self.folders = {
            name: write_adapter(self.weights, folder / name, seed)
            for seed, name in enumerate(NAMES[1:])
        }

    def entry(self, engine: str) -> Any:
        suffix = ".gguf" if engine == "llama.cpp" else ""
        adapters = {
            name: {"source": f"local:{path}{suffix}"} for name, path in self.folders.items()
        }
        precision = "auto" if engine == "llama.cpp" else "fp32"
        generation = LIMITS["generation"] | {"adapters": adapters}
        changes = LIMITS | {"generation": generation}
        return tiny.entry(engine=engine, precision=precision, **changes)

    def write_gguf(self) -> None:
        from tests.workers.models.generation.gguf_file import write_gguf, write_gguf_adapter

        write_gguf(self.weights)
        for path in self.folders.values():
            write_gguf_adapter(self.weights, path, path.with_name(f"{path.name}.gguf"))

    def expect(self, name: str, ids: list[int], tokens: int = TOKENS) -> str:
        """The greedy text with the adapter merged into the weights."""
        found = merge_greedily(self.weights, self.folders.get(name), ids, tokens)
        return tiny.text_of(self.weights, found)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


@asynccontextmanager
async def opened(adapted: Adapted, engine: str) -> AsyncIterator[PooledProcess]:
    models = [HostedModel(adapted.entry(engine), adapted.weights)]
    async with ModelPool(models, device="cpu", processes=1, start_timeout_s=START_LIMIT_S) as pool:
        yield pool.processes[0]


async def check_texts(engine: PooledProcess, adapted: Adapted) -> None:
    """All texts are computed in one batch, twice. The second time, each finds only its own keys."""
    items = [
        tiny.prompt(IDS[at:], TOKENS, adapter=name, owner="a") for at in (0, 3) for name in NAMES
    ]
    expected = [adapted.expect(name, IDS[at:]) for at in (0, 3) for name in NAMES]
    assert len(set(expected)) == len(expected)
    for _ in range(2):
        assert [result.text for result in await run(engine, *items)] == expected


async def check_takeover(engine: PooledProcess, adapted: Adapted, start_limit_s: float) -> None:
    """Kills the engine in the middle of three texts, which the next one continues."""
    items = [tiny.prompt(IDS, 2000, adapter=name, **ENDLESS) for name in NAMES]
    told = Told()
    running = asyncio.create_task(engine.run_steps(items, timeout_s=WAIT_LIMIT_S, on_message=told))
    for slot in range(len(NAMES)):
        await told.until(slot, 5)
    os.kill(engine.pid or 0, signal.SIGKILL)
    with pytest.raises(ModelProcessDied):
        await running
    async with asyncio.timeout(start_limit_s):
        await engine.ready()
    begun = [told.chunks[slot] for slot in range(len(NAMES))]
    rest = [
        tiny.prompt(IDS, sum(len(chunk.ids) for chunk in chunks) + TOKENS, adapter=name, **ENDLESS)
        for name, chunks in zip(NAMES, begun, strict=True)
    ]
    results = await run(engine, *map(later, rest, begun))
    for name, item, result in zip(NAMES, rest, results, strict=True):
        assert result.text == adapted.expect(name, IDS, item.max_tokens), name


@pytest.fixture(scope="module")
async def llama_cpp(adapted: Adapted) -> AsyncIterator[PooledProcess]:
    adapted.write_gguf()
    async with opened(adapted, "llama.cpp") as engine:
        yield engine


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A PATH with vLLM but no g++, because compiling takes minutes."""
    folder = tmp_path_factory.mktemp("bin")
    for name in (COMMAND, "lscpu", "uname", "sh", "env"):
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        yield


@pytest.fixture(scope="module")
async def vllm(adapted: Adapted, without_compiler: None) -> AsyncIterator[PooledProcess]:
    async with opened(adapted, "vllm") as engine:
        yield engine


class TestLlamaCpp:
    pytestmark = pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="the extra `text` is not installed"
    )

    async def test_each_adapter_writes_what_the_merged_model_writes(
        self, llama_cpp: PooledProcess, adapted: Adapted
    ) -> None:
        await check_texts(llama_cpp, adapted)

    async def test_a_prompt_is_cached_for_its_own_adapter(self, llama_cpp: PooledProcess) -> None:
        items = [tiny.prompt([9, *IDS], 4, adapter=name, owner="b") for name in NAMES]
        for expected in (0, len(IDS)):
            cached = [(await run(llama_cpp, item))[0].cached_tokens for item in items]
            assert cached == [expected] * len(NAMES)
        # The same prompt is not another choice of a text with a different adapter.
        other = [tiny.prompt([8, *IDS], 4, adapter=name, owner="c") for name in NAMES]
        assert [result.cached_tokens for result in await run(llama_cpp, *other)] == [0] * len(NAMES)

    async def test_a_long_text_lets_texts_with_other_adapters_take_turns(
        self, llama_cpp: PooledProcess, adapted: Adapted
    ) -> None:
        """The others end long before the first text does, which is streamed as a whole because all
        its tokens are letters.
        """
        (letter,) = tiny.ids_of(adapted.weights, "a")
        endless = {"logit_bias": {letter: 100.0}, "is_streamed": True}
        ended: list[int] = []

        def note(message: StepMessage) -> None:
            if isinstance(message, ItemEnded):
                ended.append(message.slot)
            if len(ended) == 2:
                llama_cpp.drop([0])

        long = tiny.prompt(IDS, 3000, adapter=NAMES[1], owner="a", **endless)
        others = [tiny.prompt(IDS, 40, adapter=name, owner="b") for name in ("", NAMES[2])]
        await llama_cpp.run_steps([long, *others], timeout_s=WAIT_LIMIT_S, on_message=note)
        assert set(ended[:2]) == {1, 2}

    async def test_texts_that_take_turns_keep_their_schemas_and_log_probabilities(
        self, llama_cpp: PooledProcess
    ) -> None:
        schema = json.dumps(SCHEMA | {"properties": {"a": {"type": "boolean"}, "b": {"enum": [1]}}})
        items = [
            tiny.prompt(IDS, 200, adapter=name, json_schema=schema, logprobs=logprobs)
            for name in NAMES
            for logprobs in (-1, 0)
        ]
        for result in await run(llama_cpp, *items):
            assert set(json.loads(result.text)) == {"a", "b"}

    async def test_an_unknown_adapter_is_never_ignored(self, llama_cpp: PooledProcess) -> None:
        (failed,) = await run(llama_cpp, tiny.prompt(IDS, 4, adapter="gone"))
        assert failed.code == "model_failed"

    async def test_the_next_engine_continues_with_the_adapter(
        self, llama_cpp: PooledProcess, adapted: Adapted
    ) -> None:
        await check_takeover(llama_cpp, adapted, WAIT_LIMIT_S)


class TestVllm:
    pytestmark = pytest.mark.skipif(
        shutil.which(COMMAND) is None, reason="`vllm` is not on the PATH"
    )

    async def test_each_adapter_writes_what_the_merged_model_writes(
        self, vllm: PooledProcess, adapted: Adapted
    ) -> None:
        await check_texts(vllm, adapted)

    async def test_a_prompt_is_cached_for_its_own_adapter(self, vllm: PooledProcess) -> None:
        items = [tiny.prompt([9, *IDS], 4, adapter=name, owner="b") for name in NAMES]
        for expected in (0, 32):
            cached = [(await run(vllm, item))[0].cached_tokens for item in items]
            assert cached == [expected] * len(NAMES)

    async def test_the_next_engine_continues_with_the_adapter(
        self, vllm: PooledProcess, adapted: Adapted
    ) -> None:
        await check_takeover(vllm, adapted, START_LIMIT_S)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "only LORA is supported"),
        ({"r": 1024}, "has rank 1024"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    adapted: Adapted, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    entry = adapted.entry("vllm")
    folder = shutil.copytree(adapted.folders[NAMES[1]], tmp_path / "changed")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        find_adapters(_with_source(entry, folder))
    assert refusal.value.field == f"generation.adapters.{NAMES[1]}"


def test_pickled_weights_are_refused(adapted: Adapted, tmp_path: Path) -> None:
    folder = shutil.copytree(adapted.folders[NAMES[1]], tmp_path / "pickled")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigurationError, match=f"has no {WEIGHTS}"):
        find_adapters(_with_source(adapted.entry("vllm"), folder))


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the extra `text` is not installed"
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    field = struct.pack("<QsIB", 1, b"k", 0, 1)
    broken.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * field)
    entry = tiny.entry(engine="llama.cpp", precision="auto", **LIMITS)
    with pytest.raises(ConfigurationError, match=r"broken\.gguf: damaged, incomplete") as refusal:
        find_adapters(_with_source(entry, broken))
    assert refusal.value.field == f"generation.adapters.{NAMES[1]}"


def _with_source(entry: Any, folder: Path) -> Any:
    adapters = {NAMES[1]: {"source": f"local:{folder}"}}
    generation = LIMITS["generation"] | {"adapters": adapters}
    changes = LIMITS | {"generation": generation, "precision": entry.precision}
    return tiny.entry(engine=entry.engine, **changes)
