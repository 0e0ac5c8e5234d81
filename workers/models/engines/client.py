"""An engine's client, which the pool drives directly, without a model process."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from workers.models.base import Prepared, PreparedPrompt
from workers.models.client import (
    MakeRoom,
    ModelProcessDied,
    OnPreviews,
    OnProgress,
    OnStepMessage,
    RunningBatch,
)
from workers.models.engines.dialect import EngineDialect, Hardware
from workers.models.engines.engine_metrics import ENGINES
from workers.models.engines.llama_cpp import LlamaCpp
from workers.models.engines.process import EngineProcess
from workers.models.engines.steps import Engine, EngineSteps
from workers.models.engines.vllm import Vllm
from workers.models.generation.vocabulary import Vocabulary
from workers.models.gpus import gpu_name
from workers.models.reports import (
    Failure,
    ItemEnded,
    Ready,
    ResidencyReport,
    StepMessage,
    StepsEnded,
)
from workers.models.step_shares import StepRoom

WARMUP_LIMIT_S = 300.0
_DIALECTS: dict[str, type[EngineDialect]] = {"llama.cpp": LlamaCpp, "vllm": Vllm}
"""Dialects, keyed by `engine` in a model's catalog entry."""


class EngineClient:
    """A ProcessClient for an engine; the engine is restarted after being evicted."""

    def __init__(
        self,
        entry: Model,
        vocabulary: Vocabulary,
        adapters: Mapping[str, Path],
        hardware: Hardware,
        timeout_s: float,
    ) -> None:
        self._entry = entry
        self._hardware = hardware
        self._timeout_s = timeout_s
        self._dialect = _DIALECTS[entry.engine](entry, vocabulary, adapters)
        self._device_name = gpu_name(hardware.device)
        self._room = StepRoom(entry)
        self._turn = asyncio.Semaphore(1)
        self._run: EngineSteps | None = None
        self._engine: Engine | None = None
        self._is_closed = False
        self._started = asyncio.Event()
        """Set while an engine is running."""
        self._ended = asyncio.Event()
        """Set once the pool knows that the engine has exited."""
        self.facts = Ready(self._device_name, 0.0, 0.0, 0)
        self.residency = ResidencyReport([])

    @classmethod
    async def start(
        cls,
        entry: Model,
        vocabulary: Vocabulary,
        adapters: Mapping[str, Path],
        hardware: Hardware,
        timeout_s: float,
        make_room: MakeRoom,
    ) -> Self:
        """Starts a model's engine and waits until it has generated its first token.

        Args:
            adapters: each adapter's file or folder, by name.

        Raises:
            ConfigurationError: the engine can't run this model.
            ModelFailed: the engine was not ready in time.
        """
        client = cls(entry, vocabulary, adapters, hardware, timeout_s)
        try:
            load_s, warmup_s = await client._open()
        except BaseException:
            await client.close()
            raise
        client.facts = Ready(client._device_name, load_s, warmup_s, client.memory_bytes)
        return client

    async def _open(self) -> tuple[float, float]:
        """Starts an engine.

        Returns the engine's load time and the time until its first token, in seconds.
        """
        began_s = time.monotonic()
        launch = self._dialect.launch(self._hardware)
        key = secrets.token_urlsafe(32)
        threads = self._hardware.threads
        process = await EngineProcess.start(launch, key, threads, self._timeout_s)
        loaded_s = time.monotonic()
        engine = Engine(
            process,
            self._dialect,
            self._entry.batch.max_items,
            self._dialect.part_tokens(self._hardware),
            shares_with_all=self._entry.cache.scope == "global",
        )
        try:
            await self._check_context(process)
            await self._check_cache(process)
            await self._warm_up(engine)
            if self._is_closed:
                raise ModelFailed("the engine is no longer needed")
        except BaseException:
            await process.end()
            raise
        self._engine = engine
        if (endpoint := process.metrics_endpoint) is not None:
            ENGINES.add(endpoint, self._entry.name, self._hardware.device)
        took_s = loaded_s - began_s
        self.residency = ResidencyReport(
            [0], {0: round(took_s, 6)}, {0: self.memory_bytes}, loads=1, switch_s=took_s
        )
        self._started.set()
        return took_s, time.monotonic() - loaded_s

    async def _check_context(self, process: EngineProcess) -> None:
        limit, wanted = await process.context_tokens(), self._entry.generation.context_tokens
        if limit < wanted:
            raise ConfigurationError(
                f"generation.context_tokens: {wanted} exceeds the model's maximum of {limit} "
                "tokens",
                field="generation.context_tokens",
            )

    async def _check_cache(self, process: EngineProcess) -> None:
        tokens, budget = await process.cache_tokens(), self._entry.budget
        if tokens is not None and tokens < budget:
            raise ConfigurationError(
                f"batch.max_tokens: the keys and values of {budget} tokens exceed the memory for "
                f"them, which has room for {tokens}; set it to at most {tokens}, or use a GPU with "
                "more memory or a larger gpu.count",
                field="batch.max_tokens",
            )

    async def _warm_up(self, engine: Engine) -> None:
        """Generates a token; its log probability is a number if the model is intact.

        Raises:
            ConfigurationError: the model's outputs are not numbers.
        """
        outcomes: list[StepMessage] = []
        ids = min(self._dialect.vocabulary.ends).to_bytes(4, "little")
        item = PreparedPrompt(key="", length=2, ids=ids, max_tokens=1, seed=0, logprobs=1)
        await EngineSteps(engine, self._room, 0, outcomes.append).run([item], WARMUP_LIMIT_S)
        await asyncio.sleep(0)
        for outcome in outcomes:
            if isinstance(outcome, ItemEnded) and isinstance(outcome.done.results[0], Failure):
                raise ConfigurationError(
                    f"{self._dialect.folder}: {outcome.done.results[0].message}", field="source"
                )

    @property
    def pid(self) -> int:
        return 0 if self._engine is None else self._engine.process.pid

    @property
    def memory_bytes(self) -> int:
        return 0 if self._engine is None else self._engine.process.memory_bytes

    async def send(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_step: OnProgress | None,
        model: int = 0,
        on_previews: OnPreviews | None = None,
    ) -> RunningBatch:
        """Raises an error, because texts are generated step by step."""
        raise ModelFailed("a text model runs in steps; this is a bug")

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        async with self._turn:
            switched = None
            if self._engine is None:
                try:
                    await self._open()
                except PenstockError as error:
                    return StepsEnded(0, Failure.from_error(error))
                switched = self.residency
            engine = self._engine
            assert engine is not None, "the engine is not open; this is a bug"
            self._run = EngineSteps(engine, self._room, self.memory_bytes, on_message)
            try:
                await self._run.run(batch, timeout_s)
            except ModelProcessDied:
                # The engine must be restarted before it can be used again.
                engine.process.kill()
                await self._ended.wait()
                raise
            finally:
                self._run = None
        return StepsEnded(0, None, switched)

    def admit(self, items: Sequence[Prepared]) -> int | None:
        return None if self._run is None else self._run.admit(items)

    def drop(self, slots: Sequence[int]) -> None:
        if self._run is not None:
            self._run.drop(slots)

    def preempt(self, slots: Sequence[int]) -> None:
        if self._run is not None:
            self._run.preempt(slots)

    def watch(self, slots: Sequence[int]) -> None:
        """Does nothing, because text has no previews."""

    async def evict(self, models: Sequence[int], on_turn: Callable[[], None]) -> None:
        """Stops the engine between runs. The engine is restarted on the next use."""
        async with self._turn:
            on_turn()
            self._started.clear()
            await self._end_engine()
            known = self.residency
            self.residency = ResidencyReport([], known.load_s, known.size_bytes, evictions=1)

    async def serve(self, on_end: Callable[[], None]) -> str:
        status, lines = 0, ""
        try:
            while True:
                await self._started.wait()
                engine = self._engine
                assert engine is not None, "the engine has not started; this is a bug"
                status = await engine.process.wait()
                if self._engine is engine:
                    lines = engine.process.last_lines()
                    break
        finally:
            on_end()
            self._ended.set()
            if self._run is not None:
                self._run.fail(f"the engine exited (status {status})")
            await self.close()
        return f"the engine exited (status {status}){lines}"

    async def close(self) -> None:
        self._is_closed = True
        await self._end_engine()

    async def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            if (endpoint := engine.process.metrics_endpoint) is not None:
                ENGINES.remove(endpoint)
            await engine.process.end()
