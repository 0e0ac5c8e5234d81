"""Commands, cancellations, deadlines, completions and deaths in any order, against the process
pool.

The test moves the loop's clock, and the order of events within a loop iteration is random, so a
command may be canceled, expire, and get its process in the same iteration.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from prometheus_client import REGISTRY

from api.inputs.codec_pool import SPARE_PROCESSES, CodecClient, CodecPool, ReserveMemory
from api.inputs.codec_protocol import CodecCommand, CodecReply, EncodeImage, ImageEncoded
from shared.errors import BadInput, DeadlineExceeded, Overloaded, Unavailable
from tests.tiers import examples

pytestmark = pytest.mark.slow(about_s=5)

PROCESSES = 2
"""Processes per tenant."""
ALL_PROCESSES = PROCESSES + SPARE_PROCESSES
TURNS = 30
"""Number of event loop iterations after which nothing more happens on its own."""
EXPECTED = (Overloaded, DeadlineExceeded, Unavailable, BadInput)


class MovedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances only when the test moves it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class FakeProcess(CodecClient):
    """A process that finishes a command when the test triggers it."""

    def __init__(self, running: list[FakeProcess]) -> None:
        self._running = running
        self._is_dead = False
        self.end: asyncio.Future[CodecReply] | None = None

    @property
    def is_up(self) -> bool:
        return not self._is_dead

    async def run(
        self, command: CodecCommand, data: bytes, reserve: ReserveMemory
    ) -> tuple[CodecReply, bytes]:
        assert self.end is None, "one command at a time"
        assert not self._is_dead
        self.end = asyncio.get_running_loop().create_future()
        self._running.append(self)
        try:
            async with reserve(len(data)):
                return await self.end, b""
        finally:
            self._running.remove(self)
            self.end = None

    def finish(self) -> None:
        assert self.end is not None
        self.end.set_result(ImageEncoded())

    def die(self) -> None:
        self._is_dead = True
        assert self.end is not None
        self.end.set_exception(Unavailable("the process died"))

    async def kill(self) -> None:
        self._is_dead = True


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = MovedLoop()
        self.running: list[FakeProcess] = []
        self.commands: list[asyncio.Task[Any]] = []
        self.tenants: dict[asyncio.Task[Any], str] = {}
        self.canceled: set[asyncio.Task[Any]] = set()
        self.waiting_before = _waiting()
        self.pool = self.do(_opened(self.start))

    async def start(self) -> CodecClient:
        return FakeProcess(self.running)

    def do(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def settle(self) -> None:
        self.turn(TURNS)

    @rule(turns=st.integers(1, 3))
    def turn(self, turns: int) -> None:
        async def pass_turns() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.do(pass_turns())

    @rule(
        tenant=st.sampled_from(["", "a", "b"]),
        is_new=st.booleans(),
        remaining_s=st.sampled_from([5.0, 50.0]),
    )
    def take(self, tenant: str, is_new: bool, remaining_s: float) -> None:
        async def begin() -> asyncio.Task[Any]:
            running = self.pool.run(
                EncodeImage("png", 90),
                b"bytes",
                deadline_s=time.time() + remaining_s,
                is_new=is_new,
                tenant=tenant,
            )
            return asyncio.create_task(running)

        command = self.do(begin())
        self.commands.append(command)
        self.tenants[command] = tenant

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.commands:
            command = self.commands[which % len(self.commands)]
            command.cancel()
            self.canceled.add(command)

    @rule(seconds=st.sampled_from([1.0, 5.1, 60.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.loop.now_s += seconds

    @rule(which=st.integers(0, 100), how=st.sampled_from(["finish", "refuse", "die"]))
    def end(self, which: int, how: str) -> None:
        at_work = [one for one in self.running if one.end is not None and not one.end.done()]
        if not at_work:
            return
        process = at_work[which % len(at_work)]
        assert process.end is not None
        if how == "finish":
            process.finish()
        elif how == "refuse":
            process.end.set_exception(BadInput("no image"))
        else:
            process.die()

    @invariant()
    def no_more_processes_than_allowed_are_at_work(self) -> None:
        assert len(self.running) <= ALL_PROCESSES

    @invariant()
    def commands_end_as_described(self) -> None:
        for command in self.commands:
            if command.done() and not command.cancelled():
                error = command.exception()
                assert error is None or isinstance(error, EXPECTED), repr(error)
            if command.done() and command.cancelled():
                assert command in self.canceled

    @rule()
    def nobody_waits_beside_a_free_process(self) -> None:
        """Also, no tenant ever holds all the processes, no matter how many commands it has."""
        self.settle()
        open_commands = [command for command in self.commands if not command.done()]
        by_tenant = Counter(self.tenants[command] for command in open_commands)
        wanted = sum(min(count, PROCESSES) for count in by_tenant.values())
        assert len(self.running) == min(ALL_PROCESSES, wanted)
        assert _waiting() - self.waiting_before == len(open_commands) - len(self.running)

    def teardown(self) -> None:
        """Once all commands have finished, all processes accept new ones."""
        self.settle()
        for command in self.commands:
            command.cancel()
        self.settle()
        assert all(command.done() for command in self.commands)
        assert _waiting() == self.waiting_before
        self.commands.clear()
        for _ in range(PROCESSES + 1):
            self.take("", True, 50.0)
        self.nobody_waits_beside_a_free_process()
        while self.running:
            self.end(0, "finish")
            self.settle()
        assert [command.exception() for command in self.commands] == [None] * (PROCESSES + 1)
        self.do(self.pool.__aexit__(None, None, None))
        self.loop.close()


async def _opened(start: Any) -> CodecPool:
    return await CodecPool(PROCESSES, 1024, start=start).__aenter__()


def _waiting() -> float:
    return REGISTRY.get_sample_value("penstock_api_pictures_waiting") or 0.0


def test_pool_holds_in_any_order() -> None:
    run_state_machine_as_test(
        Pool, settings=settings(max_examples=examples(60), stateful_step_count=30)
    )
