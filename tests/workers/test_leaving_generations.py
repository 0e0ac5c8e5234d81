"""Texts that are canceled or late leave their batch between two tokens, and the others continue.

No test waits for time to pass. Deadlines use a clock that the test advances, and the model process
is ordered to drop a text after a chosen step.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shared.messages import record_id
from shared.models.tasks.text import GenerationResult, TokenChunk
from tests.workers.models.generation import tiny
from tests.workers.test_steps import (
    FOREVER,
    ask,
    assert_gapless,
    outcome,
    read_until,
    running,
    spelling,
)
from workers.jobs.deadlines import JobCallback
from workers.models.base import PreparedPrompt, StepEnd
from workers.models.device import Device
from workers.models.generation.model import GenerationModel
from workers.models.generation.slots import MIN_SHARED_TOKENS
from workers.models.reports import Chunks, Failure, ItemEnded, StepsEnded
from workers.models.step_shares import StepRoom
from workers.runtime.execution import CHUNKS_EVERY_S, StepExecution
from workers.runtime.protocol import (
    HEADER,
    RunBatch,
    ServerMessage,
    decode_server_message,
    encode_admit,
    encode_drop,
)
from workers.runtime.resident_models import ResidentModels
from workers.scheduling.job import JobTimer, PulledJob

pytestmark = pytest.mark.slow

PROMPTS = [[5, 60, 61], [7, 90, 91, 92], [9, 33]]
SCHEMA = {"type": "string", "minLength": 30, "maxLength": 30}
NEIGHBORS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "json": {"json_schema": json.dumps(SCHEMA), "temperature": 1.0},
}


class _Timer:
    def __init__(self, at_s: float, fire: Callable[[], None]) -> None:
        self.at_s, self.fire = at_s, fire
        self.is_canceled = False

    def cancel(self) -> None:
        self.is_canceled = True


class MovedClock:
    """A clock that stands still until the test advances it."""

    def __init__(self) -> None:
        self._now_s = time.time()
        self._timers: list[_Timer] = []

    def now_s(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, act: JobCallback, pulled: PulledJob) -> JobTimer:
        timer = _Timer(self._now_s + delay_s, lambda: act(pulled))
        self._timers.append(timer)
        return timer

    def move(self, by_s: float) -> None:
        self._now_s += by_s
        due = [timer for timer in self._timers if timer.at_s <= self._now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            if not timer.is_canceled:
                timer.fire()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("tiny-text"))


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["canceled", "expired"])
async def test_one_text_leaves_with_its_tokens_in_its_row_and_the_others_go_on(
    redis_url: str, tmp_path: Path, end: str
) -> None:
    clock = MovedClock()
    async with spelling(redis_url, tmp_path, clock=clock) as harness:
        left_s = {"stays": 1000.0, "leaves": 200.0, "beside": 1000.0}
        for name in left_s:
            await ask(harness, name, "abc", FOREVER, left_s=left_s[name], is_streamed=True)
        await harness.until(lambda: sorted(running(harness)) == sorted(left_s))
        before = {name: await read_until(harness, record_id(name, 0), 20) for name in left_s}
        clock.move(100)
        assert len(running(harness)) == 3, "nothing is due yet"
        if end == "canceled":
            await harness.stores.records.cancel(record_id("leaves", 0))
        else:
            clock.move(200)
        name, left = await outcome(harness)
        assert (name, left.status) == ("leaves", end)
        await harness.until(lambda: bool(harness.rows))
        [(written, _)] = await harness.stores.tokens.read([(record_id("leaves", 0), 0, 0)])
        assert_gapless(written)
        [row] = harness.rows
        assert (row.request_id, row.status) == ("leaves", end)
        assert (row.input_tokens, row.output_tokens) == (3, written[-1].end)
        assert row.cost_usd == pytest.approx((3 * 2 + written[-1].end * 6) / 1e6)
        await harness.until(lambda: sorted(running(harness)) == ["beside", "stays"])
        for name in ("stays", "beside"):
            chunks = await read_until(harness, record_id(name, 0), before[name][-1].end + 1000)
            assert_gapless(chunks)
            await harness.stores.records.cancel(record_id(name, 0))
            assert (await outcome(harness))[0] == name


class ScriptedModel(GenerationModel):
    """A text model that counts its steps, so that a test can act during a particular step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(tiny.entry(), folder, Device("cpu", 1, 1.0))
        self.steps = 0
        self.acts: dict[int, Callable[[], None]] = {}

    def step(self) -> StepEnd:
        self.steps += 1
        self.acts.pop(self.steps, lambda: None)()
        return super().step()


def messages_of(
    folder: Path, items: list[PreparedPrompt], frames: dict[int, bytes]
) -> list[ServerMessage]:
    """A model process's messages about a batch.

    Each frame arrives during the step with its number.
    """
    model = ScriptedModel(folder)
    model.setup()
    resident = ResidentModels([lambda: model], [folder], loaded={0: model})
    resident.open()
    model.steps = 0
    # Advances the clock far enough that every step reports its tokens.
    now_s = itertools.count(0.0, CHUNKS_EVERY_S * 2)
    caller, process = socket.socketpair()
    with caller, process:
        for step, frame in frames.items():
            model.acts[step] = partial(caller.sendall, frame)
        room = StepRoom(tiny.entry())
        StepExecution(process, resident, RunBatch(1, list(items)), room, lambda: next(now_s)).run()
        process.shutdown(socket.SHUT_WR)
        with caller.makefile("rb") as told:
            found = []
            while head := told.read(HEADER.size):
                found.append(decode_server_message(told.read(HEADER.unpack(head)[0])))
    assert not model.acts, "the batch ended before all was sent"
    return found


def ends_of(messages: list[ServerMessage]) -> dict[int, GenerationResult | Failure]:
    ends: dict[int, GenerationResult | Failure] = {}
    for message in messages:
        if isinstance(message, ItemEnded):
            [result] = message.done.results
            assert isinstance(result, GenerationResult | Failure)
            assert message.slot not in ends
            ends[message.slot] = result
    last = messages[-1]
    assert isinstance(last, StepsEnded)
    assert last.failure is None
    return ends


def tokens_of(messages: list[ServerMessage], slot: int) -> list[TokenChunk]:
    """The chunks sent to a slot's readers."""
    told = [message for message in messages if isinstance(message, Chunks)]
    return [message.chunks[slot] for message in told if slot in message.chunks]


@pytest.mark.parametrize("kind", NEIGHBORS)
@pytest.mark.parametrize("step", [2, 3, 9])
def test_a_dropped_text_writes_no_more_and_changes_no_other(
    folder: Path, kind: str, step: int
) -> None:
    items = [
        tiny.prompt(ids, 40, is_streamed=True, logprobs=0, **NEIGHBORS[kind]) for ids in PROMPTS
    ]
    undisturbed = messages_of(folder, items, {})
    messages = messages_of(folder, items, {step: encode_drop(1, [1])})
    expected, ends = ends_of(undisturbed), ends_of(messages)
    assert isinstance(ends[1], Failure)
    assert ends[1].code == "canceled"
    for slot in (0, 2):
        kept, same = ends[slot], expected[slot]
        assert isinstance(kept, GenerationResult)
        assert isinstance(same, GenerationResult)
        assert (kept.text, kept.finish_reason) == (same.text, same.finish_reason)
        assert kept.output_tokens == same.output_tokens > step
        assert [one.token for one in kept.logprobs] == [one.token for one in same.logprobs]
    told, whole = tokens_of(messages, 1), tokens_of(undisturbed, 1)
    assert told == whole[: len(told)], "until then it was written as if nobody left"
    # The first step reads prompts and generates first tokens, and each later step generates one
    # token.
    assert sum(len(chunk.ids) for chunk in told) == step


def test_a_text_that_joins_in_the_row_of_a_dropped_one_is_written_as_if_alone(
    folder: Path,
) -> None:
    leaving = list(range(40, 40 + 2 * MIN_SHARED_TOKENS))
    prompts = [PROMPTS[0], leaving, PROMPTS[2], [8, 50], [6, 51]]
    items = [tiny.prompt(ids, 40, owner="t") for ids in prompts]
    # It starts the same way as the text that left, so that text's keys and values are reused.
    joining = tiny.prompt([*leaving, 44], 12, owner="t")
    alone = ends_of(messages_of(folder, [joining], {}))[0]
    ends = ends_of(
        messages_of(folder, items, {6: encode_drop(1, [1]) + encode_admit(1, 5, [joining])})
    )
    joined = ends[5]
    assert isinstance(alone, GenerationResult)
    assert isinstance(joined, GenerationResult)
    assert joined.text == alone.text
    assert (alone.cached_tokens, joined.cached_tokens) == (0, len(leaving))


def test_the_last_text_that_is_dropped_ends_the_batch_at_once(folder: Path) -> None:
    items = [tiny.prompt(ids, 40, is_streamed=True) for ids in PROMPTS[:2]]
    messages = messages_of(folder, items, {3: encode_drop(1, [0]), 5: encode_drop(1, [1])})
    codes = [end.code for end in ends_of(messages).values() if isinstance(end, Failure)]
    assert codes == ["canceled", "canceled"]
    written = [sum(len(chunk.ids) for chunk in tokens_of(messages, slot)) for slot in (0, 1)]
    assert written == [3, 5]
